"""Checkpoints of several processes: one folder of safetensors shards, written and read by torch's DCP.

    model/shard-00001-model-00001-of-00001.safetensors    written by process 0: full tensors, or slices of them
    model/shard-00002-…                                   written by process 1

Each file's header says where its slices begin. So any number of processes reads them in any layout, and
`torch.distributed.checkpoint.load` reads them too. DCP's default writer and planner would pickle what is not a tensor; the planner here
passes tensors only. (Between processes, in memory, DCP pickles its plans.) DCP's consolidation into one file does not support
integers; `kineo export` writes that file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from kineograph.core import distributed
from kineograph.train.dtensors import full_tensor, is_strided, to_local

SUFFIX = ".safetensors"


@dataclass
class TensorSlice:
    """The slice of a tensor that this process holds, where it begins, and the shape of the full tensor."""

    local: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def slice_of(value: Tensor) -> TensorSlice:
    """The slice that this process holds of a DTensor; all of a plain tensor."""
    if not isinstance(value, DTensor):
        return TensorSlice(value.detach(), (0,) * value.ndim, tuple(value.shape))
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return TensorSlice(value.to_local().detach(), tuple(offsets), tuple(value.shape))


def slices_to_write(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, TensorSlice]]:
    """The slices that this process writes, one by one. All processes together write every element once.

    Replicas take turns from tensor to tensor, and plain tensors go to the process with the least to write so far. Every process
    computes the same assignment. Strided DTensors are no single slice: all processes gather them, one at a time, and one writes.
    """
    load = [0] * distributed.world()
    for index, (name, value) in enumerate(tensors.items()):
        if is_strided(value):
            value = full_tensor(value)
        if isinstance(value, DTensor):
            writes = _is_writer(value, index)
        else:
            writer = min(range(len(load)), key=load.__getitem__)
            load[writer] += 1 + value.numel() * value.element_size()
            writes = writer == distributed.rank()
        if writes:
            yield name, slice_of(value)


def _is_writer(value: DTensor, index: int) -> bool:
    """Whether this process is the one of its slice's replicas that writes it."""
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return False
    # A tensor-parallel mesh is a run of neighbouring ranks; the other meshes of the world hold replicas.
    if distributed.rank() // mesh.size() != index % (distributed.world() // mesh.size()):
        return False
    return all(
        coordinate[dim] == index % mesh.size(dim)
        for dim, placement in enumerate(value.placements)
        if placement.is_replicate()
    )


class _SlicePlanner(dcp.DefaultSavePlanner):
    """Plans TensorSlices in place of DTensors: a copy on the host needs no mesh."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, piece) for name, piece in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


def _write_item(name: str, piece: TensorSlice) -> WriteItem:
    offsets = torch.Size(piece.offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, piece.local.shape),
        properties=TensorProperties.create_from_tensor(piece.local),
        size=torch.Size(piece.shape),
    )
    return WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)


def write(folder: Path, slices: Mapping[str, TensorSlice], group: Any) -> list[Path]:
    """Write the slices of all processes of `group`, a gloo group, and flush them to disk. → the files of this process."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(dict(slices), storage_writer=writer, planner=_SlicePlanner(), process_group=group)
    except dcp.CheckpointException as error:  # raised on every process; it is not an Exception
        failed, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"process {failed}: {cause}") from None
    return sorted(folder.glob(f"shard-{distributed.rank() + 1:05d}-*{SUFFIX}"))


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the full tensors, from the headers alone."""
    return {name: tuple(entry.size) for name, entry in _read_metadata(folder).items()}


def _read_metadata(folder: Path) -> dict[str, Any]:
    return dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def read(folder: Path) -> dict[str, Tensor]:
    """Full tensors, assembled from all shards."""
    entries = _read_metadata(folder).items()
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries}
    _read_into(folder, tensors)
    return tensors


def load_into(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Copy saved values into these tensors, from a folder of shards or one file. Of a DTensor, read the local slice alone."""
    read = _read_file_into if path.is_file() else _read_into
    strided = {name: target for name, target in targets.items() if is_strided(target)}
    # A strided DTensor is no single slice: read it in full, keep its shard.
    full = {name: torch.empty(target.shape, dtype=target.dtype) for name, target in strided.items()}
    read(path, {**targets, **full})
    with torch.no_grad():
        for name, target in strided.items():
            assert isinstance(target, DTensor)
            value = full[name].to(target.device)
            shard = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
            to_local(target.detach()).copy_(shard.to_local())


def _read_into(folder: Path, targets: Mapping[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
        dcp.load(dict(targets), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def _read_file_into(path: Path, targets: Mapping[str, Tensor]) -> None:
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, target in targets.items():
            piece = slice_of(target)
            if tuple(piece.local.shape) == piece.shape:
                piece.local.copy_(file.get_tensor(name))
            elif math.prod(piece.local.shape):
                box = tuple(
                    slice(start, start + size) for start, size in zip(piece.offsets, piece.local.shape, strict=True)
                )
                piece.local.copy_(file.get_slice(name)[box])
