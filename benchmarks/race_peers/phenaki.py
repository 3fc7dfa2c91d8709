"""phenaki-pytorch: C-ViViT and MaskGit over its tokens."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from einops import rearrange
from torch import Tensor

from benchmarks.race_peers.contestant import Contestant, Trained
from benchmarks.race_peers.muse import Averages, count_codes, note_codec
from benchmarks.race_peers.track import (
    Track,
    average_weights,
    drop_captions,
    fit_size,
    make_step,
    make_text_stand_in,
    nearest_power,
)


def train(track: Track) -> Trained:
    from phenaki_pytorch import MaskGit, Phenaki
    from phenaki_pytorch import phenaki_pytorch as module

    codec, average = train_codec(track)
    plan: Any = track.generators[-1].spec.config
    text = make_text_stand_in(track, track.generators[-1])
    frames = track.shape.frames
    tokens = codec.num_tokens_per_frames(frames)

    def build(width: int) -> Any:
        return MaskGit(
            num_tokens=codec.vq.codebook_size,
            max_seq_len=tokens,
            dim=width,
            dim_context=text.width,
            depth=plan.depth,
            heads=plan.heads,
            dim_head=width // plan.heads,
        )

    target = track.count_ours(*track.generators) - sum(p.numel() for p in text.parameters())
    width = fit_size(build, target, 8 * plan.heads)
    stage = track.begin("generator", *track.generators)
    with mock.patch.object(module, "get_encoded_dim", return_value=text.width):
        model = Phenaki(cvivit=average.ema_model, maskgit=build(width), text_embed_dim=text.width).to(track.device)
    model.cvivit.requires_grad_(False)
    optimizer = torch.optim.Adam(
        [*model.maskgit.parameters(), *text.parameters()], lr=1e-4 * track.rate, betas=(0.9, 0.99)
    )
    averages = Averages(model.maskgit, text)
    track.note(
        f"generator: {model.cond_drop_prob} of the captions are dropped for guidance, which its forward() fails to do"
    )
    track.note("generator: the EMA that its trainer's options promise and that it does not have")
    if len(track.generators) > 1:
        track.note("generator: on clips all the time; our plan begins with pictures")

    def loss(batch: Any) -> Tensor:
        captions = drop_captions(batch.captions, model.cond_drop_prob)
        return model(rearrange(batch.video, "b t c h w -> b c t h w"), text_embeds=text(captions))

    stage.train(make_step(stage, loss, optimizer, average=averages))
    model.maskgit, encode = averages.models
    model.encode_texts = lambda captions, output_device=None: encode(captions)
    model.eval()
    encode.eval()

    def draw(captions: list[str]) -> Tensor:
        with stage.autocast():
            return rearrange(model.sample(texts=captions, num_frames=frames), "b c t h w -> b t c h w")

    def reconstruct(clips: Tensor) -> Tensor:
        with track.stages[0].autocast():
            drawn = model.cvivit(rearrange(clips, "b t c h w -> b c t h w"), return_recons_only=True)
        return rearrange(drawn, "b c t h w -> b t c h w")

    return Trained(stage.draw_with(draw), [codec, *averages.trained], track.stages[0].draw_with(reconstruct))


def train_codec(track: Track) -> tuple[Any, Any]:
    from phenaki_pytorch import CViViT

    plan: Any = track.codec.spec.config
    shape, codes = track.shape, nearest_power(count_codes(plan.quantizer))

    def build(width: int) -> Any:
        return CViViT(
            dim=width,
            codebook_size=codes,
            image_size=(shape.height, shape.width),
            patch_size=plan.patch,
            temporal_patch_size=plan.temporal_patch,
            spatial_depth=plan.spatial_depth,
            temporal_depth=plan.temporal_depth,
            heads=plan.heads,
            dim_head=width // plan.heads,
            channels=shape.channels,
            use_vgg_and_gan=False,
        )

    width = fit_size(build, track.count_ours(track.codec), 8 * plan.heads)
    stage = track.begin("codec", track.codec)
    codec = build(width).to(track.device)
    note_codec(track, codes)
    average = average_weights(codec)
    quantizer: list[Tensor] = []
    codec.vq.register_forward_hook(lambda layer, given, output: quantizer.append(output[2]))

    def loss(batch: Any) -> Tensor:
        quantizer.clear()
        reconstruction = codec(rearrange(batch.video, "b t c h w -> b c t h w"))
        return reconstruction + quantizer.pop().sum()

    optimizer = torch.optim.Adam(codec.parameters(), lr=3e-4 * track.rate)
    stage.train(make_step(stage, loss, optimizer, clip=0.5, average=average))
    return codec, average


PEER = Contestant("phenaki", "phenaki-pytorch", "0.5.0", "phenaki_pytorch", train)
