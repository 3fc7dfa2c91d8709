"""Config of DALL-E 2's prior, and of its decoder: each U-Net of the cascade is a stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from kineograph.core.config import Config, Size, StageConfig
from kineograph.nn.transformer import TransformerConfig
from kineograph.nn.unet import UnetConfig
from kineograph.process.diffusion import DiffusionConfig
from kineograph.process.guidance import check_guidance_dropout
from kineograph.process.solvers import DiffusionSample, check_steps
from kineograph.text import TextConfig
from kineograph.text.clip_embedding import ClipChoice, ClipSource


def _is_precomputed(clip: ClipChoice | None) -> bool:
    """Whether the embeddings come with the data."""
    return isinstance(clip, ClipSource) and clip.kind == "given"


# Prior -----------------------------------------------------------------------------------------------------------


class PriorSample(Config):
    steps: int = Field(64, ge=1, le=100_000)
    """Sampling steps."""
    solver: Literal["ddpm", "ddim", "dpm_solver", "dpm_solver_sde"] = "ddim"
    """As for the decoder."""
    eta: float = Field(0.0, ge=0, le=1)
    """Noise of ddim: 0 is deterministic, 1 adds as much as ddpm."""
    guidance: float = Field(1.0, ge=0)
    """Classifier-free guidance scale; 1 turns it off and halves the cost."""
    candidates: int = Field(2, ge=1, le=10_000)
    """Embeddings sampled per caption; the one most similar to the caption's own embedding is used."""
    sphere: bool = True
    """Rescale x̂0 at every step to the norm of the training data, which guidance and few steps would change."""
    normalize: bool = True
    """Return embeddings of length 1, as CLIP does; false: as sampled."""

    @model_validator(mode="after")
    def _check_solver(self) -> PriorSample:
        self.solver_options()
        return self

    def solver_options(self) -> DiffusionSample:
        """The options of `solve`. Embeddings have a norm, not a range: no values are clipped."""
        return DiffusionSample(steps=self.steps, solver=self.solver, eta=self.eta, guidance=self.guidance, clip="none")


class PriorConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("clip",)
    clip: ClipChoice
    """Embeds images and captions: a clip stage (or runs/x/stage), {kind: transformers, name: …}, or {kind: given, width: …}."""
    text_encodings: bool = True
    """Also read the encodings of the caption's tokens, not only its pooled embedding."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples with a dropped caption, for classifier-free guidance."""
    diffusion: DiffusionConfig = DiffusionConfig(objective="x0")
    """Noise schedule, objective (default here: x0) and loss."""
    sample: PriorSample = PriorSample()
    """Options of sampling."""

    def reads(self) -> frozenset[str]:
        return frozenset() if self.clip_is_precomputed else frozenset({"pixels", "captions"})

    @property
    def clip_is_precomputed(self) -> bool:
        return _is_precomputed(self.clip)

    @field_validator("diffusion", mode="before")
    @classmethod
    def _default_objective(cls, value: object) -> object:
        """Predict x0 unless the section sets an objective."""
        return {"objective": "x0", **value} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _check_diffusion(self) -> PriorConfig:
        check_steps(self.sample.steps, self.diffusion.steps)
        check_guidance_dropout(
            self.sample.guidance, self.caption_dropout, "caption_dropout", known=self.init is not None
        )
        if self.diffusion.learned_variance:
            raise ValueError(
                "diffusion.learned_variance=true does not fit a prior: its bound is for pixels of 256 levels; set it to false"
            )
        return self


# Decoder ---------------------------------------------------------------------------------------------------------


class AugmentConfig(Config):
    blur: float = Field(0.5, ge=0, le=1)
    """Share of training samples whose low-resolution image is blurred, as sampled ones tend to be."""
    blur_sigma: float = Field(0.6, gt=0)
    """Standard deviation of the blur, in pixels of the low-resolution image."""
    noise: float = Field(0.0, ge=0, lt=1)
    """Largest noise level of the low-resolution image; 1 would be pure noise. The network is conditioned on the level. 0: no noise."""


class DecoderSample(DiffusionSample):
    resample: int = Field(1, ge=1, le=10_000)
    """Inpainting: times that each step is repeated, so that the new part agrees with the known one (RePaint)."""
    low_res_noise: float = Field(0.0, ge=0, lt=1)
    """Super-resolution: noise level of the low-resolution image, at most augment.noise; it hides artifacts of a sampled one."""
    start: str | None = None
    """With --prime: the stage of the cascade that upscales the image first; null: this one."""


