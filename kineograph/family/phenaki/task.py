"""Phenaki as a stage: training on hidden tokens, with or without a critic. Drawing is in sampling.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from einops import repeat
from torch import Tensor, nn

from kineograph.codec.token_grid import encode_tokens
from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import RemapsInit, SupportsCaching, SupportsContinuation, SupportsSampling
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Codec, Loss, Mean, Task
from kineograph.family.phenaki.config import PhenakiConfig, PhenakiSample
from kineograph.family.phenaki.network import Clips, Grid, PhenakiNetwork, TokenCritic
from kineograph.family.phenaki.sampling import draw, overlap_of
from kineograph.nn.head import Head
from kineograph.process.masking import (
    MaskedLoss,
    TokenMask,
    mask_tokens,
    resample_masked,
    score_critic,
    sum_critic_loss,
)
from kineograph.text import build_text
from kineograph.text.conditioning import (
    TextEmbeddings,
    compute_cached_text,
    encode_batch,
)

ASSET = "phenaki/critic"  # "none": there is none to be rebuilt, whatever the config says


@dataclass
class Challenge:
    """Clips in which the generator filled in hidden tokens, for a critic to find the wrong ones."""

    clips: Clips
    words: TextEmbeddings
    masked: TokenMask
    wrong: Tensor  # R


@dataclass
class Played:
    """What a step's players share; a part that nobody learns from is None."""

    scored: MaskedLoss | None
    challenge: Challenge | None


