"""Config of CogVideoX: what it is, what of it is trained, and how it draws."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from kineograph.core.config import Config, StageConfig
from kineograph.core.errors import InputError
from kineograph.family.cogvideox.shapes import Released, TransformerShape, filled
from kineograph.process.diffusion import DiffusionConfig
from kineograph.process.guidance import check_guidance_dropout
from kineograph.process.solvers import DiffusionSample
from kineograph.text import TextConfig

DIFFUSION = {"schedule": "scaled_linear", "zero_terminal": True, "objective": "v"}


class CogVideoXSample(DiffusionSample):
    guidance: float = Field(6.0, ge=0)
    clip: Literal["none", "static", "dynamic"] = "none"
    resample: int = Field(1, ge=1)
    """Continuing given frames: how often each step is taken, so that what is drawn agrees with them."""


class LoraConfig(Config):
    rank: int = Field(64, ge=1)
    alpha: float | None = Field(None, gt=0)
    """What an adapter adds is multiplied by alpha / rank; null: alpha = rank."""
    targets: tuple[str, ...] = Field(("to_q", "to_k", "to_v", "to_out"), min_length=1)
    """Layers that get an adapter, by the end of their names. The MLP's are up and down, those of time norm1.linear and norm2.linear."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On what an adapter reads."""

    @field_validator("targets")
    @classmethod
    def _as_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """`to_out.0` is what diffusers calls it."""
        return tuple("to_out" if name == "to_out.0" else name for name in value)


class FirstFrameConfig(Config):
    """Image to video: what happens to the first frame in training."""

    noise: tuple[float, float] | None = (-3.0, 0.5)
    """Mean and spread of log σ of the noise that it gets, so that the model does not take its faults for truth; null: none."""
    dropout: float = Field(0.05, ge=0, le=1)
    """Share of training clips that are shown no first frame."""
    clip: float = Field(0.0, ge=0, le=1)
    """Share of training clips of which more is shown, their first 2 to all but one latent frames: so it learns to go on from clips."""


class CogVideoXConfig(StageConfig, TransformerShape):
    references: ClassVar[tuple[str, ...]] = ("codec",)
    shape: Released | None = None
    """A released model: sets the keys below, text.length and diffusion.shift as it has them, where they are not given."""
    weights: str | None = None
    """A folder of diffusers' form (transformer, vae, text_encoder, tokenizer): where weights to start from, and what is not given, come from."""
    codec: str | None = None
    """The stage (or runs/x/stage) whose latents are diffused; null: the VAE of `weights`."""
    tile: tuple[int, int] | None = None
    """The VAE of `weights` codes larger pictures in tiles of so many pixels, in less memory; null: whole. A stage has this key itself."""
    weights_in: Literal["fp32", "bf16"] = "fp32"
    """How the transformer's weights are kept. bf16: half the memory; frozen ones lose nothing that training in bf16 would see."""
    tune: Literal["full", "lora"] | tuple[str, ...] = "full"
    """What trains: all; adapters alone; or the parameters whose names fit one of these patterns, such as blocks.*.attention.* The rest is
    that of `weights`, or of `init`, whose weights then stand in every checkpoint."""
    lora: LoraConfig = LoraConfig()
    """Of tune=lora."""
    text: TextConfig = TextConfig()
    """The encoder of captions. With `weights`, kind t5 and no name is the folder's own."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training clips without caption, for classifier-free guidance."""
    null_text: Literal["empty", "zeros", "learned"] = "empty"
    """What stands for no caption, in training and in drawing: the encoder's answer to an empty one, zeros, or a learned token."""
    image: FirstFrameConfig = FirstFrameConfig()
    """Of first_frame=true."""
    diffusion: DiffusionConfig = DiffusionConfig.model_validate(DIFFUSION)
    """Noise levels, objective and loss."""
    validation_bins: int = Field(4, ge=1)
    """Validation gives the loss at so many ranges of noise too, each with a forward pass of its own."""
    sample: CogVideoXSample = CogVideoXSample()
    """How clips are drawn."""

    @model_validator(mode="before")
    @classmethod
    def _as_released(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        if tree.get("codec") is None and tree.get("weights") is None:
            raise ValueError(
                "codec or weights is required: name the stage of a causal_vae, or give the folder of released weights (weights=DIR)"
            )
        tree = filled(tree)
        if isinstance(tree.get("weights"), str):  # a run is opened from other folders than the one it was started in
            tree["weights"] = str(Path(tree["weights"]).expanduser().absolute())
        if isinstance(tree.get("diffusion", {}), Mapping):
            tree["diffusion"] = {**DIFFUSION, **tree.get("diffusion", {})}
        text = tree.get("text", {})
        if tree.get("weights") and isinstance(text, Mapping) and text.get("kind") == "t5" and not text.get("name"):
            tree["text"] = {**text, "name": f"{tree['weights']}/text_encoder"}
        return tree

    @model_validator(mode="after")
    def _fits(self) -> CogVideoXConfig:
        if self.null_text == "empty" and self.text.kind == "given":
            raise ValueError("null_text=empty needs an encoder, and text.kind=given has none: use zeros or learned")
        if self.tile is not None and self.codec is not None:
            raise ValueError(
                "tile is read with the VAE of weights only: set it where codec is trained, or leave it out"
            )
        if self.tune == ():
            raise ValueError("tune=[] trains nothing: name patterns of parameters, or use lora or full")
        if self.tune != "full" and self.weights is None and self.init is None:
            raise ValueError(
                f"tune={self.tune if self.adapts else list(self.tune)} leaves the rest of the transformer as it is, and nothing says what it is: "
                "give the folder of released weights (weights=DIR), or a trained stage (init=runs/x/stage)"
            )
        if self.tune != "lora" and self.lora != LoraConfig():
            raise ValueError(
                f"lora is read with tune=lora only, not with tune={self.tune if self.tune == 'full' else list(self.tune)}: leave it out of the file"
            )
        if not self.first_frame and self.image != FirstFrameConfig():
            raise ValueError("image is read with first_frame=true only: leave it out")
        if self.diffusion.learned_variance:
            raise ValueError(
                "diffusion.learned_variance=true does not fit cogvideox: its network has no channels for it"
            )
        if self.text.kind != "none":
            known = self.init is not None or self.weights is not None
            check_guidance_dropout(
                self.sample.guidance, self.caption_dropout, "caption_dropout", known, self.sample.neutral_guidance
            )
        return self

    @property
    def adapts(self) -> bool:
        return self.tune == "lora"

    def check_pretrained(self, given: Collection[str], hub: bool) -> None:
        if self.weights is not None:
            check_folder(self.weights, "transformer" if self.codec else "transformer vae")
        super().check_pretrained(given, hub)


def check_folder(folder: str, parts: str = "transformer") -> None:
    """A folder of weights must have these folders (words)."""
    path = Path(folder).expanduser()
    lacks = next((part for part in parts.split() if not (path / part).is_dir()), None)
    if lacks is not None:
        what = f"has no folder {lacks}" if path.is_dir() else "does not exist"
        raise InputError(
            f"weights={folder} {what}: give a folder of diffusers' form, with transformer, vae, text_encoder and tokenizer in it"
        )
