"""What the two players of a codec descend, whether it reconstructs pictures or clips: the generator's terms, the game
against the discriminator, and how a reconstruction is scored. Clips are their frames side by side, F = B·T."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from einops import rearrange
from torch import Tensor

from kineograph.codec.adversarial import (
    AdversarialConfig,
    VideoDiscriminator,
    adaptive_weight,
    discriminator_hinge,
    finite_difference_r1,
    generator_hinge,
    gradient_at,
    perturb,
)
from kineograph.codec.perceptual import Lpips, PerceptualConfig
from kineograph.core import distributed
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Mean
from kineograph.nn.codebook_use import codebook_histogram, codebook_usage
from kineograph.nn.quantizers import Quantized, straight_through

DiscriminatorFn = Callable[[Tensor, int, Tensor], Tensor]
"""Frames F C H W, how many of them make a clip, and which are no padding, F → a logit for each patch, F h w."""


LOOKED_AT = 64  # frames that the perceptual net takes at once in validation: its maps outweigh everything else


class ReconstructionLossConfig(Protocol):
    """A codec's config, as far as it says what a good reconstruction is."""

    @property
    def loss(self) -> Literal["l1", "l2"]: ...
    @property
    def perceptual(self) -> PerceptualConfig: ...
    @property
    def adversarial(self) -> AdversarialConfig | None: ...


@dataclass
class Divergence:
    """What a continuous codec pays for its latents, in place of a quantizer's loss."""

    nats: Tensor  # F: KL of the latents of the frame's clip from a standard normal, for each value of its pixels
    weight: float


@dataclass
class Reconstruction:
    """What both players of a step look at."""

    real: Tensor  # F C H W in [−1, 1]
    fake: Tensor  # F C H W
    keep: Tensor  # F: 1 for a frame, 0 for padding
    quantized: Quantized | None  # None: the codec's latents are continuous, see `divergence`
    rows: Tensor | None  # of each row of tokens or latents, bool: False where it is padding; None: none is
    noise: Noise
    divergence: Divergence | None = None

    @property
    def count(self) -> Tensor:
        return self.keep.sum()


def is_adversarial_step(config: AdversarialConfig | None, step: int) -> bool:
    return config is not None and config.weight > 0 and step >= config.start


def bind_discriminator(
    discriminator: VideoDiscriminator | None, game: AdversarialConfig | None, shared: Reconstruction
) -> DiscriminatorFn | None:
    """The discriminator of a batch's clips, in its turn."""
    if discriminator is None or not is_adversarial_step(game, shared.noise.step):
        return None
    padded = shared.rows is not None

    def judge(pictures: Tensor, frames: int, keep: Tensor) -> Tensor:
        return discriminator(pictures, frames, keep if padded else None)

    return judge


# Losses ------------------------------------------------------------------------------------------------------------


def generator_loss(
    shared: Reconstruction,
    config: ReconstructionLossConfig,
    codes: int | None,
    look: Lpips | None,
    judge: DiscriminatorFn | None,
    last: Sequence[Tensor],
) -> Loss:
    """reconstruction + quantizer (or w_k KL) + w_p perceptual + w_a λ adversarial

    `codes` are those of the quantizer; `judge` is None while there is no game; `last` are the weights that paint the pixels, for the adaptive weight λ.
    """
    real, fake, keep, count = shared.real, shared.fake, shared.keep, shared.count
    reconstruction = (reconstruction_error(config.loss, fake, real) * keep).sum()
    total, terms = reconstruction, {"reconstruction": reconstruction}
    if shared.quantized is not None:
        terms["quantizer"] = shared.quantized.loss * count
        total = total + terms["quantizer"]
    if shared.divergence is not None:
        terms["kl"] = (shared.divergence.nats * keep).sum()
        total = total + shared.divergence.weight * terms["kl"]
    # The judges are walked back through here, to the pictures; the total carries their gradients on from there.
    reference = None  # gradient at the pictures of what the adversarial term is measured against
    if look is not None:
        weight = config.perceptual.weight
        seen, weights = sample_perceptual_frames(keep, config.perceptual.frames, shared.noise)
        terms["perceptual"], reference = gradient_at(
            fake, lambda pictures: look(select_frames(pictures, seen), select_frames(real, seen)), weights
        )
        total = total + straight_through(weight * terms["perceptual"], (fake * reference * weight).sum())
    if judge is not None:
        game = config.adversarial
        assert game is not None
        scene = DiscriminatorFrames.of(shared, game)
        terms["adversarial"], push = gradient_at(
            fake, lambda pictures: generator_hinge(scene.judged(judge, pictures)), scene.weights
        )
        strength = torch.full_like(count, game.weight)
        if game.adaptive:
            if reference is None:
                _, reference = gradient_at(
                    fake, lambda pictures: reconstruction_error(config.loss, pictures, real), keep
                )
            strength = strength * adaptive_weight(fake, last, reference, push, game.adaptive_max)
        terms["adversarial_weight"] = strength * count
        total = total + straight_through(strength * terms["adversarial"], (fake * (push * strength)).sum())
    named = {name: Mean(value, count) for name, value in terms.items()}
    return Loss(Mean(total, count), named | _codes(shared, codes))


