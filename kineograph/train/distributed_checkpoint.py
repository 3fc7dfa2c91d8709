"""Tensors that lie in parts on many processes, as one folder: torch's DCP with its safetensors writer and reader.

    model/shard-00001-model-00001-of-00001.safetensors    what process 0 wrote: whole tensors, or a box of one
    model/shard-00002-…                                   what process 1 wrote

Each file's header tells where its boxes begin, so any number of processes reads them again, in any layout, and such a folder is a checkpoint
for `torch.distributed.checkpoint.load` too. DCP's default writer and what its planner does with other things than tensors would be pickles:
neither is used, a planner of our own hands it tensors alone. (Between processes, in memory, DCP sends its plans as pickles.) Its consolidation
into one file stays unused: it does not know integers. `kineo export` makes that file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from kineograph.core import distributed

SUFFIX = ".safetensors"


@dataclass
class Part:
    """A box of a tensor, or all of it: what this process holds, where it begins, and how large the whole is."""

    local: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]


def part_of(value: Tensor) -> Part:
    """What this process holds of a tensor; of a plain tensor that is everything."""
    if not isinstance(value, DTensor):
        return Part(value.detach(), (0,) * value.ndim, tuple(value.shape))
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return Part(value.to_local().detach(), tuple(offsets), tuple(value.shape))


def own_parts(tensors: Mapping[str, Tensor | Callable[[], Tensor]]) -> Iterator[tuple[str, Part]]:
    """What this process shall write, one by one, so that all processes together write every box once.

    Of copies one process writes: replicas of a mesh take turns from tensor to tensor, and plain tensors, which all processes have, go to
    whoever has the least to write so far. Every process comes to the same answer by itself. What is a function is called by all.
    """
    burden = [0] * distributed.world()
    for index, (name, given) in enumerate(tensors.items()):
        value = given if isinstance(given, Tensor) else given()
        if isinstance(value, DTensor):
            mine = _speaks(value, index)
        else:
            writer = min(range(len(burden)), key=burden.__getitem__)
            burden[writer] += 1 + value.numel() * value.element_size()
            mine = writer == distributed.rank()
        if mine:
            yield name, part_of(value)


def _speaks(value: DTensor, index: int) -> bool:
    """Whether this process is the one among the replicas of its box that writes it."""
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        coordinate[i] == index % value.device_mesh.size(i)
        for i, placement in enumerate(value.placements)
        if placement.is_replicate()
    )


class _Plan(dcp.DefaultSavePlanner):
    """Parts are written as they are: no DTensor, so a copy on the host needs no mesh of the host's."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(name, part) for name, part in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


def _item(name: str, part: Part) -> WriteItem:
    offsets = torch.Size(part.offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, part.local.shape),
        properties=TensorProperties.create_from_tensor(part.local),
        size=torch.Size(part.whole),
    )
    return WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)


def write(folder: Path, parts: Mapping[str, Part], group: Any) -> list[Path]:
    """Write the parts of all processes of `group` (one that speaks on the host), flushed to disk. → the files that this process wrote."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(dict(parts), storage_writer=writer, planner=_Plan(), process_group=group)
    except dcp.CheckpointException as error:  # on all processes, whichever failed; not an Exception
        failed, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"process {failed}: {cause}") from None
    return sorted(folder.glob(f"shard-{distributed.rank() + 1:05d}-*{SUFFIX}"))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of whole tensors, from the headers alone."""
    return {name: tuple(entry.size) for name, entry in _saved(folder).items()}


def _saved(folder: Path) -> dict[str, Any]:
    return dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def read(folder: Path) -> dict[str, Tensor]:
    """Whole tensors, put together from all parts."""
    whole = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in _saved(folder).items()}
    fill(folder, whole)
    return whole


def fill(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Copy saved values into these tensors, of which each process may hold a part: it reads no more than that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
        dcp.load(dict(targets), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def fill_from_file(path: Path, targets: Mapping[str, Tensor]) -> None:
    """The same from one file of whole tensors."""
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, target in targets.items():
            part = part_of(target)
            if tuple(part.local.shape) == part.whole:
                part.local.copy_(file.get_tensor(name))
            elif math.prod(part.local.shape):
                box = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.local.shape, strict=True))
                part.local.copy_(file.get_slice(name)[box])
