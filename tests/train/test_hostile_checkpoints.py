"""Checkpoints and caches that a stranger wrote, checksums included: damaged, named, and passed over."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kineograph.cache.pack import HEADER, Pack, PackWriter, read_header
from kineograph.cache.store import SET, CacheSet
from kineograph.core.errors import InputError, Unreadable
from kineograph.core.task import load_weights
from kineograph.core.weight_files import WeightFiles
from kineograph.train import checkpoint

STATE = {
    "stage": "only",
    "best": None,
    "best_step": None,
    "elapsed": 1.0,
    "phase": "train",
    "assets": {},
    "stepper": {},
}


@pytest.fixture
def folder(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"model": {"w": torch.full((2,), float(step))}}, STATE)
    assert checkpoint.latest(tmp_path).step == 2
    return tmp_path


def rewrite(folder, name, content):
    """Replace a file of the newest checkpoint, and its checksum in the manifest."""
    path = folder / "step-00000002"
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = checkpoint.flush_and_hash(path / name)
    (path / "manifest.json").write_text(json.dumps(manifest))


ODD_STATES = [b"[]", b"7", b"null", b'"x"', b"{", b"\xff", b"[" * 100_000, *(
    json.dumps({"step": 2, **STATE, **odd}).encode()
    for odd in (
        {"step": 3}, {"step": "2"}, {"assets": []}, {"config": 5}, {"stepper": "x"}, {"best": "low"}, {"best_step": 1.5},
        {"elapsed": None}, {"phase": 3}, {"references": [1]}, {"data": "x"},
    )
)]  # fmt: skip


@pytest.mark.parametrize("content", ODD_STATES, ids=range(len(ODD_STATES)))
def test_an_odd_state_is_damage(folder, content):
    rewrite(folder, "state.json", content)
    notes = []
    assert checkpoint.latest(folder, notes.append).step == 1
    assert "step-00000002 is damaged (" in notes[0]


ODD_MANIFESTS = [
    [], 7, None, "x", {}, {"files": []}, {"files": 3}, {"files": {}}, {"files": {"model.safetensors": 1, "state.json": 1}},
    {"files": {"../../x": {"bytes": 0, "sha256": ""}}}, {"files": {"/etc/passwd": {}}}, {"format": 99, "files": {}},
    {"files": {"model.safetensors": {}, "state.json": {}}},
]  # fmt: skip


@pytest.mark.parametrize("manifest", ODD_MANIFESTS, ids=map(str, ODD_MANIFESTS))
def test_an_odd_manifest_is_damage(folder, manifest):
    (folder / "step-00000002" / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.latest(folder).step == 1
    with pytest.raises(InputError, match="damaged"):
        checkpoint.select(folder, 2)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_a_pipe_is_damage(folder, name):
    path = folder / "step-00000002" / name
    path.unlink()
    os.mkfifo(path)
    if name != "manifest.json":
        manifest = json.loads((path.parent / "manifest.json").read_text())
        manifest["files"][name]["bytes"] = 0
        (path.parent / "manifest.json").write_text(json.dumps(manifest))
    assert name in checkpoint.find_damage(path.parent)


@pytest.mark.parametrize("phase", ["done", "", "x" * 100, ["train"], None])
def test_an_unknown_phase_is_none(folder, phase):
    """Checkpoints of earlier versions have no checksum in phase.json."""
    (folder / "step-00000002" / "phase.json").write_text(json.dumps({"phase": phase, "elapsed": 1.0}))
    assert checkpoint.checkpoint_at(folder, 2).phase == "train"
    rewrite(folder, "state.json", json.dumps({"step": 2, **STATE, "phase": phase}).encode())
    assert checkpoint.latest(folder).step == 1


@pytest.mark.parametrize("name", [HEADER, SET])
def test_pipes_in_a_cache_are_damage(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="not a regular file"):
        {HEADER: read_header, SET: CacheSet.read}[name](tmp_path)


def test_a_safetensors_file_that_is_none_is_damage(folder):
    rewrite(folder, "model.safetensors", b"\xff" * 100)
    assert checkpoint.latest(folder).step == 1


def test_the_folder_must_have_the_name_of_its_step(folder):
    (folder / "step-00000002").rename(folder / "step-00000009")
    notes = []
    assert checkpoint.latest(folder, notes.append).step == 1
    assert "different steps (2, 2, 9)" in notes[0]


def test_phase_json_belongs_to_its_checkpoint(folder):
    position = {"phase": "sample", "samples": 8, "best": 0.5, "best_step": 1, "elapsed": 2.0}
    checkpoint.update_state(folder, 2, position)
    saved = checkpoint.checkpoint_at(folder, 2)
    assert saved.phase == "sample"
    path = folder / "step-00000002" / "phase.json"
    tree = json.loads(path.read_text())
    for odd in ({**tree, "phase": "train"}, {**tree, "best": "x"}, {**tree, "step": 7, "sha256": "x"}, [], 7):
        path.write_text(json.dumps(odd))
        assert saved.state() == {"step": 2, **STATE}
    path.write_text(json.dumps(position))  # of an earlier version
    assert saved.phase == "sample"
    path.write_text(json.dumps({"phase": "sample", "config": {"stages": {}}, "step": 9}))
    assert saved.state()["step"] == 2
    assert "config" not in saved.state()


def test_what_is_passed_over_is_named_once_by_every_command(folder, capsys):
    rewrite(folder, "state.json", b"[]")
    assert checkpoint.select(folder).step == checkpoint.select(folder).step == 1
    assert capsys.readouterr().err.count("step-00000002 is damaged") == 1


@pytest.mark.parametrize("best", [{}, {"step": "x"}, {"step": None}, {"step": [1]}, {"loss": 1}])
def test_an_odd_best_is_refused_by_name(folder, best):
    (folder / "best.json").write_text(json.dumps(best))
    with pytest.raises(InputError):
        checkpoint.select(folder, "best")
    checkpoint.prune(folder, 1, 2)


def test_weights_of_another_shape_are_an_input_error():
    with pytest.raises(InputError, match=r"weight has shape \[3, 2\]"):
        load_weights(torch.nn.Linear(2, 2), {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(2, dtype=torch.int8), "is int8"),
        (torch.zeros(2, dtype=torch.bool), "is bool"),
        (torch.zeros(2).to(torch.float8_e4m3fn), "is float8"),
        (torch.tensor([0.0, float("nan")]), "not finite"),
        (torch.tensor([0.0, float("inf")], dtype=torch.bfloat16), "not finite"),
    ],
)
def test_weights_that_are_no_numbers_are_refused_at_import(tmp_path, value, reason):
    save_file({"w": value}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=rf"a\.safetensors: w .*{reason}"):
        WeightFiles([tmp_path / "a.safetensors"])["w"]


def test_a_flipped_bit_in_a_cached_row_is_found(tmp_path):
    fields = {"latents": torch.randn(3, 2, 2), "fps": torch.ones(3)}
    writer = PackWriter(tmp_path, 3, fields)
    writer.append(fields, [bytes([i]) * 16 for i in range(3)], ["a", "b", "c"])
    writer.close()
    pack = Pack.open(tmp_path)
    assert torch.allclose(pack.read(1, "b")["latents"], fields["latents"][1], atol=1e-2)
    values = np.load(tmp_path / "latents.npy")
    values.view(np.uint8)[1, 0, 0] ^= 1
    np.save(tmp_path / "latents.npy", values)
    pack = Pack.open(tmp_path)
    pack.read(0, "a")
    with pytest.raises(Unreadable, match="checksum"):
        pack.read(1, "b")
    (tmp_path / "sums.npy").unlink()  # a pack of an earlier version
    Pack.open(tmp_path).read(1, "b")