class DecoderConfig(StageConfig, UnetConfig):
    references: ClassVar[tuple[str, ...]] = ("clip", "codec")
    sample_references: ClassVar[tuple[str, ...]] = ("prior", "low_res")
    size: Size | None = None
    """Height and width of the samples; the data are downsampled to it. Null: data.size. The CLIP sees data.size either way."""
    clip: ClipChoice | None = None
    """Embeds images and captions: a clip stage (or runs/x/stage), {kind: transformers, name: …}, or {kind: given, width: …}."""
    image_embeds: Literal["none", "time", "tokens", "both"] = "both"
    """How the image embedding enters the U-Net: added to the time embedding, as tokens for cross-attention, or both."""
    image_tokens: int = Field(4, ge=1)
    """Number of tokens that an image embedding is projected to."""
    prior: str | None = None
    """Sampling: the stage that turns captions into image embeddings; null: the CLIP's text embedding is used as one."""
    text: TextConfig = TextConfig(kind="none")
    """A text encoder for cross-attention; kind=none: no text."""
    clip_text: bool = False
    """Cross-attend to the CLIP's encodings of the caption's tokens, instead of `text`."""
    image_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples with a dropped image embedding, for classifier-free guidance."""
    text_dropout: float = Field(0.5, ge=0, le=1)
    """Share of training samples with a dropped text, independent of image_dropout."""
    low_res_size: Size | None = None
    """Super-resolution: height and width of the low-resolution image; null: no super-resolution."""
    low_res: str | None = None
    """Super-resolution, for sampling only: the stage that samples the low-resolution image. Null: images to upscale are given."""
    augment: AugmentConfig = AugmentConfig()
    """Augmentation of the low-resolution image in training."""
    crop: int | None = Field(None, ge=8)
    """Super-resolution: train on random square crops of this size (in latents, with a codec); null: on whole images."""
    codec: str | None = None
    """Diffuse the latents of this stage (or runs/x/stage) instead of pixels. Latents have no range: sample.clip does not apply."""
    latent_scale: float = Field(1.0, gt=0)
    """Latents are multiplied by this, so that their variance is about 1."""
    self_conditioning: bool = False
    """Each step reads the previous step's x̂0; every other training step runs two forward passes."""
    diffusion: DiffusionConfig = DiffusionConfig()
    """Noise schedule, objective (default: eps for pixels, v for latents) and loss."""
    sample: DecoderSample = DecoderSample()
    """Options of sampling."""

    @model_validator(mode="before")
    @classmethod
    def _default_objective(cls, tree: Any) -> Any:
        """Predict v for latents unless the section sets an objective: without a range to clip to, errors of ε at the last timesteps explode."""
        if not isinstance(tree, Mapping) or tree.get("codec") is None:
            return tree
        diffusion = tree.get("diffusion", {})
        return {**tree, "diffusion": {"objective": "v", **diffusion}} if isinstance(diffusion, Mapping) else tree

    def reads(self) -> frozenset[str]:
        if not self.clip_text:
            return self.text.reads()
        return frozenset({"pixels"} if _is_precomputed(self.clip) else {"pixels", "captions"})

    @property
    def runs_clip(self) -> bool:
        """Whether a CLIP embeds the data, unless embeddings come with them."""
        return self.clip is not None and not _is_precomputed(self.clip)

    @property
    def reads_images(self) -> bool:
        return self.image_embeds != "none"

    @property
    def reads_text(self) -> bool:
        return self.clip_text or self.text.kind != "none"

    @model_validator(mode="after")
    def _check_conditions(self) -> DecoderConfig:
        if self.reads_images and self.clip is None:
            raise ValueError(
                f"image_embeds={self.image_embeds} needs clip: name a clip stage, set {{kind: given, width: …}} for embeddings in the data, "
                "or set image_embeds=none"
            )
        if self.clip_text and self.clip is None:
            raise ValueError("clip_text=true needs clip: name a clip stage, or set clip_text=false")
        if self.clip_text and self.text.kind != "none":
            raise ValueError(
                f"clip_text=true and text.kind={self.text.kind} both encode the caption: remove one of them"
            )
        if self.prior is not None and not self.reads_images:
            raise ValueError("prior has no effect with image_embeds=none: remove prior, or set image_embeds")
        if self.low_res_size is None:
            for name in ("low_res", "crop"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs super-resolution: set low_res_size, or remove {name}")
            if self.augment != AugmentConfig() or self.sample.low_res_noise:
                name = "sample.low_res_noise" if self.sample.low_res_noise else "augment"
                raise ValueError(f"{name} has no effect without super-resolution: set low_res_size, or remove {name}")
        elif self.sample.low_res_noise > self.augment.noise:
            raise ValueError(
                f"sample.low_res_noise={self.sample.low_res_noise} is above augment.noise={self.augment.noise}, the most in training: "
                "lower it, or raise augment.noise"
            )
        if self.crop is not None and self.crop % self.factor:
            raise ValueError(f"crop={self.crop} does not fit this U-Net: use a multiple of {self.factor}")
        return self

    @model_validator(mode="after")
    def _check_diffusion(self) -> DecoderConfig:
        check_steps(self.sample.steps, self.diffusion.steps)
        if self.codec is None and self.latent_scale != 1:
            raise ValueError(
                f"latent_scale={self.latent_scale:g} has no effect on pixels: name a stage with codec, or remove it"
            )
        if self.codec is not None and self.diffusion.learned_variance:
            raise ValueError(
                "diffusion.learned_variance=true does not fit codec: its bound is for pixels of 256 levels; set it to false"
            )
        if self.codec is not None and self.self_conditioning and self.diffusion.objective == "eps":
            raise ValueError(
                "self_conditioning=true with codec does not fit diffusion.objective=eps: the x̂0 that it reads has no bound; set objective=v"
            )
        if self.codec is not None and self.sample.clip == "dynamic":
            raise ValueError("sample.clip=dynamic does not fit codec, since latents have no range: remove it")
        for key, is_read in (("image_dropout", self.reads_images), ("text_dropout", self.reads_text)):
            if is_read:
                check_guidance_dropout(
                    self.sample.guidance, getattr(self, key), key, self.init is not None, self.sample.neutral_guidance
                )
        return self
