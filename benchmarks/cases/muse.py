"""Muse: one step of the masked transformer on given tokens and text embeddings, and a guided sampling call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.case import Case, Peer, Sizes, Work
from benchmarks.cases.vqgan import layout
from benchmarks.measure import count_flops
from benchmarks.ours import sampling, training
from benchmarks.peers import autocast, optimizer_step, size

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


def _our_model(sizes: Sizes) -> Muse:
    from kineograph.codec.vqgan import VQGAN, VQGANConfig
    from kineograph.core.batch import Shape
    from kineograph.core.config import parse
    from kineograph.core.task import BuildContext, freeze
    from kineograph.family.muse.config import MuseConfig
    from kineograph.family.muse.task import Muse

    pixels = 16 * sizes["tokens"]
    shape = Shape(1, pixels, pixels, 3, 8.0)
    codec = VQGAN.build(
        parse(VQGANConfig, layout(sizes["codec_width"], sizes["codes"]) | {"perceptual": {"weight": 0}}),
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


def ours_train(sizes: Sizes, device: torch.device) -> Work:
    from kineograph.core.batch import Batch

    side, batch = sizes["tokens"], sizes["batch"]
    given = Batch(
        slots=torch.arange(batch),
        tokens=torch.randint(0, sizes["codes"], (batch, 1, side, side)),
        text_embeds=torch.randn(batch, *sizes["text"]),
        text_mask=torch.ones(batch, sizes["text"][0], dtype=torch.bool),
    )
    return training(_our_model(sizes), given, device)


def ours_sample(sizes: Sizes, device: torch.device) -> Work:
    from kineograph.core.batch import Batch
    from kineograph.family.muse.config import MuseSample

    task, batch = _our_model(sizes), sizes["batch"]
    texts = Batch(
        slots=torch.arange(batch),
        text_embeds=torch.randn(batch, *sizes["text"]),
        text_mask=torch.ones(batch, sizes["text"][0], dtype=torch.bool),
    )
    options = MuseSample(steps=sizes["steps"], guidance=sizes["guidance"])
    return sampling(task, texts, options, device)


def _peer_model(sizes: Sizes, device: torch.device) -> Any:
    """Its T5 is replaced by random embeddings of the same shape, and it wants a VQGAN even to train on tokens."""
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


def muse_maskgit_pytorch_train(sizes: Sizes, device: torch.device) -> Work:
    model = _peer_model(sizes, device)
    side, batch = sizes["tokens"], sizes["batch"]
    ids = torch.randint(0, sizes["codes"], (batch, side, side), device=device)
    embeddings = torch.randn(batch, *sizes["text"], device=device)
    parameters = list(model.transformer.parameters())
    step = optimizer_step(parameters, lambda: model(ids, text_embeds=embeddings), device, sizes["precision"])
    return Work(step, samples=batch, parameters=size(parameters), flops=count_flops(step))


def muse_maskgit_pytorch_sample(sizes: Sizes, device: torch.device) -> Work:
    model = _peer_model(sizes, device).eval()
    texts = ["a"] * sizes["batch"]

    from muse_maskgit_pytorch import muse_maskgit_pytorch as module

    def call() -> None:
        with (
            torch.no_grad(),
            autocast(device, sizes["precision"]),
            mock.patch.object(module, "tqdm", lambda steps, **_: steps),
        ):
            model.generate(texts=texts, timesteps=sizes["steps"], cond_scale=sizes["guidance"])

    parameters = size(model.transformer.parameters()) + size(model.vae.parameters())
    return Work(call, samples=sizes["batch"], parameters=parameters, flops=count_flops(call))


CASES = (
    Case(
        name="muse-train",
        about="Muse transformer step: 8 layers, width 512, 256 tokens, 65,536 codes, text embeddings given",
        sizes=TRAIN,
        small=SMALL,
        ours=ours_train,
        peer=Peer("muse-maskgit-pytorch", "0.3.5", "muse_maskgit_pytorch", muse_maskgit_pytorch_train),
    ),
    Case(
        name="muse-sample",
        about="Muse sampling call: 18 guided steps to 256 px pictures",
        sizes=SAMPLE,
        small={**SMALL, "steps": 4},
        ours=ours_sample,
        peer=Peer("muse-maskgit-pytorch", "0.3.5", "muse_maskgit_pytorch", muse_maskgit_pytorch_sample),
        warmup=2,
        repeat=8,
    ),
)
