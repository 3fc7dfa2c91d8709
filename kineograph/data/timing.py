"""Which frames of a clip to take: by their true timestamps, so that 30 → 8 frames a second gives 8 and not 30 // 3 = 10."""

from __future__ import annotations

import numpy as np

TOLERANCE = (
    2e-3  # seconds. Containers round timestamps to their own clock (webm: 1 ms), so a frame may seem to begin late
)
GIF_TOLERANCE = 0.011  # a GIF's clock ticks in hundredths: two of its times stand up to one tick too far apart


def pick(
    starts: np.ndarray,
    end: float,
    frames: int,
    fps: float | None,
    rng: np.random.Generator,
    tolerance: float = TOLERANCE,
) -> np.ndarray:
    """Indices of the frames on screen at s, s + 1/fps, s + 2/fps …, where s is the start of a random frame.

    `starts` are the frames' times in rising order, `end` is when the last one leaves the screen; `tolerance` is what the file's clock
    may have rounded away. The result is shorter than `frames` where the clip is. Without `fps` the frames are consecutive.
    """
    count = len(starts)
    if fps is None:
        first = int(rng.integers(max(count - frames, 0) + 1))
        return np.arange(first, min(first + frames, count))
    latest = end - (frames - 1) / fps - tolerance
    first = int(rng.integers(max(int(np.searchsorted(starts, latest, side="right")), 1)))
    times = starts[first] + np.arange(frames) / fps
    inside = times < end - tolerance
    inside[0] = True
    return np.searchsorted(starts, times[inside] + tolerance, side="right") - 1


def window(count: int, frames: int, rng: np.random.Generator) -> slice:
    """`frames` consecutive ones of `count`, from a random start; all of them where there are fewer."""
    first = int(rng.integers(max(count - frames, 0) + 1))
    return slice(first, min(first + frames, count))