class Phenaki(Task, SupportsSampling, SupportsContinuation, SupportsCaching, RemapsInit):
    Config = PhenakiConfig

    def __init__(self, config: PhenakiConfig, context: BuildContext) -> None:
        together = config.critic == "network" and config.only is None
        players = ("generator", "critic") if together else (config.only or "generator",)
        super().__init__(players, config.reads())
        self.config, self.shape = config, context.shape
        self.stages["codec"], self.vocabulary = context.token_codec(config.codec)
        self.grid: Grid = self.codec.shape_for(self.shape.frames, self.shape.height, self.shape.width)
        if self.shape.frames > 1:
            overlap_of(self.codec, self.shape, config.sample)
        self.mask_id = self.vocabulary
        self.text = build_text(config.text, context)
        self.text_width = self.text.width if self.text is not None else None
        self.network = PhenakiNetwork(config, config.rotary, self.vocabulary, self.grid, self.text_width)
        self.head = Head(config.width, self.vocabulary, config.label_smoothing)
        self.note = context.note
        self.critic: nn.Linear | TokenCritic | None = None
        # One that nobody trained is not there at all: neither here nor in a stage that starts from this one may it steer.
        known = self.learns("critic") or (config.init is not None and ASSET not in context.assets)
        if known and config.critic == "self":
            self.critic = nn.Linear(config.width, 1)
        elif known and config.critic == "network":
            shape = config.critic_transformer()
            self.critic = TokenCritic(shape, config.rotary, self.vocabulary, self.grid, self.text_width)
        for part in self._resting():
            part.requires_grad_(False)

    @classmethod
    def build(cls, config: PhenakiConfig, context: BuildContext) -> Phenaki:
        return cls(config, context)

    @property
    def codec(self) -> Codec:
        return self.stage("codec", Codec)

    # who learns ----------------------------------------------------------------------------------------------------

    def learns(self, part: str) -> bool:
        """Whether the generator, or the critic, is trained here."""
        return self.config.only in (None, part) and (part == "generator" or self.config.critic != "none")

    def trainable(self, player: str) -> list[nn.Module]:
        generator: list[nn.Module] = [part for part in (self.network, self.head, self.text) if part is not None]
        critic: list[nn.Module] = [self.critic] if self.critic is not None else []
        if self.config.critic == "self" and self.config.only is None:  # the critic is a head of the generator's network
            return generator + critic
        return critic if player == "critic" else generator

    def _resting(self) -> list[nn.Module]:
        """What `only` leaves as it is. Not frozen helpers: they are saved with the stage."""
        if self.config.only is None:
            return []
        return self.trainable("generator" if self.config.only == "critic" else "critic")

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for part in self._resting():
            part.eval()
        return self

    # conditions ----------------------------------------------------------------------------------------------------

    def tokens(self, batch: Batch) -> Tensor:
        """B t h w: from a cache, or from the codec."""
        return encode_tokens(self.codec, batch, self.grid, "phenaki")

    def clips(self, batch: Batch) -> Clips:
        """Tokens with their padding."""
        tokens = self.tokens(batch)
        if batch.frame_mask is None:
            return Clips.of(tokens)
        times = self.codec.mask_for(batch.frame_mask)  # B t
        if times.shape != tokens.shape[:2]:
            raise InputError(
                f"a frame mask of {batch.frame_mask.shape[1]} frames stands for {times.shape[1]} token times, and the tokens have "
                f"{tokens.shape[1]}: give a mask of the clip's frames"
            )
        return Clips.of(tokens, times)

    def words(self, batch: Batch, noise: Noise, drop: bool) -> TextEmbeddings:
        """The text of a batch; to train with guidance, a share of the captions is dropped."""
        dropped = noise.bernoulli("caption dropout", self.config.caption_dropout) if drop else None
        return encode_batch(self.text, batch, dropped)

    # training ------------------------------------------------------------------------------------------------------

    def hidden(self, clips: Clips, words: TextEmbeddings) -> Tensor:
        """B N D"""
        return self.network(clips.tokens, clips.grid, *words, clips.keep)

    def unknown(self, clips: Clips, noise: Noise) -> Tensor | None:
        """What may be hidden, B N: what is no padding, and in a share of the training clips what comes after a beginning. None: all."""
        times, rows, columns = clips.grid
        if not (self.training and self.config.primed and times > 1):
            return clips.keep
        real = times if clips.keep is None else clips.keep[:, :: rows * columns].sum(dim=1)  # B
        begun = (noise.uniform("primed times") * (real - 1)).ceil() * noise.bernoulli("primed", self.config.primed)  # B
        later = torch.arange(times, device=begun.device) >= begun[:, None]  # B t
        later = repeat(later, "b t -> b (t n)", n=rows * columns)
        return later if clips.keep is None else later & clips.keep

    def predict(self, clips: Clips, words: TextEmbeddings, noise: Noise) -> tuple[TokenMask, Tensor]:
        """Hide tokens and run the network: where the scored ones lie, and their hidden states, R D."""
        masked = mask_tokens(noise, clips.tokens.shape[1], self.unknown(clips, noise), self.config.mask_bias)
        hidden = self.hidden(clips.of_tokens(clips.tokens.masked_fill(masked.mask, self.mask_id)), words)
        return masked, hidden.flatten(0, 1).index_select(0, masked.rows)

    def challenge(
        self,
        clips: Clips,
        words: TextEmbeddings,
        masked: TokenMask,
        rows: Tensor,
        noise: Noise,
        temperature: float = 1.0,
    ) -> Challenge:
        """The same clips with the generator's own draws at the hidden places."""
        chunks = self.head.chunks(len(rows))
        filled, wrong = resample_masked(
            self.head.logits, chunks, rows.detach(), masked, clips.tokens, noise, temperature
        )
        return Challenge(clips.of_tokens(filled), words, masked, wrong)

    def scores(self, clips: Clips, words: TextEmbeddings) -> Tensor:
        """How wrong each token looks to the critic, B N 1."""
        assert self.critic is not None
        if isinstance(self.critic, TokenCritic):
            return self.critic(clips, words)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns("generator")):
            hidden = self.hidden(clips, words)
        return self.critic(hidden)

    def forward(self, batch: Batch, noise: Noise) -> Played:
        clips = self.clips(batch)
        played = Played(None, None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns("generator")):
            words = self.words(batch, noise, drop=self.training)
            masked, rows = self.predict(clips, words, noise)
            if self.learns("generator"):
                targets = clips.tokens.flatten().index_select(0, masked.rows)
                loss, correct = self.head(rows, targets, masked.weights)
                played.scored = MaskedLoss(loss, correct, masked.weights.sum())
            if self.learns("critic"):
                played.challenge = self.challenge(clips, words, masked, rows, noise)
        if played.scored is not None and played.challenge is not None and self.config.critic == "self":
            scores = self.scores(played.challenge.clips, words)
            played.scored.critic = sum_critic_loss(scores, masked, played.challenge.wrong)
        return played

    def loss(self, player: str, shared: Played) -> Loss:
        if player == "critic":
            found = shared.challenge
            assert found is not None
            return score_critic(self.scores(found.clips, found.words.detach()), found.masked, found.wrong).loss()
        assert shared.scored is not None
        return shared.scored.loss(self.config.critic_weight)

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """`loss` is the first player's; a critic that trains beside the generator is told under its name."""
        shared = self(batch, noise)
        means: dict[str, Mean] = {}
        for player in self.players:
            found = self.loss(player, shared)
            prefix = "" if player == self.players[0] else f"{player}/"
            means |= {prefix + name: mean for name, mean in {"loss": found.total, **found.terms}.items()}
        return means

    # sampling ------------------------------------------------------------------------------------------------------

    def usual_overlap(self, options: PhenakiSample) -> int | None:
        return options.overlap

    def sample(self, prompts: Prompts, options: PhenakiSample) -> Tensor:
        return draw(self, prompts, options, self.critic)

    @torch.no_grad()
    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """Tokens, which frames are real (for clips), and the text where its encoder is frozen."""
        made = {"tokens": self.tokens(batch), **compute_cached_text(self.text, batch)}
        if self.shape.frames > 1:
            mask = batch.frame_mask
            whole = torch.ones(len(batch), self.shape.frames, dtype=torch.bool, device=batch.slots.device)
            made["frame_mask"] = whole if mask is None else mask
        return made

    # how the outside treats it -------------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        critic = [self.critic.network] if isinstance(self.critic, TokenCritic) else []
        return [
            self.network,
            self.head.softmax,
            *critic,
            *(self.text.compile_targets() if self.text is not None else []),
        ]

    def blocks(self) -> list[nn.Module]:
        networks = [self.network, *([self.critic.network] if isinstance(self.critic, TokenCritic) else [])]
        return [block for network in networks for block in network.transformer.blocks]

    def assets(self) -> dict[str, str]:
        words = self.text.assets() if self.text is not None else {}
        return words if self.critic is not None or self.config.critic == "none" else words | {ASSET: "none"}

    def remap_init(self, weights: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        """A critic that is not trained here comes from there as a whole, or there is none."""
        if self.critic is not None and not self.learns("critic"):
            own = {f"critic.{name}": value.shape for name, value in self.critic.state_dict().items()}
            if any(name not in weights or weights[name].shape != shape for name, shape in own.items()):
                self.note(f"{where} has no critic={self.config.critic} of this shape: clips are drawn without one")
                self.critic = None
        return weights

    def tokens_per_clip(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]
