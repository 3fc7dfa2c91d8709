"""`train.parallel`: how the processes of a run share a stage, and their device mesh.

    replicate   every process has the whole model and a part of the batch (DDP)
    shard       every process has a shard of each block's weights, gathered when the block runs (FSDP2)
    hybrid      sharded within groups of processes, replicated across them

The processes of `tensor` and `sequence` hold one model together and see the same batch. The mesh is (replicate, shard, sequence, tensor);
the last dimension varies fastest, so that processes that communicate most are on one machine.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from kineograph.core import distributed
from kineograph.core.config import Config
from kineograph.core.errors import ConfigError


class MeshShape(NamedTuple):
    """Processes along each dimension of the mesh."""

    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    tensor: int = 1


class ParallelConfig(Config):
    """`train.parallel`: the name of a layout, or these keys."""

    layout: Literal["replicate", "shard", "hybrid"] = "replicate"
    """replicate: DDP. shard: FSDP2, which shards weights, gradients and moments. hybrid: shard within groups, replicate across them."""
    shard: int | None = Field(None, ge=2)
    """Of hybrid: processes that share one copy of the weights; null: those of one machine."""
    reshard: bool = True
    """Of shard and hybrid: free a block's gathered weights after its forward pass and gather them again for the backward pass."""
    tensor: int = Field(1, ge=1)
    """Processes over which each block's matrices are split; they see the same batch."""
    sequence: int = Field(1, ge=1)
    """Processes over which the tokens of a clip are split; they see the same batch and exchange tokens for heads around attention."""
    bucket_mb: float = Field(25.0, gt=0)
    """MiB of gradients that one all-reduce takes (replicate)."""
    find_unused: bool = True
    """Look in each step for parameters without a gradient, such as a null caption in a step that dropped no caption. false: faster, and
    such a parameter is an error."""

    static_graph: bool = False
    """Of replicate: DDP learns in the first step which parameters get a gradient and does not look again. Faster than find_unused; a step
    that uses other parameters is an error. Not with train.accumulate."""
    offload: bool = False
    """Of shard and hybrid: weights, gradients and moments of the blocks stay in main memory, and a block's weights are copied to the GPU
    when it runs. Far less GPU memory, slower steps."""

    @model_validator(mode="before")
    @classmethod
    def _parse_layout_name(cls, value: Any) -> Any:
        return {"layout": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_keys(self) -> ParallelConfig:
        if self.shard is not None and self.layout != "hybrid":
            raise ValueError(
                f"shard={self.shard} is the group size of layout=hybrid, and layout={self.layout}: leave it out, or use hybrid"
            )
        if not self.reshard and self.layout == "replicate":
            raise ValueError("reshard=false: layout=replicate shards nothing; use shard or hybrid")
        if self.offload and self.layout == "replicate":
            raise ValueError("offload=true: layout=replicate keeps whole models on the GPUs; use shard or hybrid")
        if self.static_graph and (self.layout != "replicate" or self.tensor > 1):
            raise ValueError(
                f"static_graph=true is an option of DDP, and layout={self.layout}, tensor={self.tensor}: use layout=replicate and tensor=1, "
                "or leave it out"
            )
        if self.tensor > 1 and self.layout != "replicate":
            raise ValueError(
                f"tensor={self.tensor} does not work with layout={self.layout}: use layout=replicate, or sequence in place of tensor"
            )
        if self.tensor > 1 and self.sequence > 1:
            raise ValueError(
                f"tensor={self.tensor} and sequence={self.sequence} both split attention by heads: use one of the two"
            )
        return self

    @property
    def model_ranks(self) -> int:
        """Processes that hold one model together and see the same batch."""
        return self.tensor * self.sequence

    @property
    def communicates_in_forward(self) -> bool:
        return self.layout != "replicate" or self.model_ranks > 1

    def mesh_shape(self, world: int, local_world: int = 0) -> MeshShape:
        """The mesh of `world` processes. Raises ConfigError where they do not divide."""
        if world % self.model_ranks:
            name = "tensor" if self.tensor > 1 else "sequence"
            raise ConfigError(
                f"train.parallel.{name}={self.model_ranks} does not divide {world} process{'es' if world > 1 else ''}: start a multiple of it "
                f"(torchrun --nproc-per-node; a dry run and kineo doctor take --processes), or set train.parallel={self.layout}"
            )
        data_ranks = world // self.model_ranks
        if self.layout == "replicate":
            return MeshShape(data_ranks, 1, self.sequence, self.tensor)
        if self.layout == "shard" or data_ranks == 1:
            return MeshShape(1, data_ranks, self.sequence, self.tensor)
        group = self.shard or max(1, (local_world or world) // self.model_ranks)
        if data_ranks % group:
            raise ConfigError(
                f"train.parallel.shard={group} does not divide {data_ranks} processes into groups: use one of "
                f"{', '.join(str(n) for n in range(2, data_ranks + 1) if data_ranks % n == 0)}"
            )
        return MeshShape(data_ranks // group, group, self.sequence, self.tensor)

    def data_rank_of(self, rank: int, world: int) -> tuple[int, int]:
        """→ the data rank of a process, and how many there are."""
        shape = self.mesh_shape(world)
        return rank // self.model_ranks, shape.replicate * shape.shard


class Layout:
    """The device mesh of a stage's processes. False where there is one process."""

    def __init__(self, config: ParallelConfig, device: torch.device, timeout: float = 600.0) -> None:
        self.config = config
        self.is_active = distributed.is_active()
        self.shape = config.mesh_shape(distributed.world(), distributed.local_world())
        self.data_world = self.shape.replicate * self.shape.shard
        self._timeout = timedelta(seconds=timeout)
        if not self.is_active:
            return
        if config.model_ranks == 1:
            distributed.reset_data_group()
            if config.layout == "replicate":
                return  # the default group is enough
        self.mesh = init_device_mesh(device.type, tuple(self.shape), mesh_dim_names=MeshShape._fields)
        for name in MeshShape._fields:
            self._set_timeout(self.mesh[name])
        if config.model_ranks > 1:
            self.data_group = self._flatten("replicate", "shard").get_group()
            distributed.set_data_group(distributed.rank() // config.model_ranks, self.data_world, self.data_group)

    def __bool__(self) -> bool:
        return self.is_active

    @property
    def shards(self) -> bool:
        return self.is_active and self.config.layout != "replicate"

    def sharding_mesh(self) -> DeviceMesh:
        """FSDP2's mesh: shards over the sequence ranks too; with hybrid (replicate, shard)."""
        within = self._flatten("shard", "sequence")
        if self.shape.replicate == 1:
            return within
        return DeviceMesh.from_group(
            [self.mesh["replicate"].get_group(), within.get_group()],
            within.device_type,
            mesh=self.mesh.mesh[:, :, :, 0].flatten(1),
            mesh_dim_names=("replicate", "within"),
        )

    def _flatten(self, *names: str) -> DeviceMesh:
        mesh = self.mesh[names]._flatten("_".join(names))
        self._set_timeout(mesh)
        return mesh

    def _set_timeout(self, mesh: DeviceMesh) -> None:
        _set_pg_timeout(self._timeout, mesh.get_group())
