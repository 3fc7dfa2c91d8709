"""`--processes` of the doctor and of a dry run: layouts are checked for the world that is meant, and one process's part is what it would really hold."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from kineograph.cli import main
from kineograph.core.distributed import World
from kineograph.core.errors import ConfigError, InputError
from kineograph.doctor import estimate, speed
from kineograph.doctor.estimate import Estimate, Target
from kineograph.doctor.report import describe_estimate
from kineograph.doctor.speed import read_two_batches
from kineograph.doctor.step_trace import Memory, trace_step
from kineograph.run.dry_run import dry_run, examine, planned_world
from kineograph.stage.data import count_workers
from kineograph.train.config import TrainConfig
from kineograph.train.dtensors import to_local
from kineograph.train.stepper import Stepper
from tests.doctor.test_doctor import MUSE, TREE, opened
from tests.train.ranks import run_ranks


def planned(processes: int, *overrides: str, tree: dict = TREE, probing: bool = False) -> Estimate:
    plan, data, builder = opened(tree, *overrides)
    stage = plan.stages[-1]
    return estimate.estimate_stage(builder, stage, data[stage.name], probing, world=World(processes, processes))


def held(processes: int, *overrides: str) -> Memory:
    """By one of so many, of a small transformer."""
    plan, data, builder = opened(MUSE, *overrides)
    stage = plan.stages[-1]
    (sample, _), _ = read_two_batches(data[stage.name], 2)
    world = World(processes, processes)
    micro = estimate.micro_batch(stage.train, None, world)
    return trace_step(builder, stage, stage.train, "fp32", sample, micro, world=world).memory


def said(processes: int, keys: str = "replicate") -> str:
    """Of a stage, as the doctor describes it."""
    plan, data, _ = opened(TREE, f"train.parallel={keys}")
    meant = replace(some_estimate(), stage=plan.stages[1], world=World(processes, processes), all_blocks=1024)
    return "\n".join(describe_estimate(meant, data["second"]))


@cache
def some_estimate() -> Estimate:
    return planned(1)


# What one of them holds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["shard", "{tensor: 2}", "{layout: shard, sequence: 2}", "{sequence: 2}", "replicate"])
def test_a_process_holds_what_was_said(keys: str) -> None:
    found = held(2, f"train.parallel={keys}")

    def hold(rank: int) -> dict[str, int]:
        plan, _, builder = opened(MUSE, f"train.parallel={keys}")
        stage = plan.stages[-1]
        stepper = Stepper(builder.build(stage.name, torch.device("cpu")), stage.train, stage.players)
        task, (optimizer,), (average,) = stepper.task, stepper.optimizers.values(), stepper.emas.values()
        frozen = [t for kept in task.stages.values() for t in [*kept.parameters(), *kept.buffers()]]
        tensors = {t.data_ptr(): t for t in [*map(to_local, task.parameters()), *task.buffers(), *frozen]}
        return {
            "weights": sum(t.numel() * t.element_size() for t in tensors.values()),
            "gradients": sum(p.numel() * p.element_size() for p in optimizer.parts.values()),
            "optimizer": sum(map(optimizer.state_bytes, optimizer.parts)),
            "ema": sum(to_local(value).numel() * value.element_size() for value in average.average.values()),
        }

    first, _ = run_ranks(2, hold)
    assert first == {name: getattr(found, name) for name in first}
    alone = held(1).optimizer
    assert found.optimizer < 0.8 * alone if "shard" in keys or "tensor" in keys else found.optimizer == alone


def test_a_process_takes_its_part_of_the_batch() -> None:
    one, four = planned(1), planned(4)
    assert (one.micro, four.micro) == (8, 2)
    train = opened(MUSE, "train.parallel={tensor: 2}")[0].stages[-1].train
    assert estimate.micro_batch(train, None, World(4, 4)) == 4  # two see the same
    assert four.memory.activations < one.memory.activations
    assert four.flops == pytest.approx(one.flops, rel=0.01)


def test_blocks_that_stay_gathered_take_more() -> None:
    freed, kept = (
        held(2, f"train.parallel={{layout: shard, reshard: {word}}}", "stages.generator.depth=6")
        for word in ("true", "false")
    )
    assert 0 < freed.gathered < kept.gathered
    assert kept.total - freed.total == kept.gathered - freed.gathered


def test_shards_in_main_memory_take_none_of_the_gpu() -> None:
    keys = "{layout: shard, offload: true}"
    kept, moved = held(2, "train.parallel=shard"), held(2, f"train.parallel={keys}")
    for part in ("weights", "gradients", "optimizer", "ema"):
        assert getattr(moved, part) < getattr(kept, part)
    assert (moved.activations, moved.gathered) == (kept.activations, kept.gathered)
    assert "the shards lie in main memory and are not counted" in said(2, keys)
    assert held(1, f"train.parallel={keys}") == held(1), "one process keeps them on its GPU"


def test_sharding_is_a_switch_beside_other_processes() -> None:
    deep = "stages.generator.depth=2"
    assert planned(2, deep, tree=MUSE).savings["train.parallel=shard"] == held(2, "train.parallel=shard", deep)
    duel = {**TREE, "stages": {"first": TREE["stages"]["first"]}}  # two players cannot be sharded
    for found in (planned(1), planned(2, tree=duel)):
        assert "train.parallel=shard" not in found.savings


def test_processes_on_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "free_memory", lambda device: 8 * 2**30)
    train = TrainConfig(device="cpu")
    assert [Target.of(train, world=World(n, n)).free for n in (1, 4)] == [8 * 2**30, 2 * 2**30]
    assert Target.of(train, memory=2**30, world=World(4, 4)).free == 2**30  # a GPU each


def test_what_is_not_known_is_said() -> None:
    assert "processes" not in said(1)
    assert "2, 4 of a step's 8 samples each" in said(2)
    cut = said(2, "{tensor: 2}")
    assert "matrices of blocks are split over 2 processes" in cut
    assert "activations are estimated without train.parallel.tensor" in cut
    assert "without train.parallel.sequence" in said(2, "{sequence: 2}")
    sharded = said(4, "hybrid")
    assert "blocks are sharded over 4 processes" in sharded and "validation gathers all blocks: 1 KiB more" in sharded
    assert "assuming 4 processes per machine" in sharded
    assert "assuming" not in said(4, "{layout: hybrid, shard: 2}")


def test_what_one_process_cannot_try_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PROBE_SECONDS", 0.1)
    cut = replace(some_estimate(), stage=opened(TREE, "train.parallel={tensor: 2}")[0].stages[1], world=World(2, 2))
    assert "one alone cannot run it" in str(estimate._add_speed(cut, None, None, 1.0).not_timed)  # type: ignore[arg-type]
    found = planned(2, probing=True)
    assert found.speed is not None and found.step_seconds is not None
    assert found.speed.samples == 4  # its part of the batch
    assert found.step_seconds == pytest.approx(found.speed.step_seconds + 4 * found.speed.read_seconds)
    told = "\n".join(describe_estimate(found, opened(TREE)[1]["second"]))
    assert "one of 2 processes that had nothing to exchange" in told


def test_workers_are_shared_out_over_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(32), raising=False)
    assert [count_workers(TrainConfig(), local) for local in (1, 2, 4, 8)] == [8, 8, 4, 2]
    assert count_workers(TrainConfig(workers=3), 8) == 3

    def auto(rank: int) -> int:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        return count_workers(TrainConfig())

    assert run_ranks(1, auto) == [4]


# The commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(speed, "PROBE_SECONDS", 0.05)
    monkeypatch.chdir(tmp_path)
    for name, tree in (("toy", TREE), ("muse", MUSE)):
        Path(f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return "toy.yaml"


def test_a_layout_is_checked_for_the_processes_that_are_meant(toy: str) -> None:
    lines: list[str] = []
    cut = ["muse.yaml", "stages.generator.train.parallel={tensor: 2}", "stages.generator.depth=1"]
    with pytest.raises(ConfigError, match=r"tensor=2 does not divide 1 process: .*--processes"):
        dry_run(cut, out=lines.append)
    dry_run(cut, out=lines.append, processes=4)
    assert "nothing was written" in lines[-1]
    for words, processes, message in (
        ([*cut, "train.batch_size=9"], 3, "does not divide 3 processes"),
        (["muse.yaml", "stages.generator.train.parallel={tensor: 4}", "train.batch_size=4"], 4, "does not divide the 2 heads"),
        ([toy, "stages.first.train.parallel=shard"], 2, "FSDP2 cannot run several backward passes"),
        ([toy], 3, "train.batch_size=8 does not divide into 3 processes"),
        ([toy, "train.parallel={layout: hybrid, shard: 3}"], 8, "shard=3 does not divide 8 processes"),
    ):  # fmt: skip
        for command in (dry_run, examine):
            with pytest.raises(ConfigError, match=message):
                command(words, processes=processes)


def test_one_process_of_a_launcher_speaks_for_all(
    toy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """And plans for as many as were started."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in (["train", toy, "--dry-run"], ["doctor", toy]):
        told = {}
        for rank in (1, 0):
            monkeypatch.setenv("RANK", str(rank))
            code = 0
            try:
                main(command)
            except SystemExit as end:
                code = int(end.code or 0)
            assert code == 0
            told[rank] = capsys.readouterr().out
        assert told[1] == ""
        assert "2, 4 of a step's 8 samples each" in told[0]


def test_a_dry_run_in_a_group_waits_for_nobody(toy: str) -> None:
    def check(rank: int) -> int:
        lines: list[str] = []
        if rank == 0:
            dry_run([toy], out=lines.append, processes=2)
        return len(lines)

    first, second = run_ranks(2, check)
    assert first and not second


def test_processes_are_planned_and_not_started(
    toy: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", toy, "--processes", "2"])
    assert end.value.code == 2 and "--dry-run" in capsys.readouterr().err
    with pytest.raises(InputError, match="--processes 2 needs"):
        examine([], processes=2)
    assert planned_world(None) == (1, 1) and planned_world(16) == (16, 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert planned_world(16) == (16, 8) and planned_world(4) == (4, 4)
