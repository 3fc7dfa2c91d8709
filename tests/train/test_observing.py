"""Step timings, the slowest rank, the logs of each rank, and the watchdog."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kineograph.core import distributed, heartbeat
from kineograph.core.batch import Batch
from kineograph.train import step_timer
from kineograph.train.config import TrainConfig
from kineograph.train.metrics_file import MetricsFile
from kineograph.train.phases import Cursor
from kineograph.train.progress_bar import Progress
from kineograph.train.rank_log import RankLog, log_file
from kineograph.train.step_timer import (
    MEASURED_STEPS,
    SLOW_REPORTS,
    SlowestRank,
    StepFlops,
    StepTimer,
    find_slowest_rank,
    is_measured,
)
from kineograph.train.stepper import Stepper
from kineograph.train.trainer import Trainer, TrainerHooks
from tests.train.toy_tasks import Duel, ToyConfig

CONFIG = TrainConfig(
    steps=8, batch_size=4, log_every=4, save_every=100, validate_every=0, sample_every=0, compile=False
)


# Parts of a step -------------------------------------------------------------------------------------------------


class FakeClock:
    """A clock that a test moves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(step_timer.time, "perf_counter", lambda: self.now)


def test_parts_of_measured_steps_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timer = FakeClock(monkeypatch), StepTimer("cpu")
    with timer.step(is_measured=True):
        clock.now += 7  # in no part
        with timer.part("backward"):
            clock.now += 4
        with timer.part("sync"):
            clock.now += 2
        with timer.part("forward"):
            clock.now += 5
    with timer.step(is_measured=False), timer.part("forward"):
        clock.now += 50
    assert timer.read_parts() == pytest.approx({"forward": 5000, "backward": 4000, "optimizer": 0, "sync": 2000})
    assert timer.read_parts() == {}, "each step is read once"


def test_a_part_is_the_mean_over_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timer = FakeClock(monkeypatch), StepTimer("cpu")
    for seconds in (1, 3):
        with timer.step(is_measured=True), timer.part("optimizer"):
            clock.now += seconds
    assert timer.read_parts()["optimizer"] == pytest.approx(2000)


