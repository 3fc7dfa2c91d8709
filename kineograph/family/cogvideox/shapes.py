"""The transformer's shape as config keys, and the shapes of the released models by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from kineograph.core.config import Config

Released = Literal["2b", "5b", "5b-i2v", "1.5-5b", "1.5-5b-i2v"]
Positions = Literal["sincos", "rotary", "rotary+learned"]
Latents = tuple[int, int, int]  # frames, height, width

_2B = {"depth": 30, "heads": 30, "positions": "sincos", "text": {"length": 226}, "diffusion": {"shift": 3.0}}
_5B = {"depth": 42, "heads": 48, "positions": "rotary", "text": {"length": 226}, "diffusion": {"shift": 1.0}}
_15 = {
    **_5B, "patch_time": 2, "grid": "slice", "text": {"length": 224},
    "base_size": (300, 300), "base_frames": 21,  # not read with grid=slice, but by whoever loads an exported folder
}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "2b": _2B,
    "5b": _5B,
    "5b-i2v": {**_5B, "positions": "rotary+learned", "first_frame": True},
    "1.5-5b": _15,
    # its first frames were divided by the latents' scale, where all other latents are multiplied by it
    "1.5-5b-i2v": {**_15, "first_frame": True, "first_frame_inverse_scale": True, "ofs": True},
}
"""What differs from the defaults below, and beside the transformer the text's length and the schedule's shift."""


class TransformerShape(Config):
    """Keys of the network; the defaults are what all released models have in common."""

    depth: int = Field(30, ge=1)
    """Blocks."""
    heads: int = Field(30, ge=1)
    """Attention heads; heads × head_width is the width."""
    head_width: int = Field(64, ge=16, multiple_of=16)
    """Channels of a head. Rotary positions turn a quarter of them by time and 3/8 each by height and width."""
    time_width: int = Field(512, ge=2)
    """Channels of the time's vector, which shifts, scales and gates every block."""
    patch: int = Field(2, ge=1)
    """Latents on a side that one token covers."""
    patch_time: int = Field(1, ge=1)
    """Latent frames that one token covers; clips are padded at the front to a multiple of it."""
    positions: Positions = "rotary"
    """sincos: added to tokens. rotary: turns queries and keys. rotary+learned: that, and a learned table that is added."""
    grid: Literal["resize", "slice"] = "resize"
    """rotary: fit every grid into that of base_size, centred; or let one token be one step at every size."""
    base_size: tuple[int, int] | None = (60, 90)
    """Latents' height and width that positions are laid out for (rotary with grid=resize, learned tables); null: the stage's own."""
    base_frames: int | None = Field(13, ge=1)
    """Latent frames that a learned table has; null: the stage's own."""
    space_scale: float = Field(1.875, gt=0)
    """sincos: height and width are divided by this."""
    time_scale: float = Field(1.0, gt=0)
    """sincos: time is divided by this."""
    first_frame: bool = False
    """Image to video: the network reads the first frame's latents beside the noisy ones."""
    first_frame_inverse_scale: bool = False
    """The first frame's latents are divided by the codec's scale instead of multiplied, as in the released 1.5-5b-i2v."""
    ofs: bool = False
    """The network reads a constant beside the time, as the released 1.5-5b-i2v does."""

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
                raise ValueError(
                    f"{name} is read with {wanted} only, not with positions={self.positions}: leave it out"
                )
        if self.positions == "sincos" and self.width % 16:
            raise ValueError(f"heads × head_width = {self.width} does not fit positions=sincos: use a multiple of 16")
        return self

    @property
    def width(self) -> int:
        return self.heads * self.head_width


def filled(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's keys with those of its `shape` where it does not give them itself."""
    given = dict(tree)
    for key, value in RELEASED.get(str(given.get("shape")), {}).items():
        own = given.get(key)
        if isinstance(value, dict) and (own is None or isinstance(own, Mapping)):
            given[key] = {**value, **(own or {})}
        else:
            given.setdefault(key, value)
    return given
