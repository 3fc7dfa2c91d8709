"""The doctor: estimates that agree with real steps, sentences that name the switch that helps, and a dry run that writes nothing."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from kineograph.cli import main
from kineograph.core.batch import Sample
from kineograph.core.capabilities import HasMemorySavers
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import Loss, Mean
from kineograph.data.moving_digits import MovingDigits
from kineograph.doctor import estimate, machine, report, speed
from kineograph.doctor.estimate import Estimate, micro_batch
from kineograph.doctor.report import describe_estimate
from kineograph.doctor.step_flops import count_step_flops
from kineograph.doctor.step_trace import trace_step
from kineograph.run import layers
from kineograph.run.dry_run import dry_run, examine
from kineograph.run.open_data import open_data
from kineograph.run.plan import make_plan
from kineograph.stage.build import PlanBuilder, fake_tensors
from kineograph.stage.data import StageData
from kineograph.stage.spec import Plan
from kineograph.train.stepper import Stepper
from tests.train.toy_tasks import Toy

HERE = "tests.doctor.test_doctor"
TREE = {
    "name": "toy",
    "data": {"size": 16, "glyphs": 2, "count": 64},
    "train": {"batch_size": 8, "steps": 30, "workers": 0, "trackers": [], "device": "cpu", "warmup": 0},
    "stages": {
        "first": {"task": "tests.train.toy_tasks.Duel", "width": 16, "players": {"critic": {"ema": {"decay": 0}}}},
        "second": {"task": "tests.train.toy_tasks.Toy", "codec": "first", "width": 32},
    },
}
MUSE = {
    **TREE,
    "stages": {
        "tokenizer": {
            "task": "vqgan", "width": 8, "multipliers": [1, 2], "quantizer": {"kind": "vq", "codes": 32, "dim": 4},
            "adversarial": {"width": 8}, "perceptual": {"weight": 0},
        },
        "generator": {"task": "muse", "codec": "tokenizer", "width": 32, "depth": 1, "heads": 2, "text": {"kind": "learned", "width": 16, "depth": 1}},
    },
}  # fmt: skip


class Picky(Toy):
    """Looks at the numbers of its loss, as a user's own Task may."""

    def loss(self, player, shared):
        found = super().loss(player, shared)
        return Loss(Mean(found.total.sum * 2, found.total.count)) if found.total.sum > 0 else found


def opened(tree: dict, *overrides: str) -> tuple[Plan, dict[str, StageData], PlanBuilder]:
    tree = layers.lay_over({}, tree)
    plan = make_plan(layers.read_config(overrides, base=tree))
    data: dict[str, StageData] = {}
    for stage in plan.stages:
        data[stage.name] = open_data(stage, plan.seed, note=lambda line: None, opened=data)
    return plan, data, PlanBuilder(plan, data, lambda line: None)


def estimated(tree: dict, *overrides: str, probe: bool = False) -> list[Estimate]:
    plan, data, builder = opened(tree, *overrides)
    return [
        estimate.estimate_stage(builder, stage, data[stage.name], probe)
        for stage in plan.stages
        if not stage.spec.config.skip
    ]


def tokenizer_with(**keys) -> dict:
    return {**MUSE, "stages": {"tokenizer": {**MUSE["stages"]["tokenizer"], **keys}}}


# Estimates -------------------------------------------------------------------------------------------------------


def test_parameters_and_state_are_counted() -> None:
    first, second = estimated(TREE)
    inputs = 3 * 16 * 16
    generator, critic = (inputs * 16 + 16) + (16 * inputs + inputs), (inputs * 16 + 16) + (16 + 1)
    assert first.trained == {"generator": generator, "critic": critic}
    assert first.frozen == 0
    assert first.memory.weights == first.memory.gradients == 4 * (generator + critic)
    assert first.memory.optimizer == 8 * (generator + critic)
    assert first.memory.ema == 4 * generator  # the critic has none
    helper = inputs + 1
    assert second.frozen == helper + generator + critic  # its own frozen helper, and the stage that it refers to
    assert second.memory.weights == 4 * (second.trained["model"] + second.frozen) + 8  # and an int64 buffer
    assert second.tokens == 12


