"""Findings from numbers alone: each is raised by what it is about, and by nothing that a healthy stage logs."""

from __future__ import annotations

import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kineograph.core.batch import Batch
from kineograph.core.errors import RunFailed
from kineograph.core.health import LOSS_FALLS, Finding, Limit, read_findings
from kineograph.train.config import EmaConfig, PlayerConfig, TrainConfig
from kineograph.train.data_probe import DataProbe
from kineograph.train.health import StageHealth
from kineograph.train.phases import Cursor
from kineograph.train.stepper import Stepper
from kineograph.train.trainer import Trainer, TrainerHooks
from tests.train.ranks import run_ranks
from tests.train.toy_tasks import Toy, ToyConfig

COLLAPSED = Limit("codec_collapsed", "explained_variance", "It decodes one picture.", "Lower train.lr.", at_least=0.1)


def stage(steps: int = 1000, limits: tuple[Limit, ...] = (), lr: float = 1e-3, **keys: Any) -> StageHealth:
    players = keys.pop("players", {"model": PlayerConfig(lr=lr)})
    return StageHealth(steps, players, limits, **keys)


def log(health: StageHealth, losses: list[float | None], every: int = 10, **numbers: Any) -> list[str]:
    """Log these losses; a number may be a function of the step. → "name severity" of the findings, each once"""
    found: dict[str, None] = {}
    for number, loss in enumerate(losses, 1):
        step = number * every
        values = {key: value(step) if callable(value) else value for key, value in numbers.items()}
        record = {"stage": "s", "split": "train", "step": step, "loss": loss, "gradient_norm": 1.0, "skipped": 0.0}
        found |= dict.fromkeys(names(health.observe(record | values)))
    return list(found)


def validate(health: StageHealth, step: int, **values: Any) -> list[str]:
    return names(health.observe({"stage": "s", "split": "validation", "step": step, **values}))


def names(findings: list[Finding]) -> list[str]:
    return [f"{finding.name} {finding.severity}" for finding in findings]


def falling(count: int = 100, start: float = 5.0, end: float = 1.0) -> list[float | None]:
    """A healthy loss: exponential, with noise."""
    noise = random.Random(0)
    return [end + (start - end) * math.exp(-5 * i / count) * (1 + 0.1 * noise.gauss(0, 1)) for i in range(count)]


# Nothing -------------------------------------------------------------------------------------------------------------


def test_a_healthy_stage_has_no_findings() -> None:
    health = stage(limits=(COLLAPSED, LOSS_FALLS))
    assert health.check_start() == []
    assert log(health, falling()) == []
    assert [validate(health, step, loss=1.0, explained_variance=0.9) for step in (500, 1000)] == [[], []]
    assert names(health.check_end()) == []


def test_a_diffusion_with_batches_of_one_has_no_findings() -> None:
    """Its loss depends on the timestep and varies hundredfold from step to step."""
    noise = random.Random(1)
    losses: list[float | None] = [0.002 + (0.3 + 0.7 * math.exp(-i / 50)) * noise.random() ** 3 for i in range(2000)]
    health = stage(steps=20_000, limits=(LOSS_FALLS,), batch_size=1)
    assert log(health, losses) == []
    assert names(health.check_end()) == []


def test_a_short_trial_is_not_judged() -> None:
    health = stage(steps=20, limits=(COLLAPSED, LOSS_FALLS))
    assert log(health, [5.0] * 20, every=1) == []
    assert validate(health, 20, loss=5.0, explained_variance=-2.0) == []
    assert names(health.check_end()) == []


# Learning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lr", "steps", "expected"), [(0.0, 1000, "fatal"), (1e-9, 1000, "fatal"), (0.0, 2, "warning")]
)
def test_a_learning_rate_that_moves_nothing(lr: float, steps: int, expected: str) -> None:
    (finding,) = stage(steps, lr=lr).check_start()
    assert (finding.name, finding.severity) == ("no_learning_rate", expected)
    assert f"train.lr is {lr:g}" in str(finding)


def test_a_small_learning_rate_is_none_of_our_business() -> None:
    assert stage(100, lr=1e-6).check_start() == []  # fine-tuning
    assert stage(1, lr=1e-6).check_start() == []