def discriminator_loss(shared: Reconstruction, game: AdversarialConfig | None, judge: DiscriminatorFn | None) -> Loss:
    """hinge + γ/2 · penalty, the latter once in a while. Asked for in steps of the game alone."""
    assert game is not None
    assert judge is not None
    scene = DiscriminatorFrames.of(shared, game)
    pictures = [shared.real, shared.fake.detach()]
    if game.penalty and shared.noise.step % game.penalty_every == 0:
        pictures.append(perturb(shared.real, shared.noise))
    real, fake, *moved = scene.judged(judge, *pictures).chunk(len(pictures))  # no norm looks across the batch
    each = discriminator_hinge(real, fake)
    terms = {"hinge": each, "real": real.mean((1, 2)), "fake": fake.mean((1, 2))}
    if moved:
        terms["penalty"] = finite_difference_r1(real, *moved)
        each = each + game.penalty / 2 * game.penalty_every * terms["penalty"]
    named = {name: Mean((value * scene.weights).sum(), shared.count) for name, value in terms.items()}
    return Loss(Mean((each * scene.weights).sum(), shared.count), named)


def validation_metrics(
    shared: Reconstruction, config: ReconstructionLossConfig, codes: int | None, look: Lpips | None
) -> dict[str, Mean]:
    """`loss` is what is seen: reconstruction and, where there is one, perceptual loss; the game's own loss says nothing
    about which checkpoint is best."""
    error = (to_unit_range(shared.fake) - to_unit_range(shared.real)).square().flatten(1).mean(1)
    each = {
        "reconstruction": reconstruction_error(config.loss, shared.fake, shared.real),
        "psnr": -10 * torch.log10(error.clamp_min(1e-10)),
    }
    each["loss"] = each["reconstruction"]
    if look is not None:
        pairs = zip(shared.fake.split(LOOKED_AT), shared.real.split(LOOKED_AT), strict=True)
        each["lpips"] = torch.cat([look(fake, real) for fake, real in pairs])
        each["loss"] = each["loss"] + config.perceptual.weight * each["lpips"]
    if shared.divergence is not None:
        each["kl"] = shared.divergence.nats
    means = {name: Mean((value * shared.keep).sum(), shared.count) for name, value in each.items()}
    return means | _codes(shared, codes, training=False)


def reconstruction_error(kind: Literal["l1", "l2"], fake: Tensor, real: Tensor) -> Tensor:
    """F C H W, twice → F"""
    apart = (fake - real).abs() if kind == "l1" else (fake - real).square()
    return apart.flatten(1).mean(1)


def sample_perceptual_frames(keep: Tensor, frames: int | None, noise: Noise) -> tuple[Tensor | None, Tensor]:
    """Which frames the perceptual loss looks at, and their weights: `frames` random ones of each clip, never padding. The
    seen ones stand for all real frames of their clip, so that the weighted sum is, in the mean, that over all frames.

    keep F → places in it (None: all), weights. A clip with fewer real frames than asked for has its rest at weight 0.
    """
    clips = keep.view(noise.batch, -1)  # B T
    length = clips.shape[1]
    if frames is None or frames >= length:
        return None, keep
    order = noise.uniform("perceptual", length) + 2 * clips  # real frames lie above all padding
    times = order.topk(frames).indices  # B n
    select_frames = clips.gather(1, times)
    weights = select_frames * (clips.sum(1, keepdim=True) / select_frames.sum(1, keepdim=True).clamp_min(1))
    starts = torch.arange(noise.batch, device=keep.device)[:, None] * length
    return (times + starts).flatten(), weights.flatten()