def test_the_state_is_what_a_real_stepper_holds() -> None:
    plan, data, builder = opened(TREE)
    stage = plan.stages[0]
    found = estimate.estimate_stage(builder, stage, data["first"], timed=False)
    stepper = Stepper(builder.build("first", torch.device("cpu")), stage.train, stage.players)
    stepper.step(0, next(data["first"].loader().steps(0, 1)))
    moments = sum(
        v.numel() * 4
        for o in stepper.optimizers.values()
        for key, v in o.state().items()
        if not key.startswith("step.")
    )
    averages = sum(v.numel() * 4 for ema in stepper.emas.values() for v in ema.average.values())
    assert found.memory.optimizer == moments
    assert found.memory.ema == averages


@pytest.mark.parametrize("tree", [TREE, MUSE], ids=["toy", "muse"])
def test_a_step_without_numbers_counts_what_a_real_one_takes(tree: dict) -> None:
    plan, data, builder = opened(tree, "train.batch_size=4")
    for stage in plan.stages:
        batch = next(data[stage.name].loader().steps(0, 1))[0]
        traced, real = (
            trace_step(builder, stage, stage.train, "fp32", batch, 4, numbers)
            for numbers in (None, torch.device("cpu"))
        )
        assert traced.memory.total - traced.memory.activations == real.memory.total - real.memory.activations
        assert traced.memory.activations == pytest.approx(real.memory.activations, rel=0.02)
        assert traced.flops == real.flops > 0


def test_activations_and_arithmetic_grow_with_the_micro_batch() -> None:
    sizes = (["train.batch_size=64"], ["train.batch_size=256"], ["train.batch_size=256", "train.accumulate=4"])
    one, four, split = (estimated(TREE, "stages.first.skip=true", *words)[0] for words in sizes)
    assert four.memory.activations == pytest.approx(one.memory.activations + 192 * one.sample_bytes, rel=0.02)
    assert split.memory.activations == one.memory.activations
    assert four.flops == split.flops == 4 * one.flops


def test_arithmetic_of_a_known_network() -> None:
    _, second = estimated(TREE)
    inputs, width = 3 * 16 * 16, 32
    forward = 2 * (inputs * width + 2 * width * width + width)
    # Backward costs a product for each weight and one for each input that needs a gradient: all but the first.
    assert second.flops == 8 * (3 * forward - 2 * inputs * width)


def test_savings_are_real() -> None:
    (generator,) = estimated(MUSE, "train.batch_size=16", "stages.tokenizer.skip=true")
    (halved,) = estimated(MUSE, "train.batch_size=16", "train.accumulate=2", "stages.tokenizer.skip=true")
    assert generator.savings["train.accumulate=2"] == halved.memory
    assert halved.memory.activations < generator.memory.activations
    (recomputed,) = estimated(MUSE, "train.batch_size=16", "train.checkpointing=true", "stages.tokenizer.skip=true")
    assert generator.savings["train.checkpointing=true"] == recomputed.memory
    assert recomputed.memory.activations < generator.memory.activations
    assert "train.checkpointing=true" not in recomputed.savings
    assert generator.encoded == "1 × 4 × 4 tokens of 32 codes"
    assert generator.tokens == 16


class Tokens(MovingDigits):
    """Digits as a cache holds them: encoded."""

    fields = frozenset({"tokens"})

    def read(self, index: int, rng: np.random.Generator | None = None) -> Sample:
        sample = super().read(index, rng)
        return replace(sample, pixels=None, tokens=torch.zeros(1, 4, 4, dtype=torch.int64))


