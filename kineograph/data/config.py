"""Config keys that every data source shares. A source's own `Config` extends this class."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from kineograph.core.batch import Shape
from kineograph.core.config import Config

Split = Literal["train", "validation", "test"]


class DataConfig(Config):
    source: str = "moving_digits"
    """Where samples come from: moving_digits, folder, memmap, cache, or a dotted path to a Dataset or source of yours."""
    size: tuple[int, int] = (32, 32)
    """Height and width in pixels; one number means a square."""
    frames: int = Field(1, ge=1)
    """Frames a clip; 1 means images."""
    fps: float | None = Field(None, gt=0)
    """Frames a second to sample clips at, by their true timestamps; null keeps each clip's own rate."""
    channels: Literal[1, 2, 3, 4] = 3
    """1 grayscale, 2 grayscale with alpha, 3 RGB, 4 RGBA; whatever a file holds is converted."""
    validation: float = Field(0.05, ge=0, lt=1)
    """Share of items held out for validation; 0 validates on training data (and says so)."""
    test: float = Field(0.0, ge=0, lt=1)
    """Share of items held out for the test split."""
    max_unreadable: float = Field(0.2, ge=0, le=1)
    """Stop when more than this share of the items cannot be read."""

    @field_validator("size", mode="before")
    @classmethod
    def _square(cls, value: object) -> object:
        return (value, value) if isinstance(value, int) else value

    @property
    def shape(self) -> Shape:
        return Shape(self.frames, self.size[0], self.size[1], self.channels, self.fps or 8.0)
