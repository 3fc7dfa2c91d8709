"""Phenaki: one step of C-ViViT with its discriminator, one of the masked transformer on random tokens, and a guided sampling call."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.case import Case, Peer, Sizes, Workload
from benchmarks.measure import count_flops
from benchmarks.ours import build_sampling, build_training
from benchmarks.peers import (
    autocast,
    build_gan_training,
    build_random_vgg16,
    count_parameters,
    get_trainable_parameters,
    make_optimizer_step,
)

if TYPE_CHECKING:
    from kineograph.codec.cvivit import CViViT
    from kineograph.core.batch import Batch, Shape
    from kineograph.family.phenaki.task import Phenaki

CODEC = {
    "width": 512,
    "heads": 8,
    "depth": 4,
    "codes": 8192,
    "pixels": 128,
    "frames": 17,
    "batch": 4,
    "discriminator_width": 96,
    "discriminator_frames": 1,
}
TRAIN = {**CODEC, "batch": 8, "layers": 12, "text": (64, 768)}
SAMPLE = {**TRAIN, "steps": 18, "guidance": 5.0}
SMALL = {
    "width": 64,
    "heads": 2,
    "depth": 1,
    "codes": 64,
    "pixels": 32,
    "frames": 5,
    "batch": 1,
    "discriminator_width": 4,
    "discriminator_frames": 1,
    "layers": 2,
    "text": (8, 32),
}

PATCH, TEMPORAL_PATCH = 8, 2
CAPTION_DROPOUT = 0.25


# Ours ------------------------------------------------------------------------------------------------------------


def _get_shape(sizes: Sizes) -> Shape:
    from kineograph.core.batch import Shape

    return Shape(sizes["frames"], sizes["pixels"], sizes["pixels"], 3, 8.0)


def _build_codec(sizes: Sizes, settings: dict[str, Any]) -> CViViT:
    from kineograph.codec.cvivit import CViViT, CViViTConfig
    from kineograph.core.config import parse
    from kineograph.core.task import BuildContext

    layout = {
        "width": sizes["width"],
        "heads": sizes["heads"],
        "spatial_depth": sizes["depth"],
        "temporal_depth": sizes["depth"],
        "patch": PATCH,
        "temporal_patch": TEMPORAL_PATCH,
        "quantizer": {"kind": "lfq", "codes": sizes["codes"]},
    }
    return CViViT.build(parse(CViViTConfig, layout | settings), BuildContext(_get_shape(sizes)))


def match_peer_discriminator(sizes: Sizes) -> dict[str, Any]:
    """The peer's discriminator: its size, its frames per clip, a gradient penalty in every step."""
    return {
        "width": sizes["discriminator_width"],
        "levels": 5,
        "penalty_every": 1,
        "frames": sizes["discriminator_frames"],
    }


def build_our_codec_training(sizes: Sizes, device: torch.device) -> Workload:
    """Like the peer: one random frame per clip for the perceptual network and for the discriminator, a gradient penalty in every step."""
    from kineograph.codec.perceptual import Lpips
    from kineograph.core.batch import Batch

    batch, pixels = sizes["batch"], sizes["pixels"]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "random-vgg16.safetensors"
        save_file(Lpips().state_dict(), weights)
        settings = {
            "perceptual": {"weights": weights, "frames": 1},
            "adversarial": match_peer_discriminator(sizes),
        }
        task = _build_codec(sizes, settings)
    clips = torch.randint(0, 256, (batch, sizes["frames"], 3, pixels, pixels), dtype=torch.uint8)
    return build_training(task, Batch(slots=torch.arange(batch), pixels=clips), device)


def _build_our_model(sizes: Sizes) -> Phenaki:
    from kineograph.core.config import parse
    from kineograph.core.task import BuildContext, freeze
    from kineograph.family.phenaki.config import PhenakiConfig
    from kineograph.family.phenaki.task import Phenaki

    codec = _build_codec(sizes, {"perceptual": {"weight": 0}})
    freeze(codec)
    length, width = sizes["text"]
    config = parse(
        PhenakiConfig,
        {
            "task": "phenaki",
            "codec": "codec",
            "width": sizes["width"],
            "depth": sizes["layers"],
            "heads": sizes["heads"],
            "mlp_ratio": 4.5,  # matches the peer's parameters within 2 %
            "text": {"kind": "given", "width": width, "length": length},
            "caption_dropout": CAPTION_DROPOUT,
        },
    )
    return Phenaki(config, BuildContext(_get_shape(sizes), stage=lambda name: codec))


def _make_batch(sizes: Sizes, **fields: Any) -> Batch:
    from kineograph.core.batch import Batch

    batch, text = sizes["batch"], sizes["text"]
    mask = torch.ones(batch, text[0], dtype=torch.bool)
    return Batch(slots=torch.arange(batch), text_embeds=torch.randn(batch, *text), text_mask=mask, **fields)


def build_our_training(sizes: Sizes, device: torch.device) -> Workload:
    task = _build_our_model(sizes)
    tokens = torch.randint(0, sizes["codes"], (sizes["batch"], *task.grid))
    return build_training(task, _make_batch(sizes, tokens=tokens), device)


def build_our_sampling(sizes: Sizes, device: torch.device) -> Workload:
    from kineograph.family.phenaki.config import PhenakiSample

    task = _build_our_model(sizes)
    options = PhenakiSample(steps=sizes["steps"], guidance=sizes["guidance"])
    return build_sampling(task, _make_batch(sizes), options, device)


