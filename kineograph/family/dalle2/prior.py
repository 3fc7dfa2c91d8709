"""The prior as a stage: the diffusion of CLIP image embeddings, given what a CLIP makes of the caption."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import SupportsCaching
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Mean, Task
from kineograph.family.dalle2.prior_config import PriorConfig, PriorSample
from kineograph.family.dalle2.prior_network import PriorNetwork
from kineograph.process.diffusion import Diffusion
from kineograph.process.solvers import solve
from kineograph.text.clip import unit
from kineograph.text.clip_embedding import TEXT, CaptionEmbeddings, ClipEmbedder


class Prior(Task, SupportsCaching):
    """Embeddings of length 1 are diffused as √D times themselves, so that their values are about 1, as the noise is."""

    Config = PriorConfig

    @classmethod
    def can_cache(cls, config: PriorConfig) -> bool:
        return not config.clip_is_given

    def __init__(self, config: PriorConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        self.config = config
        self.clip = ClipEmbedder(config.clip, context, self.stages)
        if config.text_encodings and self.clip.text_width is None:
            raise ConfigError(
                "text_encodings=true and the data have none: give clip.text_width and clip.length, or set text_encodings=false"
            )
        self.width = self.clip.width
        self.scale = self.width**0.5
        text_width = self.clip.text_width if config.text_encodings else None
        self.network = PriorNetwork(config, self.width, text_width, self.clip.length)
        self.diffusion = Diffusion(config.diffusion)

    @classmethod
    def build(cls, config: PriorConfig, context: BuildContext) -> Prior:
        return cls(config, context)

    def trainable(self, player: str) -> list[nn.Module]:
        return [self.network]

    # training ------------------------------------------------------------------------------------------------------

    def texts(self, batch: Batch) -> CaptionEmbeddings:
        return self.clip.texts(batch, self.config.text_encodings)

    def predict(self, x: Tensor, t: Tensor, texts: CaptionEmbeddings) -> Tensor:
        return self.network(x, t, texts.embed, texts.empty, texts.encodings, texts.mask)

    def forward(self, batch: Batch, noise: Noise) -> Tensor:
        """The loss of each sample, B."""
        return self.errors(self.clip.images(batch), self.texts(batch), noise)

    def errors(self, images: Tensor, texts: CaptionEmbeddings, noise: Noise) -> Tensor:
        if self.training:
            dropped = noise.bernoulli("caption dropout", self.config.caption_dropout)
            texts = texts._replace(empty=texts.empty | dropped)
        x0 = images * self.scale
        t = noise.integers("time", self.diffusion.steps)
        eps = noise.normal("noise", self.width)
        x_t = self.diffusion.add_noise(x0, eps, t)
        found = self.diffusion.loss(self.predict(x_t, t, texts), x0, eps, x_t, t)
        there = (images != 0).any(dim=1).float()  # a row of zeros is no embedding: the others count for it
        return found * there * (len(images) / there.sum().clamp(min=1))

    def loss(self, player: str, shared: Tensor) -> Loss:
        return Loss(Mean(shared.sum(), float(len(shared))))

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """The loss, and how like (cosine) embeddings drawn for the captions are to the true images', to the captions', and, as a control that
        must stay low, to those of other images. `cosine/true_to_text` is what a perfect prior would have in place of `cosine/text`."""
        images, texts = self.clip.images(batch), self.texts(batch)
        found = self.loss("model", self.errors(images, texts, noise))
        drawn = self.draw(texts, noise, self.config.sample.model_copy(update={"candidates": 1}))
        rows = float(len(images))

        def like(a: Tensor, b: Tensor, count: float = rows) -> Mean:
            return Mean(F.cosine_similarity(a, b, dim=-1).sum() * (count > 0), count)

        return {
            "loss": found.total,
            "cosine/image": like(drawn, images),
            "cosine/text": like(drawn, texts.embed),
            "cosine/shuffled": like(drawn, images.roll(1, 0), rows if rows > 1 else 0.0),
            "cosine/true_to_text": like(images, texts.embed),
        }

    # drawing -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, prompts: Prompts, options: PriorSample | None = None) -> Tensor:
        """Image embeddings for prompts, B D: of their captions, or of text embeddings in `prompts.batch`, or of no text at all."""
        batch = prompts.batch
        given = batch is not None and TEXT in batch.extra
        if prompts.captions is not None and (self.clip.reads_captions or not given):
            texts = self.clip.captions(prompts.captions, self.config.text_encodings)
        elif batch is not None and (given or batch.captions is not None):
            texts = self.texts(batch)
        else:
            texts = self.silence(prompts.noise)
        other = None
        if prompts.negative is not None:
            other = self.clip.captions(prompts.negative, self.config.text_encodings)
        return self.draw(texts, prompts.noise, options or self.config.sample, other)

    def silence(self, noise: Noise) -> CaptionEmbeddings:
        """No text for every row."""
        rows, device = noise.batch, noise.device
        empty = torch.ones(rows, dtype=torch.bool, device=device)
        embed = torch.zeros(rows, self.width, device=device)
        if not self.config.text_encodings:
            return CaptionEmbeddings(embed, None, None, empty)
        length, width = self.clip.length or 0, self.clip.text_width or 0
        return CaptionEmbeddings(embed, embed.new_zeros(rows, length, width), empty.new_zeros(rows, length), empty)

    @torch.no_grad()
    def draw(
        self, texts: CaptionEmbeddings, noise: Noise, options: PriorSample, other: CaptionEmbeddings | None = None
    ) -> Tensor:
        """Embeddings for texts, guided away from `other` (None: from no text), B D."""
        count = options.candidates

        def draws(name: str) -> Tensor:
            """Each candidate's own noise, (n b) D."""
            return torch.cat([noise.normal(f"prior {name} {number}", self.width) for number in range(count)])

        guide = options.guidance != 1
        wanted = _repeated(texts, count)
        both = _joined(wanted, _repeated(other or self.silence(noise), count)) if guide else wanted
        found = solve(
            self.diffusion,
            lambda x, t: self.predict(x, t, both),
            draws("start"),
            options.solving(),
            noise=lambda number: draws(f"step {number}"),
            guide=guide,
            clip=self.on_sphere if options.sphere else lambda x0: x0,
        )
        found = rearrange(found / self.scale, "(n b) d -> n b d", n=count)
        best = most_alike(found, texts)
        return unit(best) if options.normalize else best

    def on_sphere(self, x0: Tensor) -> Tensor:
        return unit(x0) * self.scale

    # how the outside treats it -------------------------------------------------------------------------------------

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        return self.clip.precomputed(batch, self.config.text_encodings)

    def compile_targets(self) -> list[nn.Module]:
        return [self.network]

    def blocks(self) -> list[nn.Module]:
        return list(self.network.transformer.blocks)

    def tokens_per_clip(self) -> int:
        return self.network.length


def most_alike(candidates: Tensor, texts: CaptionEmbeddings) -> Tensor:
    """Of n candidates, n B D, the one most like its caption's embedding, B D; without a caption the first."""
    likeness = F.cosine_similarity(candidates, texts.embed[None], dim=-1)  # n B
    best = likeness.argmax(0).masked_fill(texts.empty, 0)
    return candidates.gather(0, repeat(best, "b -> 1 b d", d=candidates.shape[2]))[0]


def _repeated(texts: CaptionEmbeddings, count: int) -> CaptionEmbeddings:
    """The same rows so many times, one after another."""
    return CaptionEmbeddings(*(None if part is None else torch.cat([part] * count) for part in texts))  # type: ignore[arg-type]


def _joined(first: CaptionEmbeddings, second: CaptionEmbeddings) -> CaptionEmbeddings:
    """The rows of both."""
    return CaptionEmbeddings(
        *(None if a is None or b is None else torch.cat([a, b]) for a, b in zip(first, second, strict=True))  # type: ignore[arg-type]
    )


TASK = Prior
