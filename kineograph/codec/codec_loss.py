"""Losses of codecs of images and clips: reconstruction, perceptual, adversarial; and their validation metrics.

Clips are flattened to frames, F = B·T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from einops import rearrange
from torch import Tensor, nn

from kineograph.codec.adversarial import (
    AdversarialConfig,
    adaptive_weight,
    discriminator_error,
    finite_difference_r1,
    generator_error,
    gradient_at,
    measure_separation,
    perturb,
    ramp_weight,
)
from kineograph.codec.perceptual import Lpips, PerceptualConfig
from kineograph.core import distributed
from kineograph.core.batch import Batch, weigh_positions
from kineograph.core.health import Limit
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Mean
from kineograph.nn.codebook_use import describe_codes
from kineograph.nn.quantizers import Quantized, straight_through

DiscriminatorFn = Callable[[Tensor, int, Tensor], Tensor]
"""Frames F C H W, frames of a clip, and 0 for padding, F → a logit for each patch, F h w."""
_ALIKE = (
    0.15  # clips whose differences from the mean clip have less than this share of their variance are nearly the same
)
LPIPS_CHUNK = 64  # frames at once in validation: VGG16's maps outweigh everything else


class CodecLossConfig(Protocol):
    """The loss settings of a codec's config."""

    @property
    def loss(self) -> Literal["l1", "l2"]: ...
    @property
    def perceptual(self) -> PerceptualConfig: ...
    @property
    def adversarial(self) -> AdversarialConfig | None: ...


@dataclass
class Divergence:
    """The KL term of a continuous codec, in place of a quantizer's loss."""

    nats: Tensor  # F: KL of the clip's latents from a standard normal, per value of its pixels
    weight: float


@dataclass
class Reconstruction:
    """The forward pass that both players share."""

    real: Tensor  # F C H W in [−1, 1]
    fake: Tensor  # F C H W
    keep: Tensor  # F: 1 for a frame, 0 for padding
    quantized: Quantized | None  # None: the latents are continuous, see `divergence`
    rows: Tensor | None  # bool for each row of tokens or latents: False for padding; None: no padding
    noise: Noise
    divergence: Divergence | None = None
    share: Tensor | None = None  # F 1 H W in [0, 1]: what counts in the loss; None: everything

    @property
    def weight(self) -> Tensor | float:
        """Of each pixel's error, with mean 1."""
        return 1.0 if self.share is None else weigh_positions(self.share)

    def restore_masked_pixels(self, images: Tensor) -> Tensor:
        """Images with the real pixels where nothing counts, so that networks that compare the two find no difference there."""
        return images if self.share is None else torch.lerp(self.real, images, self.share)

    @property
    def count(self) -> Tensor:
        return self.keep.sum()


def is_adversarial_step(config: AdversarialConfig | None, step: int) -> bool:
    return config is not None and config.weight > 0 and step >= config.start


# Losses ------------------------------------------------------------------------------------------------------------


def codec_loss(
    player: str,
    shared: Reconstruction,
    config: CodecLossConfig,
    codes: int | None,
    lpips: Lpips | None,
    discriminator: nn.Module | None,
    last: Sequence[Tensor],
) -> Loss:
    """The loss of the generator or of the discriminator. `codes`: size of the codebook; `last`: the weights that
    produce the pixels, for the adaptive weight λ."""
    discriminate = bind_discriminator(discriminator, config.adversarial, shared)
    if player == "discriminator":
        return discriminator_loss(shared, config.adversarial, discriminate)
    return generator_loss(shared, config, codes, lpips, discriminate, last)


def bind_discriminator(
    discriminator: nn.Module | None, config: AdversarialConfig | None, shared: Reconstruction
) -> DiscriminatorFn | None:
    """The discriminator of a batch; None before the adversarial loss starts."""
    if discriminator is None or not is_adversarial_step(config, shared.noise.schedule_step):
        return None
    has_padding = shared.rows is not None
    return lambda images, frames, keep: discriminator(images, frames, keep if has_padding else None)


