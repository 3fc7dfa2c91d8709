"""Capabilities that only some tasks have, one protocol each. A task declares a capability by inheriting it; callers ask with `isinstance`.

A method `can_…` says whether the stage's config allows what the class supports.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from kineograph.core.batch import Batch, Prompts, Shape
from kineograph.core.health import Limit
from kineograph.core.task import Task

# Sampling --------------------------------------------------------------------------------------------------------


@runtime_checkable
class SupportsSampling(Protocol):
    """Draws pixels for prompts."""

    def sample(self, prompts: Prompts, options: Any) -> Tensor:
        """B T C H W in [0, 1]; `options` is the stage's `sample` config."""


@runtime_checkable
class MakesSound(Protocol):
    """Draws clips with their sound."""

    def makes_sound(self) -> bool: ...

    def sample_with_sound(self, prompts: Prompts, options: Any) -> tuple[Tensor, Tensor]:
        """As `sample`, with the sound of each frame: B T S in [−1, 1], at the sample rate of the data."""


@runtime_checkable
class SupportsLatentSampling(Protocol):
    """Draws latents or tokens without decoding them."""

    def sample_latents(self, prompts: Prompts, options: Any) -> Tensor:
        """Latents B t c h w or tokens B t h w, which `sample` would decode."""


@runtime_checkable
class SupportsContinuation(Protocol):
    """Continues a clip: `sample` takes `prompts.prime` as the first frames of the result."""

    def can_continue(self) -> bool:
        return True

    def usual_overlap(self, options: Any) -> int | None:
        """Frames that a continuation sees of the clip before it; None: as many as fit in half a clip."""
        return None


@runtime_checkable
class SupportsUpscaling(Protocol):
    """Super-resolution: `sample` takes `prompts.prime` as the picture to enlarge."""

    def can_upscale(self) -> bool: ...

    def prime_size(self, options: Any) -> tuple[int, int] | None:
        """Height and width of the picture to enlarge; None: those of the result."""


@runtime_checkable
class SupportsInpainting(Protocol):
    """Redraws the part of `prompts.prime` that `prompts.mask` marks."""

    def can_inpaint(self) -> bool: ...


@runtime_checkable
class SupportsAnimation(Protocol):
    """Image to video: `sample` starts from the first frame of a real sample beside the prompt."""

    def can_animate(self) -> bool: ...


@runtime_checkable
class RoutesCaptions(Protocol):
    """Captions may steer `sample` through a stage that draws for this one, which reads none itself."""

    def takes_captions(self) -> bool: ...


@runtime_checkable
class DescribesStart(Protocol):
    """Samples may start from something other than captions and noise; evaluation labels its numbers with it."""

    def describe_start(self, prompts: Prompts) -> str | None:
        """What `sample` starts from with these prompts; None: captions and noise alone."""


@runtime_checkable
class HasSampleSize(Protocol):
    """Draws at another size than that of its data."""

    def sample_size(self) -> tuple[int, int]: ...

    def resize_reference(self, pixels: Tensor) -> Tensor:
        """Resize real pixels, B T C H W, to the size that `sample` draws, for comparison."""


@runtime_checkable
class ComparesSamples(Protocol):
    """Its loss compares the samples of a batch with one another: evaluation takes the batches of training's validation."""

    def compares_samples(self) -> bool:
        return True


# Encoding --------------------------------------------------------------------------------------------------------


@runtime_checkable
class SupportsReconstruction(Protocol):
    """Shows its own reconstruction beside the input."""

    def can_reconstruct(self) -> bool:
        return True

    def reconstruct(self, batch: Batch) -> Tensor:
        """B T C H W in [0, 1]."""