def test_a_cache_spares_the_arithmetic_of_the_encoder() -> None:
    plan, data, builder = opened(MUSE, "train.peak_tflops=1")
    stage, cpu = plan.stages[1], torch.device("cpu")
    digits = data["generator"].source
    assert isinstance(digits, MovingDigits)
    task, notes = builder.build("generator", cpu), list[str]()
    encoding, cached = (
        count_step_flops(plan, stage, task, data["generator"], source, cpu, notes.append)
        for source in (digits, Tokens(digits.config, "train"))
    )
    assert not notes
    assert encoding is not None and cached is not None
    assert 0 < cached.flops < 0.9 * encoding.flops


def test_players_that_join_late_are_counted() -> None:
    late, never = (
        estimated(tokenizer_with(adversarial=adversarial))[0] for adversarial in ({"width": 8, "start": 20}, None)
    )
    assert late.flops > 1.1 * never.flops


def test_a_task_that_needs_numbers_is_examined_on_a_few_samples() -> None:
    tree = {**TREE, "stages": {"picky": {"task": f"{HERE}.Picky", "width": 32}}}
    (found,) = estimated(tree, "train.batch_size=64")
    assert found.scaled_because is not None
    (plain,) = estimated(
        {**TREE, "stages": {"plain": {"task": "tests.train.toy_tasks.Toy", "width": 32}}}, "train.batch_size=64"
    )
    assert plain.scaled_because is None
    assert found.memory.activations == pytest.approx(plain.memory.activations, rel=0.3)


def test_a_model_far_larger_than_the_machine_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {**TREE, "stages": {"huge": {"task": "tests.train.toy_tasks.Toy", "width": 100_000}}}  # 2 × 10¹⁰ parameters
    (found,) = estimated(tree, probe=True)
    assert found.trained["model"] > 2e10
    assert found.memory.total > 300e9
    assert found.speed is None
    assert "not even one sample fits" in str(found.not_timed)
    assert not found.fits


def test_a_slow_model_is_not_probed_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "measure_matmul_flops", lambda: 1.0)
    (found,) = estimated(MUSE, "stages.tokenizer.skip=true", "train.batch_size=32", probe=True)
    assert found.speed is None
    assert "run kineo doctor on the machine that trains" in str(found.not_timed)
    # Whoever looks at a large preset on a small machine wants to know what it takes on a large one.
    assert found.savings["a GPU, in bf16"].activations < found.memory.activations


def test_speed_is_probed_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PROBE_SECONDS", 0.2)
    _, found = estimated(TREE, "train.accumulate=2", probe=True)
    assert found.speed is not None
    assert found.speed.samples == 4
    taken = found.speed.step_seconds + 8 * found.speed.read_seconds  # without workers, one after the other
    assert found.step_seconds == pytest.approx(taken)
    assert found.seconds == pytest.approx(30 * taken)
    side_by_side = Estimate(
        **{
            **vars(found),
            "stage": make_plan(layers.lay_over(layers.lay_over({}, TREE), {"train": {"workers": 2}})).stages[1],
        }
    )
    assert side_by_side.step_seconds == pytest.approx(max(found.speed.step_seconds, 4 * found.speed.read_seconds))


