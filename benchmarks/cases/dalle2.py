"""DALL-E 2: one step of a decoder U-Net on given image embeddings, and a guided sampling call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.case import Case, Peer, Sizes, Work
from benchmarks.measure import count_flops
from benchmarks.ours import sampling, training
from benchmarks.peers import autocast, optimizer_step, size

if TYPE_CHECKING:
    from kineograph.core.batch import Batch
    from kineograph.family.dalle2.task import Decoder

TRAIN = {"width": 128, "multipliers": (1, 2, 3, 4), "blocks": (2, 2, 2, 1), "pixels": 64, "embedding": 512, "batch": 64}
SAMPLE = {**TRAIN, "steps": 32, "guidance": 2.0}
SMALL = {"width": 16, "multipliers": (1, 2), "blocks": (1, 1), "pixels": 16, "embedding": 32, "batch": 2}

LEVELS = 1000
IMAGE_DROPOUT = 0.1


# Ours ------------------------------------------------------------------------------------------------------------


def _our_model(sizes: Sizes) -> Decoder:
    """Two residual blocks a level, as the peer has, but one at the coarsest: the way up is as wide as the way down here, and so as
    many parameters are reached with fewer blocks."""
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
            "diffusion": {"steps": LEVELS, "learned_variance": True},
        },
    )
    return Decoder(config, BuildContext(Shape(1, sizes["pixels"], sizes["pixels"], 3, 8.0)))


def _embeddings(sizes: Sizes) -> Batch:
    from kineograph.core.batch import Batch

    batch = sizes["batch"]
    return Batch(slots=torch.arange(batch), extra={"image_embed": torch.randn(batch, sizes["embedding"])})


def ours_train(sizes: Sizes, device: torch.device) -> Work:
    given = _embeddings(sizes)
    pictures = (sizes["batch"], 1, 3, sizes["pixels"], sizes["pixels"])
    given.pixels = torch.randint(0, 256, pictures, dtype=torch.uint8)
    return training(_our_model(sizes), given, device)


def ours_sample(sizes: Sizes, device: torch.device) -> Work:
    from kineograph.family.dalle2.config import DecoderSample

    task = _our_model(sizes)
    options = DecoderSample(solver="ddim", steps=sizes["steps"], guidance=sizes["guidance"])
    return sampling(task, _embeddings(sizes), options, device)


# The peer --------------------------------------------------------------------------------------------------------


def _peer_model(sizes: Sizes, device: torch.device) -> Any:
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
        timesteps=LEVELS,
        sample_timesteps=(sizes.get("steps"),),
        image_cond_drop_prob=IMAGE_DROPOUT,
        text_cond_drop_prob=0.5,
        learned_variance=True,
    ).to(device)


def dalle2_pytorch_train(sizes: Sizes, device: torch.device) -> Work:
    model, batch = _peer_model(sizes, device), sizes["batch"]
    pictures = torch.rand(batch, 3, sizes["pixels"], sizes["pixels"], device=device)
    embeddings = torch.randn(batch, sizes["embedding"], device=device)
    parameters = list(model.parameters())
    step = optimizer_step(
        parameters, lambda: model(pictures, image_embed=embeddings, unet_number=1), device, sizes["precision"]
    )
    return Work(step, samples=batch, parameters=size(parameters), flops=count_flops(step))


def dalle2_pytorch_sample(sizes: Sizes, device: torch.device) -> Work:
    model, batch = _peer_model(sizes, device).eval(), sizes["batch"]
    embeddings = torch.randn(batch, sizes["embedding"], device=device)

    def call() -> None:
        with torch.no_grad(), autocast(device, sizes["precision"]):
            model.sample(image_embed=embeddings, cond_scale=sizes["guidance"])

    return Work(call, samples=batch, parameters=size(model.parameters()), flops=count_flops(call))


_PEER = ("dalle2-pytorch", "1.15.6", "dalle2_pytorch")

CASES = (
    Case(
        name="dalle2-train",
        about="DALL-E 2 decoder step: U-Net of width 128 (1, 2, 3, 4), 64 px, learned variance, image embeddings given",
        sizes=TRAIN,
        small=SMALL,
        ours=ours_train,
        peer=Peer(*_PEER, dalle2_pytorch_train),
    ),
    Case(
        name="dalle2-sample",
        about="DALL-E 2 decoder sampling call: 32 guided DDIM steps to 64 px pictures",
        sizes=SAMPLE,
        small={**SMALL, "steps": 4},
        ours=ours_sample,
        peer=Peer(*_PEER, dalle2_pytorch_sample),
        warmup=2,
        repeat=8,
    ),
)
