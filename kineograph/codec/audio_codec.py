"""Audio codec: sound ⇄ tokens by causal 1-D convolutions, with the same number of tokens for every video frame.

A token depends on the sound up to its own end, and the sound decoded from it on the tokens up to it. So tokens of frame t
never hold what is heard later.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from kineograph.core.batch import Batch, Shape
from kineograph.core.capabilities import ChecksHealth
from kineograph.core.config import BlockCount, Positive, StageConfig
from kineograph.core.errors import ConfigError
from kineograph.core.health import LOSS_FALLS, Limit
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Mean, Task
from kineograph.nn.codebook_use import describe_codes
from kineograph.nn.norms import norm_layer
from kineograph.nn.quantizers import FSQConfig, Quantized, QuantizerConfig, build_quantizer, full_precision

SPECTRA = (64, 256, 1024)  # samples of the windows of the spectral loss
FLOOR = 1e-3  # magnitude below which differences stop counting: about 54 dB below a full sine


class AudioCodecConfig(StageConfig):
    task: str = "audio_codec"
    width: int = Field(64, ge=8, le=65536)
    """Channels of all levels."""
    patch: Positive = 20
    """Samples folded into channels before the first level. A token covers patch · strides[0] · strides[1] … samples."""
    strides: tuple[Positive, ...] = (5, 5)
    """Factors by which the levels after the first downsample."""
    blocks: BlockCount = 1
    """Residual blocks at each level, in encoder and decoder."""
    quantizer: QuantizerConfig = FSQConfig()
    """kind: vq, lfq or fsq, and its settings."""
    loss: Literal["l1", "l2"] = "l1"
    """Reconstruction loss of samples in [−1, 1]."""
    emphasis: float = Field(0.9, ge=0, lt=1)
    """Pre-emphasis of both sounds before that loss, x[n] − a · x[n − 1]: high frequencies and clicks count for more; 0: none."""
    spectral: float = Field(0.1, ge=0)
    """Weight of the spectral loss: log magnitudes of short-time spectra with windows of 64, 256 and 1024 samples; 0: none."""

    def reads(self) -> frozenset[str]:
        return frozenset({"audio"})

    @property
    def hop(self) -> int:
        """Samples of a token."""
        return self.patch * prod(self.strides)


class CausalConv1d(nn.Conv1d):
    """A convolution over the current and earlier positions; with a stride, over whole strides."""

    def __init__(self, width: int, out: int, kernel: int = 3, stride: int = 1, dilation: int = 1) -> None:
        super().__init__(width, out, kernel, stride, dilation=dilation)
        self.past = dilation * (kernel - 1) - (stride - 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.past, 0)))


class ResidualBlock(nn.Module):
    """norm → SiLU → dilated convolution → SiLU → convolution, added. The norm is that of each position alone."""

    def __init__(self, width: int, dilation: int = 1) -> None:
        super().__init__()
        self.norm = norm_layer("rms", width)
        self.mix = CausalConv1d(width, width, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return x + self.out(F.silu(self.mix(y)))


def _stack_blocks(width: int, count: int) -> list[nn.Module]:
    return [ResidualBlock(width, 3**index) for index in range(count)]


class Encoder(nn.Module):
    """B N samples → B width N/hop"""

    def __init__(self, config: AudioCodecConfig) -> None:
        super().__init__()
        self.patch, width = config.patch, config.width
        layers: list[nn.Module] = [CausalConv1d(config.patch, width), *_stack_blocks(width, config.blocks)]
        for stride in config.strides:
            layers += [CausalConv1d(width, width, 2 * stride, stride), *_stack_blocks(width, config.blocks)]
        self.layers = nn.Sequential(*layers)
        # Without it, quiet sounds fall on one code, and the encoder takes long to leave it.
        self.norm = norm_layer("rms", width)

    def forward(self, sound: Tensor) -> Tensor:
        x = self.layers(rearrange(sound, "b (n p) -> b p n", p=self.patch))
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Decoder(nn.Module):
    """B width N/hop → B N samples"""

    def __init__(self, config: AudioCodecConfig) -> None:
        super().__init__()
        self.strides, width = tuple(reversed(config.strides)), config.width
        self.levels = nn.ModuleList(
            nn.Sequential(*_stack_blocks(width, config.blocks)) for _ in range(len(self.strides) + 1)
        )
        self.upsample = nn.ModuleList(CausalConv1d(width, width * stride) for stride in self.strides)
        self.to_samples = CausalConv1d(width, config.patch)

    def forward(self, z: Tensor) -> Tensor:
        x = self.levels[0](z)
        for stride, upsample, level in zip(self.strides, self.upsample, self.levels[1:], strict=True):
            x = level(rearrange(upsample(x), "b (c s) n -> b c (n s)", s=stride))
        return rearrange(self.to_samples(F.silu(x)), "b p n -> b (n p)").float()


@dataclass
class SoundReconstruction:
    real: Tensor  # B T S
    fake: Tensor  # B T S
    keep: Tensor  # B T: 1 for a frame, 0 for padding
    quantized: Quantized


class AudioCodec(Task, ChecksHealth):
    """Sound ⇄ tokens, and their training."""

    Config = AudioCodecConfig

    def __init__(self, config: AudioCodecConfig, shape: Shape) -> None:
        super().__init__(reads=config.reads())
        self.config, self.shape = config, shape
        self.tokens_per_frame = count_tokens(config, shape)
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quantizer = build_quantizer(config.width, config.quantizer)
        self.vocabulary: int = self.quantizer.codes

    @classmethod
    def build(cls, config: AudioCodecConfig, context: BuildContext) -> AudioCodec:
        return cls(config, context.shape)

    # codec -------------------------------------------------------------------------------------------------------

    def _encode(self, sound: Tensor) -> Tensor:
        """B T S → B C 1 N"""
        return self.encoder(sound.flatten(1).float())[:, :, None]

    def _decode(self, z: Tensor, frames: int) -> Tensor:
        """B C 1 N → B T S"""
        return rearrange(self.decoder(z[:, :, 0]), "b (t s) -> b t s", t=frames)

    @torch.no_grad()
    def encode(self, sound: Tensor) -> Tensor:
        """B T S in [−1, 1] → tokens B T n"""
        return self.quantizer.ids(self._encode(sound)).view(*sound.shape[:2], -1)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """B T n → B T S in [−1, 1]"""
        return self._decode(self.quantizer.lookup(tokens.flatten(1)[:, None]), tokens.shape[1]).clamp(-1, 1)

    # training ----------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        return [self.encoder, self.quantizer, self.decoder]

    def forward(self, batch: Batch, noise: Noise) -> SoundReconstruction:
        real = batch.extra["audio"].float()
        keep = real.new_ones(real.shape[:2]) if batch.frame_mask is None else batch.frame_mask.to(real.dtype)
        # Padding is silent, so that it never enters a spectrum; the quantizer weighs it like the rest.
        real = real * keep[:, :, None]
        quantized = self.quantizer(self._encode(real))
        fake = self._decode(quantized.z, real.shape[1]) * keep[:, :, None]
        return SoundReconstruction(real, fake, keep, quantized)

    def loss(self, player: str, shared: SoundReconstruction) -> Loss:
        count = shared.keep.sum()
        terms = self._compute_terms(shared)
        total = terms["reconstruction"] + self.config.spectral * terms.get("spectral", 0.0)
        total = total + shared.quantized.loss * count
        terms["quantizer"] = shared.quantized.loss * count
        means = {name: Mean(value, count) for name, value in terms.items()}
        return Loss(Mean(total, count), means | describe_codes(shared.quantized.ids, self.vocabulary, count))

    def _compute_terms(self, shared: SoundReconstruction) -> dict[str, Tensor]:
        """Sums over frames."""
        error = (shared.fake - shared.real).flatten(1)  # B N
        error = (error - self.config.emphasis * F.pad(error[:, :-1], (1, 0))).view_as(shared.real)
        error = error.abs() if self.config.loss == "l1" else error.square()
        terms = {"reconstruction": error.mean(2).sum()}
        if self.config.spectral:
            terms["spectral"] = (spectral_distance(shared.fake, shared.real) * shared.keep.sum(1)).sum()
        return terms

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        """`snr`: decibels of the sound above the error, a mean over clips."""
        shared = self(batch, noise)
        count, terms = shared.keep.sum(), self._compute_terms(shared)
        loss = terms["reconstruction"] + self.config.spectral * terms.get("spectral", 0.0)
        power, error = (value.square().flatten(1).sum(1) for value in (shared.real, shared.fake - shared.real))
        snr = 10 * torch.log10(power.clamp_min(1e-8) / error.clamp_min(1e-8))
        means = {name: Mean(value, count) for name, value in {"loss": loss, **terms}.items()}
        codes = describe_codes(shared.quantized.ids, self.vocabulary, count, spare=batch.spare)
        return means | {"snr": Mean(snr.sum(), len(snr))} | codes

    def health_limits(self) -> tuple[Limit, ...]:
        remedy = "Lower train.lr, lengthen train.warmup or train for more steps."
        meaning = "The codec uses one code for everything: its tokens hold no information."
        return (LOSS_FALLS, Limit("one_code", "codes/perplexity", meaning, remedy, at_least=1.2))

    # structure ---------------------------------------------------------------------------------------------------

    def compile_targets(self) -> list[nn.Module]:
        return [self.encoder, self.decoder]

    def blocks(self) -> list[nn.Module]:
        return [part for part in self.modules() if isinstance(part, ResidualBlock)]


def count_tokens(config: AudioCodecConfig, shape: Shape) -> int:
    """Tokens of a frame; raises a ConfigError that names what fits."""
    if shape.sample_rate is None:
        raise ConfigError("audio_codec reads sound: set data.sample_rate, such as data.sample_rate=8000")
    samples = shape.samples_per_frame
    if samples % config.hop:
        levels = [" × ".join(map(str, (config.patch, *config.strides)))]
        fits = [patch for patch in range(1, samples + 1) if samples % (patch * prod(config.strides)) == 0]
        near = sorted(sorted(fits, key=lambda patch: abs(patch - config.patch))[:3])
        remedy = f"use patch={' or '.join(map(str, near))}" if near else "use other strides"
        raise ConfigError(
            f"a token of this audio_codec covers {levels[0]} = {config.hop} samples, and a frame has {samples} "
            f"(data.sample_rate={shape.sample_rate}, fps={shape.fps:g}): {remedy}"
        )
    return samples // config.hop


def spectral_distance(fake: Tensor, real: Tensor) -> Tensor:
    """B T S, twice → B: mean difference of the log magnitudes of short-time spectra."""
    with full_precision(real):
        both = torch.cat([fake, real]).flatten(1).float()  # 2B N
        distances = []
        for size in SPECTRA:
            if size > both.shape[1]:
                continue
            window = torch.hann_window(size, device=both.device)
            spectrum = torch.stft(both, size, size // 4, window=window, center=False, return_complex=True)
            power = spectrum.real.square() + spectrum.imag.square()
            log = 0.5 * (power / window.sum().square() + FLOOR**2).log()  # 2B bins windows
            distances.append((log[: len(fake)] - log[len(fake) :]).abs().flatten(1).mean(1))
        return torch.stack(distances).mean(0) if distances else both.new_zeros(len(fake))


TASK = AudioCodec