@runtime_checkable
class SupportsEmbedding(Protocol):
    """Embeds pictures and captions in one space, as CLIP does."""

    def embed_images(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B C H W or B T C H W in [0, 1] → B D, of length 1."""

    def embed_texts(self, captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """→ B D of length 1, token encodings B L E, mask B L."""


@runtime_checkable
class SupportsCaching(Protocol):
    """Trains from precomputed tokens, latents or embeddings instead of pixels and captions."""

    @classmethod
    def can_cache(cls, config: Any) -> bool:
        return True

    @classmethod
    def cache_facts(cls, config: Any) -> dict[str, Any]:
        """What `precompute` depends on beside the data, the referenced stages and `text`: file digests, options. It is part of the cache's key."""
        return {}

    def always_encode(self) -> bool:
        """Whether every step runs the frozen encoders, even when a cache exists."""
        return False

    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """Fields of a batch to cache: `tokens`, `latents`, `pixels` (uint8), `image_embed`, `frame_mask`, `first_frame` (uint8),
        `low_res_tokens`, and where the text encoder is frozen `text_embed`, or `text_embeds` with `text_mask`."""


@runtime_checkable
class HasLatentShape(Protocol):
    """Knows which clips fit its network."""

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Latent or token grid (t, h, w) of a clip; raises a ConfigError that names the sizes that fit."""


# Training --------------------------------------------------------------------------------------------------------


@runtime_checkable
class SupportsBuckets(Protocol):
    """Trains on clips of several shapes, each batch of one (data.buckets)."""

    def can_bucket(self) -> bool:
        return True


@runtime_checkable
class SupportsLossMasks(Protocol):
    """Its losses compare pixels or latents position by position, so that they can leave out what data.masks masks."""

    def can_mask_loss(self) -> bool:
        return True


@runtime_checkable
class ChecksPrecision(Protocol):
    """Cannot be trained in every precision."""

    def check_precision(self, precision: str) -> None:
        """Refuse fp32, bf16 or fp16 with a ConfigError."""


@runtime_checkable
class ComparesWithinBatch(Protocol):
    """A term of its loss compares the samples of a batch with one another; micro-batches do not see one another."""

    def describe_micro_batch(self, clips: int) -> str | None:
        """What a micro-batch of so many clips limits, and the remedy; None: nothing that matters."""


@runtime_checkable
class ChecksHealth(Protocol):
    """Knows numbers that a healthy stage of its kind never logs."""

    def health_limits(self) -> tuple[Limit, ...]:
        """Limits of validation metrics and logged training numbers, by their names in metrics.jsonl."""


@runtime_checkable
class RemapsInit(Protocol):
    """Starts from weights (`init`) that have other names or need a check."""

    def remap_init(self, weights: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        """The weights by their names in this task; refuses with an InputError those that are no start for it."""


@runtime_checkable
class HasMemorySavers(Protocol):
    """Has config keys that save memory."""

    @classmethod
    def memory_savers(cls, config: Any) -> dict[str, Any]:
        """Keys and values, each of which alone saves memory, for `kineo doctor` to try."""


# Questions with a default for tasks without the capability -------------------------------------------------------


def can_continue(task: Task) -> bool:
    return isinstance(task, SupportsContinuation) and task.can_continue()


def makes_sound(task: Task) -> TypeGuard[MakesSound]:
    return isinstance(task, MakesSound) and task.makes_sound()


def can_upscale(task: Task) -> bool:
    return isinstance(task, SupportsUpscaling) and task.can_upscale()


def can_inpaint(task: Task) -> bool:
    return isinstance(task, SupportsInpainting) and task.can_inpaint()


def can_animate(task: Task) -> bool:
    return isinstance(task, SupportsAnimation) and task.can_animate()


def can_reconstruct(task: Task) -> bool:
    return isinstance(task, SupportsReconstruction) and task.can_reconstruct()


def takes_captions(task: Task) -> bool:
    """Whether captions steer the task's samples."""
    return task.takes_captions() if isinstance(task, RoutesCaptions) else "captions" in task.reads


def sample_shape(task: Task, shape: Shape) -> Shape:
    """The shape of a task's samples, where its data have `shape`."""
    if not isinstance(task, HasSampleSize):
        return shape
    height, width = task.sample_size()
    return replace(shape, height=height, width=width)


def resize_reference(task: Task, pixels: Tensor) -> Tensor:
    """Real pixels in the size of the task's samples."""
    return task.resize_reference(pixels) if isinstance(task, HasSampleSize) else pixels
