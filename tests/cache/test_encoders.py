"""What fills a cache: as many rows at a time as training takes, compiled where much is left to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kineograph.cache import encoders
from kineograph.cache.encoders import Encoders
from kineograph.core.batch import Batch
from kineograph.core.capabilities import SupportsCaching
from kineograph.core.config import StageConfig
from kineograph.core.task import Task


class Codec(Task):
    Config = StageConfig

    def compile_targets(self) -> list[nn.Module]:
        return []


class Doubles(Task, SupportsCaching):
    """Its precompute doubles what it sees, and remembers how many rows that were."""

    Config = StageConfig

    def __init__(self) -> None:
        super().__init__()
        self.stages["codec"] = Codec()
        self.seen: list[int] = []

    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.latents is not None
        self.seen.append(len(batch))
        return {"latents": 2 * batch.latents}


def batch(rows: int) -> Batch:
    return Batch(slots=torch.arange(rows), latents=torch.arange(rows, dtype=torch.float32)[:, None])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """The tasks that were compiled."""
    found: list[Task] = []
    monkeypatch.setattr(encoders, "compile_task", lambda task, graphs: found.append(task))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def on_gpu(task: Task, said: list[str], shapes: int = 1) -> Encoders:
    made = Encoders(task, torch.device("cuda"), True, shapes, said.append)
    made.device = torch.device("cpu")  # there is none here: all but the arithmetic is as on one
    return made


def encode(made: Encoders, rows: int, left: int) -> None:
    found = made.encode(batch(rows), 4, left)
    torch.testing.assert_close(found["latents"], 2 * batch(rows).latents)


def test_small_sets_are_not_compiled_and_their_last_rows_stand_alone(compiled: list[Task]) -> None:
    task, said = Doubles(), []
    made = on_gpu(task, said)
    for left in (12, 6, 0):
        encode(made, 6, left)
    assert not compiled
    assert not said
    assert task.seen == [4, 2] * 3


def test_compiled_where_much_is_left_and_then_always_of_one_shape(compiled: list[Task]) -> None:
    task, said = Doubles(), []
    made = on_gpu(task, said)
    encode(made, 6, 10**12)
    assert not compiled  # the first batch tells too little
    for _ in range(3):
        encode(made, 6, 10**12)
    assert compiled == [task.stages["codec"]]
    assert len(said) == 1
    assert "minutes of encoding are left" in said[0]
    assert task.seen == [4, 2, 4, 2, *[4] * 4]


def test_many_shapes_of_clips_are_many_compilations(compiled: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(encoders.time, "perf_counter", lambda: float(next(clock)))  # each batch of 4 takes a second
    for shapes, wanted in ((1, 1), (3, 0)):
        compiled.clear()
        made = on_gpu(Doubles(), [], shapes)
        for _ in range(2):
            encode(made, 4, int(2 * encoders.COMPILE_AFTER) * 4)
        assert len(compiled) == wanted


def test_not_on_a_cpu_and_not_where_training_is_not_compiled(compiled: list[Task]) -> None:
    for device, may in (("cpu", True), ("cuda", False)):
        made = Encoders(Doubles(), torch.device(device), may, 1, lambda line: None)
        made.device = torch.device("cpu")
        for _ in range(3):
            encode(made, 6, 10**12)
    assert not compiled
