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
    """Classifier-free guidance scale; 1 turns it off and halves the cost."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature of tokens; 0 takes the most likely one."""
    top_k: int | None = Field(None, ge=1)
    """Sample among the k most likely tokens; null: among all."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample among the most likely tokens of this total probability (nucleus sampling); null: among all."""
    overlap: int | None = Field(None, ge=1)
    """Frames shared by consecutive windows of a clip longer than trained; null: all but those of the last latent frame."""


class NuwaConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("codec", "sketch", "sound")
    task: str = "nuwa"
    codec: str
    """The stage (or runs/x/stage) whose tokens are modelled."""
    text: TextConfig = TextConfig()
    """The text encoder."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples whose caption becomes the null text, for classifier-free guidance."""
    window: Triple | None = (5, 3, 3)
    """Earlier tokens that a token attends to: latent frames (its own included), rows and columns (odd, centred); null: all."""
    dilations: tuple[int, ...] = Field((1, 2, 4), min_length=1)
    """Dilation of the window, cycled over the blocks; only with a window."""
    positions: Literal["axial", "rotary"] = "axial"
    """axial: learned tables of frames, rows and columns, added. rotary: sines and cosines added, queries and keys rotated."""
    token_shift: bool = True
    """Attention and MLP take a part of the channels from the tokens one frame back, above and to the left."""
    embedding_gradient: float = Field(1.0, ge=0, le=1)
    """Scale of the gradient of the token embeddings; below 1 they train more slowly than the rest."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target spread evenly over all tokens."""
    sketch: str | None = None
    """The codec stage (or runs/x/stage) of the sketches in the data, as a condition; null: no sketches."""
    sketch_window: Triple = (3, 3, 3)
    """Latent frames, rows and columns of the sketch that a token reads, centred on its position; all odd."""
    sketch_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples with a blank sketch, so that clips can be drawn without one."""
    sound: str | None = None
    """The audio_codec stage (or runs/x/stage) whose tokens are drawn together with those of the frames; null: no sound."""
    sample: NuwaSample = NuwaSample()
    """How clips are sampled."""

    def reads(self) -> frozenset[str]:
        extra = {"sketch": self.sketch is not None, "audio": self.sound is not None}
        return self.text.reads() | {name for name, is_read in extra.items() if is_read}

    @field_validator("dilations", mode="before")
    @classmethod
    def _wrap_number(cls, value: object) -> object:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _check(self) -> NuwaConfig:
        if min(self.dilations) < 1:
            raise ValueError(f"dilations={list(self.dilations)}: use at least 1 each")
        if self.window is not None and (min(self.window) < 1 or not self.window[1] % 2 or not self.window[2] % 2):
            raise ValueError(
                f"window={list(self.window)} has no centre: use latent frames, rows and columns of at least 1, "
                "with odd rows and columns, such as [5, 3, 3]"
            )
        if self.window is None and self.dilations != type(self).model_fields["dilations"].default:
            raise ValueError(f"dilations={list(self.dilations)} has no effect with window=null: remove it")
        if min(self.sketch_window) < 1 or not all(size % 2 for size in self.sketch_window):
            raise ValueError(f"sketch_window={list(self.sketch_window)}: use odd sizes, such as [3, 3, 3]")
        if self.sketch is not None and self.sound is not None:
            raise ValueError(
                f"sketch={self.sketch} and sound={self.sound}: sound has no place in a sketch; set one of them to null"
            )
        if self.sketch is None:
            for name in ("sketch_window", "sketch_dropout"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} has no effect with sketch=null: remove it, or name the sketches' codec")
        if self.text.kind != "none":
            check_guidance_dropout(
                self.sample.guidance, self.caption_dropout, "caption_dropout", known=self.init is not None
            )
        return self
