"""Saving in the background: what was asked for is what is written, in order, one at a time, and failures are heard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kineograph.core.errors import RunFailed, Stopped
from kineograph.train import checkpoint
from kineograph.train import saver as saver_module
from kineograph.train.saver import HostBuffers, Saver

PATIENCE = 60


def slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event, list[str]]:
    """Writing waits until it is told to go on. → started, go on, what happened."""
    started, go, log = threading.Event(), threading.Event(), []
    original = checkpoint.write

    def write(folder: Path, step: int, *rest) -> None:
        log.append(f"begin {step}")
        started.set()
        assert go.wait(PATIENCE)
        original(folder, step, *rest)
        log.append(f"end {step}")

    monkeypatch.setattr(checkpoint, "write", write)
    return started, go, log


def test_the_copies_of_a_second_gpu_are_waited_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    gpu = torch.device("cuda:1")

    class Event:
        def record(self, stream: str) -> None:
            log.append(stream)

        def synchronize(self) -> None:
            log.append("wait")

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        log.append(device)
        yield
        log.append("left")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(saver_module, "_allocate_like", lambda value: SimpleNamespace(copy_=lambda *_, **__: None))
    buffers = HostBuffers()
    buffers.copy("weight", cast(Any, SimpleNamespace(is_cuda=True, device=gpu)))
    buffers.wait()
    assert log == ["stream of cuda:1", gpu, "wait", "left"]


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go, _ = slowly(monkeypatch)
    weight, state = torch.zeros(3), {"data": {"shards": 1}}
    with Saver(tmp_path) as saver:
        saver.save(1, {"model": {"w": weight}}, state)
        assert started.wait(PATIENCE)
        weight.fill_(7)  # the next step
        state["data"]["shards"] = 2
        saver.check()
        assert checkpoint.saved_steps(tmp_path) == []
        go.set()
        saver.wait()
        assert torch.equal(checkpoint.checkpoint_at(tmp_path, 1).tensors("model")["w"], torch.zeros(3))
        assert checkpoint.checkpoint_at(tmp_path, 1).state()["data"] == {"shards": 1}
        saver.save(2, {"model": {"w": weight}}, state)
    assert torch.equal(checkpoint.checkpoint_at(tmp_path, 2).tensors("model")["w"], torch.full((3,), 7.0))


def test_two_saves_never_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go, log = slowly(monkeypatch)
    with Saver(tmp_path) as saver:
        saver.save(1, {"model": {"w": torch.ones(2)}}, {})
        saver.then(lambda: log.append("then"))
        assert started.wait(PATIENCE)
        threading.Timer(0.2, go.set).start()
        saver.save(2, {"model": {"w": torch.ones(2)}}, {})
    assert log == ["begin 1", "end 1", "then", "begin 2", "end 2"]


def test_tied_weights_are_saved_under_both_names(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    with Saver(tmp_path) as saver:
        saver.save(1, {"model": {"a": weight, "b": weight, "part": weight[1:3], "turned": weight.view(2, 2).T}}, {})
    back = checkpoint.checkpoint_at(tmp_path, 1).tensors("model")
    assert torch.equal(back["b"], weight) and torch.equal(back["turned"], weight.view(2, 2).T)


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_file(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", save_file)


def test_a_failed_write_is_heard_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch)
    saver = Saver(tmp_path)
    saver.save(1, {"model": {"w": torch.ones(2)}}, {})
    with pytest.raises(RunFailed, match=r"cannot save .*step-00000001: .*No space left"):
        for _ in range(PATIENCE * 100):
            saver.check()
            threading.Event().wait(0.01)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [None, Stopped("stopped by SIGTERM at step 1, saved")])
def test_nothing_ends_well_that_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Exception | None
) -> None:
    full_disk(monkeypatch)
    with pytest.raises(RunFailed, match="No space left"), Saver(tmp_path) as saver:
        saver.save(1, {"model": {"w": torch.ones(2)}}, {})
        if ending is not None:
            raise ending


def test_another_error_is_told_and_what_was_begun_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="diverged"), Saver(tmp_path) as saver:
        saver.save(1, {"model": {"w": torch.ones(2)}}, {})
        raise RunFailed("diverged")
    assert checkpoint.latest(tmp_path).step == 1


def test_what_follows_a_save_fails_in_words(tmp_path: Path) -> None:
    def note() -> None:
        raise OSError(30, "Read-only file system")

    with (
        pytest.raises(RunFailed, match=r"cannot write to .*Read-only file system; free disk space"),
        Saver(tmp_path) as saver,
    ):
        saver.then(note)


def test_after_a_failure_nothing_more_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a save rests on it: a finished phase must not be noted in a checkpoint that is not there."""
    full_disk(monkeypatch)
    touched: list[str] = []
    with pytest.raises(RunFailed, match="cannot save"), Saver(tmp_path) as saver:
        saver.save(1, {"model": {"w": torch.ones(2)}}, {})
        saver._submit(lambda: touched.append("then"))
    assert touched == []
