"""The handwritten digits of scikit-learn: the held-out ones, and how they are enlarged."""

from __future__ import annotations

import importlib.util
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from einops import rearrange

from kineograph.core.errors import InputError
from kineograph.core.noise import key_of

_HELD_OUT = 15  # per cent of the glyph images, the same for every config: the shipped reader has never seen them


@lru_cache(maxsize=1)
def load_glyphs() -> tuple[np.ndarray, np.ndarray]:
    """Images N 8 8, float32 in [0, 1]; and their digits N."""
    package = importlib.util.find_spec("sklearn")  # located, not imported: that takes seconds in every worker
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if file is None or not file.exists():
        raise InputError("moving_digits needs scikit-learn's handwritten digits: pip install scikit-learn")
    table = np.loadtxt(file, delimiter=",", dtype=np.float32)  # N 65: 64 intensities of 0 … 16, and the digit
    return rearrange(table[:, :64] / 16, "n (h w) -> n h w", h=8), table[:, 64].astype(np.int64)


@cache
def list_glyphs(held_out: bool, limit: int | None = None) -> tuple[list[int], ...]:
    """Indices of the training or held-out glyphs of each digit 0 … 9; the most typical first, at most `limit`."""
    images, labels = load_glyphs()
    mask = np.array([(key_of("glyph", index) % 100 < _HELD_OUT) == held_out for index in range(len(labels))])
    pools = []
    for digit in range(10):
        glyphs = np.flatnonzero(mask & (labels == digit))
        distances = ((images[glyphs] - images[glyphs].mean(0)) ** 2).sum((1, 2))
        pools.append(glyphs[np.argsort(distances, kind="stable")][:limit].tolist())
    return tuple(pools)


@lru_cache(maxsize=1 << 15)
def paint_glyph(index: int, side: int, colour: tuple[int, ...]) -> np.ndarray:
    """The glyph of that index, enlarged and in colour: C side side, uint8."""
    ink = enlarge(load_glyphs()[0][index], side)
    return (ink * np.array(colour, dtype=np.uint16)[:, None, None] // 255).astype(np.uint8)


def enlarge(glyph: np.ndarray, side: int) -> np.ndarray:
    """8 8 in [0, 1] → side side, uint8: smooth strokes with a clear edge."""
    smooth = _weights(side, 0.0) @ glyph @ _weights(side, _ink_shift(glyph)).T  # side side
    edge = np.clip((smooth - 0.17) * 1.6, 0, 1)
    return (edge * edge * (3 - 2 * edge) * 255 + 0.5).astype(np.uint8)  # smoothstep: contrast without stairs


def _ink_shift(glyph: np.ndarray) -> float:
    """Distance of the ink right of the middle, in glyph pixels, so that a narrow 1 is centred."""
    inked = np.flatnonzero(glyph.max(0) > 0.3)
    return (inked[0] + inked[-1]) / 2 - 3.5


@lru_cache(maxsize=256)
def _weights(side: int, shift: float) -> np.ndarray:
    """side 8: Catmull-Rom weights that stretch nine glyph pixels (eight and a half-pixel rim) over `side`."""
    step = 9 / side
    at = (np.arange(side, dtype=np.float32) - (side - 1) / 2) * step + 3.5 + shift
    distance = np.abs(at[:, None] - np.arange(8, dtype=np.float32)) / max(1.0, step)
    near = 1 - (2.5 - 1.5 * distance) * distance**2
    tail = -0.5 * (distance - 1) * np.minimum(distance - 2, 0) ** 2
    return np.where(distance < 1, near, tail).astype(np.float32) / max(1.0, step)
