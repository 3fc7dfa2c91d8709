"""Config of Phenaki's stages."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from kineograph.core.config import StageConfig
from kineograph.nn.transformer import TransformerConfig
from kineograph.process.guidance import check_guidance_dropout
from kineograph.process.masking import MaskedSample
from kineograph.text import TextConfig


class PhenakiSample(MaskedSample):
    critic: bool = True
    """Let the critic, where there is one, decide which tokens are drawn again; false: the generator's confidence does."""
    overlap: int | None = Field(None, ge=1)
    """Frames that a clip longer than the trained one carries from window to window; null: as many as fit in half of `data.frames`."""


class PhenakiConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("codec",)
    codec: str
    """The stage (or runs/x/stage) whose tokens are modelled."""
    text: TextConfig = TextConfig()
    """What reads the captions."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples whose caption is replaced by the null text, for classifier-free guidance."""
    rotary: bool = True
    """Rotate queries and keys by time, row and column, beside the sines and cosines that are added to the tokens."""
    mask_bias: float = Field(1.0, gt=0)
    """Training hides a share cos(π/2 · r^mask_bias) of the tokens, r uniform. Above 1, more is hidden, and more of it can be known from the caption alone."""
    primed: float = Field(0.0, ge=0, le=1)
    """Share of training clips whose beginning, up to all times but the last, is shown and not scored: as clips that go on from given frames are drawn."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target spread evenly over all tokens."""
    critic: Literal["none", "self", "network"] = "none"
    """What learns which sampled tokens are wrong, and decides in sampling what is drawn again: a second head on the generator, or a network of its own."""
    critic_weight: float = Field(1.0, gt=0)
    """self: weight of the critic's loss beside the generator's."""
    critic_width: int | None = Field(None, ge=2)
    """network: channels of the critic; null: as the generator."""
    critic_depth: int | None = Field(None, ge=1)
    """network: blocks of the critic; null: as the generator."""
    critic_heads: int | None = Field(None, ge=1)
    """network: attention heads of the critic; null: as the generator."""
    only: Literal["generator", "critic"] | None = None
    """Train one of the two; the other stays as `init` gave it (a critic that nothing gave is not there). null: both."""
    sample: PhenakiSample = PhenakiSample()
    """How clips are drawn."""

    def player_names(self) -> tuple[str, ...]:
        return ("generator", "critic")

    def reads(self) -> frozenset[str]:
        return self.text.reads()

    @model_validator(mode="after")
    def _critic_fits(self) -> PhenakiConfig:
        unread = {"critic_weight": "self", **dict.fromkeys(("critic_width", "critic_depth", "critic_heads"), "network")}
        for name, kind in unread.items():
            if self.critic != kind and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is read with critic={kind} only, not with critic={self.critic}: leave it out")
        if self.only is not None and self.critic == "none":
            raise ValueError(f"only={self.only} chooses between generator and critic, and critic=none: leave it out")
        if self.only == "critic" and self.init is None:
            raise ValueError("only=critic needs init: the trained generator whose samples are judged")
        if self.critic == "none" or (self.only == "generator" and self.init is None):
            self.sample.check_without_critic()
        self.critic_transformer()
        if self.text.kind != "none":
            check_guidance_dropout(
                self.sample.guidance, self.caption_dropout, "caption_dropout", known=self.init is not None
            )
        return self

    def critic_transformer(self) -> TransformerConfig:
        """The shape of a critic with a network of its own."""
        own = {"width": self.critic_width, "depth": self.critic_depth, "heads": self.critic_heads}
        shape = {name: getattr(self, name) for name in TransformerConfig.model_fields}
        return TransformerConfig(**(shape | {name: value for name, value in own.items() if value is not None}))


class CriticConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("generator",)
    inherits_sample: ClassVar[str | None] = "generator"
    generator: str
    """The trained Phenaki stage (or runs/x/stage) whose samples are judged. Its text encoder is read too."""
    rotary: bool = True
    """Rotate queries and keys by time, row and column."""
    temperature: float = Field(1.0, gt=0)
    """Of the generator's tokens that the critic learns to doubt."""
    sample: PhenakiSample = PhenakiSample()
    """How clips are drawn, with the generator and this critic; what is not said here is as in the generator's stage."""
