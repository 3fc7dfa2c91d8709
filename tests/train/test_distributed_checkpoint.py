"""Checkpoints of several processes: every box written once, readable on any number of processes and in any layout, all or nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch._dynamo  # DCP imports it: once here, and not in every process that is forked
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import kineograph.train.distributed_checkpoint  # noqa: F401  the same
from kineograph.core import weight_cache
from kineograph.core.errors import InputError, RunFailed
from kineograph.core.run_folder import RunFolder
from kineograph.evaluate.run_summary import _count_parameters
from kineograph.interop.export_run import export_safetensors
from kineograph.train import checkpoint
from kineograph.train.dtensors import full_tensor, to_local
from kineograph.train.saver import Saver
from tests.train.ranks import run_ranks
from tests.train.test_checkpoint import flip

ROWS = torch.arange(35.0).view(7, 5)  # 7 rows: uneven on 2 and 4 processes
WHOLE = {
    "rows": ROWS,
    "few": torch.arange(3, dtype=torch.bfloat16),  # fewer than 4 processes
    "square": torch.arange(64.0).view(8, 8) / 7,
    "count": torch.tensor(7),
    "used": torch.tensor([True, False]),
    "none": torch.zeros(0, 4),
}


def laid_out(world: int, layout: str) -> dict[str, torch.Tensor]:
    """WHOLE, as the processes of a layout hold it."""
    if layout == "replicate":
        return {name: value.clone() for name, value in WHOLE.items()}
    mesh = init_device_mesh("cpu", (2, 2) if layout == "hybrid" else (world,))
    cut = {"shard": [Shard(0)], "columns": [Shard(-1)], "hybrid": [Replicate(), Shard(0)]}[layout]
    return {
        name: distribute_tensor(value.clone(), mesh, cut)
        if value.ndim and value.dtype.is_floating_point
        else value.clone()
        for name, value in WHOLE.items()
    }


def test_a_group_of_one_needs_no_memory_of_its_device_to_save(tmp_path: Path) -> None:
    def refuse(tensor: DTensor) -> torch.Tensor:
        raise AssertionError("gathers the whole state on the device")

    def work(rank: int) -> None:
        DTensor.full_tensor = refuse  # type: ignore[method-assign]
        save(tmp_path, 1, 1, "shard", rank)

    run_ranks(1, work)
    found = checkpoint.checkpoint_at(tmp_path, 1).tensors("model")
    assert all(torch.equal(found[name], value) for name, value in WHOLE.items())


def save(folder: Path, step: int, world: int, layout: str, rank: int, **state) -> None:
    tensors = laid_out(world, layout)
    with Saver(folder) as saver:
        saver.save(step, {"model": tensors, "optimizer": {"m/a": tensors["rows"]}}, {"assets": {}, **state})
        for value in tensors.values():  # training goes on at once
            (value.to_local() if hasattr(value, "to_local") else value).zero_()


@pytest.mark.parametrize(("world", "layout"), [(2, "replicate"), (4, "shard"), (4, "hybrid"), (2, "columns")])
def test_what_many_save_one_reads(tmp_path: Path, world: int, layout: str) -> None:
    run_ranks(world, lambda rank: save(tmp_path, 3, world, layout, rank))
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.is_sharded and found.step == 3
    back = found.tensors("model")
    assert back.keys() == WHOLE.keys()
    for name, value in WHOLE.items():
        assert torch.equal(back[name], value) and back[name].dtype == value.dtype, name
    assert torch.equal(found.tensors("optimizer")["m/a"], ROWS)
    assert found.shapes("model") == {name: tuple(value.shape) for name, value in WHOLE.items()}
    assert found.state() == {"step": 3, "assets": {}, "processes": world}
    assert found.has("optimizer") and not found.has("ema")


@pytest.mark.parametrize(("world", "layout"), [(2, "replicate"), (4, "hybrid")])
def test_every_number_is_written_once_by_all_in_turn(tmp_path: Path, world: int, layout: str) -> None:
    run_ranks(world, lambda rank: save(tmp_path, 3, world, layout, rank))
    files = sorted((tmp_path / "step-00000003/model").iterdir())
    numbers = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            numbers.append(sum(file.get_tensor(name).numel() for name in file.keys()))  # noqa: SIM118
    assert sum(numbers) == sum(value.numel() for value in WHOLE.values())
    assert len(files) == world


def test_nothing_is_pickled(tmp_path: Path) -> None:
    run_ranks(2, lambda rank: save(tmp_path, 3, 2, "shard", rank))
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert {Path(name).suffix for name in names} == {".safetensors", ".json"}
    for name in names:
        if name.endswith(".safetensors"):
            with safe_open(tmp_path / name, framework="pt") as file:
                assert len(file.keys()) > 0
    json.loads((tmp_path / "step-00000003/state.json").read_text())
    # and torch itself reads such a folder, without us
    metadata = HuggingFaceStorageReader(str(tmp_path / "step-00000003/model")).read_metadata()
    assert metadata.state_dict_metadata["rows"].size == ROWS.shape


@pytest.mark.parametrize("saved_by", [1, 2])
def test_another_number_of_processes_and_another_layout_fill_their_tensors(tmp_path: Path, saved_by: int) -> None:
    if saved_by == 1:
        checkpoint.save(tmp_path, 3, {"model": WHOLE}, {})
    else:
        run_ranks(2, lambda rank: save(tmp_path, 3, 2, "shard", rank))

    def fill(rank: int) -> None:
        for layout in ("shard", "hybrid"):
            targets = laid_out(4, layout)
            for value in targets.values():
                (value.to_local() if hasattr(value, "to_local") else value).zero_()
            checkpoint.checkpoint_at(tmp_path, 3).load_into("model", targets)
            for name, value in targets.items():
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                assert torch.equal(full, WHOLE[name]), (layout, name)

    run_ranks(4, fill)
    alone = {name: torch.zeros_like(value) for name, value in WHOLE.items()}
    checkpoint.checkpoint_at(tmp_path, 3).load_into("model", alone)
    assert all(torch.equal(alone[name], value) for name, value in WHOLE.items())


def test_a_run_in_shards_is_exported_as_plain_files_and_counted(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config_file.write_text("stages: {codec: {task: vqgan}}\n")
    run_ranks(2, lambda rank: save(run.checkpoints("codec"), 3, 2, "shard", rank))
    export_safetensors(run, tmp_path / "out")
    back = weight_cache.load(tmp_path / "out/codec.safetensors")
    assert all(torch.equal(back[name], value) for name, value in WHOLE.items())
    described = json.loads((tmp_path / "out/codec.json").read_text())
    assert described["sha256"] == checkpoint.flush_and_hash(tmp_path / "out/codec.safetensors")["sha256"]
    assert _count_parameters(run, "codec") == sum(value.numel() for value in WHOLE.values())


def test_the_digest_tells_weights_apart(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for step in (3, 4):
            with Saver(tmp_path) as saver:
                saver.save(step, {"model": {"rows": ROWS * step}, "ema": {"rows": ROWS}}, {})

    run_ranks(2, work)
    third, fourth = checkpoint.checkpoint_at(tmp_path, 3), checkpoint.checkpoint_at(tmp_path, 4)
    assert third.digest() == third.digest() != third.digest(ema=False)
    assert third.digest(ema=False) != fourth.digest(ema=False)


def test_stacked_matrices_are_saved_in_full_and_split_again(tmp_path: Path) -> None:
    """Queries, keys and values of two heads in one matrix: the shard of a process is three separate slices of it."""
    full = torch.arange(24.0).view(12, 2)

    def split(value: torch.Tensor) -> torch.Tensor:
        placement = _StridedShard(0, split_factor=3)
        return distribute_tensor(value, init_device_mesh("cpu", (2,)), [placement], src_data_rank=None)

    def write(rank: int) -> None:
        qkv = split(full.clone())
        expected = torch.cat([full[4 * i + 2 * rank : 4 * i + 2 * rank + 2] for i in range(3)])
        assert torch.equal(to_local(qkv), expected) and torch.equal(full_tensor(qkv), full)
        with Saver(tmp_path) as saver:
            saver.save(1, {"model": {"qkv": qkv, "norm": torch.ones(2)}}, {})

    def read(rank: int) -> None:
        qkv, norm = split(torch.zeros(12, 2)), torch.zeros(2)
        checkpoint.checkpoint_at(tmp_path, 1).load_into("model", {"qkv": qkv, "norm": norm})
        assert torch.equal(full_tensor(qkv), full) and torch.equal(norm, torch.ones(2))

    run_ranks(2, write)
    assert torch.equal(checkpoint.checkpoint_at(tmp_path, 1).tensors("model")["qkv"], full)
    run_ranks(2, read)
    with pytest.raises(InputError, match=r"qkv has shape \[12, 2\], and this task needs \[5\]"):
        checkpoint.checkpoint_at(tmp_path, 1).load_into("model", {"qkv": torch.zeros(5)})


# Faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda shard: flip(shard), "does not match its checksum"),
        (lambda shard: shard.unlink(), "is missing"),
        (lambda shard: os.truncate(shard, 100), "has 100 bytes instead of"),
    ],
)
def test_a_damaged_or_missing_shard_is_noticed(tmp_path: Path, damage, reason: str) -> None:
    checkpoint.save(tmp_path, 2, {"model": WHOLE}, {})
    run_ranks(2, lambda rank: save(tmp_path, 3, 2, "shard", rank))
    damage(tmp_path / "step-00000003/model/shard-00002-model-00001-of-00001.safetensors")

    def look(rank: int) -> list:
        notes: list[str] = []
        found = checkpoint.latest_on_all_ranks(tmp_path, notes.append)
        return [found.step if found else None, notes, checkpoint.latest(tmp_path).step]

    first, second = run_ranks(2, look)
    assert first[0] == second[0] == first[2] == second[2] == 2  # all go on from the same one
    assert len(first[1]) == 1 and reason in first[1][0] and "shard-00002" in first[1][0]
    assert second[1] == []  # said once


@pytest.mark.parametrize("who", [0, 1])
def test_a_full_disk_on_one_process_fails_all_and_changes_nothing(tmp_path: Path, who: int) -> None:
    run_ranks(2, lambda rank: save(tmp_path, 2, 2, "shard", rank))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(rank: int) -> str:
        def full(*arguments, **named):
            raise OSError(28, "No space left on device")

        if rank == who:
            os.fsync = full  # DCP flushes what it wrote
        with pytest.raises(RunFailed) as error:
            save(tmp_path, 3, 2, "shard", rank)
        return str(error.value)

    for told in run_ranks(2, fail):
        assert f"step-00000003: process {who}:" in told and "No space left on device" in told and "same command" in told
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("place", ["flush_and_hash", "commit"])
def test_a_process_killed_while_saving_leaves_the_old_checkpoint(tmp_path: Path, place: str) -> None:
    run_ranks(2, lambda rank: save(tmp_path, 2, 2, "shard", rank))
    victim = 0 if place == "commit" else 1

    def die(rank: int) -> str:
        if rank == victim:
            setattr(checkpoint, place, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RunFailed) as error:
            save(tmp_path, 3, 2, "shard", rank)
        return str(error.value)

    answers = run_ranks(2, die, deadly=True)
    assert answers[victim] is None and "cannot save" in answers[1 - victim]
    assert checkpoint.saved_steps(tmp_path) == [2]
    assert checkpoint.latest(tmp_path).step == 2
    run_ranks(2, lambda rank: save(tmp_path, 3, 2, "shard", rank))
    assert checkpoint.latest(tmp_path).step == 3


def test_of_a_stream_the_process_furthest_behind_decides(tmp_path: Path) -> None:
    run_ranks(2, lambda rank: save(tmp_path, 3, 2, "shard", rank, data={"shards": 8 - 2 * rank}))
    assert checkpoint.checkpoint_at(tmp_path, 3).state()["data"] == {"shards": 6}


def test_a_mesh_of_one_process_saves_one_file(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        mesh = DeviceMesh("cpu", [0])
        with Saver(tmp_path) as saver:
            saver.save(1, {"model": {"rows": distribute_tensor(ROWS.clone(), mesh, [Shard(0)])}}, {})
        assert dist.get_world_size() == 1

    run_ranks(1, work)
    found = checkpoint.latest(tmp_path)
    assert found is not None and not found.is_sharded
    assert torch.equal(found.tensors("model")["rows"], ROWS)