@dataclass
class DiscriminatorFrames:
    """What the discriminator is shown of each clip: all of it, or a run of frames that begins at random, so that motion is still seen. A run
    stands for all real frames of its clip."""

    places: Tensor | None  # among the frames of the batch; None: all
    frames: int  # a clip
    keep: Tensor  # F', 0 where a frame is padding
    weights: Tensor  # F'

    @staticmethod
    def of(shared: Reconstruction, game: AdversarialConfig) -> DiscriminatorFrames:
        noise, keep = shared.noise, shared.keep
        clips = keep.view(noise.batch, -1)  # B T
        length = clips.shape[1]
        if game.frames is None or game.frames >= length:
            return DiscriminatorFrames(None, length, keep, keep)
        real = clips.sum(1)  # padding is at the end
        starts = (noise.uniform("discriminator") * (real - game.frames + 1).clamp_min(1)).long()  # B
        times = starts[:, None] + torch.arange(game.frames, device=keep.device)  # B n
        select_frames = clips.gather(1, times)
        weights = select_frames * (real / select_frames.sum(1).clamp_min(1))[:, None]
        firsts = torch.arange(noise.batch, device=keep.device)[:, None] * length
        return DiscriminatorFrames((times + firsts).flatten(), game.frames, select_frames.flatten(), weights.flatten())

    def judged(self, judge: DiscriminatorFn, *pictures: Tensor) -> Tensor:
        """Several versions of the batch at once, one after the other: each F C H W → all their logits."""
        shown = torch.cat([select_frames(version, self.places) for version in pictures])
        return judge(shown, self.frames, self.keep.repeat(len(pictures)))


def select_frames(pictures: Tensor, places: Tensor | None) -> Tensor:
    return pictures if places is None else pictures.index_select(0, places)


def _codes(shared: Reconstruction, codes: int | None, training: bool = True) -> dict[str, Mean]:
    """How this batch uses the codebook, where there is one. A whole set's use is not the mean of these: add up codebook_histogram."""
    if shared.quantized is None or codes is None:
        return {}
    ids = shared.quantized.ids
    if shared.rows is not None:
        ids = ids.masked_fill(~shared.rows[:, None, None], codes)  # padding falls into a bin of its own
    counts = codebook_histogram(ids, codes + 1)[:codes]
    found = codebook_usage(
        distributed.all_reduce_(counts) if training else counts
    )  # judging goes on at each process's own pace
    metrics = shared.quantized.metrics if training else {}
    return {f"codes/{name}": Mean(value * shared.count, shared.count) for name, value in (metrics | found).items()}


# Pixels as networks see them ---------------------------------------------------------------------------------------


def pixels_to_frames(pixels: Tensor) -> Tensor:
    """B T C H W in [0, 1] → B·T C H W in [−1, 1]"""
    return rearrange(pixels, "b t c h w -> (b t) c h w").mul(2).sub_(1).contiguous(memory_format=torch.channels_last)


def to_unit_range(pictures: Tensor) -> Tensor:
    """[−1, 1] → [0, 1], nothing outside"""
    return ((pictures + 1) / 2).clamp(0, 1)


def frames_to_pixels(pictures: Tensor, clips: int) -> Tensor:
    """B·T C H W → B T C H W in [0, 1]"""
    return rearrange(to_unit_range(pictures), "(b t) c h w -> b t c h w", b=clips)


def repeat_last_real(values: Tensor, mask: Tensor) -> Tensor:
    """B T …, and which of its times are real, B T: the last real one stays until the end, whatever the padding showed."""
    times = torch.arange(values.shape[1], device=values.device)
    last = (mask.sum(1, keepdim=True) - 1).clamp_min(0)  # B 1
    clips = torch.arange(values.shape[0], device=values.device)[:, None]
    return values[clips, torch.minimum(times, last)]
