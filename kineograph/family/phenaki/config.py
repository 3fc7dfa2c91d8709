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
    overlap: int | None = Field(None, ge=1)
    """Frames shared by successive windows of a clip longer than trained; null: as many as fit in half of `data.frames`."""


class PhenakiConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("codec",)
    codec: str
    """The codec stage (or runs/x/stage) whose tokens are modelled."""
    text: TextConfig = TextConfig()
    """The text encoder."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples with a dropped caption, for classifier-free guidance."""
    rotary: bool = True
    """Also rotate queries and keys by time, row and column."""
    mask_bias: float = Field(1.0, gt=0)
    """Training masks a share cos(π/2 · r^mask_bias) of the tokens, r uniform. Values above 1 mask more tokens."""
    primed: float = Field(0.0, ge=0, le=1)
    """Share of training clips whose first frames are visible and not scored, as when sampling continues given frames."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread evenly over all tokens."""
    critic: Literal["none", "self", "network"] = "none"
    """Learns which sampled tokens are wrong, and selects those that sampling masks again: self (a second head) or network."""
    critic_weight: float = Field(1.0, gt=0)
    """self: weight of the critic's loss."""
    critic_width: int | None = Field(None, ge=2, le=65536)
    """network: channels of the critic; null: as the generator."""
    critic_depth: int | None = Field(None, ge=1, le=1000)
    """network: blocks of the critic; null: as the generator."""
    critic_heads: int | None = Field(None, ge=1, le=65536)
    """network: attention heads of the critic; null: as the generator."""
    only: Literal["generator", "critic"] | None = None
    """Train this one and keep the other as in `init` (without a critic in `init` there is none); null: train both."""
    sample: PhenakiSample = PhenakiSample()
    """Options of sampling."""

    def player_names(self) -> tuple[str, ...]:
        return ("generator", "critic")

    def reads(self) -> frozenset[str]:
        return self.text.reads()

    @model_validator(mode="after")
    def _check(self) -> PhenakiConfig:
        needed = {"critic_weight": "self", **dict.fromkeys(("critic_width", "critic_depth", "critic_heads"), "network")}
        for name, kind in needed.items():
            if self.critic != kind and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with critic={self.critic}: remove it, or set critic={kind}")
        if self.only is not None and self.critic == "none":
            raise ValueError(f"only={self.only} has no effect with critic=none: remove it, or set critic")
        if self.only == "critic" and self.init is None:
            raise ValueError("only=critic needs a trained generator: name it with init")
        if self.critic == "none" or (self.only == "generator" and self.init is None):
            self.sample.check_without_critic()
        self.make_critic_config()  # refuses a shape that does not fit
        if self.text.kind != "none":
            check_guidance_dropout(
                self.sample.guidance, self.caption_dropout, "caption_dropout", known=self.init is not None
            )
        return self

    def make_critic_config(self) -> TransformerConfig:
        """The transformer of critic=network."""
        own = {"width": self.critic_width, "depth": self.critic_depth, "heads": self.critic_heads}
        shape = {name: getattr(self, name) for name in TransformerConfig.model_fields}
        return TransformerConfig(**(shape | {name: value for name, value in own.items() if value is not None}))


class CriticConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("generator",)
    inherits_sample: ClassVar[str | None] = "generator"
    generator: str
    """The trained Phenaki stage (or runs/x/stage) whose samples are scored. Its text encoder is used too."""
    rotary: bool = True
    """Also rotate queries and keys by time, row and column."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the generator's tokens in training."""
    sample: PhenakiSample = PhenakiSample()
    """Options of sampling with the generator and this critic; the defaults are those of the generator's stage."""
