"""NUWA: one step of the autoregressive transformer with its text encoder on random tokens, and guided sampling."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.case import Case, Peer, Sizes, Workload
from benchmarks.measure import count_flops
from benchmarks.ours import build_training
from benchmarks.peers import autocast, count_parameters, get_trainable_parameters, make_optimizer_step

if TYPE_CHECKING:
    from kineograph.family.nuwa.task import Nuwa

TRAIN = {
    "width": 512,
    "depth": 12,
    "heads": 8,
    "codes": 512,
    "frames": 10,
    "tokens": 16,
    "batch": 8,
    "window": (5, 3, 3),
    "words": 4096,
    "length": 64,
    "text_depth": 6,
    "codec_width": 32,
}
SAMPLE = {**TRAIN, "guidance": 2.0}
SMALL = {
    "width": 64,
    "depth": 2,
    "heads": 2,
    "codes": 64,
    "frames": 2,
    "tokens": 4,
    "batch": 2,
    "words": 300,
    "length": 16,
    "text_depth": 1,
    "codec_width": 16,
}

CAPTION_DROPOUT = 0.2  # as the peer


def make_sentences(words: int) -> list[str]:
    """Made-up sentences with enough distinct words to fill the vocabulary."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(letters[(n * 7919 + k * k * 31 + n // 26**k) % 26] for k in range(5)) for n in range(words)]
    return [" ".join(vocabulary[start : start + 32]) for start in range(0, words, 32)] * 2


def _build_our_model(sizes: Sizes) -> Nuwa:
    from kineograph.codec.vqgan import VQGAN, VQGANConfig
    from kineograph.core.batch import Shape
    from kineograph.core.config import parse
    from kineograph.core.task import BuildContext, freeze
    from kineograph.family.nuwa.config import NuwaConfig
    from kineograph.family.nuwa.task import Nuwa

    pixels = 4 * sizes["tokens"]
    shape = Shape(sizes["frames"], pixels, pixels, 3, 8.0)
    layout = {
        "width": sizes["codec_width"],
        "multipliers": (1, 2, 4),
        "patch": 1,
        "quantizer": {"kind": "vq", "codes": sizes["codes"]},
        "perceptual": {"weight": 0},
    }
    codec = VQGAN.build(parse(VQGANConfig, layout), BuildContext(shape))
    freeze(codec)
    config = parse(
        NuwaConfig,
        {
            "codec": "codec",
            "width": sizes["width"],
            "depth": sizes["depth"],
            "heads": sizes["heads"],
            "window": sizes["window"],
            "text": {
                "width": sizes["width"],
                "depth": sizes["text_depth"],
                "heads": sizes["heads"],
                "length": sizes["length"],
                "vocabulary": sizes["words"],
            },
            "caption_dropout": CAPTION_DROPOUT,
        },
    )
    context = BuildContext(shape, stage=lambda name: codec, captions=lambda: make_sentences(2 * sizes["words"]))
    return Nuwa(config, context)


def _make_captions(sizes: Sizes) -> list[str]:
    """Captions that fill the text length, different in each row."""
    sentences = make_sentences(2 * sizes["words"])
    return [" ".join(sentences[row : row + 3]) for row in range(sizes["batch"])]


def build_our_training(sizes: Sizes, device: torch.device) -> Workload:
    from kineograph.core.batch import Batch

    side, batch = sizes["tokens"], sizes["batch"]
    data = Batch(
        slots=torch.arange(batch),
        tokens=torch.randint(0, sizes["codes"], (batch, sizes["frames"], side, side)),
        captions=_make_captions(sizes),
    )
    return build_training(_build_our_model(sizes), data, device)