@pytest.mark.parametrize("log_every", [1, 7, 10, 100, 1000])
def test_few_steps_are_measured_and_every_reported_one_is(log_every: int) -> None:
    config = CONFIG.model_copy(update={"steps": 5000, "log_every": log_every})
    window = range(2000 // log_every * log_every + 1, 2000 // log_every * log_every + log_every + 1)
    measured = [step for step in window if is_measured(config, step)]
    assert 1 <= len(measured) <= MEASURED_STEPS
    assert window[-1] in measured


@pytest.mark.gpu
def test_on_a_gpu_events_tell_the_time_and_nothing_waits_for_them() -> None:
    times = StepTimer("cuda")
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with times.step(is_measured=True):
        with times.part("forward"):
            for _ in range(50):
                matrix = (matrix @ matrix).tanh()
        with times.part("optimizer"):
            matrix = matrix + 1
    assert times.read_parts() == {}, "not read before the device has come to its end"
    torch.cuda.synchronize()
    found = times.read_parts()
    assert found["forward"] > 5 * found["optimizer"] > 0
    assert found["backward"] == 0


def test_the_memory_of_earlier_stages_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    StepTimer("cuda:1").begin()
    assert reset == [torch.device("cuda:1")]


class Batches:
    """The data of a test: steps of noise, with something that happens before each."""

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        self.before = before

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        for step in range(start, stop):
            self.before(step)
            pixels = torch.randint(0, 256, (4, 1, 3, 2, 2), dtype=torch.uint8)
            yield [Batch(slots=torch.arange(4), pixels=pixels)]


def trainer(run: Path, config: TrainConfig = CONFIG, data: Batches | None = None, **hooks) -> Trainer:
    torch.manual_seed(0)
    stepper = Stepper(Duel(12, ToyConfig(task="duel")), config)
    log = MetricsFile(run / "metrics.jsonl").write
    return Trainer("duel", stepper, data or Batches(), TrainerHooks(run / "checkpoints", log, quiet=True, **hooks))


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_checkpoint_is_uploaded_while_training_goes_on(tmp_path: Path) -> None:
    threads: list[str] = []
    config = CONFIG.model_copy(update={"save_every": 4, "trackers": ("hub",), "log_checkpoints": True})
    trainer(tmp_path, config, publish=lambda saved, best: threads.append(threading.current_thread().name)).fit(Cursor())
    assert len(threads) == 2 and all(name.startswith("saver") for name in threads)


def test_every_part_of_training_is_in_the_log(tmp_path: Path) -> None:
    trainer(tmp_path, step_flops=StepFlops(flops=1e6, peak=1e9)).fit(Cursor())
    found = records(tmp_path)
    assert [record["step"] for record in found] == [1, 4, 8]
    for record in found:
        parts = [record[f"time/{part}_ms"] for part in ("data", "forward", "backward", "optimizer", "sync")]
        assert all(value > 0 for value in parts)
        assert record["time/host_memory_gib"] > 0.01
        assert record["time/mfu"] == pytest.approx(record["time/tflops"] * 1e12 / 1e9)
        assert record["time/tflops"] == pytest.approx(1e6 / record["time/step_ms"] / 1e9)
        assert "time/slowest_rank" not in record, "one process is not slower than others"
    assert sum(found[-1][f"time/{part}_ms"] for part in ("forward", "backward", "optimizer", "sync")) > 0


def test_without_counted_work_no_mfu_is_told(tmp_path: Path) -> None:
    trainer(tmp_path).fit(Cursor())
    assert not {"time/mfu", "time/tflops"} & records(tmp_path)[-1].keys()


# The slowest process ---------------------------------------------------------------------------------------------


def test_the_slowest_is_named_with_what_it_loses() -> None:
    found = find_slowest_rank({"data": (1.0, 9.0, 1.0), "forward": (20.0, 21.0, 20.0), "backward": (40.0, 40.0, 41.0)})
    assert (found.rank, found.part) == (1, "data")
    assert found.behind_ms == pytest.approx(70 - 62)
    assert "rank 1" in str(found)
    assert "data" in str(found)


def test_a_rank_that_stays_slow_is_reported_once() -> None:
    timer = StepTimer("cpu")
    slow, equal = SlowestRank(2, "forward", 30.0, 0.3), SlowestRank(1, "data", 0.1, 0.001)
    assert not any(timer.should_warn(equal) for _ in range(10))
    warnings = [timer.should_warn(slow) for _ in range(10)]
    assert warnings.index(True) == SLOW_REPORTS - 1
    assert sum(warnings) == 1
    assert not timer.should_warn(SlowestRank(0, "data", 30.0, 0.3)), "another rank starts from the beginning"


# What a process says ---------------------------------------------------------------------------------------------


def test_notes_warnings_and_loggers_go_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    log = RankLog(tmp_path)
    said: list[str] = []
    warnings.simplefilter("always")
    with log.capture_warnings():
        log.with_note(said.append)("a note")
        warnings.warn("mind the gap", stacklevel=1)
        logging.getLogger("some.library").warning("disk %s", "slow")
        logging.getLogger("some.library").info("chatter")
    warnings.warn("afterwards", stacklevel=1)
    log.close()
    text = log_file(tmp_path, 0).read_text()
    assert said == ["a note"]
    assert "rank 0 of 1" in text
    assert "a note" in text
    assert "UserWarning: mind the gap" in text
    assert "WARNING some.library: disk slow" in text
    assert "chatter" not in text
    assert "afterwards" not in text
    assert "mind the gap" in capsys.readouterr().err, "rank 0 shows its warnings, too"


def test_a_second_life_is_added_to_the_log(tmp_path: Path) -> None:
    for _ in range(2):
        RankLog(tmp_path).close()
    assert log_file(tmp_path, 0).read_text().count("rank 0 of 1") == 2


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    log = RankLog(tmp_path)
    log.write("said into the void")
    log.close()


def test_a_quiet_run_is_heard_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RankLog(tmp_path)
    Progress("stage", 10, quiet=True, log_note=log.write).note("validation loss 1")
    assert "validation loss 1" in log.path.read_text()
    assert capsys.readouterr().err == ""


# Two processes ---------------------------------------------------------------------------------------------------


def _process(rank: int, run: str, what: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{run}/store", rank=rank, world_size=2)
    getattr(sys.modules[__name__], what)(Path(run))
    dist.destroy_process_group()


def _context() -> Any:
    """Processes of a server that has torch at hand: they start at once."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["kineograph.run.train", "kineograph.family.cogvideox", "kineograph.codec.vqgan"])
    return context


def two(run: Path, what: str) -> list[int | None]:
    """Exit codes of two processes that do `what`."""
    context = _context()
    processes = [context.Process(target=_process, args=(rank, str(run), what)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _one_reads_slowly(run: Path) -> None:
    log = RankLog(run)
    slow = Batches(lambda step: time.sleep(0.3 * distributed.rank()))
    config = CONFIG.model_copy(update={"log_every": 1})
    trainer(run, config, slow, rank_log=log).fit(Cursor())
    with log.capture_warnings():
        warnings.warn(f"from {distributed.rank()}", stacklevel=1)


def test_two_processes_find_the_one_that_reads_slowly(tmp_path: Path) -> None:
    assert two(tmp_path, "_one_reads_slowly") == [0, 0]
    logs = [log_file(tmp_path, rank).read_text() for rank in range(2)]
    for record in records(tmp_path)[1:]:
        assert record["time/slowest_rank"] == 1
        assert record["time/slowest_behind_ms"] > 50
        assert record["time/data_ms"] > 50, "the mean of both"
    assert "rank 1 is the slowest" in logs[0]
    assert "most of it in data" in logs[0]
    for rank in range(2):
        assert f"rank {rank} of 2" in logs[rank]
        assert f"from {rank}" in logs[rank]
        assert f"from {1 - rank}" not in logs[rank]


def _one_never_reads(run: Path) -> None:
    log = RankLog(run)
    stuck = Batches(lambda step: time.sleep(3600 if step == 2 and distributed.rank() == 1 else 0))
    training = trainer(run, CONFIG, stuck, rank_log=log)
    with log.watchdog(3.0):
        training.fit(Cursor())


def test_a_hang_leaves_stacks_and_ends_all_ranks(tmp_path: Path) -> None:
    assert two(tmp_path, "_one_never_reads") == [1, 1]
    hung = log_file(tmp_path, 1).read_text()
    assert "Timeout" in hung
    assert "test_observing.py" in hung, "the stack names the line that hangs"


def _beats_and_ends(run: Path) -> None:
    log = RankLog(run)
    with log.watchdog(2.0):
        for _ in range(8):
            time.sleep(0.3)  # far from the limit: others may want the core
            heartbeat.beat()
    time.sleep(2.3)


def _holds_the_gil(run: Path) -> None:
    import ctypes

    log = RankLog(run)
    with log.watchdog(1.0):
        ctypes.PyDLL(None).sleep(3600)  # unlike CDLL, PyDLL keeps the GIL


@pytest.mark.parametrize(("what", "code"), [("_beats_and_ends", 0), ("_holds_the_gil", 1)])
def test_heartbeats_hold_the_watchdog_off_and_the_gil_does_not(tmp_path: Path, what: str, code: int) -> None:
    process = _context().Process(target=getattr(sys.modules[__name__], what), args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == code
    assert (what in log_file(tmp_path, 0).read_text()) == (code == 1)
