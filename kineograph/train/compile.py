"""Compiles a task with torch.compile: its targets or its blocks, with or without CUDA graphs."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from kineograph.core import distributed
from kineograph.core.capabilities import SupportsBuckets
from kineograph.core.errors import ConfigError
from kineograph.core.task import Task
from kineograph.core.weight_cache import cache_folder
from kineograph.train.config import TrainConfig

MAX_SHAPES = 128  # compilations of a module, training and sampling counted apart
LARGE = 500_000_000  # parameters in blocks


def is_large(task: Task) -> bool:
    """Whether to compile block by block: dynamo compiles one block and reuses it for all that are equal.

    The whole of CogVideoX-2B takes 155 s to compile, for each bucket's shape again; its steps are too long to gain from CUDA graphs.
    """
    return sum(p.numel() for block in task.blocks() for p in block.parameters()) >= LARGE


def is_compiled(config: TrainConfig, device: torch.device) -> bool:
    """Whether training steps are compiled at all."""
    return device.type == "cuda" if config.compile == "auto" else bool(config.compile)


def uses_cuda_graphs(config: TrainConfig, device: torch.device, is_distributed: bool | None = None) -> bool:
    """Whether compiled modules run as CUDA graphs; raise a ConfigError if `graphs` is set and impossible.

    A graph has one set of buffers, which rules out accumulation, and it cannot hold collectives. With several processes
    `auto` uses none. `is_distributed`: whether there will be several, for a planned run.
    """
    if is_distributed is None:
        is_distributed = distributed.is_active()
    if config.compile == "graphs" and (device.type != "cuda" or config.accumulate > 1):
        raise ConfigError("train.compile=graphs needs a GPU and train.accumulate=1: use true or auto")
    if config.compile == "graphs" and is_distributed and config.parallel.communicates_in_forward:
        raise ConfigError(
            "train.compile=graphs needs train.parallel=replicate without tensor and sequence, since a CUDA graph cannot hold collectives: "
            "use true or auto"
        )
    is_automatic = config.compile == "auto" and config.accumulate == 1 and not is_distributed
    return device.type == "cuda" and (config.compile == "graphs" or is_automatic)


def keep_compile_cache() -> None:
    """Let torch keep what it compiles in this user's cache folder, unless TORCHINDUCTOR_CACHE_DIR names another.

    Its default is a folder of a known name in /tmp, which the next boot empties. What torch finds there it unpickles, and another user
    of the machine may have put it there first.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = cache_folder() / "compile"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:  # no home that can be written to
        return
    if status.st_uid != os.getuid() or status.st_mode & 0o022:  # in a $KINEO_CACHE that several users share
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def compile_task(task: Task, graphs: bool, by_block: bool = False) -> None:
    """Compile the task's `compile_targets` in place.

    `graphs` runs them as CUDA graphs: the host launches one graph instead of hundreds of kernels. `by_block` compiles the forward passes
    of blocks instead of the modules that hold them, so that hooks around a block (sharding) stay outside.
    """
    keep_compile_cache()
    if isinstance(task, SupportsBuckets) and task.can_bucket():
        # Every bucket is a compilation of its own, and dynamo gives up after a few.
        dynamo: Any = importlib.import_module("torch._dynamo.config")
        dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_SHAPES)
    blocks = {id(block) for block in task.blocks()} if by_block else set()
    for block in task.blocks() if by_block else []:
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    for module in task.compile_targets():
        if any(id(part) in blocks for part in module.modules()):
            continue
        # A module without parameters is a kernel or two: copying its inputs into a graph costs more than it saves.
        graphed = graphs and any(True for _ in module.parameters())
        module.compile(dynamic=False, mode="reduce-overhead" if graphed else "default")