def generator_loss(
    shared: Reconstruction,
    config: CodecLossConfig,
    codes: int | None,
    lpips: Lpips | None,
    discriminate: DiscriminatorFn | None,
    last: Sequence[Tensor],
) -> Loss:
    """reconstruction + quantizer (or w_k KL) + w_p perceptual + w_a λ adversarial"""
    real, fake, keep, count = shared.real, shared.fake, shared.keep, shared.count
    reconstruction = (reconstruction_error(config.loss, fake, real, shared.weight) * keep).sum()
    total, terms = reconstruction, {"reconstruction": reconstruction}
    if shared.quantized is not None:
        terms["quantizer"] = shared.quantized.loss * count
        total = total + terms["quantizer"]
    if shared.divergence is not None:
        terms["kl"] = (shared.divergence.nats * keep).sum()
        total = total + shared.divergence.weight * terms["kl"]
    # Backpropagate through LPIPS and the discriminator here, down to the pixels; the total carries these gradients on.
    perceptual = None
    if lpips is not None:
        weight = config.perceptual.weight
        indices, weights = sample_perceptual_frames(keep, config.perceptual.frames, shared.noise)
        terms["perceptual"], gradient = gradient_at(
            fake,
            lambda images: lpips(
                select_frames(shared.restore_masked_pixels(images), indices), select_frames(real, indices)
            ),
            weights,
        )
        perceptual = weight * gradient
        total = total + straight_through(weight * terms["perceptual"], (fake * perceptual).sum())
    if discriminate is not None:
        adversarial = config.adversarial
        assert adversarial is not None
        selection = DiscriminatorFrames.sample(shared, adversarial)
        on_fake = torch.empty(0)  # mean logit of each frame

        def fool(images: Tensor) -> Tensor:
            nonlocal on_fake
            logits = selection.logits(discriminate, shared.restore_masked_pixels(images))
            on_fake = logits.detach().mean((1, 2))
            return generator_error(adversarial.loss, logits)

        terms["adversarial"], gradient = gradient_at(fake, fool, selection.weights)
        strength = torch.full_like(count, adversarial.weight * ramp_weight(adversarial, shared.noise.schedule_step))
        if adversarial.adaptive:
            # λ of the VQGAN paper: its reconstruction loss includes the perceptual one.
            _, reference = gradient_at(
                fake, lambda images: reconstruction_error(config.loss, images, real, shared.weight), keep
            )
            if perceptual is not None:
                reference = reference + perceptual
            strength = strength * adaptive_weight(fake, last, reference, gradient, adversarial.adaptive_max)
            with torch.no_grad():
                on_real = selection.logits(discriminate, real).mean((1, 2))
            strength = strength * measure_separation(on_real, on_fake, selection.weights)
        terms["adversarial_weight"] = strength * count
        total = total + straight_through(strength * terms["adversarial"], (fake * (gradient * strength)).sum())
    named = {name: Mean(value, count) for name, value in terms.items()}
    return Loss(Mean(total, count), named | _codebook_metrics(shared, codes))


def discriminator_loss(
    shared: Reconstruction, config: AdversarialConfig | None, discriminate: DiscriminatorFn | None
) -> Loss:
    """hinge (or bce) + γ/2 · R1 penalty, the latter every `penalty_every` steps. Only for adversarial steps."""
    assert config is not None
    assert discriminate is not None
    selection = DiscriminatorFrames.sample(shared, config)
    images = [shared.real, shared.restore_masked_pixels(shared.fake.detach())]
    if config.penalty and shared.noise.step % config.penalty_every == 0:
        images += perturb(shared.real, shared.noise)
    real, fake, *perturbed = selection.logits(discriminate, *images).chunk(
        len(images)
    )  # no norm looks across the batch
    each = discriminator_error(config.loss, real, fake)
    terms = {config.loss: each, "real": real.mean((1, 2)), "fake": fake.mean((1, 2))}
    if perturbed:
        terms["penalty"] = finite_difference_r1(*perturbed)
        each = each + config.penalty / 2 * config.penalty_every * terms["penalty"]
    named = {name: Mean((value * selection.weights).sum(), shared.count) for name, value in terms.items()}
    return Loss(Mean((each * selection.weights).sum(), shared.count), named)


def validation_metrics(
    shared: Reconstruction, config: CodecLossConfig, codes: int | None, lpips: Lpips | None, spare: bool = False
) -> dict[str, Mean]:
    """`loss` is reconstruction and perceptual loss: the adversarial loss does not tell which checkpoint is best. `spare`: see `Batch`."""
    error = reconstruction_error("l2", to_unit_range(shared.fake), to_unit_range(shared.real), shared.weight)
    each = {
        "reconstruction": reconstruction_error(config.loss, shared.fake, shared.real, shared.weight),
        "psnr": -10 * torch.log10(error.clamp_min(1e-10)),
    }
    each["loss"] = each["reconstruction"]
    if lpips is not None:
        pairs = zip(
            shared.restore_masked_pixels(shared.fake).split(LPIPS_CHUNK), shared.real.split(LPIPS_CHUNK), strict=True
        )
        each["lpips"] = torch.cat([lpips(fake, real) for fake, real in pairs])
        each["loss"] = each["loss"] + config.perceptual.weight * each["lpips"]
    if shared.divergence is not None:
        each["kl"] = shared.divergence.nats
    means = {name: Mean((value * shared.keep).sum(), shared.count) for name, value in each.items()}
    means["explained_variance"] = explained_variance(shared, spare)
    return means | _codebook_metrics(shared, codes, training=False, spare=spare)


