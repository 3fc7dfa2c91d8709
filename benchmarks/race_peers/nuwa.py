"""nuwa-pytorch: VQGAN-VAE of single frames and NUWA over their tokens."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from benchmarks.peers import get_trainable_parameters
from benchmarks.race_peers.contestant import Contestant, Trained
from benchmarks.race_peers.muse import count_codes, count_halvings, note_codec, train_vae
from benchmarks.race_peers.track import Track, fit_size, make_step


def train(track: Track) -> Trained:
    from nuwa_pytorch import NUWA

    codec, average = train_codec(track)
    plan: Any = track.generators[-1].spec.config
    words = track.make_words(plan.text.length)
    track.note("text: its own encoder, over the captions' words; its 49,408 BPE tokens would be larger than the model")
    track.note("text: reversible layers, since its default encoder refuses the rotary positions that it is given")

    def build(width: int) -> Any:
        return NUWA(
            vae=average.ema_model,
            dim=width,
            text_num_tokens=words.size,
            text_max_seq_len=words.length,
            text_enc_depth=max(1, plan.text.depth),
            text_enc_heads=plan.heads,
            text_enc_dim_head=width // plan.heads,
            enc_reversible=True,
            max_video_frames=track.shape.frames,
            dec_depth=plan.depth,
            dec_heads=plan.heads,
            dec_dim_head=width // plan.heads,
            sparse_3dna_kernel_size=tuple(size + 1 - size % 2 for size in plan.window),
            sparse_3dna_dilation=tuple(plan.dilations),
        )

    frozen = sum(p.numel() for p in average.ema_model.parameters())
    width = fit_size(build, frozen + track.count_ours(*track.generators), 8 * plan.heads)
    stage = track.begin("generator", *track.generators)
    model = build(width).to(track.device)
    model.vae.requires_grad_(False)
    parameters = get_trainable_parameters(model, exclude=("vae",))
    decayed = [p for p in parameters if p.ndim > 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4 * track.rate, weight_decay=0.01)

    def loss(batch: Any) -> Tensor:
        return model(text=words.encode(batch.captions, track.device), video=batch.video, return_loss=True)

    stage.train(make_step(stage, loss, optimizer, clip=0.5))
    model.eval()
    track.note(
        "sampler: its guidance feeds the output of the guided pass to the unguided one; a row without guidance beside it"
    )

    def draw(captions: list[str], **guidance: float) -> Tensor:
        with stage.autocast():
            return model.generate(text=words.encode(captions, track.device), num_frames=track.shape.frames, **guidance)

    def reconstruct(clips: Tensor) -> Tensor:
        with track.stages[0].autocast():
            frames = model.vae(rearrange(clips, "b t c h w -> (b t) c h w"))
        return rearrange(frames, "(b t) c h w -> b t c h w", t=clips.shape[1])

    return Trained(
        draw,
        [codec, torch.nn.ParameterList(parameters)],
        reconstruct,
        unguided=lambda captions: draw(captions, cond_scale=1),
    )


def train_codec(track: Track) -> tuple[Any, Any]:
    from nuwa_pytorch import VQGanVAE

    plan: Any = track.codec.spec.config
    halvings, codes = count_halvings(plan), count_codes(plan.quantizer)

    def build(width: int) -> Any:
        return VQGanVAE(
            dim=width,
            image_size=track.shape.height,
            channels=track.shape.channels,
            num_layers=halvings,
            vq_codebook_size=codes,
            # As wide as its features: it does not project codes of another width.
            vq_codebook_dim=width * 2 ** (halvings - 1),
            use_vgg_and_gan=False,
        )

    width = fit_size(build, track.count_ours(track.codec), 16)
    stage = track.begin("codec", track.codec)
    codec = build(width).to(track.device)
    note_codec(track, codes)
    track.note("codec: Adam 3e-4 and EMA 0.995, our choice")
    return codec, train_vae(track, stage, codec)


PEER = Contestant("nuwa", "nuwa-pytorch", "0.7.8", "nuwa_pytorch", train)