def test_one_player_of_two_without_a_learning_rate_is_a_warning() -> None:
    players = {"generator": PlayerConfig(), "discriminator": PlayerConfig(lr=0)}
    (finding,) = stage(players=players).check_start()
    assert finding.severity == "warning" and "player discriminator" in finding.evidence


@pytest.mark.parametrize(
    "losses", [[5.0] * 100, [5.0, *[7.0] * 99], [5.0, *[900.0] * 99]], ids=["flat", "up", "diverged"]
)
def test_a_loss_that_does_not_fall(losses: list[float | None]) -> None:
    health = stage(limits=(LOSS_FALLS,))
    log(health, losses)
    assert names(health.check_end()) == ["nothing_learned fatal"]
    other = stage(limits=(LOSS_FALLS,), starts_random=False)
    log(other, losses)
    assert other.check_end() == []  # fine-tuning begins where it ends
    gan = stage()
    log(gan, losses)
    assert gan.check_end() == []  # the task has not said that its loss falls


def test_a_stage_in_its_warm_up_is_only_warned() -> None:
    players = {"model": PlayerConfig(lr=1e-4, warmup=2000)}
    health = stage(limits=(LOSS_FALLS, COLLAPSED), players=players)
    log(health, [5.0] * 100)
    validate(health, 1000, loss=5.0, explained_variance=-1.0)
    assert names(health.check_end()) == ["nothing_learned warning", "codec_collapsed warning"]


def test_a_loss_that_blows_up_is_noticed_even_if_it_comes_back() -> None:
    health = stage(limits=(LOSS_FALLS,))
    assert log(health, [5.0, *[80.0] * 30, *[3.0] * 69]) == ["diverged warning"]
    assert health.check_end() == []
    assert log(stage(limits=(LOSS_FALLS,)), [5.0, 80.0, 80.0, *falling(97)]) == []  # a bad moment
    assert log(stage(), [5.0, *[80.0] * 30]) == []  # a GAN


# Limits of a task ----------------------------------------------------------------------------------------------------


def test_a_limit_is_a_warning_from_the_middle_on_and_fatal_at_the_end() -> None:
    health = stage(limits=(COLLAPSED,))
    values = {"loss": 0.1, "explained_variance": 0.01}
    assert validate(health, 250, **values) == []
    assert validate(health, 500, **values) == ["codec_collapsed warning"]
    assert validate(health, 1000, **values) == []  # the end follows
    (finding,) = health.check_end()
    assert finding.severity == "fatal" and finding.value == 0.01 and finding.limit == 0.1
    assert "explained_variance is 0.01, and at least 0.1 is healthy" in str(finding)


def test_a_codec_that_recovers_has_no_finding_at_the_end() -> None:
    health = stage(limits=(COLLAPSED,))
    validate(health, 500, loss=0.1, explained_variance=0.01)
    validate(health, 1000, loss=0.01, explained_variance=0.9)
    assert health.check_end() == []


def test_a_limit_that_always_holds_counts_from_the_first_validation() -> None:
    constant = Limit("constant_tokens", "tokens/distinct", "One code.", "Train it again.", at_least=1.5, always=True)
    assert validate(stage(limits=(constant,)), 10, loss=0.0, **{"tokens/distinct": 1.0}) == ["constant_tokens fatal"]
    assert validate(stage(limits=(constant,)), 10, loss=0.0, **{"tokens/distinct": 2.0}) == []


def test_a_limit_may_be_a_share_of_another_number() -> None:
    """A generator that knows the frequencies of its tokens and nothing else, whatever validation says of what it never saw."""
    frequencies = Limit("only_frequencies", "train/cross_entropy", "", "", at_most=0.98, share_of="tokens/entropy")
    for loss, expected in ((2.6, ["only_frequencies fatal"]), (0.1, [])):
        health = stage(limits=(frequencies,))
        log(health, [loss] * 100, cross_entropy=loss)
        assert validate(health, 1000, loss=9.0, **{"tokens/entropy": 2.6}) == []
        found = health.check_end()
        assert names(found) == expected
    assert stage(limits=(frequencies,)).needs_validation(1000)
    assert frequencies.check({"train/cross_entropy": 2.0, "tokens/entropy": 0.0}) is None


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_number_that_is_missing_is_not_judged(value: float | None) -> None:
    assert COLLAPSED.check({"explained_variance": value}) is None


