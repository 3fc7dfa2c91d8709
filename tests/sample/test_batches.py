"""How many rows are drawn at a time: given, measured on a GPU, and halved when memory runs out."""

from __future__ import annotations

import json

import pytest
import torch

from kineograph import cli
from kineograph.core.batch import Prompts
from kineograph.evaluate.runner import evaluate
from kineograph.sample import batches
from kineograph.sample.batches import Memory, RowBatches
from kineograph.sample.command import write_samples
from kineograph.sample.sampler import Sampler
from tests.sample.tiny_task import TinyGenerator, make_run

CAPTIONS = [f"a {number}" for number in range(10)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "clips", frames=2).path


@pytest.fixture
def room(monkeypatch) -> list[int]:
    """A device whose memory holds `room[0]` rows; the later numbers are the rows of each attempt."""
    room, inner = [3], TinyGenerator.sample

    def draw(self: TinyGenerator, prompts: Prompts, options: object) -> torch.Tensor:
        room.append(len(prompts))
        if len(prompts) > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return inner(self, prompts, options)

    monkeypatch.setattr(TinyGenerator, "sample", draw)
    return room


def test_rows_are_halved_until_they_fit_and_stay_so(run, room, capsys):
    sampler = Sampler.open(run, device="cpu")
    room[0] = 100
    whole = sampler.sample(CAPTIONS, batch=10).pixels
    room[:] = [3]
    halved = sampler.sample(CAPTIONS, batch=9)
    assert room[1:] == [9, 4, 2, 2, 2, 2, 2]
    torch.testing.assert_close(halved.pixels, whole, rtol=0, atol=1e-6)
    told = capsys.readouterr().err
    assert "out of memory with 9 rows at a time: going on with 4 (set --batch to 4 or less)" in told
    sampler.sample(CAPTIONS, batch=9)
    assert room[-5:] == [2] * 5  # what was found holds for the next call


def test_no_memory_for_one_row_is_an_error_that_names_the_keys(run, room, tmp_path, capsys):
    room[0] = 0
    for command, keys in (
        ("sample", "lower --batch (or sample.batch"),
        ("evaluate", "lower --batch (or evaluate.batch"),
    ):
        words = (
            ["a 3"] if command == "sample" else ["--metrics", "tests.evaluate.test_runner.Brightness", "--samples", "2"]
        )
        with pytest.raises(SystemExit) as end:
            cli.main([command, str(run), *words, "--device", "cpu", "--trust"])
        told = capsys.readouterr().err
        assert end.value.code == 1 and f"the GPU is out of memory: {keys}" in told and "9 GiB" in told


def test_the_runs_own_number_holds_unless_the_command_names_one(tmp_path, room):
    folder = make_run(tmp_path / "run", frames=2)
    tree = folder.config()
    folder.write_config(tree | {"sample": {"batch": 2}, "evaluate": {"batch": 3}})
    room[0] = 100
    write_samples(folder.path, CAPTIONS[:4], out=tmp_path / "out", device="cpu")
    assert room[1:] == [2, 2]
    path = write_samples(folder.path, CAPTIONS[:4], out=tmp_path / "out", batch=4, device="cpu")[0]
    assert room[3:] == [4]
    assert "--batch 4" in json.loads(path.with_suffix(".json").read_text())["command"]
    write_samples(folder.path, CAPTIONS[:4], out=tmp_path / "out", options=["sample.batch=1"], device="cpu")
    assert room[4:] == [1] * 4


def test_an_evaluation_goes_on_with_fewer_and_finds_the_same(run, room):
    metric = "tests.evaluate.test_runner.Brightness"
    room[0] = 100
    whole = evaluate(run, [metric], samples=10, device="cpu")
    assert room[1:] == [10]
    room[:] = [3]
    lines: list[str] = []
    halved = evaluate(run, [metric], samples=10, device="cpu", note=lines.append)
    assert room[1:] == [10, 5, 2, 2, 2, 2, 2]
    assert halved["brightness"] == pytest.approx(whole["brightness"], abs=1e-6)
    assert halved["captions"] == whole["captions"]
    assert any("going on with 2 (set evaluate.batch to 2 or less)" in line for line in lines)


@pytest.mark.parametrize(("free", "rows"), [(1000, 8), (250, 2), (90, 1), (10**6, 32)])
def test_a_gpu_takes_what_fits_by_the_memory_of_the_first_row(monkeypatch, free, rows):
    readings = [Memory(50, 50, free), Memory(60, 150, free)]  # one row takes 100
    monkeypatch.setattr(batches, "_read_memory", lambda device, reset=True: readings.pop(0))
    sizes = [len(range(100)[part]) for part in RowBatches(None, "cuda").map(41, lambda part: part)]
    assert sizes[0] == 1 and sum(sizes) == 41 and max(sizes) == sizes[1] == min(rows, 40)
    assert [len(range(100)[part]) for part in RowBatches(7, "cuda").map(20, lambda part: part)] == [7, 7, 6]
    assert [len(range(100)[part]) for part in RowBatches(None, "cpu").map(40, lambda part: part)] == [32, 8]


def test_processes_that_share_weights_do_not_try_again():
    def fail(part: slice) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        list(RowBatches(4, retry=False).map(8, fail))
