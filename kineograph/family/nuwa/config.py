"""Config of NUWA's stage."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from kineograph.core.config import Config, StageConfig
from kineograph.nn.transformer import TransformerConfig
from kineograph.process.guidance import check_guidance_dropout
from kineograph.text import TextConfig

Triple = tuple[int, int, int]


class NuwaSample(Config):
    guidance: float = Field(3.0, ge=0)
    """Classifier-free guidance; 1 is none, and costs half as much."""
    temperature: float = Field(1.0, ge=0)
    """Of drawing tokens; 0 always takes the likeliest."""
    top_k: int | None = Field(None, ge=1)
    """Draw among so many likeliest tokens; null: among all."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Draw among the likeliest tokens that together have this probability; null: among all."""
    overlap: int | None = Field(None, ge=1)
    """Clips longer than trained: frames of a window that the next one begins with; null: all but the last token time's, so that every
    new one sees as much as in training."""


class NuwaConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("codec", "sketch")
    task: str = "nuwa"
    codec: str
    """The stage (or runs/x/stage) whose tokens are modelled."""
    text: TextConfig = TextConfig()
    """What reads the captions."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples whose caption is replaced by the null text, for classifier-free guidance."""
    window: Triple | None = (5, 3, 3)
    """What a token sees of the tokens before it: how many token times (its own included), rows and columns around its own place, the
    last two odd; null: all of them."""
    dilations: tuple[int, ...] = Field((1, 2, 4), min_length=1)
    """The window's spacing, taken in turn from block to block; read with a window only."""
    positions: Literal["axial", "rotary"] = "axial"
    """axial: learned tables of times, rows and columns, added to the tokens. rotary: queries and keys turn by time, row and column."""
    token_shift: bool = True
    """Each part of a block reads some channels of the tokens before, above and a time earlier instead of its own."""
    embedding_gradient: float = Field(1.0, ge=0, le=1)
    """Share of the gradient that reaches the token embeddings; below 1 they change more slowly than the rest."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target spread evenly over all tokens."""
    sketch: str | None = None
    """Draw after a sketch: the codec stage (or runs/x/stage) of the sketches that come with the data; null: none."""
    sketch_window: Triple = (3, 3, 3)
    """Times, rows and columns of the sketch that a token sees around its own place, all odd."""
    sketch_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples that see no sketch, so that clips can be drawn without one."""
    sample: NuwaSample = NuwaSample()
    """How clips are drawn."""

    def reads(self) -> frozenset[str]:
        return self.text.reads() | ({"sketch"} if self.sketch is not None else set())

    @field_validator("dilations", mode="before")
    @classmethod
    def _one_for_all(cls, value: object) -> object:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _windows(self) -> NuwaConfig:
        if min(self.dilations) < 1:
            raise ValueError(f"dilations={list(self.dilations)}: a spacing is at least 1")
        if self.window is not None and (min(self.window) < 1 or not self.window[1] % 2 or not self.window[2] % 2):
            raise ValueError(
                f"window={list(self.window)}: times, rows and columns start at 1, and rows and columns are odd (5, 3, 3)"
            )
        if self.window is None and self.dilations != type(self).model_fields["dilations"].default:
            raise ValueError("dilations are read with a window only: leave them out with window=null")
        if min(self.sketch_window) < 1 or not all(size % 2 for size in self.sketch_window):
            raise ValueError(f"sketch_window={list(self.sketch_window)}: each size is odd (3, 3, 3)")
        if self.sketch is None:
            for name in ("sketch_window", "sketch_dropout"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is read with a sketch only: name the sketch's codec, or leave it out")
        if self.text.kind != "none":
            check_guidance_dropout(
                self.sample.guidance, self.caption_dropout, "caption_dropout", known=self.init is not None
            )
        return self
