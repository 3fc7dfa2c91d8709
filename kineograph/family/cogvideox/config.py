"""Config of CogVideoX: model, training and sampling."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from kineograph.core.config import Axis, Config, StageConfig
from kineograph.core.errors import InputError
from kineograph.family.cogvideox.transformer_config import ReleasedModel, TransformerShape, apply_released_shape
from kineograph.process.diffusion import DiffusionConfig
from kineograph.process.guidance import check_guidance_dropout
from kineograph.process.solvers import DiffusionSample, check_steps
from kineograph.text import TextConfig

DIFFUSION = {"schedule": "scaled_linear", "zero_terminal": True, "objective": "v"}


class CogVideoXSample(DiffusionSample):
    guidance: float = Field(6.0, ge=0)
    clip: Literal["none", "static", "dynamic"] = "none"
    resample: int = Field(1, ge=1, le=10_000)
    """When continuing frames: times that each step is repeated, so that the new frames agree with them (RePaint)."""


class LoraConfig(Config):
    rank: int = Field(64, ge=1, le=65536)
    alpha: float | None = Field(None, gt=0)
    """Adapter outputs are scaled by alpha / rank; null: alpha = rank."""
    targets: tuple[str, ...] = Field(("to_q", "to_k", "to_v", "to_out"), min_length=1)
    """Suffixes of the layers to adapt. Also: up and down (MLP), norm1.linear and norm2.linear (modulation)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapters' input."""

    @field_validator("targets")
    @classmethod
    def _as_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Accept diffusers' name `to_out.0`."""
        return tuple("to_out" if name == "to_out.0" else name for name in value)


class FirstFrameConfig(Config):
    """Image to video: augmentation of the first frame in training."""

    noise: tuple[float, float] | None = (-3.0, 0.5)
    """Mean and standard deviation of log σ of the noise added to it; null: no noise."""
    dropout: float = Field(0.05, ge=0, le=1)
    """Share of training clips without a first frame."""
    clip: float = Field(0.0, ge=0, le=1)
    """Share of training clips that condition on their first 2 to all but one latent frames, to learn to continue clips."""


class CogVideoXConfig(StageConfig, TransformerShape):
    references: ClassVar[tuple[str, ...]] = ("codec",)
    shape: ReleasedModel | None = None
    """A released model: default for the keys below, text.length and diffusion.shift."""
    weights: str | None = None
    """A diffusers folder (transformer, vae, text_encoder, tokenizer) with the pretrained weights."""
    codec: str | None = None
    """The codec stage (or runs/x/stage); null: the VAE of `weights`."""
    tile: tuple[Axis, Axis] | None = None
    """Tile size in pixels for the VAE of `weights`, to save memory; null: no tiling. A codec stage has its own key."""
    weights_in: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the transformer's weights. bf16 halves the memory."""
    tune: Literal["full", "lora"] | tuple[str, ...] = "full"
    """What trains: everything, LoRA adapters, or parameters that match these patterns, such as blocks.*.attention.* The rest
    comes frozen from `weights`, or from `init`, and is then saved in every checkpoint."""
    lora: LoraConfig = LoraConfig()
    """Options of tune=lora."""
    text: TextConfig = TextConfig()
    """The text encoder. With `weights`, kind=t5 without a name is the folder's."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training clips with a dropped caption, for classifier-free guidance."""
    null_text: Literal["empty", "zeros", "learned"] = "empty"
    """The null condition in training and sampling: the embedding of an empty caption, zeros, or a learned token."""
    image: FirstFrameConfig = FirstFrameConfig()
    """Options of first_frame=true."""
    diffusion: DiffusionConfig = DiffusionConfig.model_validate(DIFFUSION)
    """Noise schedule, objective and loss."""
    validation_bins: int = Field(4, ge=1)
    """Timestep ranges for which validation reports the loss separately, one forward pass each."""
    sample: CogVideoXSample = CogVideoXSample()
    """Sampling options."""

    def reads(self) -> frozenset[str]:
        return self.text.reads()

    @model_validator(mode="before")
    @classmethod
    def _as_released(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        if tree.get("codec") is None and tree.get("weights") is None:
            raise ValueError(
                "codec or weights is required: name a causal_vae stage (codec=STAGE), or a folder of released weights (weights=DIR)"
            )
        tree = apply_released_shape(tree)
        if isinstance(tree.get("weights"), str):  # the run may be opened from another working directory
            tree["weights"] = str(Path(tree["weights"]).expanduser().absolute())
        if isinstance(tree.get("diffusion", {}), Mapping):
            tree["diffusion"] = {**DIFFUSION, **tree.get("diffusion", {})}
        text = tree.get("text", {})
        if tree.get("weights") and isinstance(text, Mapping) and text.get("kind") == "t5" and not text.get("name"):
            tree["text"] = {**text, "name": f"{tree['weights']}/text_encoder"}
        return tree

    @model_validator(mode="after")
    def _fits(self) -> CogVideoXConfig:
        check_steps(self.sample.steps, self.diffusion.steps)
        if self.null_text == "empty" and self.text.kind == "given":
            raise ValueError(
                "null_text=empty needs a text encoder, and text.kind=given has none: set null_text=zeros or null_text=learned"
            )
        if self.tile is not None and self.codec is not None:
            raise ValueError("tile applies to the VAE of weights only: set it in the codec's stage, or remove it")
        if self.tune == ():
            raise ValueError("tune=[] trains nothing: give parameter patterns, lora or full")
        if self.tune != "full" and self.weights is None and self.init is None:
            raise ValueError(
                f"tune={self.tune if self.uses_lora else list(self.tune)} freezes pretrained weights, and there are none: "
                "set weights=DIR (a folder of released weights) or init=runs/x/stage"
            )
        if self.tune != "lora" and self.lora != LoraConfig():
            raise ValueError(
                f"tune={self.tune if self.tune == 'full' else list(self.tune)} does not use lora: remove it, or set tune=lora"
            )
        if not self.first_frame and self.image != FirstFrameConfig():
            raise ValueError("image has no effect without first_frame=true: remove it")
        if self.diffusion.learned_variance:
            raise ValueError("diffusion.learned_variance=true does not fit cogvideox: remove it")
        if self.text.kind != "none":
            known = self.init is not None or self.weights is not None
            check_guidance_dropout(
                self.sample.guidance, self.caption_dropout, "caption_dropout", known, self.sample.neutral_guidance
            )
        return self

    @property
    def uses_lora(self) -> bool:
        return self.tune == "lora"

    def check_pretrained(self, given: Collection[str], hub: bool) -> None:
        if self.weights is not None:
            check_weights_folder(self.weights, "transformer" if self.codec else "transformer vae")
        super().check_pretrained(given, hub)


def check_weights_folder(folder: str, parts: str = "transformer") -> None:
    """Refuse a weights folder that lacks one of these subfolders (space-separated)."""
    path = Path(folder).expanduser()
    missing = next((part for part in parts.split() if not (path / part).is_dir()), None)
    if missing is not None:
        what = f"has no folder {missing}" if path.is_dir() else "does not exist"
        raise InputError(
            f"weights={folder} {what}: give a diffusers folder with transformer, vae, text_encoder and tokenizer"
        )
