"""The Phenaki task: masked training on a codec's tokens, with or without a critic. Sampling is in sampling.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from einops import repeat
from torch import Tensor, nn

from kineograph.codec.token_grid import encode_tokens
from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import (
    ChecksHealth,
    RemapsInit,
    SupportsCaching,
    SupportsContinuation,
    SupportsSampling,
)
from kineograph.core.errors import InputError
from kineograph.core.health import Limit
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Codec, Loss, Mean, Task
from kineograph.family.phenaki.config import PhenakiConfig, PhenakiSample
from kineograph.family.phenaki.network import Clips, Grid, PhenakiNetwork, TokenCritic
from kineograph.family.phenaki.sampling import choose_overlap, sample_clips
from kineograph.nn.codebook_use import describe_targets, token_limits
from kineograph.nn.head import Head
from kineograph.process.loss_ranges import loss_by_mask_share
from kineograph.process.masking import (
    TokenMask,
    mask_tokens,
    resample_masked,
    score_critic,
    sum_critic_loss,
)
from kineograph.process.token_loss import TokenLoss
from kineograph.text import build_text
from kineograph.text.conditioning import TextEmbeddings, compute_cached_text, encode_batch

# Asset "none": the checkpoint has no critic, although the config names one.
CRITIC_ASSET = "phenaki/critic"


@dataclass
class ResampledClips:
    """Clips whose masked tokens were sampled by the generator: the critic's training data."""

    clips: Clips
    text: TextEmbeddings
    masked: TokenMask
    wrong: Tensor  # R


@dataclass
class PlayerInputs:
    """What the players of a step share; None for a player that does not train."""

    generator: TokenLoss | None = None
    critic: ResampledClips | None = None


