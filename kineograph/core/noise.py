"""Keyed randomness: every draw is a pure function of (seed, step, slot, name), never of rank, worker or batch layout.

The generator is SplitMix64 in counter mode, written in integer tensor arithmetic, so that one vectorised expression
draws for a whole batch on any device, and 1, 2 or 4 processes that share a global batch draw the same numbers for the
same sample. `slot` is a sample's place in the global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
GOLDEN = (5**0.5 - 1) / 2  # the fractional parts of its multiples are spread evenly over [0, 1)


def _signed(value: int) -> int:
    """The int64 that has the same bits as this uint64."""
    value &= _MASK
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser; `>>` on int64 is arithmetic, so the sign bits are masked off."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def mix_int(value: int) -> int:
    """SplitMix64's finaliser on a Python integer."""
    z = value & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def key_of(*parts: int | str) -> int:
    """A 64-bit key of integers and names; the order of the parts matters."""
    key = 0
    for part in parts:
        value = _name_key(part) if isinstance(part, str) else part
        key = mix_int(key + _GAMMA + mix_int(value))
    return key


@lru_cache(maxsize=4096)
def _name_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def numpy_rng(*parts: int | str) -> np.random.Generator:
    """A numpy generator keyed the same way, for data workers (augmentation, random start frames)."""
    return np.random.Generator(np.random.Philox(key=key_of(*parts)))


class Noise:
    """Draws for a batch of samples. `slots[b]` is the place of row b in the global batch; `row_seeds[b]` replaces `seed` for that row."""

    def __init__(
        self,
        seed: int,
        step: int,
        slots: Tensor,
        row_seeds: Sequence[int] | None = None,
        schedule_step: int | None = None,
    ) -> None:
        """`schedule_step`: how far the stage's schedule is, in steps; None: at `step`."""
        self.seed = seed
        self.step = step
        self.schedule_step = step if schedule_step is None else schedule_step
        self.slots = slots  # B, int64
        self.row_seeds = row_seeds

    @staticmethod
    def for_rows(seed: int, step: int, rows: int, device: torch.device | str = "cpu") -> Noise:
        """Noise for a batch that is the whole global batch."""
        return Noise(seed, step, torch.arange(rows, device=device))

    @property
    def batch(self) -> int:
        return self.slots.shape[0]

    @property
    def device(self) -> torch.device:
        return self.slots.device

    def rows(self, start: int, stop: int) -> Noise:
        """The draws of rows start … stop − 1, for work done in chunks."""
        seeds = self.row_seeds and self.row_seeds[start:stop]
        return Noise(self.seed, self.step, self.slots[start:stop], seeds, self.schedule_step)

    def keyed_by(self, *parts: int | str) -> Noise:
        """Draws that are independent of these, for a stage that samples beside others."""
        rows = None if self.row_seeds is None else [key_of(seed, *parts) for seed in self.row_seeds]
        return Noise(key_of(self.seed, *parts), self.step, self.slots, rows)

    def _stream(self, name: str) -> Tensor | int:
        """A key for the name: one, or one per row."""
        if self.row_seeds is None:
            return _signed(key_of(self.seed, self.step, name))
        keys = [_signed(key_of(seed, self.step, name)) for seed in self.row_seeds]
        return torch.tensor(keys, dtype=torch.int64, device=self.device)

    def bits(self, name: str, *shape: int) -> Tensor:
        """64 random bits per element, shape B × shape."""
        keys = _mix(self.slots * _signed(_GAMMA) + self._stream(name))  # B
        count = 1
        for size in shape:
            count *= size
        counter = torch.arange(1, count + 1, device=self.device, dtype=torch.int64) * _signed(_GAMMA)
        return _mix(keys[:, None] + counter[None]).view(self.batch, *shape)

    def uniform(self, name: str, *shape: int) -> Tensor:
        """float32 in (0, 1), both ends excluded, 24 bits."""
        bits = (self.bits(name, *shape) >> 40) & ((1 << 24) - 1)
        # The largest of them, 2²⁴ − ½, has no float32 and would round to 1, whose normal draw is infinite.
        return ((bits.to(torch.float32) + 0.5) * 2.0**-24).clamp_(max=1 - 2.0**-24)

    def normal(self, name: str, *shape: int) -> Tensor:
        """float32, standard normal: the inverse normal distribution function of a uniform draw."""
        return torch.special.ndtri(self.uniform(name, *shape).to(torch.float64)).to(torch.float32)

    def spread(self, name: str | None = None) -> Tensor:
        """float64 in [0, 1), one a sample, spread evenly over the samples of a step. With a name, a draw for the step shifts all of them, so that
        each is uniform over steps; without, a slot has the same number at every step."""
        start = GOLDEN if name is None else key_of(self.seed, self.step, name) * 2.0**-64
        return (self.slots.double() * GOLDEN + start) % 1.0

    def gumbel(self, name: str, *shape: int) -> Tensor:
        """−log(−log u)."""
        return -torch.log(-torch.log(self.uniform(name, *shape)))

    def integers(self, name: str, high: int, *shape: int) -> Tensor:
        """int64 in [0, high)."""
        bits = (self.bits(name, *shape) >> 1) & ((1 << 63) - 1)
        return bits % high

    def bernoulli(self, name: str, probability: float) -> Tensor:
        """bool, one a sample: True with the given probability."""
        return self.uniform(name) < probability
