"""A small CLIP as a stage: one embedding space for images and captions, trained on the run's data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from kineograph.core import distributed
from kineograph.core.batch import Batch, Shape
from kineograph.core.capabilities import ChecksHealth, ComparesSamples, ComparesWithinBatch, SupportsEmbedding
from kineograph.core.config import StageConfig
from kineograph.core.device_copy import copy_to_device
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.health import LOSS_FALLS, Limit
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Mean, Task
from kineograph.nn.positions import LearnedPositions
from kineograph.nn.transformer import Transformer, TransformerConfig, init_weights
from kineograph.text.conditioning import encode_captions
from kineograph.text.config import TextConfig
from kineograph.text.learned import LearnedText

NO_CAPTION = -(2**63)  # the key of a blank caption; no hash has this value


class ClipConfig(StageConfig, TransformerConfig):
    """`width`, `depth` and so on are those of the image transformer."""

    embed_width: int = Field(256, ge=2, le=65536)
    """Channels of the embeddings."""
    patch: int = Field(8, ge=1, le=65536)
    """Side of an image token in pixels."""
    text: TextConfig = TextConfig()
    """The text encoder; kind: learned."""
    temperature: float = Field(0.07, gt=0)
    """Initial temperature of the softmax over a batch; it is trained."""
    min_temperature: float = Field(0.01, gt=0)
    """Lower bound of the temperature: below 1/100, one wrong pair would outweigh a batch."""

    def reads(self) -> frozenset[str]:
        return self.text.reads()

    @model_validator(mode="after")
    def _check_text(self) -> ClipConfig:
        if self.text.kind != "learned":
            raise ValueError(f"text.kind={self.text.kind}: clip trains its own text encoder; use learned")
        if self.temperature < self.min_temperature:
            raise ValueError(
                f"temperature={self.temperature} is below min_temperature={self.min_temperature}: raise it, or lower min_temperature"
            )
        return self


class ImageTower(nn.Module):
    """Images N C H W in [0, 1] → features N D, the mean over patches"""

    def __init__(self, config: TransformerConfig, patch: int, shape: Shape) -> None:
        super().__init__()
        if shape.height % patch or shape.width % patch:
            raise ConfigError(
                f"data.size={shape.height} × {shape.width} is not a multiple of patch={patch}: change one of them"
            )
        self.patch = patch
        self.grid = (shape.height // patch, shape.width // patch)
        self.patches = nn.Linear(shape.channels * patch**2, config.width)
        self.positions = LearnedPositions(self.grid, config.width)
        init_weights(self, 1)
        self.transformer = Transformer(config)

    def forward(self, images: Tensor) -> Tensor:
        x = rearrange(images * 2 - 1, "n c (h p) (w q) -> n (h w) (p q c)", p=self.patch, q=self.patch)
        return self.transformer(self.patches(x) + self.positions()).mean(1)  # N D


class TrainedClip(Task, SupportsEmbedding, ComparesSamples, ComparesWithinBatch, ChecksHealth):
    Config = ClipConfig

    def __init__(self, config: ClipConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        self.config, self.shape = config, context.shape
        self.width = config.embed_width
        self.picture_size = (context.shape.height, context.shape.width)
        self.image = ImageTower(config, config.patch, context.shape)
        self.text = LearnedText(config.text, context)
        self.text_width, self.length = self.text.width, self.text.length
        self.image_projection = nn.Linear(config.width, self.width, bias=False)
        self.text_projection = nn.Linear(self.text.width, self.width, bias=False)
        init_weights(self.image_projection, 1)
        init_weights(self.text_projection, 1)
        self.sharpest = -math.log(config.min_temperature)
        self.sharpness = nn.Parameter(torch.tensor(-math.log(config.temperature)))  # log 1/temperature

    def trainable(self, player: str) -> list[nn.Module]:
        return [self]

    # embeddings ----------------------------------------------------------------------------------------------------

    def embed_images(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B C H W or B T C H W in [0, 1] of any size → B D, of length 1; for a clip, of the mean over its real frames"""
        clips = pixels[:, None] if pixels.ndim == 4 else pixels
        if clips.shape[2] != self.shape.channels:
            raise InputError(
                f"images of {clips.shape[2]} channels for a clip stage trained on {self.shape.channels}: set data.channels={self.shape.channels}"
            )
        frames = rearrange(clips, "b t c h w -> (b t) c h w").float()
        size = (self.shape.height, self.shape.width)
        if tuple(frames.shape[2:]) != size:
            frames = F.interpolate(frames, size, mode="bicubic", antialias=True).clamp(0, 1)
        features = rearrange(self.image(frames), "(b t) d -> b t d", b=len(clips))
        return unit(self.image_projection(masked_mean(features, frame_mask)))

    def embed_texts(self, captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """→ B D of length 1, encodings of the tokens B L E, mask B L"""
        encodings, mask = encode_captions(self.text, captions)
        assert encodings is not None
        assert mask is not None
        return unit(self.text_projection(masked_mean(encodings, mask))), encodings.float(), mask

    # training ------------------------------------------------------------------------------------------------------

    def scale(self) -> Tensor:
        """1/temperature, within its bound"""
        return self.sharpness.clamp(max=self.sharpest).exp()

    def bound_temperature(self) -> None:
        """Clamp the parameter itself, once a step, so that it can leave the bound at once."""
        with torch.no_grad():
            self.sharpness.clamp_(max=self.sharpest)

    def forward(self, batch: Batch, noise: Noise) -> ContrastiveLoss:
        if self.training:
            self.bound_temperature()
        images = self.embed_images(batch.video, batch.frame_mask)
        texts, _, _ = self.embed_texts(cast("list[str]", batch.captions))
        keys = copy_to_device(self.keys(cast("list[str]", batch.captions)), images.device)
        if self.training:
            gather, first = distributed.all_gather_with_grad, len(batch) * distributed.data_rank()
        else:  # batches may differ in size between processes, and a spare one is another's
            rows = 0 if batch.spare else len(batch)
            gather, first = partial(_gather_rows, rows), distributed.count_rows_before(rows, images.device)
        return contrastive_loss(images, texts, keys, self.scale(), gather, first)

    def keys(self, captions: list[str]) -> Tensor:
        """B, on the host: equal for captions with the same tokens, NO_CAPTION for blank ones."""
        ids = self.text.vocabulary.ids
        return torch.tensor([hash(ids(caption)) if caption.strip() else NO_CAPTION for caption in captions])

    def loss(self, player: str, shared: ContrastiveLoss) -> Loss:
        rows = shared.rows
        terms = {"image_to_text": shared.text_hits, "text_to_image": shared.image_hits}
        return Loss(
            Mean(shared.loss, rows),
            {f"retrieval/{name}": Mean(hits.float(), rows) for name, hits in terms.items()}
            | {
                "temperature": Mean(rows / shared.scale.detach(), rows),
                "chance": Mean(shared.chance, rows),
            },
        )

    def describe_micro_batch(self, clips: int) -> str | None:
        return (
            f"tells each picture from the {clips:,} captions of a micro-batch, not of the batch: set train.accumulate=1, with a smaller "
            "train.batch_size or train.checkpointing=true if memory is short"
        )

    def health_limits(self) -> tuple[Limit, ...]:
        remedy = "Lower train.lr, lengthen train.warmup or train for more steps, with more captions in a batch."
        meaning = "Pictures and captions are matched no better than by chance."
        matches = Limit("chance_matches", "train/loss", meaning, remedy, at_most=0.98, share_of="train/chance")
        return (LOSS_FALLS, matches)

    # structure -----------------------------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        return [self.image, *([self.text.transformer] if self.text.transformer is not None else [])]

    def blocks(self) -> list[nn.Module]:
        texts = list(self.text.transformer.blocks) if self.text.transformer is not None else []
        return [*self.image.transformer.blocks, *texts]

    def assets(self) -> dict[str, str]:
        return self.text.assets()

    def tokens_per_clip(self) -> int:
        return self.shape.frames * self.image.grid[0] * self.image.grid[1]


def unit(vectors: Tensor) -> Tensor:
    """Scale to length 1, in float32."""
    return F.normalize(vectors.float(), dim=-1)


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """B N D → B D: the mean where the mask (B N) is True"""
    values = values.float()
    if mask is None:
        return values.mean(1)
    weights = mask[..., None].float()
    return (values * weights).sum(1) / weights.sum(1)


TASK = TrainedClip


@dataclass
class ContrastiveLoss:
    """Sums over the pairs of this process."""

    loss: Tensor
    text_hits: Tensor  # images whose nearest caption is theirs
    image_hits: Tensor  # captions whose nearest image is theirs
    rows: Tensor  # pairs that are compared
    scale: Tensor  # 1/temperature
    chance: Tensor  # the loss of embeddings that are all the same


def _gather_rows(rows: int, value: Tensor) -> Tensor:
    return distributed.all_gather_rows(value[:rows])


def contrastive_loss(
    images: Tensor,
    texts: Tensor,
    keys: Tensor,
    scale: Tensor,
    gather: Callable[[Tensor], Tensor] = lambda value: value,
    first: int = 0,
) -> ContrastiveLoss:
    """Symmetric InfoNCE of unit vectors, images B D and texts B D; `keys` (B, int64) are equal where captions are.

        loss = ½ Σᵢ [ −log e^{s·xᵢyᵢ} / Σ_{j ∈ N(i)} e^{s·xᵢyⱼ}  −log e^{s·xᵢyᵢ} / Σ_{j ∈ N(i)} e^{s·xⱼyᵢ} ]

    N(i) is i and all j with another caption: an image of the same caption is not a negative, or it would be pushed away from its own
    caption. Rows without a caption (NO_CAPTION) are no pairs, and no negatives. `gather` collects the rows of all processes, which are
    negatives too, and `first` is the index of the own rows among them; each process computes the loss of its own rows.
    """
    with torch.autocast(images.device.type, enabled=False):  # a logit of 100 has steps of 0.5 in bf16
        images, texts = images.float(), texts.float()
        all_images, all_texts, all_keys = gather(images), gather(texts), gather(keys)
        pairs = keys != NO_CAPTION  # B
        # Spare rows have no index, and their loss is not counted.
        own = torch.arange(first, first + len(keys), device=keys.device).clamp_(max=len(all_keys) - 1)
        same_caption = keys[:, None] == all_keys[None]  # B N
        is_other = own[:, None] != torch.arange(len(all_keys), device=keys.device)
        excluded = (same_caption | (all_keys == NO_CAPTION)) & is_other
        to_texts, to_images = scale * images @ all_texts.T, scale * texts @ all_images.T  # B N
        losses = [
            F.cross_entropy(logits.masked_fill(excluded, -torch.inf), own, reduction="none")
            for logits in (to_texts, to_images)
        ]
        hits = [same_caption.gather(1, logits.argmax(1, keepdim=True))[:, 0] for logits in (to_texts, to_images)]
    loss, chance = torch.stack(losses).mean(0), (~excluded).sum(1).log()
    text, image = ((hit & pairs).sum() for hit in hits)
    return ContrastiveLoss((loss * pairs).sum(), text, image, pairs.sum().float(), scale, (chance * pairs).sum())
