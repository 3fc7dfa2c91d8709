"""The prior as a stage: diffusion of CLIP image embeddings, conditioned on the CLIP's embedding of the caption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from kineograph.core import distributed
from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import ChecksHealth, SupportsCaching
from kineograph.core.errors import ConfigError
from kineograph.core.health import LOSS_FALLS, Limit
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Mean, Task
from kineograph.family.dalle2.config import PriorConfig, PriorSample
from kineograph.nn.positions import LearnedPositions, sincos_embedding
from kineograph.nn.transformer import Transformer, TransformerConfig, init_weights
from kineograph.process.diffusion import Diffusion
from kineograph.process.loss_ranges import loss_by_timestep
from kineograph.process.solvers import solve
from kineograph.text.clip import unit
from kineograph.text.clip_embedding import TEXT, CaptionEmbeddings, ClipEmbedder


class PriorNetwork(nn.Module):
    """A causal transformer: [token encodings · text embedding · time · noisy image embedding · query] → prediction at the query.

    Padding and null text are learned vectors, not masked: a dropped caption in training equals no caption in sampling.
    """

    def __init__(self, config: TransformerConfig, embed_width: int, text_width: int | None, length: int | None) -> None:
        super().__init__()
        width = self.width = config.width
        self.encoding = nn.Linear(text_width, width, bias=False) if text_width is not None else None
        self.text = nn.Linear(embed_width, width, bias=False)
        self.image = nn.Linear(embed_width, width, bias=False)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.answer = nn.Linear(width, embed_width, bias=False)
        init_weights(self, 1)
        self.length = 4 + (length or 0 if text_width is not None else 0)
        self.positions = LearnedPositions((self.length,), width)
        self.no_token = _learned_vector(width) if self.encoding is not None else None
        self.no_text, self.query = _learned_vector(width), _learned_vector(width)
        self.transformer = Transformer(config, causal=True)

    def forward(
        self,
        x: Tensor,  # B D, noisy embedding, unit variance
        t: Tensor,  # B, int64
        text: Tensor,  # B D, of length 1
        no_text: Tensor,  # B, bool
        encodings: Tensor | None = None,  # B L E
        mask: Tensor | None = None,  # B L
    ) -> Tensor:
        """B D"""
        dtype = self.query.dtype
        pooled = self.text(text.to(dtype) * text.shape[1] ** 0.5)  # B W
        pooled = torch.where(no_text[:, None], self.no_text.to(pooled.dtype), pooled)
        time = self.time(sincos_embedding(t[:, None], self.width).to(dtype) * self.width**0.5)
        query = repeat(self.query.to(pooled.dtype), "d -> b d", b=len(x))
        tokens = torch.stack([pooled, time, self.image(x.to(dtype)), query], dim=1)  # B 4 W
        if self.encoding is not None:
            assert encodings is not None and mask is not None and self.no_token is not None
            encoded = self.encoding(encodings.to(dtype))  # B L W
            real = (mask & ~no_text[:, None])[..., None]
            tokens = torch.cat([torch.where(real, encoded, self.no_token.to(encoded.dtype)), tokens], dim=1)
        hidden = self.transformer(tokens + self.positions())  # B N W
        return self.answer(hidden[:, -1])


def _learned_vector(width: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(width) * width**-0.5)


class SampleErrors(NamedTuple):
    error: Tensor  # B, 0 where the image embedding is missing
    present: Tensor  # B, 1 where it is there
    t: Tensor  # B, timesteps


class Prior(Task, SupportsCaching, ChecksHealth):
    """Embeddings of length 1 are multiplied by √D for diffusion, so that their values have unit variance like the noise."""

    Config = PriorConfig

    def __init__(self, config: PriorConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        self.config = config
        self.clip = ClipEmbedder(config.clip, context, self.stages)
        if config.text_encodings and self.clip.text_width is None:
            raise ConfigError(
                "text_encodings=true needs text encodings in the data: set clip.text_width and clip.length, or text_encodings=false"
            )
        self.width = self.clip.width
        self.scale = self.width**0.5
        text_width = self.clip.text_width if config.text_encodings else None
        self.network = PriorNetwork(config, self.width, text_width, self.clip.length)
        self.diffusion = Diffusion(config.diffusion)

    # training ------------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        return [self.network]

    def encode_batch(self, batch: Batch) -> CaptionEmbeddings:
        return self.clip.texts(batch, self.config.text_encodings)

    def predict(self, x: Tensor, t: Tensor, texts: CaptionEmbeddings) -> Tensor:
        return self.network(x, t, texts.embed, texts.empty, texts.encodings, texts.mask)

    def forward(self, batch: Batch, noise: Noise) -> SampleErrors:
        return self.compute_errors(self.clip.images(batch), self.encode_batch(batch), noise)

    def compute_errors(self, images: Tensor, texts: CaptionEmbeddings, noise: Noise) -> SampleErrors:
        if self.training:
            dropped = noise.bernoulli("caption dropout", self.config.caption_dropout)
            texts = texts._replace(empty=texts.empty | dropped)
        x0 = images * self.scale
        t = noise.integers("time", self.diffusion.steps)
        eps = noise.normal("noise", self.width)
        x_t = self.diffusion.add_noise(x0, eps, t)
        errors = self.diffusion.loss(self.predict(x_t, t, texts), x0, eps, x_t, t)
        present = (images != 0).any(dim=1).float()  # a row of zeros is a missing embedding
        return SampleErrors(errors * present, present, t)

    def loss(self, player: str, shared: SampleErrors) -> Loss:
        return Loss(Mean(shared.error.sum(), shared.present.sum()))

    def health_limits(self) -> tuple[Limit, ...]:
        return (LOSS_FALLS,)

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """The loss, also by quarter of the timesteps, and mean cosines of sampled embeddings with those of the true images, the captions, and,
        as a control that must stay low, other images. `cosine/true_to_text` is the value of `cosine/text` for a perfect prior."""
        images, texts = self.clip.images(batch), self.encode_batch(batch)
        errors = self.compute_errors(images, texts, noise)
        loss = self.loss("model", errors)
        samples = self.sample_embeddings(texts, noise, self.config.sample.model_copy(update={"candidates": 1}))
        # The image before each one in the batch of all processes.
        counted = images[: 0 if batch.spare else len(images)]
        first, everywhere = (
            distributed.count_rows_before(len(counted), images.device),
            distributed.all_gather_rows(counted),
        )
        others = everywhere[(torch.arange(len(images), device=images.device) + first - 1) % len(everywhere)]

        def mean_cosine(a: Tensor, b: Tensor) -> Mean:
            present = (a != 0).any(dim=1) & (b != 0).any(dim=1)
            return Mean((F.cosine_similarity(a, b, dim=-1) * present).sum(), present.sum())

        return {
            "loss": loss.total,
            **loss_by_timestep(errors.error, errors.t, self.diffusion.steps, errors.present),
            "cosine/image": mean_cosine(samples, images),
            "cosine/text": mean_cosine(samples, texts.embed),
            "cosine/shuffled": mean_cosine(samples, others if len(everywhere) > 1 else torch.zeros_like(samples)),
            "cosine/true_to_text": mean_cosine(images, texts.embed),
        }

    # sampling ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, prompts: Prompts, options: PriorSample | None = None) -> Tensor:
        """Image embeddings B D for captions, for text embeddings in `prompts.batch`, or for the null text."""
        batch = prompts.batch
        has_embeddings = batch is not None and TEXT in batch.extra
        if prompts.captions is not None and (self.clip.reads_captions or not has_embeddings):
            texts = self.clip.captions(prompts.captions, self.config.text_encodings)
        elif batch is not None and (has_embeddings or batch.captions is not None):
            texts = self.encode_batch(batch)
        else:
            texts = self.encode_null(prompts.noise)
        negative = None
        if prompts.negative is not None:
            negative = self.clip.captions(prompts.negative, self.config.text_encodings)
        return self.sample_embeddings(texts, prompts.noise, options or self.config.sample, negative)

    def encode_null(self, noise: Noise) -> CaptionEmbeddings:
        """The null text for every row."""
        rows, device = noise.batch, noise.device
        empty = torch.ones(rows, dtype=torch.bool, device=device)
        embed = torch.zeros(rows, self.width, device=device)
        if not self.config.text_encodings:
            return CaptionEmbeddings(embed, None, None, empty)
        length, width = self.clip.length or 0, self.clip.text_width or 0
        return CaptionEmbeddings(embed, embed.new_zeros(rows, length, width), empty.new_zeros(rows, length), empty)

    @torch.no_grad()
    def sample_embeddings(
        self, texts: CaptionEmbeddings, noise: Noise, options: PriorSample, negative: CaptionEmbeddings | None = None
    ) -> Tensor:
        """Image embeddings B D for texts; `negative` None: the null text."""
        count = options.candidates

        def draw_noise(name: str) -> Tensor:
            """Independent noise for each candidate, (n b) D."""
            return torch.cat([noise.normal(f"prior {name} {number}", self.width) for number in range(count)])

        guide = options.guidance != 1
        parts = [texts] * count
        if guide:
            parts += [negative or self.encode_null(noise)] * count
        condition = _concat(parts)
        samples = solve(
            self.diffusion,
            lambda x, t: self.predict(x, t, condition),
            draw_noise("start"),
            options.solver_options(),
            noise=lambda number: draw_noise(f"step {number}"),
            guide=guide,
            clip=(lambda x0: unit(x0) * self.scale) if options.sphere else None,
        )
        best = select_most_similar(rearrange(samples / self.scale, "(n b) d -> n b d", n=count), texts)
        return unit(best) if options.normalize else best

    # caching, compilation, checkpoints -----------------------------------------------------------------------------

    @classmethod
    def can_cache(cls, config: PriorConfig) -> bool:
        return not config.clip_is_precomputed

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        return self.clip.precomputed(batch, self.config.text_encodings)

    def compile_targets(self) -> list[nn.Module]:
        return [self.network]

    def blocks(self) -> list[nn.Module]:
        return list(self.network.transformer.blocks)

    def tokens_per_clip(self) -> int:
        return self.network.length


def select_most_similar(candidates: Tensor, texts: CaptionEmbeddings) -> Tensor:
    """Of n candidates, n B D, the one most similar to its caption's embedding, B D; the first where there is no caption."""
    similarity = F.cosine_similarity(candidates, texts.embed[None], dim=-1)  # n B
    best = similarity.argmax(0).masked_fill(texts.empty, 0)
    return candidates.gather(0, repeat(best, "b -> 1 b d", d=candidates.shape[2]))[0]


def _concat(parts: Sequence[CaptionEmbeddings]) -> CaptionEmbeddings:
    """Concatenate the rows of all parts."""
    encodings = [part.encodings for part in parts if part.encodings is not None]
    masks = [part.mask for part in parts if part.mask is not None]
    return CaptionEmbeddings(
        torch.cat([part.embed for part in parts]),
        torch.cat(encodings) if encodings else None,
        torch.cat(masks) if masks else None,
        torch.cat([part.empty for part in parts]),
    )


TASK = Prior