def test_a_limit_of_logged_steps_needs_them_in_a_row() -> None:
    saturated = Limit("saturated", "d/loss", "It wins.", "Lower its lr.", at_least=0.02, severity="warning", logs=50)
    assert log(stage(limits=(saturated,)), [1.0] * 60, **{"d/loss": 0.0}) == ["saturated warning"]
    assert log(stage(limits=(saturated,)), [1.0] * 60, **{"d/loss": lambda step: float(step == 300)}) == []


def test_the_end_asks_for_a_validation_only_where_a_limit_needs_one() -> None:
    assert stage(limits=(COLLAPSED,)).needs_validation(1000)
    assert not stage(limits=(LOSS_FALLS,)).needs_validation(1000)
    assert not stage(steps=20, limits=(COLLAPSED,)).needs_validation(20)
    health = stage(limits=(COLLAPSED,))
    validate(health, 1000, loss=1.0, explained_variance=0.5)
    assert not health.needs_validation(1000)


# Numbers that are not finite -----------------------------------------------------------------------------------------


def test_a_validation_loss_that_is_not_finite() -> None:
    health = stage()
    assert validate(health, 500, loss=None) == ["nonfinite_loss warning"]
    assert validate(health, 1000, loss=None) == ["nonfinite_loss fatal"]
    assert names(health.check_end()) == ["nonfinite_loss fatal"]
    recovered = stage()
    validate(recovered, 500, loss=math.inf)
    validate(recovered, 1000, loss=1.0)
    assert recovered.check_end() == []


@pytest.mark.parametrize(("in_a_row", "severity"), [(1, "warning"), (5, "fatal")])
def test_a_run_that_ends_with_nan(in_a_row: int, severity: str) -> None:
    health = stage()
    log(health, [*falling(99), None], skipped=lambda step: in_a_row if step == 1000 else 0.0)
    assert names(health.check_end()) == [f"nonfinite_loss {severity}"]


def test_weights_that_are_not_finite() -> None:
    (finding,) = stage().check_end(["encoder.weight", "codebook"])
    assert finding.severity == "fatal" and "2 tensors hold nan or inf: encoder.weight, codebook" in finding.evidence


