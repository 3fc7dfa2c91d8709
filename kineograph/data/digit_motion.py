"""Where moving digits are: starts, steps, walls, places. Integer pixels, the upper left corner of each digit's square.

The direction that a caption names is the one in which a digit sets out. It may bounce off a wall late in the clip, never so
early that its way from the first frame to the last would point elsewhere: `Stage.must_go` is walked before the first wall.
Without `bounces` that is the whole way, so that every frame is the start plus a multiple of the speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from kineograph.core.errors import ConfigError
from kineograph.data.digit_captions import DIRECTIONS, PLACES, Facts

_TRIES = 32  # starts to choose from when two digits should keep out of each other's way
_MARGIN = 0.07  # of the room: keeps a digit clearly inside its place


@dataclass(frozen=True)
class Stage:
    """The canvas and how far digits go on it."""

    height: int
    width: int
    frames: int
    side: int  # of a digit's square
    speed: float  # pixels a frame along each axis that the direction has
    grid: int  # starts are multiples of this
    bounces: bool = True  # digits may meet a wall before the clip ends

    @staticmethod
    def of(
        size: tuple[int, int], frames: int, digits: int, speed: float | None, grid: int | None, bounces: bool = True
    ) -> Stage:
        shorter = min(size)
        if shorter < 16:
            raise ConfigError(f"data.size={list(size)}: moving digits need at least 16 pixels a side")
        side = round(shorter * (0.56 if digits == 1 else 0.38))
        farthest = 0.55 * shorter if bounces else shorter - side
        usual = _usual_speed(shorter, frames, digits, farthest)
        stage = Stage(*size, frames, side, speed or usual, grid or 1, bounces)
        stage._check(speed)
        return stage

    @property
    def room(self) -> np.ndarray:
        """Largest row and column."""
        return np.array([self.height - self.side, self.width - self.side])

    @property
    def travel(self) -> float:
        return self.speed * (self.frames - 1)

    @property
    def must_go(self) -> float:
        """Pixels in the named direction before a wall may turn the digit back."""
        if not self.bounces:
            return self.travel
        return min(self.travel, max(0.7 * self.travel, min(self.height, self.width) / 4))

    def _check(self, asked: float | None) -> None:
        if self.frames > 1:
            shorter = min(self.height, self.width)
            slowest = shorter / 8 / (self.frames - 1)
            fastest = (shorter - self.side) / (0.7 if self.bounces else 1.0) / (self.frames - 1)
            if not slowest <= self.speed <= fastest + 1e-9:
                too_fast = (
                    "so fast that walls would turn digits back at once"
                    if self.bounces
                    else "so fast that digits would reach a wall, which data.bounce=false rules out,"
                )
                what = "too slow to see" if self.speed < slowest else too_fast
                raise ConfigError(
                    f"data.speed={asked} is {what} in {self.frames} frames of {self.height}×{self.width}: "
                    f"use {slowest:.2f} to {fastest:.2f} pixels a frame"
                )
        if not self._has_starts():
            fitting = [grid for grid in range(1, int(self.room.max()) + 1) if replace(self, grid=grid)._has_starts()]
            raise ConfigError(
                f"data.grid={self.grid} leaves no start for some motion or place at {self.height}×{self.width}: "
                f"use {_ranges(fitting)}{', or a lower data.speed' if self.frames > 1 else ''}"
            )

    def _has_starts(self) -> bool:
        """Whether some start on the grid lets a digit go every way, or stand in every place."""
        rooms = self.room.tolist()
        if self.frames > 1:
            spans = [self._span(sign, room) for sign in (-1, 1) for room in rooms]
        else:
            spans = [_cell(k, room) for k in range(3) for room in rooms]
        return all(self._choices(np.array(low), np.array(high)) >= 1 for low, high in spans)

    def _span(self, sign: int, room: float) -> tuple[float, float]:
        """Starts along one axis that let a digit go as far as it must."""
        return (0 if sign >= 0 else self.must_go, room if sign <= 0 else room - self.must_go)

    def _choices(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        first = np.ceil(low / self.grid - 1e-6)
        return np.floor(high / self.grid + 1e-6) - first + 1

    def paths(self, facts: Facts, draws: np.ndarray) -> np.ndarray:
        """Figures × frames × (row, column). `draws` are uniform, tries × figures × 2."""
        room = self.room
        first, choices, away = (np.stack(each) for each in zip(*(_ways(self, f.direction, f.place) for f in facts)))
        starts = (first + np.floor(draws * choices)) * self.grid  # tries × figures × 2
        at = (starts[:, :, None] + away) % (2 * room)  # walls reflect: a triangle wave of period 2 · room
        at = np.minimum(at, 2 * room - at)
        return np.floor(at[self._clearest(at)] + 0.5).astype(np.int64)

    def _clearest(self, at: np.ndarray) -> int:
        """The try in which two digits cover each other least."""
        if at.shape[1] == 1:
            return 0
        common = np.clip(0.9 * self.side - np.abs(at[:, 0] - at[:, 1]), 0, None)  # tries × frames × 2
        return int(common.prod(-1).sum(-1).argmin())


@lru_cache(maxsize=4096)
def _ways(stage: Stage, direction: str | None, place: str | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a figure: its first start in steps of the grid and how many there are, each (row, column); and its way from the start, frames × 2."""
    room = stage.room
    if direction:
        step = np.array(DIRECTIONS[direction])
        spans = [stage._span(sign, most) for sign, most in zip(step.tolist(), room, strict=True)]
    else:
        step = np.zeros(2)
        spans = [_cell(k, most) for k, most in zip(divmod(PLACES.index(place or "centre"), 3), room, strict=True)]
    low, high = np.array(spans, dtype=np.float64).T
    away = step * (stage.speed * np.arange(stage.frames))[:, None]
    return np.ceil(low / stage.grid - 1e-6), stage._choices(low, high), away


def _ranges(numbers: list[int]) -> str:
    """`1 to 4, 6, 8 to 9` of numbers that rise."""
    first = [number for number in numbers if number - 1 not in numbers]
    last = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in zip(first, last, strict=True))


def tries(digits: int) -> int:
    return 1 if digits == 1 else _TRIES


def _usual_speed(shorter: int, frames: int, digits: int, farthest: float) -> float:
    """A sixteenth of the side a frame (two digits need room to pass: a 24th); faster in very short clips, slower in long ones,

    where a digit goes `farthest` pixels in all.
    """
    steps = max(1, frames - 1)
    speed = min(max(shorter / (16 if digits == 1 else 24), shorter / 4 / steps), farthest / steps)
    return float(math.floor(speed)) if speed >= 1 else speed  # whole pixels where that is one or more


def _cell(k: int, room: float) -> tuple[float, float]:
    """Starts that put a digit clearly into the k-th third of an axis."""
    low = 0 if k == 0 else k / 3 + _MARGIN
    high = 1 if k == 2 else (k + 1) / 3 - _MARGIN
    return low * room, high * room
