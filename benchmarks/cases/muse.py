"""Muse: one step of the masked transformer on random tokens and text embeddings, and a guided sampling call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.case import Case, Peer, Sizes, Workload
from benchmarks.cases.vqgan import match_peer_layout
from benchmarks.measure import count_flops
from benchmarks.ours import build_sampling, build_training
from benchmarks.peers import autocast, count_parameters, make_optimizer_step

if TYPE_CHECKING:
    from kineograph.family.muse.task import Muse

TRAIN = {
    "width": 512,
    "depth": 8,
    "heads": 8,
    "codes": 65536,
    "tokens": 16,
    "batch": 32,
    "text": (64, 768),
    "codec_width": 128,
}
SAMPLE = {**TRAIN, "batch": 8, "steps": 18, "guidance": 3.0}
SMALL = {"width": 64, "depth": 2, "heads": 2, "codes": 256, "tokens": 4, "batch": 2, "text": (8, 32), "codec_width": 32}

CAPTION_DROPOUT = 0.25


def _build_our_model(sizes: Sizes) -> Muse:
    from kineograph.codec.vqgan import VQGAN, VQGANConfig
    from kineograph.core.batch import Shape
    from kineograph.core.config import parse
    from kineograph.core.task import BuildContext, freeze
    from kineograph.family.muse.config import MuseConfig
    from kineograph.family.muse.task import Muse

    pixels = 16 * sizes["tokens"]
    shape = Shape(1, pixels, pixels, 3, 8.0)
    codec = VQGAN.build(
        parse(VQGANConfig, match_peer_layout(sizes["codec_width"], sizes["codes"]) | {"perceptual": {"weight": 0}}),
        BuildContext(shape),
    )
    freeze(codec)
    length, width = sizes["text"]
    config = parse(
        MuseConfig,
        {
            "task": "muse",
            "codec": "codec",
            "width": sizes["width"],
            "depth": sizes["depth"],
            "heads": sizes["heads"],
            "text": {"kind": "given", "width": width, "length": length},
            "caption_dropout": CAPTION_DROPOUT,
        },
    )
    return Muse(config, BuildContext(shape, stage=lambda name: codec))


def build_our_training(sizes: Sizes, device: torch.device) -> Workload:
    from kineograph.core.batch import Batch

    side, batch = sizes["tokens"], sizes["batch"]
    data = Batch(
        slots=torch.arange(batch),
        tokens=torch.randint(0, sizes["codes"], (batch, 1, side, side)),
        text_embeds=torch.randn(batch, *sizes["text"]),
        text_mask=torch.ones(batch, sizes["text"][0], dtype=torch.bool),
    )
    return build_training(_build_our_model(sizes), data, device)


def build_our_sampling(sizes: Sizes, device: torch.device) -> Workload:
    from kineograph.core.batch import Batch
    from kineograph.family.muse.config import MuseSample

    task, batch = _build_our_model(sizes), sizes["batch"]
    texts = Batch(
        slots=torch.arange(batch),
        text_embeds=torch.randn(batch, *sizes["text"]),
        text_mask=torch.ones(batch, sizes["text"][0], dtype=torch.bool),
    )
    options = MuseSample(steps=sizes["steps"], guidance=sizes["guidance"])
    return build_sampling(task, texts, options, device)


def _build_peer_model(sizes: Sizes, device: torch.device) -> Any:
    """muse-maskgit-pytorch with random embeddings in place of T5. It needs a VQGAN even to train on tokens."""
    from muse_maskgit_pytorch import MaskGit, MaskGitTransformer, VQGanVAE
    from muse_maskgit_pytorch import muse_maskgit_pytorch as module

    length, width = sizes["text"]

    def encode(texts: list[str], name: str = "") -> Tensor:
        return torch.randn(len(texts), length, width, device=device)

    vae = VQGanVAE(dim=sizes["codec_width"], codebook_size=sizes["codes"], use_vgg_and_gan=False)
    with mock.patch.multiple(module, get_encoded_dim=lambda name: width, t5_encode_text=encode):
        transformer = MaskGitTransformer(
            num_tokens=sizes["codes"],
            seq_len=sizes["tokens"] ** 2,
            dim=sizes["width"],
            depth=sizes["depth"],
            dim_head=sizes["width"] // sizes["heads"],
            heads=sizes["heads"],
            ff_mult=4,
        )
    return MaskGit(
        vae=vae, transformer=transformer, image_size=16 * sizes["tokens"], cond_drop_prob=CAPTION_DROPOUT
    ).to(device)


def build_peer_training(sizes: Sizes, device: torch.device) -> Workload:
    model = _build_peer_model(sizes, device)
    side, batch = sizes["tokens"], sizes["batch"]
    ids = torch.randint(0, sizes["codes"], (batch, side, side), device=device)
    embeddings = torch.randn(batch, *sizes["text"], device=device)
    parameters = list(model.transformer.parameters())
    step = make_optimizer_step(parameters, lambda: model(ids, text_embeds=embeddings), device, sizes["precision"])
    return Workload(step, samples=batch, parameters=count_parameters(parameters), flops=count_flops(step))


def build_peer_sampling(sizes: Sizes, device: torch.device) -> Workload:
    model = _build_peer_model(sizes, device).eval()
    texts = ["a"] * sizes["batch"]

    from muse_maskgit_pytorch import muse_maskgit_pytorch as module

    def call() -> None:
        with (
            torch.no_grad(),
            autocast(device, sizes["precision"]),
            mock.patch.object(module, "tqdm", lambda steps, **_: steps),
        ):
            model.generate(texts=texts, timesteps=sizes["steps"], cond_scale=sizes["guidance"])

    parameters = count_parameters(model.transformer.parameters()) + count_parameters(model.vae.parameters())
    return Workload(call, samples=sizes["batch"], parameters=parameters, flops=count_flops(call))


CASES = (
    Case(
        name="muse-train",
        about="Muse transformer step: 8 layers, width 512, 256 tokens, 65,536 codes, text embeddings given",
        sizes=TRAIN,
        small=SMALL,
        ours=build_our_training,
        peer=Peer("muse-maskgit-pytorch", "0.3.5", "muse_maskgit_pytorch", build_peer_training),
    ),
    Case(
        name="muse-sample",
        about="Muse sampling call: 18 guided steps to 256 px pictures",
        sizes=SAMPLE,
        small={**SMALL, "steps": 4},
        ours=build_our_sampling,
        peer=Peer("muse-maskgit-pytorch", "0.3.5", "muse_maskgit_pytorch", build_peer_sampling),
        warmup=2,
        repeat=8,
    ),
)
