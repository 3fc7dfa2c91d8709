"""VQGAN: a convolutional image tokenizer. Clips are tokenized frame by frame."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from kineograph.codec import perceptual as lpips
from kineograph.codec.adversarial import AdversarialConfig, Discriminator, check_size
from kineograph.codec.fitting import tokens_across
from kineograph.codec.game import Reconstruction, discriminator_loss, game_on, generator_loss, inward, outward, scores
from kineograph.codec.perceptual import Lpips, PerceptualConfig
from kineograph.codec.pyramid import Decoder, Encoder, PyramidConfig, ToPixels
from kineograph.core.batch import Batch, Shape
from kineograph.core.config import StageConfig
from kineograph.core.noise import Noise
from kineograph.core.task import BuildContext, Loss, Mean, Task
from kineograph.nn.conv import ResidualBlock
from kineograph.nn.quantizers import QuantizerConfig, VQConfig, build_quantizer


class VQGANConfig(StageConfig, PyramidConfig):
    task: str = "vqgan"
    quantizer: QuantizerConfig = VQConfig()
    """kind: vq, lfq or fsq, and what belongs to it."""
    loss: Literal["l1", "l2"] = "l1"
    """Reconstruction loss, of pixels in [−1, 1]."""
    perceptual: PerceptualConfig = PerceptualConfig()
    adversarial: AdversarialConfig | None = None
    """The GAN; null: none."""


class VQGAN(Task):
    """Codec and its training: generator (encoder, quantizer, decoder) against discriminator."""

    Config = VQGANConfig
    players: ClassVar[tuple[str, ...]] = ("generator", "discriminator")  # an instance without a GAN has the first alone

    def __init__(self, config: VQGANConfig, shape: Shape, perceptual: Lpips | None = None) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self.shape_for(shape.frames, shape.height, shape.width)
        self.encoder = Encoder(shape.channels, config)
        self.quantizer = build_quantizer(config.widths[-1], config.quantizer)
        self.decoder = Decoder(config)
        self.to_pixels = ToPixels(shape.channels, config)
        self.vocabulary = self.quantizer.codes
        self.perceptual = perceptual
        self.discriminator: Discriminator | None = None
        self.players = ("generator",)  # type: ignore[misc]
        if config.adversarial and config.adversarial.weight:
            check_size(config.adversarial, shape.height, shape.width)
            self.discriminator = Discriminator(shape.channels, config.adversarial)
            self.players = ("generator", "discriminator")  # type: ignore[misc]

    @classmethod
    def build(cls, config: VQGANConfig, context: BuildContext) -> VQGAN:
        return cls(config, context.shape, lpips.for_stage(config.perceptual, context))

    # codec -------------------------------------------------------------------------------------------------------

    def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Tokens (t, h, w) of a clip."""
        factor = self.config.factor
        return frames, *tokens_across("vqgan", height, width, (factor, factor))

    def mask_for(self, frame_mask: Tensor) -> Tensor:
        return frame_mask

    @torch.no_grad()
    def encode(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """B T C H W in [0, 1] → B T h w"""
        self.shape_for(*pixels.shape[1:2], *pixels.shape[-2:])
        ids = self.quantizer(self.encoder(inward(pixels))).ids
        return rearrange(ids, "(b t) h w -> b t h w", b=pixels.shape[0])

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """B T h w → B T C H W in [0, 1]"""
        features = self.quantizer.lookup(rearrange(tokens, "b t h w -> (b t) h w"))
        return outward(self.to_pixels(self.decoder(features)), tokens.shape[0])

    # training ----------------------------------------------------------------------------------------------------

    def trainable(self, player: str) -> list[nn.Module]:
        if player == "discriminator" and self.discriminator is not None:
            return [self.discriminator]
        return [self.encoder, self.quantizer, self.decoder, self.to_pixels]

    def plays(self, player: str, step: int) -> bool:
        return player == "generator" or game_on(self.config.adversarial, step)

    def forward(self, batch: Batch, noise: Noise) -> Reconstruction:
        video = batch.video
        real = inward(video)
        keep = None
        if batch.frame_mask is not None and video.shape[1] > 1:
            keep = batch.frame_mask.flatten()
        quantized = self.quantizer(self.encoder(real), keep)
        fake = self.to_pixels(self.decoder(quantized.z))
        weights = real.new_ones(real.shape[0]) if keep is None else keep.to(real.dtype)
        return Reconstruction(real, fake, weights, quantized, keep, noise)

    def loss(self, player: str, shared: Reconstruction) -> Loss:
        game = self.config.adversarial
        judge = self.discriminator if game_on(game, shared.noise.step) else None
        if player == "discriminator":
            assert game is not None
            assert judge is not None
            return discriminator_loss(shared, game, judge)
        return generator_loss(
            shared, self.config, self.vocabulary, self.perceptual, judge, [self.to_pixels.conv.weight]
        )

    def validate(self, batch: Batch, noise: Noise) -> dict[str, Mean]:
        return scores(self(batch, noise), self.config, self.vocabulary, self.perceptual)

    def reconstruct(self, batch: Batch) -> Tensor:
        return self.decode(self.encode(batch.video))

    # how the outside treats it -----------------------------------------------------------------------------------

    def compiled(self) -> list[nn.Module]:
        return [part for part in (self.encoder, self.decoder, self.discriminator, self.perceptual) if part is not None]

    def blocks(self) -> list[nn.Module]:
        return [part for part in self.modules() if isinstance(part, ResidualBlock)]


TASK = VQGAN