class Phenaki(Task, SupportsSampling, SupportsContinuation, SupportsCaching, RemapsInit, ChecksHealth):
    Config = PhenakiConfig

    def __init__(self, config: PhenakiConfig, context: BuildContext) -> None:
        both = config.critic == "network" and config.only is None
        players = ("generator", "critic") if both else (config.only or "generator",)
        super().__init__(players, config.reads())
        self.config, self.shape = config, context.shape
        self.stages["codec"], self.vocabulary = context.token_codec(config.codec)
        self.grid: Grid = self.codec.shape_for(self.shape.frames, self.shape.height, self.shape.width)
        if self.shape.frames > 1:
            choose_overlap(self.codec, self.shape, config.sample)  # refuses an overlap that does not fit
        self.mask_id = self.vocabulary
        self.text = build_text(config.text, context)
        self.text_width = self.text.width if self.text is not None else None
        self.network = PhenakiNetwork(config, config.rotary, self.vocabulary, self.grid, self.text_width)
        self.head = Head(config.width, self.vocabulary, config.label_smoothing)
        self.note = context.note
        self.critic: nn.Linear | TokenCritic | None = None
        # Never build an untrained critic: its random scores would steer sampling.
        has_critic = self.is_trained("critic") or (config.init is not None and CRITIC_ASSET not in context.assets)
        if has_critic and config.critic == "self":
            self.critic = nn.Linear(config.width, 1)
        elif has_critic and config.critic == "network":
            critic_config = config.make_critic_config()
            self.critic = TokenCritic(critic_config, config.rotary, self.vocabulary, self.grid, self.text_width)
        for module in self._untrained():
            module.requires_grad_(False)

    @property
    def codec(self) -> Codec:
        return self.stage("codec", Codec)

    # training ------------------------------------------------------------------------------------------------------

    def is_trained(self, part: str) -> bool:
        """Whether the generator, or the critic, is trained in this stage."""
        return self.config.only in (None, part) and (part == "generator" or self.config.critic != "none")

    def trainable(self, player: str) -> list[nn.Module]:
        generator: list[nn.Module] = [part for part in (self.network, self.head, self.text) if part is not None]
        critic: list[nn.Module] = [self.critic] if self.critic is not None else []
        if self.config.critic == "self" and self.config.only is None:
            return generator + critic
        return critic if player == "critic" else generator

    def _untrained(self) -> list[nn.Module]:
        """What `only` leaves as it is. Unlike frozen parts it is saved with the stage."""
        if self.config.only is None:
            return []
        return self.trainable("generator" if self.config.only == "critic" else "critic")

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self._untrained():
            module.eval()
        return self

    def get_tokens(self, batch: Batch) -> Tensor:
        """B t h w, from the cache or the codec."""
        return encode_tokens(self.codec, batch, self.grid, "phenaki")

    def get_clips(self, batch: Batch) -> Clips:
        """Tokens and their padding."""
        tokens = self.get_tokens(batch)
        if batch.frame_mask is None:
            return Clips.flatten(tokens)
        mask = self.codec.mask_for(batch.frame_mask)  # B t
        if mask.shape != tokens.shape[:2]:
            raise InputError(
                f"a frame mask of {batch.frame_mask.shape[1]} frames stands for {mask.shape[1]} latent frames, and the tokens have "
                f"{tokens.shape[1]}: give a mask over the frames of the clip"
            )
        return Clips.flatten(tokens, mask)

    def encode_text(self, batch: Batch, noise: Noise, drop: bool) -> TextEmbeddings:
        """Text embeddings of a batch; with `drop`, a share of the captions becomes the null text."""
        dropped = noise.bernoulli("caption dropout", self.config.caption_dropout) if drop else None
        return encode_batch(self.text, batch, dropped)

    def compute_hidden(self, clips: Clips, text: TextEmbeddings) -> Tensor:
        """B N D"""
        return self.network(clips.tokens, clips.grid, *text, clips.keep)

    def find_maskable(self, clips: Clips, noise: Noise) -> Tensor | None:
        """Tokens that may be masked, B N; None: all. Not padding, nor the visible beginning of a primed clip."""
        frames, rows, columns = clips.grid
        if not (self.training and self.config.primed and frames > 1):
            return clips.keep
        real = frames if clips.keep is None else clips.keep[:, :: rows * columns].sum(dim=1)  # B
        # At least one frame and at most all but the last are visible in a primed clip.
        visible = (noise.uniform("primed times") * (real - 1)).ceil() * noise.bernoulli("primed", self.config.primed)
        maskable = torch.arange(frames, device=visible.device) >= visible[:, None]  # B t
        maskable = repeat(maskable, "b t -> b (t n)", n=rows * columns)
        return maskable if clips.keep is None else maskable & clips.keep

    def predict(self, clips: Clips, text: TextEmbeddings, noise: Noise) -> tuple[TokenMask, Tensor]:
        """Mask tokens and run the network. → the mask, and the hidden states of the scored tokens, R D"""
        masked = mask_tokens(noise, clips.tokens.shape[1], self.find_maskable(clips, noise), self.config.mask_bias)
        inputs = clips.replace_tokens(clips.tokens.masked_fill(masked.mask, self.mask_id))
        return masked, self.compute_hidden(inputs, text).flatten(0, 1).index_select(0, masked.rows)

    def resample_masked(
        self,
        clips: Clips,
        text: TextEmbeddings,
        masked: TokenMask,
        rows: Tensor,
        noise: Noise,
        temperature: float = 1.0,
    ) -> ResampledClips:
        """Sample the masked tokens from the model; `rows` are their hidden states, R D."""
        chunks = self.head.chunks(len(rows))
        tokens, wrong = resample_masked(
            self.head.logits, chunks, rows.detach(), masked, clips.tokens, noise, temperature
        )
        return ResampledClips(clips.replace_tokens(tokens), text, masked, wrong)

    def score_tokens(self, clips: Clips, text: TextEmbeddings) -> Tensor:
        """The critic's scores, B N 1, high = looks wrong."""
        assert self.critic is not None
        if isinstance(self.critic, TokenCritic):
            return self.critic(clips, text)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_trained("generator")):
            hidden = self.compute_hidden(clips, text)
        return self.critic(hidden)

    def forward(self, batch: Batch, noise: Noise) -> PlayerInputs:
        clips = self.get_clips(batch)
        shared = PlayerInputs()
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_trained("generator")):
            text = self.encode_text(batch, noise, drop=self.training)
            masked, rows = self.predict(clips, text, noise)
            if self.is_trained("generator"):
                targets = clips.tokens.flatten().index_select(0, masked.rows)
                loss, correct = self.head(rows, targets, masked.weights)
                shared.generator = TokenLoss(loss, correct, masked.weights.sum())
                if not self.training:
                    shared.generator.targets = describe_targets(clips.tokens, self.vocabulary, clips.keep, batch.spare)
                    shared.generator.targets |= loss_by_mask_share(
                        lambda weights: self.head(rows, targets, weights).loss, masked, clips.keep
                    )
            if self.is_trained("critic"):
                shared.critic = self.resample_masked(clips, text, masked, rows, noise)
        if shared.generator is not None and shared.critic is not None and self.config.critic == "self":
            scores = self.score_tokens(shared.critic.clips, text)
            shared.generator.critic = sum_critic_loss(scores, masked, shared.critic.wrong)
        return shared

    def loss(self, player: str, shared: PlayerInputs) -> Loss:
        if player == "generator":
            assert shared.generator is not None
            return shared.generator.loss(self.config.critic_weight)
        resampled = shared.critic
        assert resampled is not None
        scores = self.score_tokens(resampled.clips, resampled.text.detach())
        return score_critic(scores, resampled.masked, resampled.wrong).loss()

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """Named means; those of a critic that trains beside the generator are under `critic/`."""
        shared = self(batch, noise)
        means: dict[str, Mean] = {}
        for player in self.players:
            loss = self.loss(player, shared)
            prefix = "" if player == self.players[0] else f"{player}/"
            means |= {prefix + name: mean for name, mean in {"loss": loss.total, **loss.terms}.items()}
        return means

    def health_limits(self) -> tuple[Limit, ...]:
        return token_limits(self.config.label_smoothing) if self.is_trained("generator") else ()

    # sampling ------------------------------------------------------------------------------------------------------

    def usual_overlap(self, options: PhenakiSample) -> int | None:
        return options.overlap

    def sample(self, prompts: Prompts, options: PhenakiSample) -> Tensor:
        return sample_clips(self, prompts, options, self.critic)

    # caching, compilation, checkpoints -----------------------------------------------------------------------------

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        fields = {"tokens": self.get_tokens(batch), **compute_cached_text(self.text, batch)}
        if self.shape.frames > 1:
            all_real = torch.ones(len(batch), self.shape.frames, dtype=torch.bool, device=batch.slots.device)
            fields["frame_mask"] = all_real if batch.frame_mask is None else batch.frame_mask
        return fields

    def _networks(self) -> list[PhenakiNetwork]:
        return [self.network, *([self.critic.network] if isinstance(self.critic, TokenCritic) else [])]

    def compile_targets(self) -> list[nn.Module]:
        text = self.text.compile_targets() if self.text is not None else []
        return [*self._networks(), self.head.softmax, *text]

    def blocks(self) -> list[nn.Module]:
        return [block for network in self._networks() for block in network.transformer.blocks]

    def assets(self) -> dict[str, str]:
        assets = self.text.assets() if self.text is not None else {}
        lost_critic = self.critic is None and self.config.critic != "none"
        return assets | {CRITIC_ASSET: "none"} if lost_critic else assets

    def remap_init(self, weights: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        """Drop a critic that is not trained here if the initial weights do not hold all of it."""
        if self.critic is not None and not self.is_trained("critic"):
            shapes = {f"critic.{name}": value.shape for name, value in self.critic.state_dict().items()}
            if any(name not in weights or weights[name].shape != shape for name, shape in shapes.items()):
                self.note(f"{where} has no critic={self.config.critic} of this shape: clips are drawn without one")
                self.critic = None
        return weights

    def tokens_per_clip(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]
