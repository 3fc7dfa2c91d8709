"""NUWA as a stage: every token of a clip is learned from those before it, and drawn after them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kineograph.codec.token_grid import encode_tokens
from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import SupportsCaching, SupportsContinuation, SupportsSampling
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Codec, Loss, Mean, Task
from kineograph.family.nuwa.canvas import Easel
from kineograph.family.nuwa.config import NuwaConfig, NuwaSample
from kineograph.family.nuwa.generation import draw
from kineograph.family.nuwa.network import Condition, NuwaNetwork, OneStep
from kineograph.nn.head import Head
from kineograph.text import build_text
from kineograph.text.conditioning import compute_cached_text, encode_batch


@dataclass
class Scored:
    """Sums over the tokens of a batch that are no padding."""

    cross_entropy: Tensor
    correct: Tensor
    count: Tensor


class Nuwa(Task, SupportsSampling, SupportsContinuation, SupportsCaching):
    Config = NuwaConfig

    def __init__(self, config: NuwaConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        self.config, self.shape = config, context.shape
        size = (context.shape.frames, context.shape.height, context.shape.width)
        codec, self.vocabulary = context.token_codec(config.codec)
        self.stages["codec"] = codec
        self.grid = codec.shape_for(*size)
        sketch = None
        if config.sketch is not None:
            sketch_codec, sketch_vocabulary = context.token_codec(config.sketch, "sketch")
            self.stages["sketch"] = sketch_codec
            sketch = sketch_vocabulary, sketch_codec.shape_for(*size)
        self.text = build_text(config.text, context)
        text_width = self.text.width if self.text is not None else None
        self._network = partial(NuwaNetwork, config, self.vocabulary, self.grid, text_width, sketch)
        self._head = partial(Head, config.width, self.vocabulary, config.label_smoothing)
        self.network, self.head = self._network(), self._head()
        self.one_step = OneStep()
        self.easel = Easel()

    @classmethod
    def build(cls, config: NuwaConfig, context: BuildContext) -> Nuwa:
        return cls(config, context)

    @property
    def codec(self) -> Codec:
        return self.stage("codec", Codec)

    def blank(self) -> tuple[NuwaNetwork, Head]:
        """Another network and head, of the meta device: without numbers."""
        with torch.device("meta"):
            return self._network(), self._head()

    # conditions ----------------------------------------------------------------------------------------------------

    def tokens(self, batch: Batch) -> Tensor:
        """B t h w: from a cache, or from the codec."""
        return encode_tokens(self.codec, batch, self.grid, "nuwa")

    def sketch_tokens(self, batch: Batch) -> Tensor | None:
        """Tokens of the sketches that come with a batch, B t h w, the id for nothing where frames are padding. None: there are no sketches."""
        if "sketch" not in batch.extra or self.network.sketch is None:
            return None
        codec = self.stage("sketch", Codec)
        with torch.no_grad():
            tokens = codec.encode(batch.extra["sketch"].float() / 255, batch.frame_mask)
        if batch.frame_mask is not None:
            tokens = tokens.masked_fill(
                ~codec.mask_for(batch.frame_mask)[:, :, None, None], self.network.sketch.nothing
            )
        return tokens

    def read_sketch(self, batch: Batch, dropped: Tensor | None = None) -> Tensor | None:
        """The same for training, B M; rows where `dropped` (B) see nothing."""
        if self.network.sketch is None:
            return None
        tokens = self.sketch_tokens(batch)
        if tokens is None:
            raise InputError(
                "this nuwa draws after sketches, and these samples have none: use data that give one (sketch, T C H W), or set sketch=null"
            )
        if dropped is not None:
            tokens = tokens.masked_fill(dropped[:, None, None, None], self.network.sketch.nothing)
        return self.network.sketch.cut(tokens)

    def prompted_sketch(self, prompts: Prompts) -> Tensor | None:
        """The sketches beside the prompts, B t h w; without any, nothing is sketched."""
        if self.network.sketch is None:
            return None
        found = self.sketch_tokens(prompts.batch) if prompts.batch is not None else None
        if found is not None:
            return found
        shape = (len(prompts), *self.network.sketch.grid)
        return torch.full(shape, self.network.sketch.nothing, device=prompts.noise.device)

    def condition(self, batch: Batch, noise: Noise | None = None) -> Condition:
        """What a batch of clips comes with; in training some rows without their caption, some without their sketch."""
        teach = noise if self.training else None
        dropped = teach.bernoulli("caption dropout", self.config.caption_dropout) if teach is not None else None
        blank = teach.bernoulli("sketch dropout", self.config.sketch_dropout) if teach is not None else None
        return Condition(*encode_batch(self.text, batch, dropped), self.read_sketch(batch, blank))

    # training ------------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        return [module for module in (self.network, self.head, self.text) if module is not None]

    def forward(self, batch: Batch, noise: Noise) -> Scored:
        tokens = self.tokens(batch)  # B t h w
        condition = self.condition(batch, noise)
        hidden = self.network(tokens.flatten(1), condition.text, condition.mask, condition.sketch)  # B N D
        if batch.frame_mask is None:
            weights = torch.ones(tokens.numel(), device=tokens.device)
        else:  # padding is at the end, so no real token sees it: it is only left out of the score
            weights = self.codec.mask_for(batch.frame_mask)[:, :, None, None].expand_as(tokens).flatten().float()
        loss, correct = self.head(hidden.flatten(0, 1), tokens.flatten(), weights)
        return Scored(loss, correct, weights.sum())

    def loss(self, player: str, shared: Scored) -> Loss:
        terms = {
            "cross_entropy": Mean(shared.cross_entropy.detach(), shared.count),
            "accuracy": Mean(shared.correct, shared.count),
        }
        return Loss(Mean(shared.cross_entropy, shared.count), terms)

    # sampling ------------------------------------------------------------------------------------------------------

    def usual_overlap(self, options: NuwaSample) -> int | None:
        return options.overlap

    @torch.no_grad()
    def sample(self, prompts: Prompts, options: NuwaSample) -> Tensor:
        return draw(self, prompts, options)

    @classmethod
    def can_cache(cls, config: NuwaConfig) -> bool:
        return config.sketch is None  # sketches come as pixels

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens, and the text where its encoder is frozen."""
        return {"tokens": self.tokens(batch), **compute_cached_text(self.text, batch)}

    # how the outside treats it -------------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        return [
            self.network,
            self.one_step,
            self.head.softmax,
            *(self.text.compile_targets() if self.text is not None else []),
        ]

    def blocks(self) -> list[nn.Module]:
        return list(self.network.blocks)

    def assets(self) -> dict[str, str]:
        return self.text.assets() if self.text is not None else {}

    def tokens_per_clip(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]
