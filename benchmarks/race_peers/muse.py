"""muse-maskgit-pytorch: VQGAN-VAE and MaskGit."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
from einops import rearrange
from torch import Tensor

from benchmarks.race_peers.contestant import Contestant, Trained
from benchmarks.race_peers.track import (
    Stage,
    Track,
    average_weights,
    fit_size,
    make_step,
    make_text_stand_in,
    nearest_power,
)


def train(track: Track) -> Trained:
    from muse_maskgit_pytorch import MaskGit, MaskGitTransformer
    from muse_maskgit_pytorch import muse_maskgit_pytorch as module

    vae, average = train_codec(track)
    plan: Any = track.generators[-1].spec.config
    target = track.count_ours(*track.generators)
    codes, side = vae.codebook_size, vae.get_encoded_fmap_size(track.shape.height)
    text = make_text_stand_in(track, track.generators[-1])

    def build(width: int) -> Any:
        with mock.patch.object(module, "get_encoded_dim", return_value=text.width):
            return MaskGitTransformer(
                num_tokens=codes,
                seq_len=side**2,
                dim=width,
                depth=plan.depth,
                heads=plan.heads,
                dim_head=width // plan.heads,
            )

    width = fit_size(build, target - sum(p.numel() for p in text.parameters()), 8 * plan.heads)
    stage = track.begin("generator", *track.generators)
    model = MaskGit(vae=average.ema_model, transformer=build(width), image_size=track.shape.height).to(track.device)
    model.vae.requires_grad_(False)
    parameters = [*model.transformer.parameters(), *text.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4 * track.rate)
    track.note("the package has no trainer for MaskGit: Adam of 3e-4 and EMA as in its trainer of the VAE")
    averages = Averages(model.transformer, text)

    def loss(batch: Any) -> Tensor:
        return model(batch.video[:, 0], text_embeds=text(batch.captions))

    stage.train(make_step(stage, loss, optimizer, average=averages))
    model.transformer, encode = averages.models
    model.transformer.encode_text = lambda captions: encode(captions)
    model.eval()
    encode.eval()

    def draw(captions: list[str]) -> Tensor:
        with stage.autocast():
            return rearrange(model.generate(texts=captions), "b c h w -> b 1 c h w")

    def reconstruct(clips: Tensor) -> Tensor:
        with track.stages[0].autocast():
            return model.vae(clips[:, 0])[:, None]

    return Trained(stage.draw_with(draw), [vae, *averages.trained], track.stages[0].draw_with(reconstruct))


class Averages:
    """EMA of several modules."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        self.trained = modules
        self.averages = [average_weights(module) for module in modules]

    def update(self) -> None:
        for average in self.averages:
            average.update()

    @property
    def models(self) -> list[Any]:
        return [average.ema_model for average in self.averages]


def count_codes(quantizer: Any) -> int:
    return math.prod(quantizer.levels) if quantizer.kind == "fsq" else quantizer.codes


def count_halvings(config: Any) -> int:
    """By how many powers of two our VQGAN makes pictures smaller."""
    return round(math.log2(config.patch)) + len(config.multipliers) - 1


def train_codec(track: Track) -> tuple[Any, Any]:
    from muse_maskgit_pytorch import VQGanVAE

    plan: Any = track.codec.spec.config
    codes = nearest_power(count_codes(plan.quantizer))

    def build(width: int) -> Any:
        return VQGanVAE(
            dim=width,
            channels=track.shape.channels,
            layers=count_halvings(plan),
            codebook_size=codes,
            use_vgg_and_gan=False,
        )

    width = fit_size(build, track.count_ours(track.codec), 16)
    stage = track.begin("codec", track.codec)
    vae = build(width).to(track.device)
    note_codec(track, codes)
    return vae, train_vae(track, stage, vae)


def train_vae(track: Track, stage: Stage, vae: Any) -> Any:
    """By reconstruction and the quantizer's loss. → the average of its weights"""
    average = average_weights(vae)

    def loss(batch: Any) -> Tensor:
        images = rearrange(batch.video, "b t c h w -> (b t) c h w")
        latents, _, quantizer = vae.encode(images)
        return vae.recon_loss_fn(vae.decode(latents), images) + quantizer.sum()

    stage.train(make_step(stage, loss, torch.optim.Adam(vae.parameters(), lr=3e-4 * track.rate), average=average))
    return average


def note_codec(track: Track, codes: int) -> None:
    track.note(f"codec: {codes:,} codes; reconstruction and the quantizer's loss (which it drops without a GAN)")
    track.note("codec: neither GAN nor perceptual loss: VGG cannot be fetched, and our plan has neither")


PEER = Contestant("muse", "muse-maskgit-pytorch", "0.3.5", "muse_maskgit_pytorch", train)
