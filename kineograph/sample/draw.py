"""Prompts to pixels with a Task, trained or in training: one path, so that a picture seen while training is the picture that the same
weights draw later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from einops import repeat
from torch import Tensor

from kineograph.core import distributed, heartbeat
from kineograph.core.batch import Batch, Prompts, Shape
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise, key_of
from kineograph.core.task import Task
from kineograph.train.precision import autocast, resolve_precision

BATCH = 32  # rows drawn at once unless told otherwise


def draw_for_training(
    task: Task,
    captions: list[str] | None,
    options: Any,
    shape: Shape,
    seed: int,
    device: torch.device | str,
    frames: int | None = None,
    count: int = 1,
    real: Batch | None = None,
    batch: int = BATCH,
    latents: bool = False,
) -> Tensor:
    """What `Sampler.sample(captions, seed=seed, frames=frames)` would draw with the weights that `task` has now. → B T C H W, on the CPU.
    Several processes each draw a part; the first one has all rows, the others none.

    `real` holds a sample beside each prompt, for tasks that draw from one (super-resolution, given text embeddings). `latents`: undecoded.
    """
    rows = len(captions) if captions is not None else count
    return draw_together(
        task,
        captions,
        rows=rows,
        options=options,
        shape=shape,
        seed=seed,
        device=device,
        frames=frames,
        real=real,
        batch=batch,
        latents=latents,
    )


def draw(
    task: Task,
    captions: Sequence[str] | None,
    *,
    rows: int,
    options: Any,
    shape: Shape,
    seed: int,
    device: torch.device | str,
    frames: int | None = None,
    size: tuple[int, int] | None = None,
    prime: Tensor | None = None,
    negative: str | None = None,
    real: Batch | None = None,
    batch: int = BATCH,
    first: int = 0,
    slots: Tensor | None = None,
    mask: Tensor | None = None,
    latents: bool = False,
) -> Tensor:
    """Rows `first` … `first + rows − 1` (or `slots`) of a call, `batch` at a time; row r's noise is keyed by (seed, "sample", r).
    → B T C H W, on the CPU."""
    device = torch.device(device)
    slots = torch.arange(first, first + rows) if slots is None else slots
    height, width = size or (None, None)
    parts = []
    with inference_mode(task, device):
        for start in range(0, rows, batch):
            stop = min(start + batch, rows)
            heartbeat.beat()
            prompts = Prompts(
                noise=Noise(key_of(seed, "sample"), 0, slots[start:stop].to(device)),
                captions=list(captions[start:stop]) if captions is not None else None,
                negative=[negative] * (stop - start) if negative is not None else None,
                frames=frames,
                height=height,
                width=width,
                prime=repeat(prime, "t c h w -> b t c h w", b=stop - start).to(device) if prime is not None else None,
                mask=repeat(mask, "h w -> b h w", b=stop - start).to(device) if mask is not None else None,
                batch=_rows(real, start, stop).to(device) if real is not None else None,
            )
            if latents:
                parts.append(task.sample_latents(prompts, options).float().cpu())
                continue
            pixels = task.sample(prompts, options)  # B T C H W
            if pixels.ndim != 5 or pixels.shape[0] != stop - start or pixels.shape[2] != shape.channels:
                raise InputError(
                    f"{type(task).__name__}.sample gave {tuple(pixels.shape)} for {stop - start} prompts: a Task gives B T C H W with {shape.channels} channels"
                )
            parts.append(pixels.float().clamp(0, 1).cpu())
    return torch.cat(parts)


def draw_together(
    task: Task,
    captions: Sequence[str] | None,
    *,
    rows: int,
    real: Batch | None = None,
    slots: Tensor | None = None,
    **how: Any,
) -> Tensor:
    """As `draw`, by all processes of a group, each its part of the rows. → all of them in the first process, none elsewhere.

    Every process runs the model equally often, so that one whose weights lie in parts can be drawn with: what is over is drawn and dropped.
    """
    if not distributed.is_active():
        return draw(task, captions, rows=rows, real=real, slots=slots, **how)
    slots = torch.arange(rows) if slots is None else slots
    share = -(-rows // distributed.data_world())
    start = share * distributed.data_rank()
    places = [min(place, rows - 1) for place in range(start, start + share)]
    drawn = draw(
        task,
        [captions[place] for place in places] if captions is not None else None,
        rows=share,
        real=real.rows(places) if real is not None else None,
        slots=slots[places],
        **how,
    )
    mine = drawn[: max(0, min(rows - start, share))]
    parts = distributed.gather_tensors([mine if distributed.is_data_leader() else mine[:0]])
    return torch.cat([part[0] for part in parts]) if distributed.is_first() else mine[:0]


def _rows(batch: Batch, start: int, stop: int) -> Batch:
    part = batch.map(lambda tensor: tensor[start:stop])
    return replace(part, captions=part.captions[start:stop] if part.captions is not None else None)


@contextmanager
def inference_mode(task: Task, device: torch.device) -> Iterator[None]:
    """Eval mode, no gradients, the precision of its training; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in task.modules()]
    trains = any(p.requires_grad for p in task.parameters())
    task.eval()
    try:
        with ExitStack() as stack:
            # Tensors made in inference mode and kept (position tables) could never take part in training again.
            stack.enter_context(torch.no_grad() if trains else torch.inference_mode())
            wanted = task.precision if device.type == "cuda" else "auto"
            stack.enter_context(autocast(resolve_precision(wanted, device), device))
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def device_for(name: str) -> torch.device:
    """`auto`, or a device that must be there."""
    try:
        device = distributed.resolve_device(name)
    except RuntimeError:
        raise InputError(f"--device {name} is not a device: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu")
    return device