# The peer --------------------------------------------------------------------------------------------------------


def _build_peer_codec(sizes: Sizes, with_losses: bool) -> Any:
    from phenaki_pytorch import CViViT

    settings = {"vgg": build_random_vgg16()} if with_losses else {"use_vgg_and_gan": False}
    return CViViT(
        dim=sizes["width"],
        codebook_size=sizes["codes"],
        image_size=sizes["pixels"],
        patch_size=PATCH,
        temporal_patch_size=TEMPORAL_PATCH,
        spatial_depth=sizes["depth"],
        temporal_depth=sizes["depth"],
        dim_head=sizes["width"] // sizes["heads"],
        heads=sizes["heads"],
        **settings,
    )


def build_peer_codec_training(sizes: Sizes, device: torch.device) -> Workload:
    codec = _build_peer_codec(sizes, with_losses=True).to(device)
    clips = torch.rand(sizes["batch"], 3, sizes["frames"], sizes["pixels"], sizes["pixels"], device=device)
    real = clips.clone()  # the discriminator's call turns on the gradients of its input
    players = {
        "generator": (get_trainable_parameters(codec, exclude=("discr", "vgg")), lambda: codec(clips)),
        "discriminator": (list(codec.discr.parameters()), lambda: codec(real, return_discr_loss=True)),
    }
    return build_gan_training(players, sizes["batch"], device, sizes["precision"])


def _build_peer_model(sizes: Sizes, device: torch.device) -> Any:
    """phenaki-pytorch with random embeddings in place of T5."""
    from phenaki_pytorch import MaskGit, Phenaki
    from phenaki_pytorch import phenaki_pytorch as module

    width = sizes["text"][1]
    side = sizes["pixels"] // PATCH
    length = (1 + (sizes["frames"] - 1) // TEMPORAL_PATCH) * side**2
    with mock.patch.object(module, "get_encoded_dim", return_value=width):
        transformer = MaskGit(
            num_tokens=sizes["codes"],
            max_seq_len=length,
            dim=sizes["width"],
            dim_context=width,
            depth=sizes["layers"],
            heads=sizes["heads"],
            dim_head=sizes["width"] // sizes["heads"],
        )
        codec = _build_peer_codec(sizes, with_losses=False)
        return Phenaki(
            cvivit=codec,
            maskgit=transformer,
            text_embed_dim=width,
            cond_drop_prob=CAPTION_DROPOUT,
            steps=sizes.get("steps", 18),
        ).to(device)


def build_peer_training(sizes: Sizes, device: torch.device) -> Workload:
    model = _build_peer_model(sizes, device)
    batch, side = sizes["batch"], sizes["pixels"] // PATCH
    times = 1 + (sizes["frames"] - 1) // TEMPORAL_PATCH
    ids = torch.randint(0, sizes["codes"], (batch, times, side, side), device=device)
    embeddings = torch.randn(batch, *sizes["text"], device=device)
    parameters = list(model.maskgit.parameters())
    step = make_optimizer_step(
        parameters, lambda: model(video_codebook_ids=ids, text_embeds=embeddings), device, sizes["precision"]
    )
    return Workload(step, samples=batch, parameters=count_parameters(parameters), flops=count_flops(step))


def build_peer_sampling(sizes: Sizes, device: torch.device) -> Workload:
    from phenaki_pytorch import phenaki_pytorch as module

    model = _build_peer_model(sizes, device).eval()
    texts = ["a"] * sizes["batch"]

    def encode(texts: list[str], **_: Any) -> Tensor:
        return torch.randn(len(texts), *sizes["text"], device=device)

    model.encode_texts = encode

    def call() -> None:
        with (
            torch.no_grad(),
            autocast(device, sizes["precision"]),
            mock.patch.object(module, "t5_encode_text", encode),
        ):
            model.sample(texts=texts, num_frames=sizes["frames"], cond_scale=sizes["guidance"])

    parameters = count_parameters(model.maskgit.parameters()) + count_parameters(get_trainable_parameters(model.cvivit))
    return Workload(call, samples=sizes["batch"], parameters=parameters, flops=count_flops(call))


def _peer(build: Any) -> Peer:
    return Peer("phenaki-pytorch", "0.5.0", "phenaki_pytorch", build)


CASES = (
    Case(
        name="cvivit-train",
        about="C-ViViT, generator and discriminator step: 4 + 4 layers in encoder and in decoder, width 512, 17 × 128 × 128, 8,192 codes",
        sizes=CODEC,
        small=SMALL,
        ours=build_our_codec_training,
        peer=_peer(build_peer_codec_training),
    ),
    Case(
        name="phenaki-train",
        about="Phenaki transformer step: 12 layers, width 512, 2,304 tokens, 8,192 codes, text embeddings given",
        sizes=TRAIN,
        small=SMALL,
        ours=build_our_training,
        peer=_peer(build_peer_training),
    ),
    Case(
        name="phenaki-sample",
        about="Phenaki sampling call: 18 guided steps to clips of 17 × 128 × 128",
        sizes=SAMPLE,
        small={**SMALL, "steps": 3},
        ours=build_our_sampling,
        peer=_peer(build_peer_sampling),
        warmup=2,
        repeat=8,
    ),
)
