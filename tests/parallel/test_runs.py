"""Whole runs of several processes: one folder, one voice, the same numbers; stopped, failing and going on together."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kineograph import cli
from kineograph.core.config import merge, nest
from kineograph.core.errors import InputError
from kineograph.run.launch import LauncherEnv, first_slurm_host, read_launcher_env
from kineograph.train.phases import Cursor
from tests.parallel.worlds import output_of, run
from tests.run.clip_tasks import BASE

KEYS = {
    "train__steps": 4,
    "train__validation_samples": 5,
    "train__sample_every": 2,
    "train__samples": 3,
    "train__log_every": 1,
    "train__save_every": 2,
}


def config(folder: Path, name: str, **changes: Any) -> Path:
    tree = BASE
    for path, value in {**KEYS, **changes}.items():
        tree = merge(tree, nest(path.replace("__", "."), value))
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def train(words: list[str], trouble: str = "") -> None:
    """The command line, in every process; `trouble` is what befalls rank 1."""
    from kineograph.train.trainer import Trainer

    step: Callable[..., float] = Trainer._train_step

    def troubled(self: Trainer, at: Cursor, *rest: Any) -> float:
        if os.environ["RANK"] == "1" and self.stage == "generator" and at.step == 1 and trouble == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        if os.environ["RANK"] == "1" and at.step == 1 and trouble == "fail":
            raise InputError("cannot go on")
        return step(self, at, *rest)

    Trainer._train_step = troubled  # type: ignore[method-assign]
    cli.main(["train", *words])


def codes(found: list[Any]) -> list[int]:
    return [(end or {"exit": 0})["exit"] or 0 for end in found]


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith("time/")} for record in records]


def same(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    assert [list(record) for record in one] == [list(record) for record in two]
    for first, second in zip(one, two, strict=True):
        for key, value in first.items():
            assert second[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), (key, first)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as one process makes it."""
    folder = tmp_path_factory.mktemp("alone")
    from kineograph.run.train import train as train_here

    return train_here([str(config(folder, "run"))], run=folder / "run", quiet=True)


def pictures(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("samples/*/*"))
        if path.suffix in (".png", ".gif", ".txt", ".json")
    }


def test_a_run_of_two_is_the_run_of_one(alone: Path, tmp_path: Path) -> None:
    """Metrics, validation, samples drawn by both, files; and every line is said once."""
    out = tmp_path / "out"
    found = run(
        2, "tests.parallel.test_runs:train", out, [str(config(tmp_path, "run")), "--run", str(tmp_path / "run")]
    )
    assert codes(found) == [0, 0], output_of(out, 0)
    same(lines(alone), lines(tmp_path / "run"))
    assert pictures(alone).keys() == pictures(tmp_path / "run").keys() and len(pictures(alone)) > 6
    first, second = output_of(out, 0), output_of(out, 1)
    assert first.count("done: ") == 1 and "generator" in first
    assert second == ""


def test_a_signal_to_one_process_stops_all_and_they_go_on(alone: Path, tmp_path: Path) -> None:
    """All leave at the same step, with 75 and the marker; the run then goes on in one process as if nothing had been."""
    out, folder, file = tmp_path / "out", tmp_path / "run", config(tmp_path, "run")
    found = run(2, "tests.parallel.test_runs:train", out, [str(file), "--run", str(folder)], "stop")
    assert codes(found) == [75, 75], output_of(out, 0)
    assert (folder / "stopped").read_text() == "saved\n"
    assert "stopped by SIGTERM at step 2 of generator" in output_of(out, 0)
    assert output_of(out, 1) == ""
    from kineograph.run.train import train as train_here

    train_here([str(file)], run=folder, quiet=True)
    assert not (folder / "stopped").exists()
    same(lines(alone), lines(folder))


