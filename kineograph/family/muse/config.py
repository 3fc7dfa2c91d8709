"""Config of Muse's stages."""

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
    """The stage (or runs/x/stage) whose tokens are modelled."""
    text: TextConfig = TextConfig()
    """What reads the captions."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples whose caption is replaced by the null text, for classifier-free guidance."""
    positions: Literal["learned", "sincos"] = "learned"
    """Position vectors added to the tokens."""
    rotary: bool = True
    """Rotate queries and keys by row and column too."""
    mask_bias: float = Field(1.0, gt=0)
    """Training hides a share cos(π/2 · r^mask_bias) of the tokens, r uniform. Above 1, more is hidden, and more of it can be known from the caption alone."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target spread evenly over all tokens."""
    self_conditioning: bool = False
    """Let each step read the last step's hidden states; trained by two passes on every other step."""
    critic: Literal["none", "self"] = "none"
    """self: a second head learns which sampled tokens are wrong, and decides in sampling what is drawn again."""
    critic_weight: float = Field(1.0, gt=0)
    """Weight of the self-critic's loss."""
    low_res: str | None = None
    """Super-resolution: the generator stage to enlarge from, or a codec stage whose tokens of a smaller image are given."""
    low_res_size: Size | None = None
    """Height and width of the smaller image; null: the generator's, or half of data.size with a codec."""
    sample: MuseSample = MuseSample()
    """How images are drawn."""

    def reads(self) -> frozenset[str]:
        return self.text.reads()

    @model_validator(mode="after")
    def _ranks_by_what_is_there(self) -> MuseConfig:
        if self.critic == "none":
            self.sample.check_without_critic()
        elif self.sample.noise != MuseSample().noise:
            raise ValueError(
                f"sample.noise={self.sample.noise:g} is noise on the generator's confidence, and critic={self.critic} decides in its place: "
                "leave it out, or set sample.critic_noise"
            )
        return self

    @model_validator(mode="after")
    def _knows_the_null_text(self) -> MuseConfig:
        if self.text.kind != "none":
            check_guidance_dropout(
                self.sample.guidance, self.caption_dropout, "caption_dropout", known=self.init is not None
            )
        return self


class CriticConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("generator",)
    inherits_sample: ClassVar[str | None] = "generator"
    generator: str
    """The trained Muse stage (or runs/x/stage) whose samples are judged. Its text encoder is read too."""
    positions: Literal["learned", "sincos"] = "learned"
    """Position vectors added to the tokens."""
    rotary: bool = True
    """Rotate queries and keys by row and column too."""
    temperature: float = Field(1.0, gt=0)
    """Of the generator's tokens that the critic learns to doubt."""
    sample: MuseSample = MuseSample()
    """How images are drawn, with the generator and this critic; what is not said here is as in the generator's stage."""