def explained_variance(shared: Reconstruction, spare: bool = False) -> Mean:
    """1 − Σ (x − x̂)² / Σ (x − x̄)²: 0 for a codec that decodes the mean clip x̄ of all processes' batch, whatever it encodes.

    x̄ fits its own batch of n clips: the errors are reduced by (n − 1) / n to match. A batch of one is compared with its mean colour,
    and so are clips that are nearly the same, such as the parts of one film: there x̄ beats every codec.
    """
    keep = shared.keep.view(shared.noise.batch, -1)  # B T
    real, fake = (
        to_unit_range(images).reshape(*keep.shape, images.shape[1], -1) for images in (shared.real, shared.fake)
    )
    clips, total = keep.sum(0), (real * keep[:, :, None, None]).sum(0)  # T, T C H·W
    if spare:
        clips, total = torch.zeros_like(clips), torch.zeros_like(total)
    clips, total = distributed.all_reduce_(clips), distributed.all_reduce_(total)
    mean = total / clips.clamp_min(1)[:, None, None]
    colour = mean.mean(-1, keepdim=True).expand_as(mean)
    weight = 1.0 if shared.share is None else weigh_positions(shared.share).view(*keep.shape, 1, -1)

    def total_error(other: Tensor) -> Tensor:
        """Σ (x − other)² over real frames, T"""
        return (((real - other).square() * weight).mean((2, 3)) * keep).sum(0)

    variance, around_colour, error = total_error(mean), total_error(colour), total_error(fake)
    sums = torch.stack([variance, around_colour])
    apart, whole = distributed.all_reduce_(torch.zeros_like(sums) if spare else sums.clone()).sum(1)
    use_mean = (clips > 1) & (apart > _ALIKE * whole)  # T
    share = torch.where(use_mean, (clips - 1) / clips.clamp_min(1), 1.0)
    variance, error = torch.where(use_mean, variance, around_colour).sum(), (error * share).sum()
    return Mean(variance - error, variance)


def codec_limits(
    codes: int | None, quantizer: str = "vq", has_divergence: bool = False, has_discriminator: bool = False
) -> tuple[Limit, ...]:
    """Health limits of a codec. `codes`: size of its codebook; `quantizer`: its kind."""
    remedy = "Lower train.lr, lengthen train.warmup or train for more steps; look at the pictures in validation/."
    collapsed = Limit(
        "codec_collapsed",
        "explained_variance",
        "The codec decodes every picture to about the same one: a stage trained on it would learn nothing.",
        remedy,
        at_least=0.1,  # trained codecs have 0.8 and more
    )
    limits = [collapsed]
    if codes is not None and codes >= 16:
        smaller = "fewer quantizer.levels" if quantizer == "fsq" else "a smaller quantizer.codes or quantizer.kind=fsq"
        meaning = "The codec uses one code for everything: its tokens hold no information."
        limits.append(Limit("one_code", "codes/perplexity", meaning, remedy, at_least=1.2))
        limits.append(
            Limit(
                "few_codes",
                "codes/use",
                "Nearly all of the codebook is unused.",
                f"Use {smaller}, lower train.lr, or train for more steps.",
                at_least=min(0.01, 10 / codes),  # ten codes: a batch may have fewer tokens than the codebook codes
                severity="warning",
            )
        )
    if has_divergence:
        meaning = "The posterior is the prior: the latents are noise."
        # Nats per value of a pixel. A trained VAE has 0.01 and more.
        limits.append(Limit("posterior_collapsed", "kl", meaning, "Lower kl, its weight. " + remedy, at_least=1e-4))
    if has_discriminator:
        limits.append(
            Limit(
                "discriminator_saturated",
                "discriminator/loss",
                "The discriminator tells all pictures apart and has stopped learning: its gradient teaches little.",
                "Lower the lr of player discriminator, raise adversarial.penalty, or start it later (adversarial.start).",
                at_least=0.02,  # of 1 at the start (bce: 0.69)
                severity="warning",
                logs=50,
            )
        )
    return tuple(limits)