@pytest.mark.slow
def test_two_processes_end_by_one_clock(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "run"
    file = config(tmp_path, "run", train__minutes=0.05, train__steps=20, train__save_every=10)
    assert codes(run(2, "tests.parallel.test_runs:train", out, [str(file), "--run", str(folder)])) == [0, 0]
    last = [record for record in lines(folder) if record["split"] == "train" and record["stage"] == "generator"][-1]
    assert (folder / "generator" / "checkpoints" / f"step-{last['step']:08d}" / "manifest.json").exists()


def test_an_error_on_one_rank_ends_all_and_names_the_rank(tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = config(tmp_path, "run")
    found = run(2, "tests.parallel.test_runs:train", out, [str(file), "--run", str(tmp_path / "run")], "fail")
    assert codes(found) == [1, 2]
    assert output_of(out, 1).count("error: rank 1: cannot go on") == 1
    assert "error: rank 0: another process of the job is gone or does not answer" in output_of(out, 0)


def test_a_bad_key_is_reported_by_each_rank_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [str(config(tmp_path, "run")), "train.parallel.tensor=3", "--run", str(tmp_path / "run")]
    assert codes(run(2, "tests.parallel.test_runs:train", out, words)) == [2, 2]
    for rank in range(2):
        assert f"error: rank {rank}: train.parallel.tensor=3 does not divide 2 processes" in output_of(out, rank)
    assert not (tmp_path / "run").exists()


FAMILY = [
    "muse-tiny", "train.steps=4", "train.batch_size=8", "train.save_every=2", "train.validate_every=2", "train.sample_every=4", "train.samples=3",
    "train.log_every=1", "train.validation_samples=5", "train.workers=0", "train.trackers=[]", "train.device=cpu", "data.count=48",
    "stages.tokenizer.width=16", "stages.generator.cache=false", "stages.generator.width=32", "stages.generator.depth=2",
    "stages.generator.text.width=32", "stages.generator.text.dropout=0",
]  # fmt: skip
LATER = "stages.generator.train.steps=6"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard", "{layout: shard, sequence: 2}", "{tensor: 2}", "{sequence: 2}"])
def test_a_family_is_validated_saved_and_drawn_from_under_every_layout(layout: str, tmp_path: Path) -> None:
    """Judging has its own pace on each process; then the run goes on under another layout, in one process."""
    from kineograph.run.train import train as train_here

    alone = train_here([*FAMILY, LATER], run=tmp_path / "alone", quiet=True)
    out, folder = tmp_path / "out", tmp_path / "run"
    words = [*FAMILY, f"stages.generator.train.parallel={layout}", "--run", str(folder)]
    assert codes(run(2, "tests.parallel.test_runs:train", out, words)) == [0, 0], output_of(out, 0)
    train_here([LATER, "train.parallel=replicate"], run=folder, quiet=True)
    wanted = [record for record in lines(alone) if record["split"] == "train"]
    found = [record for record in lines(folder) if record["split"] == "train"]
    for name, steps in (("tokenizer", 4), ("generator", 6)):
        curves = [[r["loss"] for r in records if r["stage"] == name] for records in (wanted, found)]
        assert len(curves[0]) == len(curves[1]) == steps
        assert curves[1] == pytest.approx(curves[0], rel=1e-3)
    assert len(list((folder / "generator" / "samples" / "step-00000004").glob("*.txt"))) == 3


# What launchers say ------------------------------------------------------------------------------------------------


def test_variables_of_launchers() -> None:
    assert read_launcher_env({}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    there = {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
    assert read_launcher_env(torchrun | there) == LauncherEnv("torchrun", 3, 4, 1, 2, "node1", 1234)
    openmpi = {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }  # fmt: skip
    assert read_launcher_env(openmpi) == LauncherEnv("mpirun", 1, 2, 1, 2, "127.0.0.1", 29400)
    hydra = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert read_launcher_env(hydra | there) == LauncherEnv("mpirun", 2, 4, 0, 2, "node1", 1234)
    slurm = {
        "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "31",
    }  # fmt: skip
    assert read_launcher_env(slurm) == LauncherEnv("srun", 5, 8, 1, 4, "gpu07", 29431)


def test_a_lone_process_of_a_job_is_alone() -> None:
    """A batch script has the job's variables too."""
    assert read_launcher_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "31"}) is None
    assert read_launcher_env({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_machines_that_do_not_know_the_first() -> None:
    apart = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(InputError, match="MASTER_ADDR is not set"):
        read_launcher_env(apart)
    with pytest.raises(InputError, match="WORLD_SIZE=2 without RANK"):
        read_launcher_env({"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a1,a2", "a1"), ("gpu[07-09,12],cpu1", "gpu07"), ("n[3,5]", "n3")]
)
def test_the_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first