def test_half_of_the_updates_skipped() -> None:
    both = ["skipped_updates warning", "skipped_updates fatal"]
    assert log(stage(), falling(), skipped=lambda step: step // 2) == both
    # From step 700 on: the share of the whole stage is still small.
    assert log(stage(), falling(), skipped=lambda step: max(0, step - 700) // 2) == both


def test_a_few_skipped_updates() -> None:
    assert log(stage(), falling(), skipped=lambda step: step // 50) == ["skipped_updates warning"]
    assert log(stage(), falling(), skipped=lambda step: step // 300) == []
    # fp16 begins with a loss scale that is too high.
    first = {"skipped": lambda step: min(step, 16)}
    assert log(stage(), falling(), **first) == ["skipped_updates warning"]
    assert log(stage(scales_loss=True), falling(), **first) == []


def test_a_short_stage_with_half_of_its_updates_skipped() -> None:
    health = stage(steps=20)
    log(health, [1.0] * 20, every=1, skipped=lambda step: step // 2)
    assert names(health.check_end()) == ["skipped_updates fatal"]


# Gradients and losses ------------------------------------------------------------------------------------------------


def test_a_player_without_gradient() -> None:
    assert log(stage(), falling(20), gradient_norm=0.0) == ["no_gradient fatal"]
    assert log(stage(), falling(9), gradient_norm=0.0) == []
    seldom = stage(steps=150)
    log(seldom, [1.0] * 3, every=50, gradient_norm=0.0)
    assert names(seldom.check_end()) == ["no_gradient fatal"]
    trial = stage(steps=2)
    log(trial, [1.0] * 2, every=1, gradient_norm=0.0)
    assert trial.check_end() == []
    players = {"generator": PlayerConfig(), "discriminator": PlayerConfig()}
    assert log(stage(players=players), falling(20), **{"discriminator/gradient_norm": 0.0}) == ["no_gradient warning"]


def test_a_loss_of_exactly_zero() -> None:
    assert log(stage(), [0.0] * 20) == ["zero_loss warning"]
    assert log(stage(), [1e-9] * 20) == []


def test_a_spike() -> None:
    losses = falling()
    losses[80] = 60.0
    assert log(stage(), losses) == ["loss_spike warning"]
    near_zero: list[float | None] = [5.0, *[1e-6] * 98, 1e-3]
    assert log(stage(), near_zero) == []


def test_learning_by_heart() -> None:
    health = stage()
    log(health, falling())
    found = [
        validate(health, step, loss=loss)
        for step, loss in zip(range(200, 1001, 200), (2, 1.5, 1.6, 1.7, 1.9), strict=True)
    ]
    assert found == [[], [], [], [], ["overfitting warning"]]
    # Both rise: that is something else.
    other = stage()
    log(other, [1.0 + i / 100 for i in range(100)])
    assert not any(validate(other, step, loss=step / 100) for step in range(200, 1001, 200))


# Again ---------------------------------------------------------------------------------------------------------------


def test_a_resumed_stage_stands_where_it_was() -> None:
    """Replaying the file gives the same findings later, and repeats none."""
    records = [
        {"split": "train", "step": step * 10, "loss": 5.0, "gradient_norm": 1.0, "skipped": 0.0}
        for step in range(1, 60)
    ]
    said = {"split": "health", "step": 10, "finding": {"name": "one_caption", "severity": "warning"}}
    health = stage(limits=(LOSS_FALLS,))
    health.replay([*records, said])
    log(health, [5.0] * 41)
    assert names(health.check_end()) == ["nothing_learned fatal"]
    assert not health.is_new(Finding("one_caption", "warning", "", "", ""))
    fatal = Finding("one_caption", "fatal", "", "", "")
    assert health.is_new(fatal) and not health.is_new(fatal)


def test_findings_are_read_back_from_metrics(tmp_path: Path) -> None:
    finding = Finding("codec_collapsed", "fatal", "0 of 1", "It is dead.", "Lower train.lr.", math.nan, 0.1)
    record = {"stage": "tokenizer", "split": "health", "step": 7, "finding": finding.to_json()}
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"stage": "x", "step": 1}), json.dumps(record), '{"finding": 3}', '{"finding"']
    path.write_text("\n".join(lines))
    ((name, step, found),) = read_findings(path)
    assert (name, step, found.name, found.value, found.limit) == ("tokenizer", 7, "codec_collapsed", None, 0.1)
    assert list(read_findings(tmp_path / "missing.jsonl")) == []


@pytest.mark.parametrize("changes", [{"name": {"a": 1}}, {"evidence": ["x"]}, {"severity": "odd"}, {"severity": [1]}])
def test_an_odd_finding_of_a_stranger_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    """`kineo evaluate` would fail on it."""
    finding = COLLAPSED.check({"explained_variance": 0.0}).to_json()  # type: ignore[union-attr]
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"stage": "x", "step": 1, "finding": finding | changes}) + "\n")
    with open(path, "a") as file:
        file.write('{"stage": "x", "step": 1e999, "finding": ' + json.dumps(finding) + "}\n")
    assert list(read_findings(path)) == []


# Data ----------------------------------------------------------------------------------------------------------------


def make_batch(values: torch.Tensor, captions: list[str] | None = None) -> Batch:
    return Batch(torch.arange(len(values)), pixels=values, captions=captions)


def probe(*batches: Batch, reads_captions: bool = False) -> list[str] | None:
    looking = DataProbe(reads_captions)
    for batch in batches:
        looking.add([batch])
        found = looking.check([json.loads(json.dumps(looking.summary()))])
        if found is not None:
            return names(found)
    return None


def test_black_pictures_and_pictures_that_are_all_the_same() -> None:
    black = torch.zeros(32, 1, 3, 4, 4, dtype=torch.uint8)
    same = torch.arange(48, dtype=torch.uint8).view(1, 1, 3, 4, 4).repeat(32, 1, 1, 1, 1)
    mixed = black.clone()
    mixed[31, 0, 0, 0, 0] = 1
    assert probe(make_batch(black)) == ["blank_data fatal"]
    assert probe(make_batch(same)) == ["identical_data warning"]
    assert probe(make_batch(mixed)) == []


