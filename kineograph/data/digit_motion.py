"""Paths of moving digits: starts, steps, walls, places. Integer pixels, the upper left corner of each digit's square.

A caption names the direction in which a digit starts. It may bounce off a wall late in the clip, but never so early that its path from the
first to the last frame points elsewhere: it moves `Canvas.min_travel` before the first wall. Without `bounces` that is the whole path, so
every frame is the start plus a multiple of the speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from kineograph.core.errors import ConfigError
from kineograph.data.digit_captions import DIRECTIONS, PLACES, Facts, Figure

CANDIDATES = 32  # starts to choose from, so that two digits overlap little
_MARGIN = 0.07  # share of the room that keeps a digit clearly inside its place


@dataclass(frozen=True)
class Canvas:
    """The canvas, and how far digits move on it."""

    height: int
    width: int
    frames: int
    side: int  # of a digit's square
    speed: float  # pixels per frame along each axis of the direction
    grid: int  # starts are multiples of this
    bounces: bool = True  # digits may reach a wall before the clip ends

    @staticmethod
    def of(
        size: tuple[int, int], frames: int, digits: int, speed: float | None, grid: int | None, bounces: bool = True
    ) -> Canvas:
        shorter = min(size)
        if shorter < 16:
            raise ConfigError(f"data.size={list(size)}: moving digits need at least 16 pixels a side")
        side = round(shorter * (0.56 if digits == 1 else 0.38))
        farthest = 0.55 * shorter if bounces else shorter - side
        default = _default_speed(shorter, frames, digits, farthest)
        canvas = Canvas(*size, frames, side, speed or default, grid or 1, bounces)
        canvas._check(speed)
        return canvas

    @property
    def room(self) -> np.ndarray:
        """Largest row and column."""
        return np.array([self.height - self.side, self.width - self.side])

    @property
    def travel(self) -> float:
        return self.speed * (self.frames - 1)

    @property
    def min_travel(self) -> float:
        """Pixels in the named direction before a wall may reflect the digit."""
        if not self.bounces:
            return self.travel
        return min(self.travel, max(0.7 * self.travel, min(self.height, self.width) / 4))

    def _check(self, speed: float | None) -> None:
        if self.frames > 1:
            shorter = min(self.height, self.width)
            slowest = shorter / 8 / (self.frames - 1)
            fastest = (shorter - self.side) / (0.7 if self.bounces else 1.0) / (self.frames - 1)
            if not slowest <= self.speed <= fastest + 1e-9:
                what = "too slow to see"
                if self.speed >= slowest:
                    what = "so fast that walls would reflect digits at once"
                    if not self.bounces:
                        what = "so fast that digits would reach a wall (data.bounce=false)"
                raise ConfigError(
                    f"data.speed={speed} is {what} in {self.frames} frames of {self.height}×{self.width}: "
                    f"use {slowest:.2f} to {fastest:.2f} pixels per frame"
                )
        if not self._has_starts():
            valid = [grid for grid in range(1, int(self.room.max()) + 1) if replace(self, grid=grid)._has_starts()]
            raise ConfigError(
                f"data.grid={self.grid} leaves no start for some motion or place at {self.height}×{self.width}: "
                f"use {_format_ranges(valid)}{', or a lower data.speed' if self.frames > 1 else ''}"
            )

    def _has_starts(self) -> bool:
        """Whether the grid has a start for every direction, or for every place."""
        rooms = self.room.tolist()
        if self.frames > 1:
            spans = [self._span(sign, room) for sign in (-1, 1) for room in rooms]
        else:
            spans = [_cell(k, room) for k in range(3) for room in rooms]
        return all(self._choices(np.array(low), np.array(high)) >= 1 for low, high in spans)

    def _span(self, sign: int, room: float) -> tuple[float, float]:
        """Starts along one axis from which a digit can move `min_travel`."""
        return (0 if sign >= 0 else self.min_travel, room if sign <= 0 else room - self.min_travel)

    def _choices(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        first = np.ceil(low / self.grid - 1e-6)
        return np.floor(high / self.grid + 1e-6) - first + 1

    def paths(self, facts: Facts, draws: np.ndarray) -> np.ndarray:
        """Figures × frames × (row, column). `draws` are uniform, candidates × figures × 2."""
        room = self.room
        first, choices, path = (
            np.stack(each) for each in zip(*(_starts_and_path(self, f.direction, f.place) for f in facts))
        )
        starts = (first + np.floor(draws * choices)) * self.grid  # candidates × figures × 2
        at = (starts[:, :, None] + path) % (2 * room)  # walls reflect: a triangle wave of period 2 · room
        at = np.minimum(at, 2 * room - at)
        return np.floor(at[self._least_overlap(at)] + 0.5).astype(np.int64)

    def bounce_times(self, figure: Figure, draws: np.ndarray) -> list[float]:
        """When a single figure meets a wall, in frames, where a later frame shows it moving back. `draws` as in `paths`."""
        first, choices, _ = _starts_and_path(self, figure.direction, figure.place)
        start = (first + np.floor(draws[0, 0] * choices)) * self.grid
        times: set[float] = set()
        for at, sign, room in zip(start, DIRECTIONS.get(figure.direction or "", (0, 0)), self.room, strict=True):
            if sign:
                hit = (room - at if sign > 0 else at) / self.speed
                times |= {round(float(time), 6) for time in np.arange(hit, self.frames - 1 - 1e-6, room / self.speed)}
        return sorted(times)

    def _least_overlap(self, at: np.ndarray) -> int:
        """The candidate in which two digits overlap least."""
        if at.shape[1] == 1:
            return 0
        overlap = np.clip(0.9 * self.side - np.abs(at[:, 0] - at[:, 1]), 0, None)  # candidates × frames × 2
        return int(overlap.prod(-1).sum(-1).argmin())


@lru_cache(maxsize=4096)
def _starts_and_path(
    canvas: Canvas, direction: str | None, place: str | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A figure's first start in grid steps and the number of starts, each (row, column); and its path from the start, frames × 2."""
    room = canvas.room
    if direction:
        step = np.array(DIRECTIONS[direction])
        spans = [canvas._span(sign, most) for sign, most in zip(step.tolist(), room, strict=True)]
    else:
        step = np.zeros(2)
        spans = [_cell(k, most) for k, most in zip(divmod(PLACES.index(place or "centre"), 3), room, strict=True)]
    low, high = np.array(spans, dtype=np.float64).T
    path = step * (canvas.speed * np.arange(canvas.frames))[:, None]
    return np.ceil(low / canvas.grid - 1e-6), canvas._choices(low, high), path


def _format_ranges(numbers: list[int]) -> str:
    """Ascending numbers → `1 to 4, 6, 8 to 9`."""
    first = [number for number in numbers if number - 1 not in numbers]
    last = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in zip(first, last, strict=True))


def _default_speed(shorter: int, frames: int, digits: int, farthest: float) -> float:
    """1/16 of the side per frame (1/24 for two digits, which must pass each other); faster in very short clips, slower in long ones,
    where a digit moves `farthest` pixels in total."""
    steps = max(1, frames - 1)
    speed = min(max(shorter / (16 if digits == 1 else 24), shorter / 4 / steps), farthest / steps)
    return float(math.floor(speed)) if speed >= 1 else speed  # whole pixels where that is one or more


def _cell(k: int, room: float) -> tuple[float, float]:
    """Starts that put a digit clearly into the k-th third of an axis."""
    low = 0 if k == 0 else k / 3 + _MARGIN
    high = 1 if k == 2 else (k + 1) / 3 - _MARGIN
    return low * room, high * room
