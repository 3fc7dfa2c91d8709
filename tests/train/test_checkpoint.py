"""Checkpoints: complete or not there, checked byte by byte, the best kept, weights loadable alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from kineograph.core import weight_cache
from kineograph.core.errors import InputError, RunFailed
from kineograph.train import checkpoint

TENSORS = {
    "model": {"a.weight": torch.arange(6.0).view(2, 3), "count": torch.tensor(3)},
    "ema": {"a.weight": torch.ones(2, 3), "count": torch.tensor(3)},
    "optimizer": {"model/exp_avg.a.weight": torch.zeros(2, 3)},
}


def save(folder: Path, step: int, **state) -> checkpoint.Checkpoint:
    return checkpoint.save(folder, step, TENSORS, {"assets": {}, **state})


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    saved = save(tmp_path / "new" / "folder", 12, best=0.5, text="ü")
    found = checkpoint.latest(tmp_path / "new" / "folder")
    assert found == saved
    assert saved.path.name == "step-00000012"
    assert torch.equal(found.tensors("model")["a.weight"], TENSORS["model"]["a.weight"])
    assert found.tensors("model")["count"].dtype == torch.int64
    assert found.state() == {"step": 12, "assets": {}, "best": 0.5, "text": "ü"}


def test_nothing_is_pickled(tmp_path: Path) -> None:
    found = save(tmp_path, 1)
    assert sorted(path.name for path in found.path.iterdir()) == [
        "ema.safetensors",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def test_weights_load_alone_for_sampling(tmp_path: Path) -> None:
    found = save(tmp_path, 1)
    (found.path / "optimizer.safetensors").unlink()
    assert torch.equal(found.weights()["a.weight"], torch.ones(2, 3))
    assert torch.equal(found.weights(ema=False)["a.weight"], TENSORS["model"]["a.weight"])
    assert found.digest() != found.digest(ema=False)
    without = checkpoint.save(tmp_path, 2, {"model": TENSORS["model"]}, {})
    assert torch.equal(without.weights()["a.weight"], TENSORS["model"]["a.weight"])
    assert without.digest() == found.digest(ema=False)  # the same weights, the same digest


def test_tied_weights_and_views_are_saved(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    found = checkpoint.save(
        tmp_path, 1, {"model": {"embed": weight, "head": weight, "turned": weight.T, "row": weight[1]}}, {}
    )
    back = found.tensors("model")
    assert torch.equal(back["head"], weight)
    assert torch.equal(back["turned"], weight.T)
    assert torch.equal(back["row"], weight[1])


# Failures while saving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["save_file", "write_json", "flush_and_hash", "os.replace"])
def test_a_failure_while_saving_changes_nothing(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    before = files(tmp_path)

    def full_disk(*arguments, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os if place == "os.replace" else checkpoint, place.rpartition(".")[2], full_disk)
    with pytest.raises(RunFailed, match=r"step-00000020.*No space left") as error:
        save(tmp_path, 20)
    assert error.value.exit_code == 1
    assert files(tmp_path) == before
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path).step == 10
    assert save(tmp_path, 20).step == 20


@pytest.mark.parametrize("place", ["save_file", "write_json", "os.replace"])
def test_a_kill_while_saving_leaves_the_old_state(tmp_path: Path, place: str) -> None:
    """A process that dies at this point of the save, without a chance to tidy up."""
    save(tmp_path, 10)
    child = os.fork()
    if child == 0:
        target = checkpoint.os if place == "os.replace" else checkpoint
        setattr(target, place.rpartition(".")[2], lambda *arguments, **named: os._exit(9))
        save(tmp_path, 20)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert checkpoint.saved_steps(tmp_path) == [10]
    assert checkpoint.latest(tmp_path).step == 10
    assert any(path.name.startswith(".writing-") for path in tmp_path.iterdir())
    checkpoint.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


# Damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: flip(path / "model.safetensors"), "model.safetensors does not match its checksum"),
        (lambda path: flip(path / "state.json"), "state.json does not match its checksum"),
        (lambda path: (path / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
        (lambda path: os.truncate(path / "ema.safetensors", 40), "ema.safetensors has 40 bytes instead of"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing or damaged"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is missing or damaged"),
    ],
)
def test_damage_is_noticed_and_the_one_before_is_taken(tmp_path: Path, damage, reason: str) -> None:
    save(tmp_path, 10)
    damage(save(tmp_path, 20).path)
    notes: list[str] = []
    assert checkpoint.latest(tmp_path, notes.append).step == 10
    assert len(notes) == 1
    assert "step-00000020" in notes[0]
    assert reason in notes[0]
    assert checkpoint.select(tmp_path, "last").step == 10
    with pytest.raises(InputError, match=reason):
        checkpoint.select(tmp_path, 20)


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    save(tmp_path, 10)
    flip(save(tmp_path, 20).path / "model.safetensors")
    save(tmp_path, 20)
    assert checkpoint.find_damage(tmp_path / "step-00000020") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_what_a_newer_version_wrote_is_not_guessed_at(tmp_path: Path) -> None:
    save(tmp_path, 10)
    newer = save(tmp_path, 20).path / "manifest.json"
    newer.write_text(newer.read_text().replace('"format": 1', '"format": 3'))
    notes: list[str] = []
    assert checkpoint.latest(tmp_path, notes.append).step == 10
    assert "format 3 is newer" in notes[0]


def test_a_checkpoint_is_not_read_again_until_it_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = save(tmp_path, 10)
    read: list[Path] = []
    compare = checkpoint._compare_file
    monkeypatch.setattr(checkpoint, "_compare_file", lambda path, entry: (read.append(path), compare(path, entry))[1])
    assert checkpoint.latest(tmp_path) == checkpoint.latest(tmp_path) == found
    once = len(read)
    assert once == 4
    flip(found.path / "model.safetensors")
    assert checkpoint.latest(tmp_path) is None
    assert len(read) > once


def test_when_all_are_damaged(tmp_path: Path) -> None:
    flip(save(tmp_path, 10).path / "model.safetensors")
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(InputError, match="every checkpoint is damaged"):
        checkpoint.select(tmp_path)
    with pytest.raises(
        InputError, match=r"every checkpoint in .* is damaged \(the newest: model.safetensors does not match"
    ):
        checkpoint.latest_on_all_ranks(tmp_path)


# Keeping ---------------------------------------------------------------------------------------------------------


def test_prune_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    checkpoint.write_best(tmp_path, 20, 0.25)
    (tmp_path / ".removing-step-00000005").mkdir()
    checkpoint.prune(tmp_path, 2, 50)
    assert checkpoint.saved_steps(tmp_path) == [20, 40, 50]
    assert not list(tmp_path.glob(".*"))
    assert checkpoint.select(tmp_path, "best").step == 20
    assert checkpoint.read_best(tmp_path) == {"step": 20, "loss": 0.25}


def test_prune_does_not_take_a_damaged_one_for_the_newest(tmp_path: Path) -> None:
    """The run fell back from a damaged step 40 to 20 and has just saved 30: that one must survive."""
    for step in (20, 40):
        save(tmp_path, step)
    flip(tmp_path / "step-00000040/model.safetensors")
    assert checkpoint.latest(tmp_path).step == 20
    save(tmp_path, 30)
    checkpoint.prune(tmp_path, 1, 30)
    assert checkpoint.saved_steps(tmp_path) == [30]


def test_a_reader_is_told_that_training_removed_what_it_reads(tmp_path: Path) -> None:
    chosen = checkpoint.select(save(tmp_path, 10).path.parent)
    save(tmp_path, 20)
    checkpoint.prune(tmp_path, 1, 20)
    for read in (lambda: chosen.tensors("model"), chosen.weights, chosen.state, chosen.digest):
        with pytest.raises(InputError, match=r"step-00000010 was removed while it was read.*run the command again"):
            read()


def test_choosing_again_when_training_removed_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    compare = checkpoint._compare_file

    def prune_first(path: Path, entry: dict) -> str | None:
        if "step-00000010" in str(path):
            save(tmp_path, 20)
            checkpoint.prune(tmp_path, 1, 20)
        return compare(path, entry)

    monkeypatch.setattr(checkpoint, "_compare_file", prune_first)
    assert checkpoint.select(tmp_path).step == 20


def test_choosing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint yet"):
        checkpoint.select(tmp_path / "none")
    save(tmp_path, 10)
    save(tmp_path, 100_000_000)  # nine digits sort by number, not by name
    assert checkpoint.saved_steps(tmp_path) == [10, 100_000_000]
    assert checkpoint.select(tmp_path, "last").step == 100_000_000
    assert checkpoint.select(tmp_path, "10").step == 10
    with pytest.raises(InputError, match="no best checkpoint"):
        checkpoint.select(tmp_path, "best")
    with pytest.raises(InputError, match="no checkpoint of step 11: there are 10, 100000000"):
        checkpoint.select(tmp_path, 11)
    with pytest.raises(InputError, match="use last, best or a step"):
        checkpoint.select(tmp_path, "newest")


def test_foreign_names_are_not_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for name in ("step-10", "step-00000020.bak", "notes"):
        (tmp_path / name).mkdir()
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".writing-step-00000030")
    assert checkpoint.saved_steps(tmp_path) == [10]


def test_reading_a_weights_file(tmp_path: Path) -> None:
    found = save(tmp_path, 1)
    assert weight_cache.load(found.path / "model.safetensors").keys() == TENSORS["model"].keys()
    (tmp_path / "odd.safetensors").write_text("not one")
    for name in ("odd.safetensors", "gone.safetensors"):
        with pytest.raises(InputError, match=name):
            weight_cache.load(tmp_path / name)


def test_the_manifest_tells_sizes(tmp_path: Path) -> None:
    found = save(tmp_path, 1)
    listed = json.loads((found.path / "manifest.json").read_text())["files"]
    assert {name: entry["bytes"] for name, entry in listed.items()} == {
        path.name: path.stat().st_size for path in found.path.iterdir() if path.name != "manifest.json"
    }
