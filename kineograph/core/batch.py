"""The data of models: a sample, a batch, and the prompts of a sampling call.

Pixels leave the loader as uint8 and become float in [0, 1] on the device. At every model boundary they are
B T C H W; an image is a clip with T = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kineograph.core.noise import Noise


@dataclass(frozen=True)
class Shape:
    """The shape of a stage's clips."""

    frames: int
    height: int
    width: int
    channels: int
    fps: float
    sample_rate: int | None = None  # of the sound track; None: no sound

    @property
    def samples_per_frame(self) -> int:
        """Samples of the sound track that belong to a frame; the data config has checked that they are a whole number."""
        return round((self.sample_rate or 0) / self.fps)


class Sound(NamedTuple):
    """The sound track of one clip."""

    samples: Tensor  # T S, float in [−1, 1]: the samples of each frame
    rate: int


@dataclass
class Sample:
    """One item of a data source, which fills the fields that it has."""

    pixels: Tensor | None = None  # T C H W, uint8
    frame_mask: Tensor | None = None  # T, bool; False = padding
    fps: float | None = None
    caption: str | None = None
    texts: tuple[
        str, ...
    ] = ()  # the item's captions as the data have them, where `caption` is another or one of several
    tokens: Tensor | None = None  # t h w, int64: codebook ids
    latents: Tensor | None = None  # float: latents, or a posterior's mean and log-variance
    text_embeds: Tensor | None = None  # L D, float
    text_mask: Tensor | None = None  # L, bool
    loss_mask: Tensor | None = None  # H W, uint8: 255 counts in the loss, 0 does not
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Fields of some families: image embeddings, sketches, audio (T S)."""


@dataclass
class Batch:
    """Stacked samples. `slots` are their positions in the global batch, which key their noise."""

    slots: Tensor  # B, int64
    pixels: Tensor | None = None  # B T C H W, uint8 (or float in [0, 1])
    frame_mask: Tensor | None = None  # B T, bool; None: no padding, so attention needs no mask
    fps: Tensor | None = None  # B
    captions: list[str] | None = None  # None: no sample has one; "" is the null text
    texts: list[tuple[str, ...]] | None = None  # as in Sample; None: the captions are as the data have them
    tokens: Tensor | None = None  # B t h w
    latents: Tensor | None = None
    text_embeds: Tensor | None = None  # B L D
    text_mask: Tensor | None = None  # B L
    loss_mask: Tensor | None = None  # B H W, uint8; None: everything counts
    extra: dict[str, Tensor] = field(default_factory=dict)
    spare: bool = False  # rows repeated from another rank to fill the batch; excluded from metrics

    def __len__(self) -> int:
        return self.slots.shape[0]

    @property
    def video(self) -> Tensor:
        """Pixels as float in [0, 1], B T C H W."""
        if self.pixels is None:
            raise ValueError("this batch has no pixels: it comes from a token or latent cache")
        if self.pixels.is_floating_point():  # in [0, 1] already
            return self.pixels.float()
        return self.pixels.to(torch.float32).div_(255.0)

    def loss_share(self, height: int, width: int) -> Tensor | None:
        """Which part of each position of a map counts in the loss, B 1 h w in [0, 1]."""
        if self.loss_mask is None:
            return None
        mask = self.loss_mask[:, None].to(torch.float32) / 255
        return mask if mask.shape[-2:] == (height, width) else F.interpolate(mask, (height, width), mode="area")

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Apply `change` to every tensor."""
        changed: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                changed[item.name] = change(value)
            elif isinstance(value, dict):
                changed[item.name] = {name: change(tensor) for name, tensor in value.items()}
        return replace(self, **changed)

    def tensors(self) -> list[Tensor]:
        values = [getattr(self, item.name) for item in fields(self)]
        return [value for value in [*values, *self.extra.values()] if isinstance(value, Tensor)]

    def rows(self, indices: Sequence[int]) -> Batch:
        """These rows, in this order."""
        chosen = torch.tensor(indices)
        batch = self.map(lambda tensor: tensor[chosen.to(tensor.device)])
        return replace(
            batch,
            captions=[self.captions[index] for index in indices] if self.captions is not None else None,
            texts=[self.texts[index] for index in indices] if self.texts is not None else None,
        )

    def to(self, device: torch.device) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self.map(lambda tensor: tensor.pin_memory())

    @staticmethod
    def collate(samples: Sequence[Sample], slots: Sequence[int]) -> Batch:
        """Stack samples; clips of different lengths are padded at the end and masked."""
        first = samples[0]
        batch = Batch(slots=torch.tensor(slots, dtype=torch.int64))
        clips = [sample.pixels for sample in samples if sample.pixels is not None]
        masks = [sample.frame_mask for sample in samples if sample.frame_mask is not None]
        if clips:
            longest = max(map(len, clips))
            batch.pixels = torch.stack([_pad_frames(clip, longest) for clip in clips])
            masks = [
                torch.ones(len(clip), dtype=torch.bool) if sample.frame_mask is None else sample.frame_mask
                for sample, clip in zip(samples, clips, strict=True)
            ]
            masks = [_pad_frames(mask, longest, False) for mask in masks]
        if len(masks) == len(samples):
            mask = torch.stack(masks)
            batch.frame_mask = None if mask.all() else mask
        if all(sample.fps is not None for sample in samples):
            batch.fps = torch.tensor([sample.fps for sample in samples], dtype=torch.float32)
        if any(sample.caption is not None for sample in samples):
            batch.captions = [sample.caption or "" for sample in samples]
        if any(sample.texts for sample in samples):
            batch.texts = [
                sample.texts or ((sample.caption,) if sample.caption is not None else ()) for sample in samples
            ]
        for name in ("tokens", "latents", "text_embeds", "text_mask"):
            if getattr(first, name) is not None:
                setattr(batch, name, torch.stack([getattr(sample, name) for sample in samples]))
        batch.loss_mask = _stack_loss_masks([sample.loss_mask for sample in samples])
        for name in {name for sample in samples for name in sample.extra}:
            parts = [sample.extra[name] for sample in samples]
            if len({part.shape[:1] for part in parts}) > 1:  # of clips of different lengths
                parts = [_pad_frames(part, max(map(len, parts))) for part in parts]
            batch.extra[name] = torch.stack(parts)
        return batch


