"""How metrics are computed, where packages and papers differ: keys of `train.metric_options`, options of `kineo evaluate` and `kineo metrics`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from kineograph.core.config import Config, make_absolute

FidMode = Literal["tensorflow", "clean", "pytorch"]
FvdMode = Literal["tensorflow", "pytorch"]
Features = Literal[64, 192, 768, 2048]

EXTRACTOR_METRICS = ("fid", "rfid", "kid", "is", "fvd", "lpips", "paired_lpips", "clip_score")
"""Metrics whose network can be chosen."""


class MetricOptions(Config):
    fid_mode: FidMode | None = None
    """How fid, rfid and kid resize pictures to 299 pixels: tensorflow (the original, torch-fidelity), clean (clean-fid), pytorch
    (pytorch-fid); null: tensorflow."""
    fid_features: Features | None = None
    """The layer of Inception that fid, rfid and kid compare, by its width; null: 2048, the last."""
    fvd_mode: FvdMode | None = None
    """How fvd resizes frames to 224 pixels: tensorflow (the original), pytorch (cd-fvd); null: tensorflow."""
    fvd_frames: int | None = Field(None, ge=10)
    """Compare the first so many frames of each clip; shorter clips are not counted; null: all frames."""
    kid_subsets: int = Field(100, ge=1, le=100_000)
    """Random subsets of kid, drawn where there are more samples than kid_subset_size."""
    kid_subset_size: int | None = Field(None, ge=2)
    """Samples in a subset of kid; null: 1000, or all if there are fewer."""
    is_splits: int | None = Field(None, ge=1)
    """Parts whose Inception Scores are averaged; null: 10 from 5,000 pictures on, otherwise 1."""
    from_items: bool = False
    """Judge a stage alone: a decoder draws from the image embeddings of the real items, an upsampler from the items made smaller, and no
    other stage draws for it."""
    extractors: dict[str, str] = Field({})
    """Networks of your own, by metric: a name of `kineo weights list`, or a safetensors or TorchScript file; `{fid: features.pt}`."""

    @field_validator("extractors")
    @classmethod
    def _check_metrics(cls, value: dict[str, str]) -> dict[str, str]:
        for metric in value:
            if metric not in EXTRACTOR_METRICS:
                raise ValueError(f"{metric} has no extractor: use one of {', '.join(EXTRACTOR_METRICS)}")
        return {metric: _complete(name) for metric, name in value.items()}


def _complete(name: str) -> str:
    """A file keeps its meaning when the run continues in another folder; names of weights stay."""
    is_path = "/" in name or bool(Path(name).suffix)
    return make_absolute(name) if is_path and Path(name).expanduser().exists() else name
