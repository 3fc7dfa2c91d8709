"""Config keys of the transformer's shape, and the shapes of the released models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from kineograph.core.config import Config, Positive

ReleasedModel = Literal["2b", "5b", "5b-i2v", "1.5-5b", "1.5-5b-i2v"]
Positions = Literal["sincos", "rotary", "rotary+learned"]
Latents = tuple[int, int, int]  # frames, height, width

_2B = {"depth": 30, "heads": 30, "positions": "sincos", "text": {"length": 226}, "diffusion": {"shift": 3.0}}
_5B = {"depth": 42, "heads": 48, "positions": "rotary", "text": {"length": 226}, "diffusion": {"shift": 1.0}}
_15 = {
    **_5B, "patch_time": 2, "grid": "slice", "text": {"length": 224},
    "base_size": (300, 300), "base_frames": 21,  # unused with grid=slice, but exported folders have them
}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "2b": _2B,
    "5b": _5B,
    "5b-i2v": {**_5B, "positions": "rotary+learned", "first_frame": True},
    "1.5-5b": _15,
    # Its first-frame latents are divided by the scale that all other latents are multiplied by.
    "1.5-5b-i2v": {**_15, "first_frame": True, "first_frame_inverse_scale": True, "ofs": True},
}
"""Differences from the defaults below, with text.length and diffusion.shift."""


class TransformerShape(Config):
    """Keys of the network. The defaults are common to all released models."""

    depth: int = Field(30, ge=1, le=1000)
    """Number of blocks."""
    heads: int = Field(30, ge=1, le=65536)
    """Attention heads; heads × head_width is the width."""
    head_width: int = Field(64, ge=16, multiple_of=16, le=65536)
    """Channels per head. Rotary positions use a quarter of them for time and 3/8 each for height and width."""
    time_width: int = Field(512, ge=2)
    """Channels of the time embedding."""
    patch: int = Field(2, ge=1, le=65536)
    """Spatial patch size in latents."""
    patch_time: int = Field(1, ge=1)
    """Temporal patch size in latent frames; clips are padded in front to a multiple of it."""
    positions: Positions = "rotary"
    """sincos: added to tokens. rotary: rotates queries and keys. rotary+learned: also adds a learned table."""
    grid: Literal["resize", "slice"] = "resize"
    """rotary: resize fits every grid into base_size, centred; slice counts tokens at any size."""
    base_size: tuple[Positive, Positive] | None = (60, 90)
    """Latents' height and width that positions refer to (grid=resize, learned tables); null: the stage's own."""
    base_frames: int | None = Field(13, ge=1)
    """Latent frames of a learned table; null: the stage's own."""
    space_scale: float = Field(1.875, gt=0)
    """sincos: height and width are divided by this."""
    time_scale: float = Field(1.0, gt=0)
    """sincos: time is divided by this."""
    first_frame: bool = False
    """Image to video: the first frame's latents are concatenated to the noisy ones."""
    first_frame_inverse_scale: bool = False
    """The first frame's latents are divided by the codec's scale instead of multiplied, as in the released 1.5-5b-i2v."""
    ofs: bool = False
    """Add the embedding of a constant to the time embedding, as in the released 1.5-5b-i2v."""

    @model_validator(mode="after")
    def _shape_fits(self) -> TransformerShape:
        defaults = TransformerShape.model_fields
        readers = {
            "grid": self.positions != "sincos",
            "space_scale": self.positions == "sincos",
            "time_scale": self.positions == "sincos",
            "first_frame_inverse_scale": self.first_frame,
        }
        for name, read in readers.items():
            if not read and getattr(self, name) != defaults[name].default:
                wanted = "first_frame=true" if name.startswith("first") else "other positions"
                raise ValueError(f"positions={self.positions} does not use {name}: remove it, or set {wanted}")
        if self.positions == "sincos" and self.width % 16:
            raise ValueError(f"heads × head_width = {self.width} does not fit positions=sincos: use a multiple of 16")
        return self

    @property
    def width(self) -> int:
        return self.heads * self.head_width


def apply_released_shape(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's keys, completed by those of its released `shape`."""
    result = dict(tree)
    for key, value in RELEASED.get(str(result.get("shape")), {}).items():
        own = result.get(key)
        if isinstance(value, dict) and (own is None or isinstance(own, Mapping)):
            result[key] = {**value, **(own or {})}
        else:
            result.setdefault(key, value)
    return result