def _stack_loss_masks(masks: Sequence[Tensor | None]) -> Tensor | None:
    """B H W; of a sample without a mask everything counts."""
    first = next((mask for mask in masks if mask is not None), None)
    if first is None:
        return None
    return torch.stack([torch.full_like(first, 255) if mask is None else mask for mask in masks])


def weigh_positions(share: Tensor) -> Tensor:
    """Weights of the positions of B … h w from `Batch.loss_share`, with mean 1: a mean of weighted errors is the mean over what counts.

    A sample of which nothing counts has weights 0.
    """
    return share / share.flatten(1).mean(1).clamp_min(1e-6).view(-1, *[1] * (share.ndim - 1))


def _pad_frames(frames: Tensor, length: int, value: bool | None = None) -> Tensor:
    """Repeat the last frame (or `value`) up to `length`."""
    missing = length - frames.shape[0]
    if not missing:
        return frames
    tail = frames[-1:] if value is None else torch.full_like(frames[-1:], value)
    return torch.cat([frames, tail.expand(missing, *frames.shape[1:])])


@dataclass
class Prompts:
    """One sampling call: what to draw, for how many, with which noise."""

    noise: Noise
    captions: list[str] | None = None  # None: unconditional
    negative: list[str] | None = None
    frames: int | None = None  # None: as trained
    height: int | None = None
    width: int | None = None
    prime: Tensor | None = None  # B T C H W, float in [0, 1]: frames to continue from
    mask: Tensor | None = None  # B H W, bool: the part of `prime` to inpaint
    batch: Batch | None = None  # real samples beside the prompts, for tasks that start from an image
    from_items: bool = False  # start from the samples of `batch` even where another stage would draw from the captions

    def __len__(self) -> int:
        return self.noise.batch
