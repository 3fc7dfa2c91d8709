"""The rows of a request: what each clip or picture is drawn from, with its inputs read. Rows of one shape are drawn together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kineograph.core.batch import Batch, Prompts
from kineograph.core.config import Config
from kineograph.core.noise import Noise, key_of
from kineograph.core.prompt import Prompt
from kineograph.data.open_source import DataConfig
from kineograph.sample.limits import ClipLimits
from kineograph.sample.prime import Mask, Prime, read_mask, read_prime
from kineograph.sample.prompt_file import name_prompt
from kineograph.sample.request import SampleRequest

Input = str | Path | Tensor


@dataclass(frozen=True)
class Row:
    """One clip or picture to draw. None means: as trained, or none."""

    prompt: Prompt | None  # of a prompts file
    caption: str | None
    seed: int
    slot: int  # keys the noise, beside the seed
    negative: str | None = None
    frames: int | None = None
    prime: Prime | None = None
    mask: Mask | None = None

    @property
    def shape(self) -> tuple[object, ...]:
        """Rows that agree in it can be drawn in one batch."""
        given = len(self.prime.frames) if self.prime is not None else 0
        return self.frames, given, self.mask is None, self.negative is None


class RowReader:
    """Reads the inputs of a request's rows, each file once."""

    def __init__(
        self, limits: ClipLimits, data: DataConfig, options: Config | None, note: Callable[[str], None]
    ) -> None:
        self.limits, self.data, self.options, self.note = limits, data, options, note
        self._read: dict[tuple[object, ...], Prime | Mask] = {}

    def read(self, request: SampleRequest) -> list[Row]:
        """`count` rows per prompt. A prompt with a seed of its own has the noise of a request for it alone."""
        rows = []
        for index, prompt in enumerate(request.entries or [None]):
            with name_prompt(prompt or Prompt.model_construct()):
                negative, frames, prime, mask = self._read_inputs(prompt, request)
            for number in range(request.count):
                seed, slot = request.seed, index * request.count + number
                if prompt is not None and prompt.seed is not None:
                    seed, slot = prompt.seed, number
                caption = prompt.prompt if prompt is not None and request.has_captions else None
                rows.append(Row(prompt, caption, seed, slot, negative, frames, prime, mask))
        return rows

    def _read_inputs(
        self, prompt: Prompt | None, request: SampleRequest
    ) -> tuple[str | None, int | None, Prime | None, Mask | None]:
        own = prompt if prompt is not None else Prompt.model_construct()
        negative = own.negative if own.negative is not None else request.negative
        frames = own.frames or request.frames
        if frames is not None:
            self.limits.check_shape(frames, request.size)
        mask = self._read_mask(own.mask or request.mask, request)
        prime = self._read_prime(own.image or request.prime, request, frames, mask is not None)
        return negative, frames, prime, mask

    def _read_mask(self, source: Input | None, request: SampleRequest) -> Mask | None:
        if source is None:
            return None
        shape = self.limits.shape
        key = ("mask", *_identify(source))
        if key not in self._read:
            self._read[key] = read_mask(source, self.limits, request.size or (shape.height, shape.width))
        mask = self._read[key]
        assert isinstance(mask, Mask)
        return mask

    def _read_prime(
        self, source: Input | None, request: SampleRequest, frames: int | None, masked: bool
    ) -> Prime | None:
        if source is None:
            return None
        frames = frames or self.limits.shape.frames
        key = ("prime", *_identify(source), frames, masked)
        if key not in self._read:
            self._read[key] = read_prime(
                source, self.limits, self.data, frames, request.size, self.options, self.note, masked
            )
        prime = self._read[key]
        assert isinstance(prime, Prime)
        return prime


def _identify(source: Input) -> tuple[object, ...]:
    return (id(source),) if isinstance(source, Tensor) else (str(source),)


def group_rows(rows: Sequence[Row]) -> list[list[int]]:
    """Indices of rows that can be drawn together, in the order of their first rows."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.shape, []).append(index)
    return list(groups.values())


def make_prompts(rows: Sequence[Row], size: tuple[int, int] | None = None, batch: Batch | None = None) -> Prompts:
    """The sampling call for rows of one shape; `batch`: real items or sketches beside them."""
    first = rows[0]
    height, width = size or (None, None)
    return Prompts(
        noise=row_noise([row.seed for row in rows], torch.tensor([row.slot for row in rows])),
        captions=[row.caption or "" for row in rows] if first.caption is not None else None,
        negative=[row.negative or "" for row in rows] if first.negative is not None else None,
        frames=first.frames,
        height=height,
        width=width,
        prime=torch.stack([row.prime.frames for row in rows if row.prime is not None]) if first.prime else None,
        mask=torch.stack([row.mask.inpaint for row in rows if row.mask is not None]) if first.mask else None,
        batch=batch,
    )


def row_noise(seeds: Sequence[int], slots: Tensor) -> Noise:
    """The noise of rows that may differ in their seeds; equal ones give the noise of one sampling call."""
    keys = [key_of(seed, "sample") for seed in seeds]
    return Noise(keys[0], 0, slots, keys if len(set(keys)) > 1 else None)
