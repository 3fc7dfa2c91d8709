"""How the processes of a run share a stage: `train.parallel`, and the mesh of processes that it asks for.

    replicate   every process has the whole model and a part of the batch (DDP)
    shard       every process has a part of each block's weights, gathered when the block runs (FSDP2)
    hybrid      sharded within groups of processes, replicated across them

`tensor` and `sequence` processes hold one model together and see the same batch. The mesh is (replicate, shard, sequence, tensor), the
last fastest, so that those who speak most sit on one machine.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from kineograph.core import distributed
from kineograph.core.config import Config
from kineograph.core.errors import ConfigError


class Sizes(NamedTuple):
    """Processes along each side of the mesh."""

    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    tensor: int = 1


class ParallelConfig(Config):
    """`train.parallel`: a word, which is the layout, or these keys."""

    layout: Literal["replicate", "shard", "hybrid"] = "replicate"
    """replicate: DDP; shard: FSDP2, weights, gradients and moments in parts; hybrid: shard within groups, replicate across them."""
    shard: int | None = Field(None, ge=2)
    """hybrid: processes that share one copy of the weights; null: those of one machine."""
    reshard: bool = True
    """shard, hybrid: free a block's gathered weights after its forward pass and gather them again for the backward one."""
    tensor: int = Field(1, ge=1)
    """Processes over which each block's matrices are cut; they see the same batch."""
    sequence: int = Field(1, ge=1)
    """Processes over which the tokens of a clip are cut; they see the same batch, and attention is exchanged over heads."""
    bucket_mb: float = Field(25.0, gt=0)
    """MiB of gradients that are reduced at once, while the backward pass goes on (replicate)."""
    find_unused: bool = True
    """Look in each step for parameters that took no part (a null caption where none was dropped). false: faster where all do; one that
    does not is then an error."""

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return {"layout": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fit(self) -> ParallelConfig:
        if self.shard is not None and self.layout != "hybrid":
            raise ValueError(
                f"shard={self.shard} is the size of a group in layout=hybrid, and the layout is {self.layout}"
            )
        if not self.reshard and self.layout == "replicate":
            raise ValueError("reshard=false: with layout=replicate nothing is sharded; use shard or hybrid")
        if self.tensor > 1 and self.layout != "replicate":
            raise ValueError(
                f"tensor={self.tensor} with layout={self.layout}: blocks that are cut over processes are not sharded as well; "
                "use layout=replicate, or sequence in place of tensor"
            )
        if self.tensor > 1 and self.sequence > 1:
            raise ValueError(
                f"tensor={self.tensor} and sequence={self.sequence} both cut attention by heads: use one of the two"
            )
        return self

    @property
    def together(self) -> int:
        """Processes that hold one model and see one batch."""
        return self.tensor * self.sequence

    @property
    def speaks_inside(self) -> bool:
        """Whether processes exchange something inside the forward pass."""
        return self.layout != "replicate" or self.together > 1

    def sizes(self, world: int, local_world: int = 0) -> Sizes:
        """The mesh for so many processes."""
        if world % self.together:
            name = "tensor" if self.tensor > 1 else "sequence"
            raise ConfigError(
                f"train.parallel.{name}={self.together} does not divide {world} process{'es' if world > 1 else ''}: start a multiple of it "
                f"(torchrun --nproc-per-node; a dry run and kineo doctor take --processes), or set train.parallel={self.layout}"
            )
        apart = world // self.together
        if self.layout == "replicate":
            return Sizes(apart, 1, self.sequence, self.tensor)
        if self.layout == "shard" or apart == 1:
            return Sizes(1, apart, self.sequence, self.tensor)
        group = self.shard or max(1, (local_world or world) // self.together)
        if apart % group:
            raise ConfigError(
                f"train.parallel.shard={group} does not divide {apart} processes into groups: use one of "
                f"{', '.join(str(n) for n in range(2, apart + 1) if apart % n == 0)}"
            )
        return Sizes(apart // group, group, self.sequence, self.tensor)

    def data_place(self, rank: int, world: int) -> tuple[int, int]:
        """Which part of the batch a process reads, of how many."""
        return rank // self.together, self.sizes(world).replicate * self.sizes(world).shard


class Layout:
    """The mesh of a stage's processes and the groups within it. With one process, nothing."""

    def __init__(self, config: ParallelConfig, device: torch.device, timeout: float = 600.0) -> None:
        self.config = config
        self.active = distributed.is_active()
        self.sizes = config.sizes(distributed.world(), distributed.local_world())
        self.data_world = self.sizes.replicate * self.sizes.shard
        self.timeout = timedelta(seconds=timeout)
        if not self.active:
            return
        self.device_type = device.type
        if config.together == 1:
            distributed.reset_data_group()
            if config.layout == "replicate":
                return  # everything is over all processes: the default group will do
        self.mesh = init_device_mesh(device.type, tuple(self.sizes), mesh_dim_names=Sizes._fields)
        if config.together > 1:
            group = self._joined("replicate", "shard").get_group()
            self._wait_at_most(group)
            distributed.set_data_group(distributed.rank() // config.together, self.data_world, group)

    def __bool__(self) -> bool:
        return self.active

    @property
    def shards(self) -> bool:
        return self.active and self.config.layout != "replicate"

    def sharding_mesh(self) -> DeviceMesh:
        """Processes over which weights lie in parts, those of a sequence among them; across groups of them first, with hybrid."""
        within = self._joined("shard", "sequence")
        if self.sizes.replicate == 1:
            return within
        across = self.mesh["replicate"]
        self._wait_at_most(across.get_group())
        self._wait_at_most(within.get_group())
        return DeviceMesh.from_group(
            [across.get_group(), within.get_group()],
            self.device_type,
            mesh=self.mesh.mesh[:, :, :, 0].flatten(1),
            mesh_dim_names=("replicate", "within"),
        )

    def group(self, side: Literal["sequence", "tensor"]) -> dist.ProcessGroup:
        group = self.mesh[side].get_group()
        self._wait_at_most(group)
        return group

    def across_tensor(self) -> dist.ProcessGroup:
        """Those that hold the same part of a matrix that is cut."""
        group = self._joined("replicate", "shard", "sequence").get_group()
        self._wait_at_most(group)
        return group

    def _joined(self, *sides: str) -> DeviceMesh:
        found = self.mesh[sides]
        return found._flatten("_".join(sides)) if len(sides) > 1 else found

    def _wait_at_most(self, group: dist.ProcessGroup) -> None:
        _set_pg_timeout(self.timeout, group)
