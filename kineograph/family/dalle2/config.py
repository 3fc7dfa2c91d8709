"""Config of DALL-E 2's decoder: one U-Net of a cascade is one stage."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from kineograph.core.config import Size, StageConfig
from kineograph.family.dalle2.low_res import AugmentConfig
from kineograph.nn.unet import UnetConfig
from kineograph.process.diffusion import DiffusionConfig
from kineograph.process.guidance import check_guidance_dropout
from kineograph.process.solvers import DiffusionSample, check_steps
from kineograph.text import TextConfig
from kineograph.text.clip_embedding import ClipChoice, ClipSource


class DecoderSample(DiffusionSample):
    resample: int = Field(1, ge=1)
    """Inpainting: how often each step is taken, so that the new part agrees with the kept one."""
    low_res_noise: float = Field(0.0, ge=0, lt=1)
    """Super-resolution: noise added to the smaller picture, at most augment.noise; it hides the faults of a drawn one."""
    start: str | None = None
    """With a given picture: the stage of the cascade that enlarges it first; null: this one."""


class DecoderConfig(StageConfig, UnetConfig):
    references: ClassVar[tuple[str, ...]] = ("clip", "codec")
    sample_references: ClassVar[tuple[str, ...]] = ("prior", "low_res")
    size: Size | None = None
    """Height and width of what is drawn: the data's pictures made smaller. Null: data.size, which is what the CLIP is shown in either case."""
    clip: ClipChoice | None = None
    """What embeds images and captions: a clip stage (or runs/x/stage), or {kind: transformers, name: …} or {kind: given, width: …}."""
    image_embeds: Literal["none", "time", "tokens", "both"] = "both"
    """How the image embedding is read: added to the time's vector, as tokens for cross-attention, or both."""
    image_tokens: int = Field(4, ge=1)
    """Tokens that an image embedding is unfolded into."""
    prior: str | None = None
    """The stage that makes an image embedding of a caption when drawing; null: the CLIP's text embedding is taken for one."""
    text: TextConfig = TextConfig(kind="none")
    """An encoder whose token encodings every cross-attention reads; kind none: none."""
    clip_text: bool = False
    """Read the CLIP's own encodings of the caption's tokens instead of `text`."""
    image_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples without image embedding, for classifier-free guidance."""
    text_dropout: float = Field(0.5, ge=0, le=1)
    """Share of training samples without text, drawn apart from image_dropout."""
    low_res_size: Size | None = None
    """Super-resolution: height and width of the smaller picture that is enlarged; null: none, the picture is drawn from noise alone."""
    low_res: str | None = None
    """Super-resolution: the stage that draws the smaller picture; needed for drawing only. Null: pictures to enlarge are given."""
    augment: AugmentConfig = AugmentConfig()
    """What happens to the smaller picture in training."""
    crop: int | None = Field(None, ge=8)
    """Super-resolution: train on random squares of so many pixels (latents, with a codec); null: on whole pictures."""
    codec: str | None = None
    """Diffuse the latents of this stage (or runs/x/stage) instead of pixels. They have no range: sample.clip leaves them alone."""
    latent_scale: float = Field(1.0, gt=0)
    """Latents are multiplied by this, so that they vary by about 1."""
    self_conditioning: bool = False
    """Let each step read the picture that the last one predicted; trained by two passes on every other step."""
    diffusion: DiffusionConfig = DiffusionConfig()
    """Noise levels, objective and loss."""
    sample: DecoderSample = DecoderSample()
    """How pictures are drawn."""

    def reads(self) -> frozenset[str]:
        if not self.clip_text:
            return self.text.reads()
        given = isinstance(self.clip, ClipSource) and self.clip.kind == "given"  # encodings come with the data
        return frozenset({"pixels"} if given else {"pixels", "captions"})

    @model_validator(mode="after")
    def _fits(self) -> DecoderConfig:
        check_steps(self.sample.steps, self.diffusion.steps)
        if self.image_embeds != "none" and self.clip is None:
            raise ValueError(
                f"image_embeds={self.image_embeds} needs clip: name a clip stage, or give {{kind: given, width: …}} for embeddings in the data, "
                "or set image_embeds=none"
            )
        if self.clip_text and self.clip is None:
            raise ValueError("clip_text=true needs clip: name a clip stage, or set it to false")
        if self.clip_text and self.text.kind != "none":
            raise ValueError(
                f"clip_text=true and text.kind={self.text.kind} are two encoders of the same text: choose one"
            )
        if self.prior is not None and self.image_embeds == "none":
            raise ValueError("prior makes image embeddings, and image_embeds=none reads none: leave prior out")
        if self.low_res_size is None:
            for name in ("low_res", "crop"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} is of super-resolution: set low_res_size to the size of the smaller picture"
                    )
        elif self.sample.low_res_noise > self.augment.noise:
            raise ValueError(
                f"sample.low_res_noise={self.sample.low_res_noise} is more than the network sees in training: raise augment.noise={self.augment.noise}"
            )
        if self.codec is not None and self.diffusion.learned_variance:
            raise ValueError(
                "diffusion.learned_variance=true does not fit codec: its bound counts the 256 steps of a pixel, and latents have none"
            )
        if self.codec is not None and self.sample.clip == "dynamic":
            raise ValueError("sample.clip=dynamic keeps pixels in range, and latents have none: leave it out")
        if self.crop is not None and self.crop % self.factor:
            raise ValueError(f"crop={self.crop} does not fit this U-Net: use a multiple of {self.factor}")
        for key, read in (("image_dropout", self.reads_images), ("text_dropout", self.reads_text)):
            if read:
                check_guidance_dropout(
                    self.sample.guidance, getattr(self, key), key, self.init is not None, self.sample.neutral_guidance
                )
        return self

    @property
    def reads_images(self) -> bool:
        return self.image_embeds != "none"

    @property
    def reads_text(self) -> bool:
        return self.clip_text or self.text.kind != "none"
