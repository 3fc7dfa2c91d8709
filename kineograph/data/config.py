"""Config keys that every data source shares. A source's own `Config` extends this class."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kineograph.core.batch import Shape
from kineograph.core.config import Config, Size

Split = Literal["train", "validation", "test"]


class DataConfig(Config):
    source: str = "moving_digits"
    """Where samples come from: moving_digits, folder, memmap, webdataset, cache, or a dotted path to a Dataset or source of yours."""
    size: Size = (32, 32)
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

    @field_validator("size")
    @classmethod
    def _some_pixels(cls, value: tuple[int, int]) -> tuple[int, int]:
        if min(value) < 1:
            raise ValueError("height and width are at least 1 pixel")
        return value

    @model_validator(mode="after")
    def _something_to_train_on(self) -> DataConfig:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation={self.validation} and test={self.test} leave nothing to train on: together they must stay below 1"
            )
        return self

    @property
    def shape(self) -> Shape:
        return Shape(self.frames, self.size[0], self.size[1], self.channels, self.fps or 8.0)


def source_name(data: dict[str, Any], otherwise: str = DataConfig.model_fields["source"].default) -> str:
    return str(data.get("source") or otherwise).replace("-", "_")


def drop_other_source_keys(
    data: dict[str, Any], over: dict[str, Any], before: str = DataConfig.model_fields["source"].default
) -> dict[str, Any]:
    """`data` as `over` may be laid onto it: where that changes the source, the old one's own keys go; the shared ones stay.

    `before` is the source that `data` has when it names none.
    """
    if not over.get("source") or source_name(over) == source_name(data, before):
        return data
    return {key: value for key, value in data.items() if key in DataConfig.model_fields}