def reconstruction_error(kind: Literal["l1", "l2"], fake: Tensor, real: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """F C H W, twice → F. `weight` of each pixel, F 1 H W."""
    error = (fake - real).abs() if kind == "l1" else (fake - real).square()
    return (error if isinstance(weight, float) else error * weight).flatten(1).mean(1)


def frame_shares(batch: Batch, frames: int) -> Tensor | None:
    """What counts in the loss, B·T 1 H W, of clips of `frames`; None: everything."""
    share = None if batch.loss_mask is None else batch.loss_share(*batch.loss_mask.shape[-2:])
    return None if share is None else share.repeat_interleave(frames, 0)


def _codebook_metrics(
    shared: Reconstruction, codes: int | None, training: bool = True, spare: bool = False
) -> dict[str, Mean]:
    if shared.quantized is None or codes is None:
        return {}
    keep = None if shared.rows is None else shared.rows[:, None, None]
    extra = shared.quantized.metrics if training else {}
    metrics = {f"codes/{name}": Mean(value * shared.count, shared.count) for name, value in extra.items()}
    return metrics | describe_codes(shared.quantized.ids, codes, shared.count, keep, spare)


# Selection of frames -----------------------------------------------------------------------------------------------


def sample_perceptual_frames(keep: Tensor, frames: int | None, noise: Noise) -> tuple[Tensor | None, Tensor]:
    """Choose `frames` random frames of each clip, never padding, weighted so that the expected sum is that over all frames.

    keep F → indices into it (None: all), weights. Surplus choices in clips with fewer real frames have weight 0.
    """
    clips = keep.view(noise.batch, -1)  # B T
    length = clips.shape[1]
    if frames is None or frames >= length:
        return None, keep
    order = noise.uniform("perceptual", length) + 2 * clips  # real frames rank above all padding
    times = order.topk(frames).indices  # B n
    chosen = clips.gather(1, times)
    weights = chosen * (clips.sum(1, keepdim=True) / chosen.sum(1, keepdim=True).clamp_min(1))
    offsets = torch.arange(noise.batch, device=keep.device)[:, None] * length
    return (times + offsets).flatten(), weights.flatten()


@dataclass
class DiscriminatorFrames:
    """The frames that the discriminator sees: whole clips, or consecutive frames from a random start, so that motion is seen."""

    indices: Tensor | None  # into the frames of the batch; None: all
    frames: int  # of a clip
    keep: Tensor  # F', 0 for padding
    weights: Tensor  # F': the chosen frames stand for all real frames of their clip

    @staticmethod
    def sample(shared: Reconstruction, config: AdversarialConfig) -> DiscriminatorFrames:
        noise, keep = shared.noise, shared.keep
        clips = keep.view(noise.batch, -1)  # B T
        length = clips.shape[1]
        if config.frames is None or config.frames >= length:
            return DiscriminatorFrames(None, length, keep, keep)
        real = clips.sum(1)  # padding is at the end
        starts = (noise.uniform("discriminator") * (real - config.frames + 1).clamp_min(1)).long()  # B
        times = starts[:, None] + torch.arange(config.frames, device=keep.device)  # B n
        chosen = clips.gather(1, times)
        weights = chosen * (real / chosen.sum(1).clamp_min(1))[:, None]
        offsets = torch.arange(noise.batch, device=keep.device)[:, None] * length
        return DiscriminatorFrames((times + offsets).flatten(), config.frames, chosen.flatten(), weights.flatten())

    def logits(self, discriminate: DiscriminatorFn, *images: Tensor) -> Tensor:
        """The logits of several versions of the batch, each F C H W, concatenated."""
        selected = torch.cat([select_frames(version, self.indices) for version in images])
        return discriminate(selected, self.frames, self.keep.repeat(len(images)))


def select_frames(images: Tensor, indices: Tensor | None) -> Tensor:
    return images if indices is None else images.index_select(0, indices)


# Pixels ------------------------------------------------------------------------------------------------------------


def pixels_to_frames(pixels: Tensor) -> Tensor:
    """B T C H W in [0, 1] → B·T C H W in [−1, 1]"""
    return rearrange(pixels, "b t c h w -> (b t) c h w").mul(2).sub_(1).contiguous(memory_format=torch.channels_last)


def to_unit_range(images: Tensor) -> Tensor:
    """[−1, 1] → [0, 1], clamped"""
    return ((images + 1) / 2).clamp(0, 1)


def frames_to_pixels(images: Tensor, clips: int) -> Tensor:
    """B·T C H W in [−1, 1] → B T C H W in [0, 1]"""
    return rearrange(to_unit_range(images), "(b t) c h w -> b t c h w", b=clips)


def repeat_last_real(values: Tensor, mask: Tensor) -> Tensor:
    """Replace the padding of B T … by the last real value; `mask` B T."""
    times = torch.arange(values.shape[1], device=values.device)
    last = (mask.sum(1, keepdim=True) - 1).clamp_min(0)  # B 1
    clips = torch.arange(values.shape[0], device=values.device)[:, None]
    return values[clips, torch.minimum(times, last)]
