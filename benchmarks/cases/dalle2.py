"""DALL-E 2: one step of a decoder U-Net on random image embeddings, and a guided sampling call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.case import Case, Peer, Sizes, Workload
from benchmarks.measure import count_flops
from benchmarks.ours import build_sampling, build_training
from benchmarks.peers import autocast, count_parameters, make_optimizer_step

if TYPE_CHECKING:
    from kineograph.core.batch import Batch
    from kineograph.family.dalle2.task import Decoder

TRAIN = {"width": 128, "multipliers": (1, 2, 3, 4), "blocks": (2, 2, 2, 1), "pixels": 64, "embedding": 512, "batch": 64}
SAMPLE = {**TRAIN, "steps": 32, "guidance": 2.0}
SMALL = {"width": 16, "multipliers": (1, 2), "blocks": (1, 1), "pixels": 16, "embedding": 32, "batch": 2}

TIMESTEPS = 1000
IMAGE_DROPOUT = 0.1


# Ours ------------------------------------------------------------------------------------------------------------


def _build_our_model(sizes: Sizes) -> Decoder:
    """Two residual blocks per level like the peer, but one at the coarsest: our way up is wider, so this matches the parameter count."""
    from kineograph.core.batch import Shape
    from kineograph.core.config import parse
    from kineograph.core.task import BuildContext
    from kineograph.family.dalle2.config import DecoderConfig
    from kineograph.family.dalle2.task import Decoder

    config = parse(
        DecoderConfig,
        {
            "task": "dalle2",
            "width": sizes["width"],
            "multipliers": sizes["multipliers"],
            "blocks": sizes["blocks"],
            "clip": {"kind": "given", "width": sizes["embedding"]},
            "image_dropout": IMAGE_DROPOUT,
            "diffusion": {"steps": TIMESTEPS, "learned_variance": True},
        },
    )
    return Decoder(config, BuildContext(Shape(1, sizes["pixels"], sizes["pixels"], 3, 8.0)))


def _make_batch(sizes: Sizes) -> Batch:
    from kineograph.core.batch import Batch

    batch = sizes["batch"]
    return Batch(slots=torch.arange(batch), extra={"image_embed": torch.randn(batch, sizes["embedding"])})


def build_our_training(sizes: Sizes, device: torch.device) -> Workload:
    data = _make_batch(sizes)
    pictures = (sizes["batch"], 1, 3, sizes["pixels"], sizes["pixels"])
    data.pixels = torch.randint(0, 256, pictures, dtype=torch.uint8)
    return build_training(_build_our_model(sizes), data, device)


def build_our_sampling(sizes: Sizes, device: torch.device) -> Workload:
    from kineograph.family.dalle2.config import DecoderSample

    task = _build_our_model(sizes)
    options = DecoderSample(solver="ddim", steps=sizes["steps"], guidance=sizes["guidance"])
    return build_sampling(task, _make_batch(sizes), options, device)


# The peer --------------------------------------------------------------------------------------------------------


def _build_peer_model(sizes: Sizes, device: torch.device) -> Any:
    from dalle2_pytorch import Decoder, Unet

    coarse = len(sizes["multipliers"]) - 1
    unet = Unet(
        dim=sizes["width"],
        image_embed_dim=sizes["embedding"],
        cond_dim=sizes["width"],
        channels=3,
        dim_mults=sizes["multipliers"],
        cond_on_image_embeds=True,
        num_resnet_blocks=2,
        self_attn=(False, *(True,) * coarse),
    )
    return Decoder(
        unet=(unet,),
        image_sizes=(sizes["pixels"],),
        timesteps=TIMESTEPS,
        sample_timesteps=(sizes.get("steps"),),
        image_cond_drop_prob=IMAGE_DROPOUT,
        text_cond_drop_prob=0.5,
        learned_variance=True,
    ).to(device)


def build_peer_training(sizes: Sizes, device: torch.device) -> Workload:
    model, batch = _build_peer_model(sizes, device), sizes["batch"]
    pictures = torch.rand(batch, 3, sizes["pixels"], sizes["pixels"], device=device)
    embeddings = torch.randn(batch, sizes["embedding"], device=device)
    parameters = list(model.parameters())
    step = make_optimizer_step(
        parameters, lambda: model(pictures, image_embed=embeddings, unet_number=1), device, sizes["precision"]
    )
    return Workload(step, samples=batch, parameters=count_parameters(parameters), flops=count_flops(step))


def build_peer_sampling(sizes: Sizes, device: torch.device) -> Workload:
    model, batch = _build_peer_model(sizes, device).eval(), sizes["batch"]
    embeddings = torch.randn(batch, sizes["embedding"], device=device)

    def call() -> None:
        with torch.no_grad(), autocast(device, sizes["precision"]):
            model.sample(image_embed=embeddings, cond_scale=sizes["guidance"])

    return Workload(call, samples=batch, parameters=count_parameters(model.parameters()), flops=count_flops(call))


_PEER = ("dalle2-pytorch", "1.15.6", "dalle2_pytorch")

CASES = (
    Case(
        name="dalle2-train",
        about="DALL-E 2 decoder step: U-Net of width 128 (1, 2, 3, 4), 64 px, learned variance, image embeddings given",
        sizes=TRAIN,
        small=SMALL,
        ours=build_our_training,
        peer=Peer(*_PEER, build_peer_training),
    ),
    Case(
        name="dalle2-sample",
        about="DALL-E 2 decoder sampling call: 32 guided DDIM steps to 64 px pictures",
        sizes=SAMPLE,
        small={**SMALL, "steps": 4},
        ours=build_our_sampling,
        peer=Peer(*_PEER, build_peer_sampling),
        warmup=2,
        repeat=8,
    ),
)
