"""Moving digits, opened, and where they are."""

from __future__ import annotations

import numpy as np

from kineograph.core.config import parse
from kineograph.data.digit_captions import Facts, joins, wordings, write_caption
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig


def source(split="train", **keys):
    return MovingDigits.open(parse(MovingDigitsConfig, keys, "data"), split)


def clip(opened, index):
    return opened.read(index).pixels.numpy()


def centres(pixels):
    """Centre of mass of each frame, T × (row, column)."""
    light = pixels.astype(np.float64).max(1)  # T H W
    rows, columns = np.indices(light.shape[1:])
    mass = light.sum((1, 2))
    return np.stack([(light * rows).sum((1, 2)) / mass, (light * columns).sum((1, 2)) / mass], -1)


def captions_for(facts: Facts, split) -> list[str]:
    """Every caption of these facts in a split's own wordings: training's, or the ones held out from it."""
    moving = facts[0].direction is not None
    return [
        write_caption(facts, wording, join) for wording in wordings(split, moving, len(facts)) for join in joins(facts)
    ]
