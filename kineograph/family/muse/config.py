"""Config of Muse's generator and critic stages."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from kineograph.core.config import Size, StageConfig
from kineograph.nn.transformer import TransformerConfig
from kineograph.process.guidance import check_guidance_dropout
from kineograph.process.masking import MaskedSample
from kineograph.text import TextConfig

MuseSample = MaskedSample


class MuseConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("codec", "low_res")
    codec: str
    """The codec stage (or runs/x/stage) whose tokens are modelled."""
    text: TextConfig = TextConfig()
    """The text encoder."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples with a dropped caption, for classifier-free guidance."""
    positions: Literal["learned", "sincos"] = "learned"
    """Position embeddings added to the tokens."""
    rotary: bool = True
    """Also rotate queries and keys by row and column."""
    mask_bias: float = Field(1.0, gt=0)
    """Training masks a share cos(π/2 · r^mask_bias) of the tokens, r uniform. Values above 1 mask more tokens."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread evenly over all tokens."""
    self_conditioning: bool = False
    """Each step reads the hidden states of the previous step; every other training step runs two forward passes."""
    critic: Literal["none", "self"] = "none"
    """self: a second head learns which sampled tokens are wrong, and selects the tokens that sampling masks again."""
    critic_weight: float = Field(1.0, gt=0)
    """Weight of the self-critic's loss."""
    low_res: str | None = None
    """Super-resolution: the generator stage to upscale from, or a codec stage, which encodes a given smaller image."""
    low_res_size: Size | None = None
    """Height and width of the smaller image; null: the generator's, or half of data.size with a codec."""
    sample: MuseSample = MuseSample()
    """Options of sampling."""

    def reads(self) -> frozenset[str]:
        return self.text.reads()

    @model_validator(mode="after")
    def _check_sample(self) -> MuseConfig:
        if self.critic == "none":
            self.sample.check_without_critic()
            if self.critic_weight != type(self).model_fields["critic_weight"].default:
                raise ValueError("critic_weight has no effect with critic=none: remove it, or set critic=self")
        elif self.sample.critic and self.sample.noise != MuseSample().noise:
            raise ValueError(
                f"sample.noise={self.sample.noise:g} is noise on the generator's confidence, and critic={self.critic} decides in its place: "
                "remove it, or set sample.critic_noise or sample.critic=false"
            )
        if self.low_res is None and self.low_res_size is not None:
            raise ValueError("low_res_size needs super-resolution: name a stage with low_res, or remove low_res_size")
        if self.text.kind != "none":
            check_guidance_dropout(
                self.sample.guidance, self.caption_dropout, "caption_dropout", known=self.init is not None
            )
        return self


class CriticConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("generator",)
    inherits_sample: ClassVar[str | None] = "generator"
    generator: str
    """The trained Muse stage (or runs/x/stage) whose samples are scored. Its text encoder is used too."""
    positions: Literal["learned", "sincos"] = "learned"
    """Position embeddings added to the tokens."""
    rotary: bool = True
    """Also rotate queries and keys by row and column."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the generator's tokens in training."""
    sample: MuseSample = MuseSample()
    """Options of sampling with the generator and this critic; the defaults are those of the generator's stage."""
