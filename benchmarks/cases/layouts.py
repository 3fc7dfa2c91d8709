"""Overhead of DDP and FSDP2: the same step without a group, and under each layout in a group of one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from benchmarks.case import Case, Sizes, Workload
from benchmarks.cases.cogvideox import build_our_model, make_batch
from benchmarks.measure import count_flops
from benchmarks.peers import count_parameters

TRAIN = {"depth": 12, "heads": 30, "latents": (4, 60, 90), "text": (226, 4096), "batch": 1}
SMALL = {"depth": 2, "heads": 2, "latents": (3, 16, 16), "text": (8, 32)}


def make_builder(parallel: Any) -> Callable[[Sizes, torch.device], Workload]:
    """One optimizer step of CogVideoX's transformer; parallel=None: no process group. Compiled on a GPU, without CUDA graphs."""

    def build(sizes: Sizes, device: torch.device) -> Workload:
        import torch.distributed as dist

        from kineograph.core import distributed
        from kineograph.train.config import TrainConfig
        from kineograph.train.stepper import Stepper

        batch = make_batch(sizes)
        settings: dict[str, Any] = {"batch_size": len(batch), "ema": {"decay": 0}}
        eager = TrainConfig(**settings, compile=False)
        flops = count_flops(
            lambda: Stepper(build_our_model(sizes, device).train(), eager, device=device).step(0, [batch]) and None
        )
        if parallel is not None:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

        def close() -> None:
            if parallel is not None:
                dist.destroy_process_group()
                distributed.reset_data_group()

        try:
            config = TrainConfig(**settings, compile=device.type == "cuda", parallel=parallel or "replicate")
            task = build_our_model(sizes, device)
            parameters = count_parameters(task.network.parameters())  # type: ignore[union-attr,operator]
            stepper = Stepper(task.train(), config, device=device)
        except BaseException:
            close()
            raise
        batch = batch.pin_memory() if device.type == "cuda" else batch
        steps = count()
        return Workload(
            lambda: stepper.step(next(steps), [batch]),
            samples=len(batch),
            parameters=parameters,
            flops=flops,
            precision=stepper.precision,
            close=close,
        )

    return build


ABOUT = "one optimizer step: 12 layers, width 1,920, 5,626 tokens, batch 1"
CASES = [
    Case("layout-plain", f"{ABOUT}; one process, no group", TRAIN, SMALL, make_builder(None)),
    Case("layout-replicate", f"{ABOUT}; DDP in a group of one", TRAIN, SMALL, make_builder("replicate")),
    Case("layout-shard", f"{ABOUT}; FSDP2 in a group of one", TRAIN, SMALL, make_builder("shard")),
    Case(
        "layout-shard-kept",
        f"{ABOUT}; FSDP2 in a group of one, weights kept gathered until the backward pass",
        TRAIN,
        SMALL,
        make_builder({"layout": "shard", "reshard": False}),
    ),
]
