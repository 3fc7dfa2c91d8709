"""Config of DALL-E 2's prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from kineograph.core.config import Config, StageConfig
from kineograph.nn.transformer import TransformerConfig
from kineograph.process.diffusion import DiffusionConfig
from kineograph.process.guidance import check_guidance_dropout
from kineograph.process.solvers import DiffusionSample, check_steps
from kineograph.text.clip_embedding import ClipChoice, ClipSource


class PriorSample(Config):
    steps: int = Field(64, ge=1)
    """Forward passes from noise to an embedding."""
    solver: Literal["ddpm", "ddim", "dpm_solver", "dpm_solver_sde"] = "ddim"
    """As of every diffusion."""
    eta: float = Field(0.0, ge=0, le=1)
    """Noise that ddim adds back: 0 none, 1 as much as ddpm."""
    guidance: float = Field(1.0, ge=0)
    """Classifier-free guidance; 1 is none, and costs half as much."""
    candidates: int = Field(2, ge=1)
    """Embeddings drawn for each caption; the one most like the caption's own embedding is taken."""
    sphere: bool = True
    """Bring the predicted embedding to its right length at every step, as guidance and few steps would not leave it."""
    normalize: bool = True
    """Give embeddings of length 1, as the CLIP does; false: as they were drawn."""

    @model_validator(mode="after")
    def _fits(self) -> PriorSample:
        self.solving()
        return self

    def solving(self) -> DiffusionSample:
        """The same for the solvers. An embedding has a length, not a range: no values are clipped."""
        return DiffusionSample(steps=self.steps, solver=self.solver, eta=self.eta, guidance=self.guidance, clip="none")


class PriorConfig(StageConfig, TransformerConfig):
    references: ClassVar[tuple[str, ...]] = ("clip",)
    clip: ClipChoice
    """What embeds images and captions: a clip stage (or runs/x/stage), or {kind: transformers, name: …} or {kind: given, width: …}."""
    text_encodings: bool = True
    """Read the encodings of the caption's tokens too, beside its embedding."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training samples that see no text, for classifier-free guidance."""
    diffusion: DiffusionConfig = DiffusionConfig(objective="x0")
    """Noise levels, objective (x0 unless it says otherwise) and loss."""
    sample: PriorSample = PriorSample()
    """How embeddings are drawn."""

    def reads(self) -> frozenset[str]:
        return frozenset() if self.clip_is_given else frozenset({"pixels", "captions"})

    @property
    def clip_is_given(self) -> bool:
        """Whether embeddings come with the data."""
        return isinstance(self.clip, ClipSource) and self.clip.kind == "given"

    @field_validator("diffusion", mode="before")
    @classmethod
    def _answers_with_embeddings(cls, value: object) -> object:
        """A section that does not name its objective has the prior's, not that of other diffusions."""
        return {"objective": "x0", **value} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _fits(self) -> PriorConfig:
        check_steps(self.sample.steps, self.diffusion.steps)
        check_guidance_dropout(
            self.sample.guidance, self.caption_dropout, "caption_dropout", known=self.init is not None
        )
        if self.diffusion.learned_variance:
            raise ValueError(
                "diffusion.learned_variance=true does not fit a prior: its bound counts the 256 steps of a pixel, and embeddings have none"
            )
        return self
