"""Muse as a stage: training on hidden tokens, and drawing images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from kineograph.codec.token_grid import encode_tokens
from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import DescribesStart, SupportsCaching, SupportsSampling, SupportsUpscaling
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise, key_of
from kineograph.core.task import BuildContext, Codec, Loss, Task
from kineograph.family.muse.config import MuseConfig, MuseSample
from kineograph.family.muse.network import Condition, MuseNetwork
from kineograph.nn.head import Head
from kineograph.process.masking import (
    Critic,
    MaskedLoss,
    TokenMask,
    mask_tokens,
    resample_masked,
    sample_tokens_guided,
    sum_critic_loss,
)
from kineograph.text import build_text
from kineograph.text.conditioning import (
    compute_cached_text,
    encode_batch,
    encode_prompts,
)


class Muse(Task, SupportsSampling, SupportsCaching, SupportsUpscaling, DescribesStart):
    Config = MuseConfig

    def __init__(self, config: MuseConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        shape = context.shape
        if shape.frames != 1:
            raise ConfigError(f"data.frames={shape.frames} does not fit muse, which draws images: set data.frames=1")
        self.config, self.shape = config, shape
        codec, self.vocabulary = context.token_codec(config.codec)
        self.mask_id = self.vocabulary
        _, height, width = codec.shape_for(1, shape.height, shape.width)
        self.grid = (height, width)
        self.stages["codec"] = codec
        self.low_res = self._find_low_res(config, context) if config.low_res else None
        self.text = build_text(config.text, context)
        text_width = self.text.width if self.text is not None else None
        self.network = MuseNetwork(
            config, self.vocabulary, self.grid, text_width, self.low_res, config.self_conditioning
        )
        self.head = Head(config.width, self.vocabulary, config.label_smoothing)
        self.critic = nn.Linear(config.width, 1) if config.critic == "self" else None

    @classmethod
    def build(cls, config: MuseConfig, context: BuildContext) -> Muse:
        return cls(config, context)

    def _find_low_res(self, config: MuseConfig, context: BuildContext) -> tuple[int, tuple[int, int]]:
        """Vocabulary and grid of the smaller image's tokens."""
        assert config.low_res is not None
        stage = context.stage(config.low_res)
        if isinstance(stage, Muse):
            self.stages["base"] = stage
            codec, vocabulary = stage.codec, stage.vocabulary
            size = (stage.shape.height, stage.shape.width)
            if config.low_res_size not in (None, size):
                raise ConfigError(
                    f"low_res_size={config.low_res_size} does not fit low_res={config.low_res}, which draws {size}: leave it out"
                )
        else:
            codec, vocabulary = context.token_codec(config.low_res, "low_res")
            size = config.low_res_size or (self.shape.height // 2, self.shape.width // 2)
        self.stages["low_res"], self.low_res_size = codec, size
        _, height, width = codec.shape_for(1, *size)
        return vocabulary, (height, width)

    # conditions ----------------------------------------------------------------------------------------------------

    def tokens(self, batch: Batch) -> Tensor:
        """B N: from a cache, or from the codec."""
        return rearrange(encode_tokens(self.codec, batch, (1, *self.grid), "muse"), "b 1 h w -> b (h w)")

    @property
    def codec(self) -> Codec:
        return self.stage("codec", Codec)

    def read_low_res(self, batch: Batch) -> Tensor | None:
        """Tokens of the same images made smaller, B M."""
        if "low_res" not in self.stages:
            return None
        if "low_res_tokens" in batch.extra:
            return batch.extra["low_res_tokens"].flatten(1)
        if batch.pixels is None:
            raise InputError(
                "super-resolution reads pixels to make them smaller: cache low_res_tokens beside the tokens, or train from pixels"
            )
        return self.shrink(batch.video)

    @torch.no_grad()
    def shrink(self, pixels: Tensor) -> Tensor:
        """B 1 C H W → tokens of the smaller image, B M."""
        if tuple(pixels.shape[-2:]) != self.low_res_size:
            small = F.interpolate(pixels[:, 0], self.low_res_size, mode="bicubic", antialias=True).clamp(0, 1)
            pixels = small[:, None]
        return self.stage("low_res", Codec).encode(pixels).flatten(1)

    def condition(self, batch: Batch, dropped: Tensor | None = None) -> Condition:
        return Condition(*encode_batch(self.text, batch, dropped), self.read_low_res(batch))

    # training ------------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        return [module for module in (self.network, self.head, self.text, self.critic) if module is not None]

    def hidden(self, tokens: Tensor, condition: Condition, previous: Tensor | None = None) -> Tensor:
        """B N → B N D."""
        if self.config.self_conditioning and previous is None:
            previous = torch.zeros(*tokens.shape, self.config.width, device=tokens.device)
        return self.network(tokens, condition.text, condition.mask, condition.low_res, previous)

    def predict(self, tokens: Tensor, condition: Condition, noise: Noise) -> tuple[TokenMask, Tensor]:
        """Hide tokens and run the network: where the scored ones lie, and their hidden states, R D."""
        masked = mask_tokens(noise, tokens.shape[1], bias=self.config.mask_bias)
        inputs = tokens.masked_fill(masked.mask, self.mask_id)
        previous = None
        if self.config.self_conditioning and key_of(noise.seed, noise.step, "self-conditioning") % 2:
            with torch.no_grad():
                previous = self.hidden(inputs, condition)
        hidden = self.hidden(inputs, condition, previous)
        return masked, hidden.flatten(0, 1).index_select(0, masked.rows)

    def resample_masked(
        self, rows: Tensor, masked: TokenMask, tokens: Tensor, noise: Noise, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Tokens with the model's own draws at the scored places, B N, and which of the R draws are wrong."""
        return resample_masked(self.head.logits, self.head.chunks(len(rows)), rows, masked, tokens, noise, temperature)

    def forward(self, batch: Batch, noise: Noise) -> MaskedLoss:
        tokens = self.tokens(batch)
        dropped = noise.bernoulli("caption dropout", self.config.caption_dropout) if self.training else None
        condition = self.condition(batch, dropped)
        masked, rows = self.predict(tokens, condition, noise)
        targets = tokens.flatten().index_select(0, masked.rows)
        loss, correct = self.head(rows, targets, masked.weights)
        scored = MaskedLoss(loss, correct, masked.weights.sum())
        if self.critic is not None:
            filled, wrong = self.resample_masked(rows.detach(), masked, tokens, noise)
            scored.critic = sum_critic_loss(self.critic(self.hidden(filled, condition)), masked, wrong)
        return scored

    def loss(self, player: str, shared: MaskedLoss) -> Loss:
        return shared.loss(self.config.critic_weight)

    # sampling ------------------------------------------------------------------------------------------------------

    def prompted(self, prompts: Prompts) -> tuple[Condition, Condition | None]:
        """What is asked for, and what to be guided away from (None: nothing was asked for)."""
        shape = self.shape
        asked = (prompts.frames or 1, prompts.height or shape.height, prompts.width or shape.width)
        if asked != (1, shape.height, shape.width):
            raise InputError(
                f"frames × height × width = {asked} cannot be drawn: this muse was trained for {(1, shape.height, shape.width)}"
            )
        low_res = self.prompted_low_res(prompts)
        wanted, other = encode_prompts(self.text, prompts)
        return Condition(*wanted, low_res), None if other is None else Condition(*other, low_res)

    def prompted_low_res(self, prompts: Prompts) -> Tensor | None:
        """The smaller image's tokens: of a given picture, or drawn by the base generator, or of a real sample beside the prompt."""
        if "low_res" not in self.stages:
            if prompts.prime is not None:
                raise InputError("muse draws images from text: a given picture is used by super-resolution stages only")
            return None
        if prompts.prime is not None:
            return self.shrink(prompts.prime[:, :1])
        if "base" in self.stages:
            base = self.stage("base", Muse)
            inner = Prompts(prompts.noise, prompts.captions, prompts.negative, batch=prompts.batch)
            return base.draw(inner, base.config.sample).flatten(1)
        if prompts.batch is None:
            raise InputError(
                "this super-resolution stage has a codec as low_res and nothing to enlarge: give a picture with --prime"
            )
        return self.read_low_res(prompts.batch)

    def describe_start(self, prompts: Prompts) -> str | None:
        if "low_res" not in self.stages or "base" in self.stages or prompts.prime is not None:
            return None
        return f"real pictures made smaller, {self.low_res_size[0]} × {self.low_res_size[1]}"

    def can_upscale(self) -> bool:
        return "low_res" in self.stages

    def prime_size(self, options: Any) -> tuple[int, int] | None:
        return self.low_res_size if "low_res" in self.stages else None

    @torch.no_grad()
    def draw(
        self, prompts: Prompts, options: MuseSample, make_critic: Callable[[Condition], Critic] | None = None
    ) -> Tensor:
        """Tokens for prompts, B 1 h w."""
        wanted, other = self.prompted(prompts)
        rows, length = len(prompts), self.grid[0] * self.grid[1]
        guide = options.guidance != 1 and other is not None
        both = wanted.join(other) if guide and other is not None else wanted
        memory = self.network.memory(both)
        previous: list[Tensor | None] = [None]
        if self.config.self_conditioning:
            previous[0] = torch.zeros(
                rows * (2 if guide else 1), length, self.config.width, device=prompts.noise.device
            )

        def hidden(tokens: Tensor, step: int) -> Tensor:
            found = self.network(tokens, both.text, both.mask, both.low_res, previous[0], memory)
            if self.config.self_conditioning:
                previous[0] = found.clone()  # a CUDA graph writes its next result where this one lies
            return found

        if make_critic is None and self.critic is not None:
            make_critic = self._self_critic
        tokens = sample_tokens_guided(
            hidden,
            self.head.logits,
            torch.full((rows, length), self.mask_id, device=prompts.noise.device),
            options,
            guide=guide,
            mask_id=self.mask_id,
            noise=prompts.noise,
            critic=make_critic(wanted) if make_critic is not None else None,
        )
        return rearrange(tokens, "b (h w) -> b 1 h w", h=self.grid[0])

    def _self_critic(self, condition: Condition) -> Critic:
        assert self.critic is not None
        head = self.critic
        return lambda tokens, step: head(self.hidden(tokens, condition))[..., 0]

    def sample(self, prompts: Prompts, options: MuseSample) -> Tensor:
        return self.decode(self.draw(prompts, options))

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        return self.codec.decode(tokens)

    @classmethod
    def can_cache(cls, config: MuseConfig) -> bool:
        return config.low_res is None  # super-resolution reads pixels, to make them smaller

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens, and the text where its encoder is frozen."""
        tokens = self.tokens(batch).view(len(batch), 1, *self.grid)
        return {"tokens": tokens, **compute_cached_text(self.text, batch)}

    # how the outside treats it -------------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        return [self.network, self.head.softmax, *(self.text.compile_targets() if self.text is not None else [])]

    def blocks(self) -> list[nn.Module]:
        return list(self.network.transformer.blocks)

    def assets(self) -> dict[str, str]:
        return self.text.assets() if self.text is not None else {}

    def tokens_per_clip(self) -> int:
        return self.grid[0] * self.grid[1]
