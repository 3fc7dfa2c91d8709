"""A family's recipe for a race: its digits preset on a GPU, its tiny preset on a CPU, fitted to the data.

A family races as soon as it has presets FAMILY-digits and FAMILY-tiny; nothing here knows one of them.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from kineograph.core.capabilities import SupportsSampling
from kineograph.core.config import Tree, merge
from kineograph.core.registry import find_task
from kineograph.run.layers import find_preset, preset_names, read_file
from kineograph.run.presets import list_presets

KINDS = {"cuda": "digits", "cpu": "tiny"}  # device → the presets that were made for it
CACHE_FROM = 3.0  # minutes of a stage from which on it pays to encode all data before the first step
SMALLEST_BATCH, LARGER_BATCH = 4, 4  # samples; times the preset's


@dataclass(frozen=True)
class RaceShape:
    """The shape of the clips or pictures that every family draws."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        size = f"{self.height} px" if self.height == self.width else f"{self.height} × {self.width} px"
        return f"{self.frames} frames of {size}" if self.frames > 1 else f"pictures of {size}"


def list_families() -> list[str]:
    """The families that have presets for both kinds of device and draw."""
    names = set(preset_names())
    families = dict.fromkeys(preset.family for preset in list_presets())
    return [
        name
        for name in families
        if all(f"{name}-{kind}" in names for kind in KINDS.values()) and issubclass(find_task(name), SupportsSampling)
    ]


def fit_recipe(family: str, data: Tree, shape: RaceShape, device: str, minutes: float) -> Tree:
    """The config of a run that trains `family` on these data for these minutes."""
    tree = read_file(find_preset(f"{family}-{KINDS[device]}"))
    base, shared = tree.get("data") or {}, tree.get("train") or {}
    stages: dict[str, Tree] = tree["stages"]
    last = merge(base, list(stages.values())[-1].get("data") or {})
    scale = min(shape.height, shape.width) / _get_side(last)
    draws_clips = last.get("frames", 1) > 1
    fitted = {}
    for name, stage in stages.items():
        before = merge(base, stage.get("data") or {})
        # A family of pictures is given clips as they are: its Task says why it cannot draw them.
        own = _fit_shape(before, data, shape, scale) if draws_clips or shape.frames == 1 else {}
        if draws_clips and before.get("frames", 1) == 1 < shape.frames:
            own["frames"] = 1  # pictures first, then clips
        after = RaceShape(own.get("frames", shape.frames), *(own.get("size") or [shape.height, shape.width]))
        keys = {key: _scale_size(key, value, scale) for key, value in stage.items() if key not in ("data", "train")}
        train = _fit_training(deepcopy(merge(shared, stage.get("train") or {})))
        train["batch_size"] = _fit_batch(train.get("batch_size", 32), before, after)
        fitted[name] = {**keys, **({"data": own} if own else {}), "train": train}
    _drop_duplicate_stages(fitted)
    total = sum(stage["train"].get("minutes_share", 1.0) for stage in fitted.values())
    for stage in fitted.values():
        share = stage["train"].get("minutes_share", 1.0) / total
        stage["train"]["minutes_share"] = round(share, 4)
        if stage.get("cache") in ("if_possible", True) and share * minutes < CACHE_FROM:
            stage["cache"] = "auto"
    return {"name": family, "data": data, "train": {"minutes": minutes}, "stages": fitted}


def _get_side(data: Tree) -> int:
    size = data.get("size", 64)
    return int(min(size)) if isinstance(size, list) else int(size)


def _fit_shape(before: Tree, data: Tree, shape: RaceShape, scale: float) -> Tree:
    """The data keys of a stage that reads smaller pictures than the race's, by the same factor as in its preset."""
    ratio = round(_get_side(before) * scale) / min(shape.height, shape.width)
    if ratio == 1:
        return {}
    pixels = {"grid": max(1, round(data["grid"] * ratio))} if "grid" in data else {}
    return {"size": [round(shape.height * ratio), round(shape.width * ratio)], **pixels}


def _scale_size(key: str, value: Any, scale: float) -> Any:
    """Keys such as low_res_size are pixels."""
    is_pixels = key.endswith("_size") and isinstance(value, int) and not isinstance(value, bool)
    return round(value * scale) if is_pixels else value


def _fit_batch(batch: int, before: Tree, after: RaceShape) -> int:
    """About as many pixels as in the preset, in powers of two of its batch: fewer samples where they are larger, up to 4 × where smaller."""
    pixels, new = before.get("frames", 1) * _get_side(before) ** 2, after.frames * after.height * after.width
    largest = LARGER_BATCH * batch
    while batch > SMALLEST_BATCH and new > pixels:
        batch, pixels = batch // 2, pixels * 2
    while batch < largest and 2 * new <= pixels:
        batch, pixels = batch * 2, pixels / 2
    return max(1, batch)


def _fit_training(train: Tree) -> Tree:
    """Without previews and metrics during training, which cost time. Weak stages are judged, not refused."""
    dropped = ("epoch_samples", "epochs", "metrics", "evaluate_every", "evaluation_samples", "grids", "samples")
    steps = train.get("steps", 1000)
    return {key: value for key, value in train.items() if key not in dropped} | {
        "validate_every": steps,
        "save_every": max(1, steps // 4),
        "sample_every": 0,
        "trackers": [],
        "health": "warn",
    }


def _drop_duplicate_stages(stages: dict[str, Tree]) -> None:
    """Drop a stage that another one starts from, where both would see the same items; the other is trained as it, in both's time."""
    for name, stage in list(stages.items()):
        first = stages.get(stage.get("init") or "")
        if first is not None and first.get("data") == stage.get("data") and first["task"] == stage["task"]:
            share = first["train"].get("minutes_share", 1.0) + stage["train"].get("minutes_share", 1.0)
            stage["train"] = {**first["train"], "minutes_share": share}
            del stages[stage.pop("init")], name
