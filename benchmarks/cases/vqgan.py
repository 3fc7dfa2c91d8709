"""VQGAN: one step of generator and discriminator."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.case import Case, Peer, Sizes, Work
from benchmarks.ours import training
from benchmarks.peers import game_step, random_vgg16, trainable


def layout(width: int, codes: int) -> dict[str, Any]:
    """The peer's: its widths at its resolutions (the first level at full size), residual blocks at the coarsest level only."""
    return {
        "width": width,
        "multipliers": (1, 1, 2, 4, 8),
        "patch": 1,
        "blocks": (0, 0, 0, 0, 1),
        "decoder_blocks": (0, 0, 0, 0, 2),
        "quantizer": {"kind": "lfq", "codes": codes},
    }


def ours(sizes: Sizes, device: torch.device) -> Work:
    """With the peer's cadence of the gradient penalty, every step; random weights stand in the perceptual net."""
    from kineograph.codec.perceptual import Lpips
    from kineograph.codec.vqgan import VQGAN, VQGANConfig
    from kineograph.core.batch import Batch, Shape
    from kineograph.core.config import parse
    from kineograph.core.task import BuildContext

    batch, pixels = sizes["batch"], sizes["pixels"]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "random-vgg16.safetensors"
        save_file(Lpips().state_dict(), weights)
        judges = {
            "perceptual": {"weights": weights},
            "adversarial": {"width": sizes["width"], "levels": 4, "penalty_every": 1},
        }
        config = parse(VQGANConfig, layout(sizes["width"], sizes["codes"]) | judges)
        task = VQGAN.build(config, BuildContext(Shape(1, pixels, pixels, 3, 8.0)))
    images = torch.randint(0, 256, (batch, 1, 3, pixels, pixels), dtype=torch.uint8)
    return training(task, Batch(slots=torch.arange(batch), pixels=images), device)


def muse_maskgit_pytorch(sizes: Sizes, device: torch.device) -> Work:
    """Its trainer passes the penalty's cadence to the generator's call, which ignores it: every discriminator step pays."""
    from muse_maskgit_pytorch import VQGanVAE

    vae = VQGanVAE(dim=sizes["width"], codebook_size=sizes["codes"], vgg=random_vgg16()).to(device)
    images = torch.rand(sizes["batch"], 3, sizes["pixels"], sizes["pixels"], device=device)
    real = images.clone()  # the discriminator's call turns on gradients of the images it is given
    players = {
        "generator": (trainable(vae, without=("discr", "_vgg")), lambda: vae(images, return_loss=True)),
        "discriminator": (list(vae.discr.parameters()), lambda: vae(real, return_discr_loss=True)),
    }
    return game_step(players, sizes["batch"], device, sizes["precision"])


CASES = (
    Case(
        name="vqgan-train",
        about="VQGAN, generator and discriminator step, 65,536 codes, 256 px",
        sizes={"width": 128, "codes": 65536, "pixels": 256, "batch": 8},
        small={"width": 16, "codes": 256, "pixels": 64, "batch": 1},
        ours=ours,
        peer=Peer("muse-maskgit-pytorch", "0.3.5", "muse_maskgit_pytorch", muse_maskgit_pytorch),
    ),
)
