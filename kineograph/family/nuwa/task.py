"""The NUWA task: autoregressive training on a codec's tokens, with or without sound, conditioned on text and sketches."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from kineograph.codec.token_grid import encode_tokens
from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import (
    ChecksHealth,
    MakesSound,
    SupportsCaching,
    SupportsContinuation,
    SupportsSampling,
)
from kineograph.core.errors import InputError
from kineograph.core.health import Limit
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Codec, Loss, Task
from kineograph.family.nuwa.config import NuwaConfig, NuwaSample
from kineograph.family.nuwa.decoding import SessionCache
from kineograph.family.nuwa.network import Condition, DecodeStep, NuwaNetwork
from kineograph.family.nuwa.sampling import sample_clips
from kineograph.family.nuwa.sound import SoundRows
from kineograph.nn.codebook_use import describe_targets, token_limits
from kineograph.nn.head import Head
from kineograph.process.token_loss import TokenLoss
from kineograph.text import build_text
from kineograph.text.conditioning import compute_cached_text, encode_batch


class Nuwa(Task, SupportsSampling, MakesSound, SupportsContinuation, SupportsCaching, ChecksHealth):
    Config = NuwaConfig

    def __init__(self, config: NuwaConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        self.config, self.shape = config, context.shape
        size = (context.shape.frames, context.shape.height, context.shape.width)
        codec, self.vocabulary = context.token_codec(config.codec)
        self.stages["codec"] = codec
        self.grid = codec.shape_for(*size)
        self.sound: SoundRows | None = None
        if config.sound is not None:
            self.sound = SoundRows.open(config.sound, context, self.grid, self.vocabulary)
            self.stages["sound"] = self.sound.codec
            self.grid, self.vocabulary = self.sound.grid, self.sound.vocabulary  # of pictures and sound
        sketch = None
        if config.sketch is not None:
            sketch_codec, sketch_vocabulary = context.token_codec(config.sketch, "sketch")
            self.stages["sketch"] = sketch_codec
            sketch = sketch_vocabulary, sketch_codec.shape_for(*size)
        self.text = build_text(config.text, context)
        text_width = self.text.width if self.text is not None else None
        sound_rows = self.sound.rows if self.sound is not None else 0
        self._build_network = partial(NuwaNetwork, config, self.vocabulary, self.grid, text_width, sketch, sound_rows)
        self._build_head = partial(Head, config.width, self.vocabulary, config.label_smoothing)
        self.network, self.head = self._build_network(), self._build_head()
        self.decode_step = DecodeStep()
        self.sessions = SessionCache()

    @property
    def codec(self) -> Codec:
        return self.stage("codec", Codec)

    def decode(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """B t h w → pixels, and the tokens of the sound, B t n."""
        if self.sound is None:
            return self.codec.decode(tokens), None
        picture, sound = self.sound.split(tokens)
        return self.codec.decode(picture), sound

    def build_on_meta(self) -> tuple[NuwaNetwork, Head]:
        """A second network and head on the meta device."""
        with torch.device("meta"):
            return self._build_network(), self._build_head()

    # conditions ----------------------------------------------------------------------------------------------------

    def get_tokens(self, batch: Batch) -> Tensor:
        """B t h w, from the cache or the codec; with sound, its rows follow those of the picture in each frame."""
        if self.sound is None:
            return encode_tokens(self.codec, batch, self.grid, "nuwa")
        picture = encode_tokens(self.codec, batch, self.sound.picture, "nuwa")
        return self.sound.encode(picture, batch.extra["audio"])

    def encode_sketch(self, batch: Batch) -> Tensor | None:
        """Sketch tokens of a batch, B t h w, blank at padded frames; None: no sketches, or the model reads none."""
        if "sketch" not in batch.extra or self.network.sketch is None:
            return None
        codec = self.stage("sketch", Codec)
        with torch.no_grad():
            tokens = codec.encode(batch.extra["sketch"].float() / 255, batch.frame_mask)
        if batch.frame_mask is not None:
            padding = ~codec.mask_for(batch.frame_mask)[:, :, None, None]
            tokens = tokens.masked_fill(padding, self.network.sketch.blank_id)
        return tokens

    def encode_prompt_sketch(self, prompts: Prompts) -> Tensor | None:
        """Sketch tokens for sampling, B t h w, blank without a sketch; None: the model reads no sketches."""
        if self.network.sketch is None:
            return None
        tokens = self.encode_sketch(prompts.batch) if prompts.batch is not None else None
        if tokens is not None:
            return tokens
        shape = (len(prompts), *self.network.sketch.grid)
        return torch.full(shape, self.network.sketch.blank_id, device=prompts.noise.device)

    def encode_batch(self, batch: Batch, noise: Noise | None = None) -> Condition:
        """Text and sketch of a batch. In training some rows lose their caption, some their sketch."""
        noise = noise if self.training else None
        dropped = noise.bernoulli("caption dropout", self.config.caption_dropout) if noise is not None else None
        text = encode_batch(self.text, batch, dropped)
        if self.network.sketch is None:
            return Condition(*text)
        tokens = self.encode_sketch(batch)
        if tokens is None:
            raise InputError(
                "this nuwa reads sketches, and these samples have none: use data with a sketch (T C H W), or set sketch=null"
            )
        if noise is not None:
            dropped = noise.bernoulli("sketch dropout", self.config.sketch_dropout)
            tokens = tokens.masked_fill(dropped[:, None, None, None], self.network.sketch.blank_id)
        return Condition(*text, self.network.sketch.crop(tokens))

    # training ------------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        return [module for module in (self.network, self.head, self.text) if module is not None]

    def forward(self, batch: Batch, noise: Noise) -> TokenLoss:
        tokens = self.get_tokens(batch)  # B t h w
        condition = self.encode_batch(batch, noise)
        hidden = self.network(tokens.flatten(1), *condition)  # B N D
        if batch.frame_mask is None:
            weights = torch.ones(tokens.numel(), device=tokens.device)
        else:
            # Padding comes last, so no real token attends to it; it only has to leave the loss.
            weights = self.codec.mask_for(batch.frame_mask)[:, :, None, None].expand_as(tokens).flatten().float()
        loss, correct = self.head(hidden.flatten(0, 1), tokens.flatten(), weights)
        targets = {}
        if not self.training:
            targets = describe_targets(tokens, self.vocabulary, weights.view_as(tokens), batch.spare)
        return TokenLoss(loss, correct, weights.sum(), targets=targets)

    def loss(self, player: str, shared: TokenLoss) -> Loss:
        return shared.loss()

    def health_limits(self) -> tuple[Limit, ...]:
        return token_limits(self.config.label_smoothing)

    # sampling ------------------------------------------------------------------------------------------------------

    def usual_overlap(self, options: NuwaSample) -> int | None:
        return options.overlap

    @torch.no_grad()
    def sample(self, prompts: Prompts, options: NuwaSample) -> Tensor:
        return sample_clips(self, prompts, options)[0]

    def makes_sound(self) -> bool:
        return self.sound is not None

    @torch.no_grad()
    def sample_with_sound(self, prompts: Prompts, options: NuwaSample) -> tuple[Tensor, Tensor]:
        pixels, sound = sample_clips(self, prompts, options)
        assert sound is not None
        return pixels, sound

    @classmethod
    def can_cache(cls, config: NuwaConfig) -> bool:
        return config.sketch is None and config.sound is None  # these are encoded in every step

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens, and text embeddings if the encoder is frozen."""
        return {"tokens": self.get_tokens(batch), **compute_cached_text(self.text, batch)}

    # for compilation, sharding and checkpoints ----------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        text = self.text.compile_targets() if self.text is not None else []
        return [self.network, self.decode_step, self.head.softmax, *text]

    def blocks(self) -> list[nn.Module]:
        return list(self.network.blocks)

    def assets(self) -> dict[str, str]:
        return self.text.assets() if self.text is not None else {}

    def tokens_per_clip(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]