def test_reading_is_timed_as_training_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small folder is decoded once: later epochs wait for no file."""
    for number in range(40):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / f"{number}.png")
    decoded: list[str] = []

    def count(module: str, name: str) -> None:
        function = getattr(import_module(module), name)
        monkeypatch.setattr(
            f"{module}.{name}", lambda path, *given: decoded.append(path.name) or function(path, *given)
        )

    count("kineograph.data.decoded_cache", "load_media")
    count("kineograph.data.folder", "decode_media")
    for kept, files in ((True, 8), (False, 16)):
        keys = ["data.source=folder", f"data.folder={tmp_path}", f"train.keep_decoded={str(kept).lower()}"]
        _, data, _ = opened(tokenizer_with(), *keys, "data.size=16")
        decoded.clear()
        speed.read_two_batches(data["tokenizer"], 8)
        assert len(decoded) == files


def test_probing_leaves_the_estimate_of_memory_alone() -> None:
    plan, data, builder = opened(TREE)
    one, two = (estimate.estimate_stage(builder, plan.stages[1], data["second"], probe) for probe in (False, True))
    assert one.memory == two.memory


def test_micro_batches_are_at_least_one_sample() -> None:
    plan, _, _ = opened(TREE, "train.batch_size=2", "train.accumulate=2")
    assert micro_batch(plan.stages[0].train) == 1


# What is told ----------------------------------------------------------------------------------------------------


def told(found: Estimate) -> str:
    _, data, _ = opened(TREE)
    return "\n".join(describe_estimate(found, data["second"]))


def test_what_does_not_fit_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    _, roomy = estimated(TREE)
    assert "fits" in told(roomy)
    assert "DOES NOT FIT" not in told(roomy)
    state = roomy.memory.total - roomy.memory.activations
    for_five = roomy.memory.total - 3 * roomy.sample_bytes
    monkeypatch.setattr(estimate, "free_memory", lambda device: int(for_five / estimate.MAX_MEMORY_SHARE) + 100)
    _, tight = estimated(TREE)
    text = told(tight)
    assert "DOES NOT FIT" in text
    assert "train.accumulate=2 (micro-batches of at most 5)" in text
    assert "train.batch_size=5" in text
    assert all(estimated(TREE, *remedy)[1].fits for remedy in (["train.accumulate=2"], ["train.batch_size=5"]))
    assert not estimated(TREE, "train.batch_size=6")[1].fits
    monkeypatch.setattr(estimate, "free_memory", lambda device: state // 2)
    _, hopeless = estimated(TREE)
    assert "make the model smaller or use a larger device" in told(hopeless)


def test_a_step_that_runs_out_of_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(estimate, "time_steps", run_out)
    _, data, builder = opened(TREE)
    found = estimate.estimate_stage(builder, builder.plan.stages[1], data["second"])
    text = "\n".join(describe_estimate(found, data["second"]))
    assert "DOES NOT FIT" in text
    assert "not timed: a step of 8 samples ran out of memory: it takes more than was estimated" in text


def test_two_switches_together_where_one_is_not_enough() -> None:
    _, found = estimated(TREE)
    state = found.memory.total - found.memory.activations
    lean = {"train.checkpointing=true": replace(found.memory, activations=800)}  # 100 bytes a sample
    small = replace(found.target, free=int((state + 250) / estimate.MAX_MEMORY_SHARE))
    tight = replace(found, target=small, sample_bytes=10.0**4, savings=lean, combined=None)
    assert "train.checkpointing=true with train.accumulate=4" in told(tight)


def test_without_arguments_the_machine_is_described(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "OPTIONAL", (*machine.OPTIONAL, ("no-such-package", "nothing", "pip install nothing")))
    examine([])
    text = capsys.readouterr().out
    for part in (
        "Python 3.",
        f"torch         {torch.__version__}",
        "cores",
        "memory free",
        "disk",
        "auto picks    device",
        "precision",
    ):
        assert part in text
    assert "no-such-package is not installed, for nothing: pip install nothing" in text


def test_with_a_file_every_stage_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "PROBE_SECONDS", 0.2)
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(TREE, sort_keys=False))
    examine([str(path), "stages.first.skip=true", "train.steps=1000"])
    text = capsys.readouterr().out
    assert "first: skipped" in text
    for part in (
        "second: Toy, 26.8 k parameters to train",
        "  picture       ",
        "12 in a sequence",
        "weights",
        "activations",
        "steps an hour",
        "for 1,000 steps",
    ):
        assert part in text


def test_numbers_for_people() -> None:
    assert [report.format_size(n) for n in (5, 1536, 3 * 2**20, 139 * 2**30, 1010 * 1024)] == [
        "5 bytes",
        "1.5 KiB",
        "3 MiB",
        "139 GiB",
        "1010 KiB",
    ]
    assert [report.format_count(n) for n in (12, 29_992, 35_500_000, 2e9)] == ["12", "30 k", "35.5 M", "2 billion"]
    assert [report.format_time(s) for s in (5, 600, 7200, 864_000)] == ["5 s", "10 min", "2.0 h", "10.0 days"]


# Devices that are not here, and what would fit there ---------------------------------------------------------------


class Heavy(Toy, HasMemorySavers):
    """A stage that says what would make it lighter."""

    @classmethod
    def memory_savers(cls, config):
        return {"width": 8}


HEAVY = {**TREE, "stages": {"only": {"task": f"{HERE}.Heavy", "width": 64}}}


def imagined(tree: dict, gib: float, *overrides: str) -> Estimate:
    plan, data, builder = opened(tree, *overrides)
    stage = plan.stages[-1]
    return estimate.estimate_stage(builder, stage, data[stage.name], memory=int(gib * 2**30))


def test_a_gpu_can_be_imagined() -> None:
    found = imagined(MUSE, 80, "stages.tokenizer.skip=true")
    assert found.target.free == 80 * 2**30
    assert found.target.precision == "bf16" and found.target.device.type == "cuda"
    assert found.speed is None and found.not_timed == "that device is not here"
    assert found.fits
    (here,) = estimated(MUSE, "stages.tokenizer.skip=true")
    assert found.memory.activations < here.memory.activations  # half the bytes
    text = told(found)
    assert "of 80 GiB on a GPU of that size" in text


def test_precision_is_a_switch_on_a_gpu() -> None:
    found = imagined(MUSE, 80, "stages.tokenizer.skip=true", "train.precision=fp32")
    assert found.savings["train.precision=bf16"].activations < found.memory.activations


def test_switches_come_in_the_order_of_what_they_save() -> None:
    found = imagined(HEAVY, 80, "train.batch_size=256")
    totals = [memory.total for memory in found.savings.values()]
    assert totals == sorted(totals) and all(total < found.memory.total for total in totals)
    assert {
        "stages.only.width=8",
        "train.ema.decay=0",
        "train.accumulate=2",
    } <= found.savings.keys()
    assert found.savings["train.ema.decay=0"].total == found.memory.total - found.memory.ema
    (small,) = estimated(
        {**TREE, "stages": {"only": {**HEAVY["stages"]["only"], "width": 8}}},
        "train.batch_size=256",
        "train.precision=bf16",
    )
    assert found.savings["stages.only.width=8"] == small.memory
    assert "less memory" not in told(found)  # of 80 GiB it takes little
    text = told(imagined(HEAVY, 3 * found.memory.total / 2**30, "train.batch_size=256"))
    assert (
        f"less memory   {next(iter(found.savings))}: " in text and "stages.only.width=8: " in text and " less, " in text
    )


def test_an_optimizer_of_8_bits_is_a_switch() -> None:
    tree = {**TREE, "stages": {"only": {"task": f"{HERE}.Heavy", "width": 128}}}
    found, again = imagined(tree, 80), imagined(tree, 80, "train.optimizer=adamw_8bit")
    assert found.savings["train.optimizer=adamw_8bit"].total == again.memory.total < found.memory.total
    assert again.memory.optimizer < found.memory.optimizer / 2
    assert "train.optimizer=adamw_8bit" not in again.savings
    assert imagined(tree, 80, "train.optimizer=adamw_split").memory == found.memory  # no weights in bf16 here


def test_switches_together_where_none_is_enough() -> None:
    whole = imagined(HEAVY, 80, "train.batch_size=256")
    best = next(iter(whole.savings.values())).total
    found = imagined(HEAVY, (best - 1000) / estimate.MAX_MEMORY_SHARE / 2**30, "train.batch_size=256")
    assert not found.fits and all(
        memory.total > estimate.MAX_MEMORY_SHARE * found.target.free for memory in found.savings.values()
    )
    assert found.combined is not None
    switches, memory = found.combined
    assert len(switches) > 1 and memory.total <= estimate.MAX_MEMORY_SHARE * found.target.free
    applied = [switch for switch in switches if "=" in switch]
    plan, data, builder = opened(HEAVY, "train.batch_size=256", *applied)
    again = estimate.estimate_stage(builder, plan.stages[0], data["only"], memory=found.target.free)
    assert again.fits and again.memory == memory
    assert f"together      {' '.join(switches)}: " in told(found)


def test_nothing_helps_where_the_weights_alone_are_too_large() -> None:
    found = imagined(TREE, 0.0001)
    assert found.combined is None
    assert "make the model smaller or use a larger device" in told(found)
    small = replace(found, memory=replace(found.memory, weights=0, gradients=0, optimizer=0, ema=0), savings={})
    assert "make clips smaller (data.frames, data.size) or use a larger device" in told(small)


def test_trained_parameters_decide_about_the_state() -> None:
    """As with adapters: what is frozen has weights and nothing else."""
    plan, data, builder = opened(TREE)
    stage = plan.stages[1]
    found = estimate.estimate_stage(builder, stage, data["second"], timed=False)
    assert found.memory.gradients == 4 * found.trained["model"] < found.memory.weights
    assert found.memory.optimizer == 2 * found.memory.gradients


def test_fake_tensors_change_nothing_outside_of_them() -> None:
    apply = torch.nn.Module._apply
    with fake_tensors():
        layer = torch.nn.Linear(4, 4)
        assert torch.nn.Module._apply is apply
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(layer.weight.sum() > 0)  # there are no numbers
    assert bool(torch.nn.Linear(4, 4).weight.abs().sum() > 0)


class Converted(Toy):
    """Converts its own weights while it is built, which torch cannot do with fake ones."""

    @classmethod
    def build(cls, config, context):
        return super().build(config, context).double().float()


def test_a_task_that_converts_its_weights_is_estimated_with_real_ones() -> None:
    tree = {**TREE, "stages": {"only": {"task": f"{HERE}.Converted", "width": 16}}}
    (found,) = estimated(tree)
    assert found.scaled_because is not None and "needs real numbers" in found.scaled_because


class Fussy(Picky):
    """Looks at numbers, and is far too large to be tried with them."""


def test_what_needs_numbers_is_not_tried_where_there_is_no_room() -> None:
    tree = {**TREE, "stages": {"only": {"task": f"{HERE}.Fussy", "width": 100_000}}}
    with pytest.raises(InputError, match="only cannot be traced on fake tensors"):
        imagined(tree, 80)


def test_a_run_without_its_data_is_estimated_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(HEAVY, sort_keys=False))
    examine([str(path), "data.source=folder", f"data.folder={tmp_path / 'gone'}"], memory=8)
    text = capsys.readouterr().out
    assert "gone does not exist" in text and "estimated without data" in text
    assert "none found: the figures below assume some" in text and "1,024 items" not in text
    assert "fits" in text and "8 GiB on a GPU of that size" in text
    with pytest.raises(InputError, match="--memory 8 needs"):
        examine([], memory=8)


def test_half_precision_needs_no_gpu_here_when_one_is_imagined(heavy: Path, capsys: pytest.CaptureFixture) -> None:
    examine([str(heavy), "train.precision=fp16"], memory=8)
    assert "fp16" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="fp16 needs a GPU"):
        examine([str(heavy), "train.precision=fp16", "train.device=cpu"])


@pytest.mark.parametrize(
    "words",
    [
        ["data.source=memmap", "data.folder=gone.npy"],
        ["data.source=folder"],  # and where it lies need not be said
        ["data.source=webdataset"],
        ["stages.only.data.source=memmap"],
        ["data.source=webdataset", "data.shards=gone.tar"],
        ["data.source=webdataset", "data.shards=gone.tar.gz"],
        ["data.source=webdataset", "data.shards=gone-*.tar"],
    ],
)
def test_data_of_every_kind_may_be_missing(words: list[str], heavy: Path, capsys: pytest.CaptureFixture) -> None:
    examine([str(heavy), *words], memory=8)
    assert "estimated without data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.source=folder", "data.folder=empty"], "holds nothing to train on"),
        (
            ["data.source=memmap", "data.folder=raw.bin", "data.array_shape=[3]", "data.array_dtype=sideways"],
            "is not a dtype",
        ),
        (["data.frames=9", "data.speed=1e9"], "data.speed"),
        (["train.batch_size=7", "train.accumulate=2"], "does not divide"),
        (["data.source=webdataset", "data.shards=broken.tar"], "cannot be read|holds no samples"),
    ],
)
def test_what_is_wrong_is_no_missing_data(
    words: list[str], message: str, heavy: Path, capsys: pytest.CaptureFixture
) -> None:
    """As `kineo train` would: an error, exit code 2, and no estimate."""
    (heavy.parent / "empty").mkdir()
    (heavy.parent / "broken.tar").write_bytes(b"no tar")
    (heavy.parent / "raw.bin").write_bytes(b"123")
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(heavy), *words, "--memory", "8"])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert re.search(message, err) and "estimated without data" not in out


@pytest.fixture
def heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file in the folder that everything is named from."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump({**HEAVY, "data": {"size": 16}}, sort_keys=False))
    return path


# Dry run ---------------------------------------------------------------------------------------------------------


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_dry_run_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(speed, "PROBE_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(yaml.safe_dump(MUSE, sort_keys=False))
    dry_run(["toy.yaml"])
    Path("small.yaml").write_text(yaml.safe_dump(TREE, sort_keys=False))
    dry_run(["small.yaml", "train.trackers=[tensorboard]"], run="elsewhere")
    assert everything(tmp_path) == {"toy.yaml", "small.yaml"}
    text = capsys.readouterr().out
    assert "runs/toy is new" in text
    assert "nothing was written" in text
    assert "generator: Muse" in text


def test_a_dry_run_of_a_half_done_run_estimates_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kineograph.run.plan import resolve_run
    from kineograph.train import checkpoint

    monkeypatch.setattr(speed, "PROBE_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(yaml.safe_dump(TREE, sort_keys=False))
    plan, folder = resolve_run(["toy.yaml", "train.steps=40"])
    folder.write_config(plan.tree())
    for stage, step, phase in (("first", 40, "train"), ("second", 30, "train")):
        weights = {"model": {"w": torch.zeros(1)}}
        checkpoint.save(folder.checkpoints(stage), step, weights, {"phase": phase})
    before = everything(tmp_path)
    lines: list[str] = []
    dry_run(["toy.yaml", "train.steps=40"], out=lines.append)
    text = "\n".join(lines)
    assert "first: finished at step 40; it is not trained again" in text
    assert "first: Duel" not in text
    assert "; continues from step 30" in text and "for the last 10 of 40 steps" in text
    assert "for what is left on this machine" in text
    assert everything(tmp_path) == before


def test_a_dry_run_fails_as_training_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(yaml.safe_dump(TREE, sort_keys=False))
    os.mkdir("empty")
    monkeypatch.setitem(sys.modules, "wandb", None)
    for words, message in (
        (["data.source=folder", "data.folder=empty"], "holds nothing to train on"),
        (["data.source=folder", "data.folder=gone"], "gone"),
        (["train.batch_size=7", "train.accumulate=2"], "does not divide"),
        (["stages.second.codec=runs/none/first"], "not a run folder"),
        (["train.precision=fp16"], "needs a GPU"),
        (["train.stepps=3"], "did you mean train.steps"),
        (["stages.second.train.trackers=[wandb]"], "wandb, which is not installed"),
        (["stages.second.train.parallel={layout: shard, offload: true}"], "works in a process group only"),
    ):
        with pytest.raises((ConfigError, InputError), match=message):
            dry_run(["toy.yaml", *words])
    with pytest.raises(InputError, match="no run to resume"):
        dry_run(["toy.yaml"], resume="must")
    assert everything(tmp_path) == {"toy.yaml", "empty"}
