"""Prompts to pixels with a Task, trained or in training: one path, so that the same weights draw the same pictures in both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kineograph.core import distributed
from kineograph.core.batch import Prompts
from kineograph.core.capabilities import SupportsLatentSampling, SupportsSampling, makes_sound
from kineograph.core.config import Config
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise, key_of
from kineograph.core.task import Task
from kineograph.sample.batches import MOST, RowBatches
from kineograph.train.precision import autocast, resolve_precision


class Drawn(NamedTuple):
    """The clips of a sampling call, on the CPU."""

    pixels: Tensor  # B T C H W in [0, 1]; or latents, where these were asked for
    sound: Tensor | None = None  # B T S in [−1, 1]; None: the task makes none


def sampling_noise(seed: int, slots: Tensor) -> Noise:
    """The noise of rows `slots` of a sampling call."""
    return Noise(key_of(seed, "sample"), 0, slots)


def draw(
    task: Task,
    prompts: Prompts,
    options: Config | None,
    device: torch.device | str,
    batch: RowBatches | int | None = None,
    latents: bool = False,
) -> Drawn:
    """Sample all rows of `prompts`; with `latents`, what the codec would decode."""
    parts = list(draw_parts(task, prompts, options, device, batch, latents))
    sounds = [part.sound for part in parts if part.sound is not None]
    return Drawn(torch.cat([part.pixels for part in parts]), torch.cat(sounds) if sounds else None)


def draw_parts(
    task: Task,
    prompts: Prompts,
    options: Config | None,
    device: torch.device | str,
    batch: RowBatches | int | None = None,
    latents: bool = False,
) -> Iterator[Drawn]:
    """`draw`, some rows at a time."""
    device = torch.device(device)
    batches = batch if isinstance(batch, RowBatches) else RowBatches(batch, device)

    def draw_rows(rows: slice) -> Drawn:
        with inference_mode(task, device):
            part = _select_rows(prompts, rows, device)
            if latents:
                assert isinstance(task, SupportsLatentSampling)
                return Drawn(task.sample_latents(part, options).float().cpu())
            sound = None
            if makes_sound(task):
                pixels, sound = task.sample_with_sound(part, options)
                sound = sound.float().clamp(-1, 1).cpu()
            else:
                assert isinstance(task, SupportsSampling)
                pixels = task.sample(part, options)
            if pixels.ndim != 5 or len(pixels) != len(part):
                raise InputError(
                    f"{type(task).__name__}.sample returned {tuple(pixels.shape)} for {len(part)} prompts: return B T C H W"
                )
            return Drawn(pixels.float().clamp(0, 1).cpu(), sound)

    return batches.map(len(prompts), draw_rows)


def draw_across_ranks(task: Task, prompts: Prompts, *arguments: Any, **keywords: Any) -> Drawn:
    """`draw`, with the rows split over all ranks. → all rows on rank 0, none elsewhere.

    Every rank runs the model equally often, as sharded weights require: surplus rows repeat the last one and are dropped.
    """
    if not distributed.is_active():
        return draw(task, prompts, *arguments, **keywords)
    rows = len(prompts)
    share = -(-rows // distributed.data_world())
    start = share * distributed.data_rank()
    indices = [min(row, rows - 1) for row in range(start, start + share)]
    drawn = draw(task, _select_rows(prompts, indices), *arguments, **keywords)
    count = max(0, min(rows - start, share))
    mine = [tensor[:count] for tensor in drawn if tensor is not None]
    none = [tensor[:0] for tensor in mine]
    parts = distributed.gather_tensors(mine if distributed.is_data_leader() else none)
    return Drawn(*map(torch.cat, zip(*parts, strict=True))) if distributed.is_first() else Drawn(*none)


def draw_parts_across_ranks(
    task: Task, prompts: Prompts, options: Config | None, device: torch.device | str, batches: RowBatches
) -> Iterator[Drawn]:
    """`draw_parts`, with the rows split over all ranks. → the parts on rank 0, empty ones elsewhere."""
    if not distributed.is_active():
        yield from draw_parts(task, prompts, options, device, batches)
        return
    size = MOST * distributed.data_world()
    for start in range(0, len(prompts), size):
        part = _select_rows(prompts, slice(start, start + size))
        yield draw_across_ranks(task, part, options, device, batches)


def _select_rows(prompts: Prompts, rows: slice | list[int], device: torch.device | None = None) -> Prompts:
    """Some rows of `prompts`, moved to `device`."""
    indices = range(len(prompts))[rows] if isinstance(rows, slice) else rows

    def select_texts(texts: list[str] | None) -> list[str] | None:
        return [texts[index] for index in indices] if texts is not None else None

    def select(tensor: Tensor) -> Tensor:
        return tensor[rows].to(device, non_blocking=True)

    noise, batch = prompts.noise, prompts.batch
    seeds = [noise.row_seeds[index] for index in indices] if noise.row_seeds is not None else None
    if batch is not None:
        batch = replace(batch.map(select), captions=select_texts(batch.captions))
    return replace(
        prompts,
        noise=Noise(noise.seed, noise.step, select(noise.slots), seeds),
        captions=select_texts(prompts.captions),
        negative=select_texts(prompts.negative),
        prime=select(prompts.prime) if prompts.prime is not None else None,
        mask=select(prompts.mask) if prompts.mask is not None else None,
        batch=batch,
    )


@contextmanager
def inference_mode(task: Task, device: torch.device) -> Iterator[None]:
    """Eval mode, no gradients and the precision of training; restores every module's own mode afterwards."""
    modes = [(module, module.training) for module in task.modules()]
    in_training = any(p.requires_grad for p in task.parameters())
    precision = resolve_precision(task.precision if device.type == "cuda" else "auto", device)
    task.eval()
    try:
        # Tensors that a task caches under inference_mode (position tables) could never be trained with again.
        with torch.no_grad() if in_training else torch.inference_mode(), autocast(precision, device):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