def test_the_probe_looks_at_enough_items() -> None:
    black = torch.zeros(8, 1, 1, 4, 4, dtype=torch.uint8)
    assert probe(make_batch(black), make_batch(black)) is None  # a film may begin in the dark
    assert probe(*[make_batch(black)] * 4) == ["blank_data fatal"]
    assert probe(*[make_batch(black)] * 3, make_batch(black + 1)) == []


def test_one_caption_for_all() -> None:
    pixels = torch.randint(0, 255, (32, 1, 1, 4, 4), dtype=torch.uint8)
    assert probe(make_batch(pixels, ["a digit"] * 32), reads_captions=True) == ["one_caption warning"]
    assert probe(make_batch(pixels, ["a digit"] * 32)) == []  # a codec
    assert probe(make_batch(pixels, [*["a digit"] * 31, "a 3"]), reads_captions=True) == []
    assert probe(make_batch(pixels), reads_captions=True) == []  # embedded in a cache


def test_processes_that_each_see_one_picture_see_two_together() -> None:
    parts = []
    for value in (0, 7):
        looking = DataProbe(False)
        looking.add([make_batch(torch.full((32, 1, 1, 4, 4), value, dtype=torch.uint8))])
        parts.append(looking.summary())
    assert DataProbe(False).check(parts) == []
    assert names(DataProbe(False).check(parts[:1] * 2) or []) == ["blank_data fatal"]


def test_cached_tokens_that_are_all_the_same() -> None:
    for batch in (
        Batch(torch.arange(32), tokens=torch.full((32, 1, 4, 4), 9)),
        Batch(torch.arange(32), latents=torch.full((32, 1, 4, 4), 9, dtype=torch.bfloat16)),
    ):
        looking = DataProbe(False)
        looking.add([batch])
        (finding,) = looking.check([looking.summary()]) or []
        assert finding.severity == "fatal" and "every value in them is 9" in finding.evidence


# Several processes ---------------------------------------------------------------------------------------------------


def train_toy(rank: int, blank: tuple[int, ...], health: StageHealth | None = None) -> str:
    """Train a toy on two processes, of which some see black pictures. → how it ended"""

    class Batches:
        def steps(self, start: int, stop: int) -> Any:
            for _ in range(start, stop):
                pixels = torch.randint(0, 256, (16, 1, 3, 2, 2), dtype=torch.uint8) * (rank not in blank)
                yield [Batch(torch.arange(16) + 16 * rank, pixels=pixels)]

    torch.manual_seed(rank)
    config = TrainConfig(steps=3, batch_size=32, log_every=1, validate_every=0, sample_every=0, ema=EmaConfig(decay=0))
    with tempfile.TemporaryDirectory() as folder:
        stepper = Stepper(Toy(12, ToyConfig(task="toy")), config)
        hooks = TrainerHooks(Path(folder), lambda record: None, quiet=True)
        trainer = Trainer("toy", stepper, Batches(), hooks)
        if health is not None:
            trainer.health = health
        try:
            trainer.fit(Cursor())
        except RunFailed as error:
            return str(error)
    return "done"


def test_all_processes_end_together() -> None:
    assert run_ranks(2, lambda rank: train_toy(rank, blank=(1,))) == ["done", "done"]
    both = run_ranks(2, lambda rank: train_toy(rank, blank=(0, 1)))
    assert both[0] == both[1] and both[0].startswith("stage toy: blank_data: the first 32 pictures are all the same")


class Alone(StageHealth):
    """Finds something that no other process finds."""

    def observe(self, record: Any) -> list[Finding]:
        return [Finding("skipped_updates", "fatal", "half of them", "It diverges.", "Lower train.lr.")]


def test_the_first_process_decides_for_all() -> None:
    players = {"model": PlayerConfig()}
    first = run_ranks(2, lambda rank: train_toy(rank, (), (StageHealth if rank else Alone)(3, players)))
    assert first[0] == first[1] and first[0].startswith("stage toy: skipped_updates")
    other = run_ranks(2, lambda rank: train_toy(rank, (), (Alone if rank else StageHealth)(3, players)))
    assert other == ["done", "done"]