def build_our_sampling(sizes: Sizes, device: torch.device, frames: int | None = None) -> Workload:
    from kineograph.core.batch import Prompts
    from kineograph.core.task import freeze
    from kineograph.family.nuwa.config import NuwaSample
    from kineograph.sample.inference import draw, sampling_noise
    from kineograph.train.compile import compile_task
    from kineograph.train.precision import resolve_precision

    task = _build_our_model(sizes).to(device)
    freeze(task)
    codec = task.stages["codec"].to(device)
    batch, frames = sizes["batch"], frames or sizes["frames"]
    options = NuwaSample(guidance=sizes["guidance"], top_k=max(1, sizes["codes"] // 10))  # as the peer
    captions, seeds = _make_captions(sizes), count()

    def call() -> Tensor:
        noise = sampling_noise(next(seeds), torch.arange(batch))
        return draw(task, Prompts(noise, captions, frames=frames), options, device).pixels

    if device.type == "cuda":
        for part in (task, codec):
            compile_task(part, graphs=True)
    # CUDA graphs hide their operations: count 2 per weight, token and row; guidance doubles the rows.
    weights = count_parameters(task.network.parameters()) + count_parameters(task.head.parameters())
    tokens = frames * sizes["tokens"] ** 2
    return Workload(
        call,
        samples=batch,
        parameters=count_parameters(task.parameters()) + count_parameters(codec.parameters()),
        flops=2.0 * weights * tokens * 2 * batch,
        precision=resolve_precision("auto", device),
        notes=[f"{tokens:,} tokens per clip"],
    )


def build_our_first_frame(sizes: Sizes, device: torch.device) -> Workload:
    return build_our_sampling(sizes, device, frames=1)


def _build_peer_model(sizes: Sizes, device: torch.device) -> Any:
    from nuwa_pytorch import NUWA, VQGanVAE

    vae = VQGanVAE(
        dim=sizes["codec_width"],
        image_size=4 * sizes["tokens"],
        channels=3,
        num_layers=2,
        vq_codebook_size=sizes["codes"],
        # As wide as its features: it does not project codes of another width.
        vq_codebook_dim=2 * sizes["codec_width"],
        use_vgg_and_gan=False,
        vq_kmeans_init=False,
    )
    return NUWA(
        vae=vae,
        dim=sizes["width"],
        text_num_tokens=sizes["words"],
        text_enc_depth=sizes["text_depth"],
        text_enc_heads=sizes["heads"],
        text_max_seq_len=sizes["length"],
        max_video_frames=sizes["frames"],
        enc_reversible=True,
        dec_depth=sizes["depth"],
        dec_heads=sizes["heads"],
        sparse_3dna_kernel_size=sizes["window"],
        sparse_3dna_dilation=(1, 2, 4),
        shift_video_tokens=True,
    ).to(device)


def build_peer_training(sizes: Sizes, device: torch.device) -> Workload:
    model = _build_peer_model(sizes, device)
    side, batch = sizes["tokens"], sizes["batch"]
    text = torch.randint(1, sizes["words"], (batch, sizes["length"]), device=device)
    video = torch.randint(0, sizes["codes"], (batch, sizes["frames"], side, side), device=device)
    parameters = get_trainable_parameters(model, exclude=("vae",))
    step = make_optimizer_step(
        parameters, lambda: model(text=text, video=video, return_loss=True), device, sizes["precision"]
    )
    return Workload(step, samples=batch, parameters=count_parameters(parameters), flops=count_flops(step))


def build_peer_first_frame(sizes: Sizes, device: torch.device) -> Workload:
    """nuwa-pytorch. It recomputes the whole sequence for every token, so the first frame is the cheapest."""
    from nuwa_pytorch import nuwa_pytorch as module

    model = _build_peer_model(sizes, device).eval()
    text = torch.randint(1, sizes["words"], (sizes["batch"], sizes["length"]), device=device)

    def call() -> None:
        with (
            torch.no_grad(),
            autocast(device, sizes["precision"]),
            mock.patch.object(module, "tqdm", lambda steps, **_: steps),
        ):
            model.generate(text=text, num_frames=1, cond_scale=sizes["guidance"])

    tokens = sizes["tokens"] ** 2
    return Workload(
        call,
        samples=sizes["batch"],
        parameters=count_parameters(model.parameters()),
        notes=[f"{tokens:,} tokens, the first frame of {sizes['frames']}: later frames cost more"],
    )


CASES = (
    Case(
        name="nuwa-train",
        about="NUWA step: 12 layers, width 512, 10 × 16 × 16 tokens, 512 codes, with a text encoder of 6 layers",
        sizes=TRAIN,
        small=SMALL,
        ours=build_our_training,
        peer=Peer("nuwa-pytorch", "0.7.8", "nuwa_pytorch", build_peer_training),
    ),
    Case(
        name="nuwa-sample",
        about="NUWA sampling call: 2,560 tokens one by one, guided (no peer, which would take a quarter of an hour)",
        sizes=SAMPLE,
        small=SMALL,
        ours=build_our_sampling,
        warmup=1,
        repeat=3,
    ),
    Case(
        name="nuwa-sample-frame",
        about="NUWA sampling call of one frame: the first 256 of the 2,560 tokens, on both sides",
        sizes=SAMPLE,
        small=SMALL,
        ours=build_our_first_frame,
        peer=Peer("nuwa-pytorch", "0.7.8", "nuwa_pytorch", build_peer_first_frame),
        warmup=1,
        repeat=1,
    ),
)
