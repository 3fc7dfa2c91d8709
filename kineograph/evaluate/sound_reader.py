"""What is heard and seen in a clip of a moving digit: pitch by autocorrelation, clicks by onset, bounces by the path of the ink.

Plain signal processing on one clip at a time; nothing here is trained.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LOWEST, HIGHEST = 200.0, 900.0  # Hz: pitches are searched between these
SILENCE = 0.02  # RMS below which nothing is heard
PERIODIC = 0.5  # autocorrelation at a period, relative to lag 0
CLICK_BAND = 1100.0  # Hz: clicks sound above it, tones below
CLICK_RMS = 0.12  # RMS of a window above the band at which a click begins
CLICK_WINDOW = 0.01  # seconds
CLICK_APART = 0.03  # seconds of quiet between two clicks
TURNED = 0.25  # share of its speed that a digit must lose between two frames to have bounced there


def read_pitch(sound: Tensor, rate: int) -> float | None:
    """Hz of the tone in samples n: the shortest lag at which the sound repeats; None: silence or noise."""
    sound = _split_bands(sound, rate)[0]
    if sound.square().mean().sqrt() < SILENCE:
        return None
    spectrum = torch.fft.rfft(sound, n=2 * len(sound))
    lags = torch.fft.irfft(spectrum.abs().square())[: len(sound)]
    lags = lags / torch.arange(len(sound), 0, -1)  # the mean over the samples that overlap
    first, last = max(2, int(rate / HIGHEST)), min(math.ceil(2 * rate / LOWEST), len(lags) - 2)
    lags = lags / lags[0]
    peaks = [lag for lag in range(first, last) if lags[lag - 1] < lags[lag] >= lags[lag + 1]]
    highest = max((float(lags[lag]) for lag in peaks), default=0.0)
    if highest < PERIODIC:
        return None
    period = _refine_peak(lags, next(lag for lag in peaks if lags[lag] >= 0.9 * highest))
    # A later repetition gives the period more finely.
    later = [lag for lag in peaks if lags[lag] >= 0.9 * highest and abs(lag / period - round(lag / period)) < 0.2]
    return rate * round(later[-1] / period) / _refine_peak(lags, later[-1])


def _split_bands(sound: Tensor, rate: int) -> tuple[Tensor, Tensor]:
    """The tones without their mean, and the part above them, n each."""
    sound = sound.float().flatten()
    spectrum, frequencies = torch.fft.rfft(sound), torch.fft.rfftfreq(len(sound), 1 / rate)
    tones = torch.fft.irfft(spectrum * ((frequencies > 0) & (frequencies < CLICK_BAND)), n=len(sound))
    return tones, torch.fft.irfft(spectrum * (frequencies >= CLICK_BAND), n=len(sound))


def _refine_peak(values: Tensor, index: int) -> float:
    """The top of the parabola through a peak and its neighbours."""
    before, top, after = (float(values[index + step]) for step in (-1, 0, 1))
    bend = before - 2 * top + after
    return index + (0.5 * (before - after) / bend if bend else 0.0)


def find_clicks(sound: Tensor, rate: int) -> list[float]:
    """Seconds at which clicks begin in samples n: where the part above the tones rises out of quiet."""
    high = _split_bands(sound, rate)[1]
    window = max(1, round(CLICK_WINDOW * rate))
    power = F.avg_pool1d(F.pad(high.square(), (0, window - 1))[None], window, 1)[0]  # from each sample on
    loud = (power.sqrt() > CLICK_RMS).tolist()
    clicks: list[int] = []
    last = -math.inf  # the last loud sample
    for index, is_loud in enumerate(loud):
        if is_loud:
            if index - last > CLICK_APART * rate:
                clicks.append(index)
            last = index
    # A window is loud before its click begins, by about half its length.
    return [(index + window / 2) / rate for index in clicks]


def find_bounces(pixels: Tensor) -> list[float]:
    """Times, in frames, at which the ink of T C H W in [0, 1] turns round; along rows and columns.

    A digit of speed u that meets a wall within a frame moves v = u (1 − 2 r) in it, where r is the part after the wall.
    """
    ink = pixels.float().mean(1)  # T H W
    ink = ink * (ink > 0.2)
    mass = ink.sum((1, 2)).clamp_min(1e-6)
    times: list[float] = []
    for axis in (1, 2):
        weights = torch.arange(ink.shape[axis], device=ink.device, dtype=ink.dtype)
        centre = (ink.sum(3 - axis) * weights).sum(1) / mass  # T
        steps = centre.diff().tolist()
        if not steps:
            continue
        speed = steps[0]
        if abs(speed) < 0.25:
            continue
        turned = next((k for k, step in enumerate(steps) if step / speed < 1 - TURNED), None)
        if turned is not None:
            times.append(turned + min(max((1 + steps[turned] / speed) / 2, 0.0), 1.0))
    return sorted(times)
