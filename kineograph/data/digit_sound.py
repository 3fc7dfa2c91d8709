"""The sound of a moving digit: a steady tone whose pitch names the digit, and a click whenever it meets a wall."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Hz, by digit: the white keys from C4 to E5, moved to multiples of 8 Hz (at most 1 % off). So every frame of a clip of 1, 2, 4
# or 8 fps holds whole periods, and frames without a click sound alike.
PITCHES = (264, 296, 328, 352, 392, 440, 496, 528, 592, 656)
TONE = 0.2  # amplitude
# A click is a damped oscillation far above all tones.
CLICK = 0.8
CLICK_HZ = 1600
CLICK_DECAY = 0.03  # seconds until it is down to 1/e


def make_sound(digit: int, bounces: Sequence[float], frames: int, samples: int, rate: int) -> np.ndarray:
    """T S, float32: `bounces` are times in frames, `samples` those of a frame."""
    time = np.arange(frames * samples) / rate
    sound = TONE * np.sin(2 * np.pi * PITCHES[digit] * time)
    for bounce in bounces:
        since = time - round(bounce * samples) / rate
        click = CLICK * np.exp(-np.maximum(since, 0) / CLICK_DECAY) * np.sin(2 * np.pi * CLICK_HZ * since)
        sound += np.where(since >= 0, click, 0)
    return sound.astype(np.float32).reshape(frames, samples)
