"""VQGAN: one step of generator and discriminator."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.case import Case, Peer, Sizes, Workload
from benchmarks.ours import build_training
from benchmarks.peers import build_gan_training, build_random_vgg16, get_trainable_parameters


def match_peer_layout(width: int, codes: int) -> dict[str, Any]:
    """The peer's layout: the first level at full resolution, residual blocks at the coarsest level only."""
    return {
        "width": width,
        "multipliers": (1, 1, 2, 4, 8),
        "patch": 1,
        "blocks": (0, 0, 0, 0, 1),
        "decoder_blocks": (0, 0, 0, 0, 2),
        "quantizer": {"kind": "lfq", "codes": codes},
    }


def build_ours(sizes: Sizes, device: torch.device) -> Workload:
    """With a gradient penalty in every step, like the peer; the perceptual network has random weights."""
    from kineograph.codec.perceptual import Lpips
    from kineograph.codec.vqgan import VQGAN, VQGANConfig
    from kineograph.core.batch import Batch, Shape
    from kineograph.core.config import parse
    from kineograph.core.task import BuildContext

    batch, pixels = sizes["batch"], sizes["pixels"]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "random-vgg16.safetensors"
        save_file(Lpips().state_dict(), weights)
        losses = {
            "perceptual": {"weights": weights},
            "adversarial": {"width": sizes["width"], "levels": 4, "penalty_every": 1},
        }
        config = parse(VQGANConfig, match_peer_layout(sizes["width"], sizes["codes"]) | losses)
        task = VQGAN.build(config, BuildContext(Shape(1, pixels, pixels, 3, 8.0)))
    images = torch.randint(0, 256, (batch, 1, 3, pixels, pixels), dtype=torch.uint8)
    return build_training(task, Batch(slots=torch.arange(batch), pixels=images), device)


def build_peer(sizes: Sizes, device: torch.device) -> Workload:
    """muse-maskgit-pytorch. Its trainer passes the penalty's interval to the generator's call, which ignores it: the penalty is in every step."""
    from muse_maskgit_pytorch import VQGanVAE

    vae = VQGanVAE(dim=sizes["width"], codebook_size=sizes["codes"], vgg=build_random_vgg16()).to(device)
    images = torch.rand(sizes["batch"], 3, sizes["pixels"], sizes["pixels"], device=device)
    real = images.clone()  # the discriminator's call turns on the gradients of its input
    players = {
        "generator": (get_trainable_parameters(vae, exclude=("discr", "_vgg")), lambda: vae(images, return_loss=True)),
        "discriminator": (list(vae.discr.parameters()), lambda: vae(real, return_discr_loss=True)),
    }
    return build_gan_training(players, sizes["batch"], device, sizes["precision"])


CASES = (
    Case(
        name="vqgan-train",
        about="VQGAN, generator and discriminator step, 65,536 codes, 256 px",
        sizes={"width": 128, "codes": 65536, "pixels": 256, "batch": 8},
        small={"width": 16, "codes": 256, "pixels": 64, "batch": 1},
        ours=build_ours,
        peer=Peer("muse-maskgit-pytorch", "0.3.5", "muse_maskgit_pytorch", build_peer),
    ),
)
