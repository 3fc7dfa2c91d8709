"""The Muse task: masked token modelling of images, super-resolution, and sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from kineograph.codec.token_grid import encode_tokens
from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import (
    ChecksHealth,
    DescribesStart,
    RoutesCaptions,
    SupportsCaching,
    SupportsSampling,
    SupportsUpscaling,
    takes_captions,
)
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.health import Limit
from kineograph.core.noise import Noise, key_of
from kineograph.core.task import BuildContext, Codec, Loss, Task
from kineograph.family.muse.config import MuseConfig, MuseSample
from kineograph.family.muse.network import Condition, Grid, MuseNetwork
from kineograph.nn.codebook_use import describe_targets, token_limits
from kineograph.nn.head import Head
from kineograph.process.loss_ranges import loss_by_mask_share
from kineograph.process.masking import (
    Critic,
    TokenMask,
    mask_tokens,
    resample_masked,
    sample_tokens_guided,
    sum_critic_loss,
)
from kineograph.process.token_loss import TokenLoss
from kineograph.text import build_text
from kineograph.text.conditioning import compute_cached_text, encode_batch, encode_prompts

LOW_RES = "low_res_tokens"  # in Batch.extra: B M, of a cache
MakeCritic = Callable[[Condition], Critic]


class Muse(Task, SupportsSampling, SupportsCaching, SupportsUpscaling, RoutesCaptions, DescribesStart, ChecksHealth):
    Config = MuseConfig

    def __init__(self, config: MuseConfig, context: BuildContext) -> None:
        super().__init__(reads=config.reads())
        shape = context.shape
        if shape.frames != 1:
            raise ConfigError(f"data.frames={shape.frames} does not fit muse, which draws images: set data.frames=1")
        self.config, self.shape, self.name = config, shape, context.name
        codec, self.vocabulary = context.token_codec(config.codec)
        self.mask_id = self.vocabulary
        _, height, width = codec.shape_for(1, shape.height, shape.width)
        self.grid: Grid = (height, width)
        self.stages["codec"] = codec
        self.low_res = self._set_low_res(config.low_res, context) if config.low_res else None
        self.text = build_text(config.text, context)
        text_width = self.text.width if self.text is not None else None
        self.network = MuseNetwork(
            config, self.vocabulary, self.grid, text_width, self.low_res, config.self_conditioning
        )
        self.head = Head(config.width, self.vocabulary, config.label_smoothing)
        self.critic = nn.Linear(config.width, 1) if config.critic == "self" else None

    def _set_low_res(self, name: str, context: BuildContext) -> tuple[int, Grid]:
        """Set the stages and the size of the smaller image. → its tokens' vocabulary and grid"""
        stage, low_res_size = context.stage(name), self.config.low_res_size
        if isinstance(stage, Muse):
            self.stages["base"] = stage
            codec, vocabulary = stage.codec, stage.vocabulary
            size = (stage.shape.height, stage.shape.width)
            if low_res_size not in (None, size):
                raise ConfigError(
                    f"low_res_size={low_res_size} does not fit low_res={name}, which draws {size}: remove low_res_size"
                )
        else:
            codec, vocabulary = context.token_codec(name, "low_res")
            size = low_res_size or (self.shape.height // 2, self.shape.width // 2)
        self.stages["low_res"], self.low_res_size = codec, size
        _, height, width = codec.shape_for(1, *size)
        return vocabulary, (height, width)

    @property
    def codec(self) -> Codec:
        return self.stage("codec", Codec)

    # training ------------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        return [module for module in (self.network, self.head, self.text, self.critic) if module is not None]

    def get_tokens(self, batch: Batch) -> Tensor:
        """B N, from the cache or the codec."""
        return rearrange(encode_tokens(self.codec, batch, (1, *self.grid), "muse"), "b 1 h w -> b (h w)")

    def encode_batch(self, batch: Batch, dropped: Tensor | None = None) -> Condition:
        """The conditions of a batch; rows where `dropped` (B) get the null text."""
        return Condition(*encode_batch(self.text, batch, dropped), self.get_low_res_tokens(batch))

    def get_low_res_tokens(self, batch: Batch) -> Tensor | None:
        """Tokens of the smaller images, B M; None without super-resolution."""
        if not self.can_upscale():
            return None
        if LOW_RES in batch.extra:
            return batch.extra[LOW_RES].long()
        if batch.pixels is None:
            raise InputError(
                "super-resolution needs pixels to resize, or a cache with the tokens of the smaller image: train from pixels, or run kineo cache"
            )
        return self.encode_low_res(batch.video)

    @torch.no_grad()
    def encode_low_res(self, pixels: Tensor) -> Tensor:
        """Resize B 1 C H W to the smaller size and encode. → tokens B M"""
        if tuple(pixels.shape[-2:]) != self.low_res_size:
            small = F.interpolate(pixels[:, 0], self.low_res_size, mode="bicubic", antialias=True).clamp(0, 1)
            pixels = small[:, None]
        return self.stage("low_res", Codec).encode(pixels).flatten(1)

    def compute_hidden(self, tokens: Tensor, condition: Condition, previous: Tensor | None = None) -> Tensor:
        """Hidden states of tokens B N, B N D; `previous` is for self-conditioning."""
        if self.config.self_conditioning and previous is None:
            previous = torch.zeros(*tokens.shape, self.config.width, device=tokens.device)
        return self.network(tokens, condition.text, condition.mask, condition.low_res, previous)

    def uses_previous(self, noise: Noise) -> bool:
        """Whether to self-condition on a first pass: every other step in training; always in validation, as in sampling."""
        if not self.config.self_conditioning:
            return False
        return not self.training or bool(key_of(noise.seed, noise.step, "self-conditioning") % 2)

    def predict(self, tokens: Tensor, condition: Condition, noise: Noise) -> tuple[TokenMask, Tensor]:
        """Mask tokens and run the network. → the mask, and the hidden states of the scored tokens, R D"""
        masked = mask_tokens(noise, tokens.shape[1], bias=self.config.mask_bias)
        inputs = tokens.masked_fill(masked.mask, self.mask_id)
        previous = None
        if self.uses_previous(noise):
            with torch.no_grad():
                previous = self.compute_hidden(inputs, condition)
        hidden = self.compute_hidden(inputs, condition, previous)
        return masked, hidden.flatten(0, 1).index_select(0, masked.rows)

    def resample_masked(
        self, rows: Tensor, masked: TokenMask, tokens: Tensor, noise: Noise, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Sample the masked tokens from the model. → tokens B N, and which of the R samples are wrong"""
        return resample_masked(self.head.logits, self.head.chunks(len(rows)), rows, masked, tokens, noise, temperature)

    def forward(self, batch: Batch, noise: Noise) -> TokenLoss:
        tokens = self.get_tokens(batch)
        dropped = noise.bernoulli("caption dropout", self.config.caption_dropout) if self.training else None
        condition = self.encode_batch(batch, dropped)
        masked, rows = self.predict(tokens, condition, noise)
        targets = tokens.flatten().index_select(0, masked.rows)
        loss, correct = self.head(rows, targets, masked.weights)
        result = TokenLoss(loss, correct, masked.weights.sum())
        if not self.training:
            result.targets = describe_targets(tokens, self.vocabulary, spare=batch.spare)
            result.targets |= loss_by_mask_share(lambda weights: self.head(rows, targets, weights).loss, masked)
        if self.critic is not None:
            filled, wrong = self.resample_masked(rows.detach(), masked, tokens, noise)
            result.critic = sum_critic_loss(self.critic(self.compute_hidden(filled, condition)), masked, wrong)
        return result

    def loss(self, player: str, shared: TokenLoss) -> Loss:
        return shared.loss(self.config.critic_weight)

    def health_limits(self) -> tuple[Limit, ...]:
        return token_limits(self.config.label_smoothing)

    # sampling ------------------------------------------------------------------------------------------------------

    def encode_prompts(self, prompts: Prompts, options: MuseSample | None = None) -> tuple[Condition, Condition | None]:
        """→ conditions of the prompts, and of the negative or null prompts (None: the prompts are the null text)"""
        shape = self.shape
        size = (prompts.frames or 1, prompts.height or shape.height, prompts.width or shape.width)
        if size != (1, shape.height, shape.width):
            raise InputError(
                f"frames × height × width = {size} cannot be drawn: this muse was trained for {(1, shape.height, shape.width)}"
            )
        low_res = self.get_prompted_low_res(prompts, options)
        positive, negative = encode_prompts(self.text, prompts)
        return Condition(*positive, low_res), None if negative is None else Condition(*negative, low_res)

    def get_prompted_low_res(self, prompts: Prompts, options: MuseSample | None = None) -> Tensor | None:
        """Tokens of the smaller image: of the given image, sampled by the base generator, or of the real sample beside the prompt."""
        if not self.can_upscale():
            return None
        if prompts.prime is not None:
            return self.encode_low_res(prompts.prime[:, :1])
        if self._draws_base(prompts):
            base = self.stage("base", Muse)
            base_prompts = Prompts(prompts.noise, prompts.captions, prompts.negative, batch=prompts.batch)
            return base.sample_tokens(base_prompts, self._make_base_options(base, options)).flatten(1)
        if prompts.batch is None:
            raise InputError(
                f"low_res={self.config.low_res} is a codec and there is no image to upscale: give one with --prime"
            )
        return self.get_low_res_tokens(prompts.batch)

    def _make_base_options(self, base: Muse, options: MuseSample | None) -> MuseSample:
        """The base's own; a stage without text passes the requested guidance down."""
        passes_down = self.text is None and options is not None and options.guidance != self.config.sample.guidance
        changes = {"guidance": options.guidance} if options is not None and passes_down else {}
        return base.config.sample.model_copy(update=changes)

    def takes_captions(self) -> bool:
        return "captions" in self.reads or ("base" in self.stages and takes_captions(self.stages["base"]))

    def _draws_base(self, prompts: Prompts) -> bool:
        return "base" in self.stages and not (prompts.from_items and prompts.batch is not None)

    def describe_start(self, prompts: Prompts) -> str | None:
        if not self.can_upscale() or self._draws_base(prompts) or prompts.prime is not None:
            return None
        return f"real pictures made smaller, {self.low_res_size[0]} × {self.low_res_size[1]}"

    def can_upscale(self) -> bool:
        return "low_res" in self.stages

    def prime_size(self, options: Any) -> tuple[int, int] | None:
        return self.low_res_size if self.can_upscale() else None

    @torch.no_grad()
    def sample_tokens(self, prompts: Prompts, options: MuseSample, make_critic: MakeCritic | None = None) -> Tensor:
        """Tokens for prompts, B 1 h w."""
        positive, negative = self.encode_prompts(prompts, options)
        rows, length, device = len(prompts), self.grid[0] * self.grid[1], prompts.noise.device
        guide = options.guidance != 1 and negative is not None
        condition = positive.concat(negative) if guide and negative is not None else positive
        memory = self.network.memory(condition)
        previous: Tensor | None = None
        if self.config.self_conditioning:
            previous = torch.zeros(rows * (2 if guide else 1), length, self.config.width, device=device)

        def compute_hidden(tokens: Tensor, step: int) -> Tensor:
            nonlocal previous
            hidden = self.network(tokens, condition.text, condition.mask, condition.low_res, previous, memory)
            if self.config.self_conditioning:
                previous = hidden.clone()  # the next replay of a CUDA graph overwrites its output
            return hidden

        if make_critic is None and self.critic is not None:
            make_critic = self._make_self_critic
        tokens = sample_tokens_guided(
            compute_hidden,
            self.head.logits,
            torch.full((rows, length), self.mask_id, device=device),
            options,
            guide=guide,
            mask_id=self.mask_id,
            # Super-resolution is independent of its base, which draws for the same prompts.
            noise=prompts.noise.keyed_by(self.name) if self.can_upscale() else prompts.noise,
            critic=make_critic(positive) if make_critic is not None and options.critic else None,
        )
        return rearrange(tokens, "b (h w) -> b 1 h w", h=self.grid[0])

    def _make_self_critic(self, condition: Condition) -> Critic:
        assert self.critic is not None
        head = self.critic
        return lambda tokens, step: head(self.compute_hidden(tokens, condition))[..., 0]

    @torch.no_grad()
    def sample(self, prompts: Prompts, options: MuseSample, make_critic: MakeCritic | None = None) -> Tensor:
        return self.codec.decode(self.sample_tokens(prompts, options, make_critic))

    # caching, compilation, checkpoints -----------------------------------------------------------------------------

    @classmethod
    def cache_facts(cls, config: MuseConfig) -> dict[str, Any]:
        return {} if config.low_res is None else {"low_res_size": config.low_res_size}

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        tokens = self.get_tokens(batch).view(len(batch), 1, *self.grid)
        low_res = self.get_low_res_tokens(batch)
        smaller = {} if low_res is None else {LOW_RES: low_res.to(torch.int32)}
        return {"tokens": tokens, **smaller, **compute_cached_text(self.text, batch)}

    def compile_targets(self) -> list[nn.Module]:
        return [self.network, self.head.softmax, *(self.text.compile_targets() if self.text is not None else [])]

    def blocks(self) -> list[nn.Module]:
        return list(self.network.transformer.blocks)

    def assets(self) -> dict[str, str]:
        return self.text.assets() if self.text is not None else {}

    def tokens_per_clip(self) -> int:
        return self.grid[0] * self.grid[1]
