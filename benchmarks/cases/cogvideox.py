"""CogVideoX: one step of the transformer on random latents and text embeddings, with and without activation checkpointing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.case import Case, Peer, Sizes, Workload
from benchmarks.measure import count_flops
from benchmarks.ours import build_training
from benchmarks.peers import count_parameters

if TYPE_CHECKING:
    from kineograph.core.batch import Batch
    from kineograph.core.task import Task

TRAIN = {"depth": 30, "heads": 30, "latents": (13, 60, 90), "text": (226, 4096), "batch": 1, "checkpointing": False}
SMALL = {"depth": 2, "heads": 2, "latents": (3, 16, 16), "text": (8, 32)}

CHANNELS = 16
EAGER, COMPILED = "bf16 weights", "bf16 weights, torch.compile"


# Ours ------------------------------------------------------------------------------------------------------------


def _build_codec(sizes: Sizes) -> Task:
    """A codec that only gives the shape of the latents."""
    from kineograph.core.config import StageConfig
    from kineograph.core.task import PosteriorCodec

    class ShapeOnlyCodec(PosteriorCodec):
        Config = StageConfig
        latent_channels, scale, spatial = CHANNELS, 1.15258426, 8

        def shape_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
            return sizes["latents"]

        def posterior(self, pixels: Tensor, frame_mask: Tensor | None = None) -> Tensor:
            raise NotImplementedError

    return ShapeOnlyCodec()


def build_our_model(sizes: Sizes, device: torch.device) -> Task:
    from kineograph.core.batch import Shape
    from kineograph.core.config import parse
    from kineograph.core.task import BuildContext
    from kineograph.family.cogvideox import CogVideoX, CogVideoXConfig

    length, width = sizes["text"]
    keys = {
        "task": "cogvideox",
        "shape": "2b",
        "codec": "given",
        "depth": sizes["depth"],
        "heads": sizes["heads"],
        "weights_in": "bf16" if device.type == "cuda" else "fp32",
        "text": {"kind": "given", "width": width, "length": length},
        "null_text": "zeros",
    }
    t, h, w = sizes["latents"]
    context = BuildContext(Shape(4 * t - 3, 8 * h, 8 * w, 3, 8.0), stage=lambda name: _build_codec(sizes))
    with torch.device(device):
        return CogVideoX.build(parse(CogVideoXConfig, keys), context)


def make_batch(sizes: Sizes) -> Batch:
    from kineograph.core.batch import Batch

    (t, h, w), batch = sizes["latents"], sizes["batch"]
    return Batch(
        slots=torch.arange(batch),
        latents=torch.randn(batch, t, CHANNELS, h, w),
        text_embeds=torch.randn(batch, *sizes["text"]),
        text_mask=torch.ones(batch, sizes["text"][0], dtype=torch.bool),
    )


def build_our_training(sizes: Sizes, device: torch.device) -> Workload:
    """Compiled as by `auto` at this size: one block for all, without CUDA graphs."""
    return build_training(
        build_our_model(sizes, device),
        make_batch(sizes),
        device,
        checkpointing=sizes["checkpointing"],
        ema={"decay": 0},  # the peer has no EMA
    )


# The peer --------------------------------------------------------------------------------------------------------


def build_peer_training(sizes: Sizes, device: torch.device) -> Workload:
    """diffusers' transformer with bf16 weights: squared error, backward, clip at 1, fused AdamW."""
    from diffusers import CogVideoXTransformer3DModel

    (t, h, w), batch, (length, width) = sizes["latents"], sizes["batch"], sizes["text"]
    variant = sizes["precision"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model: Any = CogVideoXTransformer3DModel(
            num_attention_heads=sizes["heads"],
            num_layers=sizes["depth"],
            sample_height=h,
            sample_width=w,
            sample_frames=4 * t - 3,
            text_embed_dim=width,
            max_text_seq_length=length,
        ).to(dtype)
    if sizes["checkpointing"]:
        model.enable_gradient_checkpointing()
    latents = torch.randn(batch, t, CHANNELS, h, w, device=device, dtype=dtype)
    text = torch.randn(batch, length, width, device=device, dtype=dtype)
    times = torch.full((batch,), 500, device=device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def make_step(forward: Any) -> Any:
        def step() -> None:
            output = forward(hidden_states=latents, encoder_hidden_states=text, timestep=times, return_dict=False)[0]
            ((output - latents).float() ** 2).mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    flops = count_flops(make_step(model))
    step = make_step(torch.compile(model) if variant == COMPILED else model)
    return Workload(step, samples=batch, parameters=count_parameters(parameters), flops=flops, precision=variant)


_ABOUT = "CogVideoX-2B transformer step: 30 layers, width 1,920, 13 × 60 × 90 latents (17,776 tokens), bf16 weights, text embeddings given"
_PEER = Peer("diffusers", "0.42.1", "diffusers", build_peer_training, needs=(), precisions=(EAGER, COMPILED))

CASES = (
    Case(
        name="cogvideox-train",
        about=_ABOUT,
        sizes=TRAIN,
        small=SMALL,
        ours=build_our_training,
        peer=_PEER,
        warmup=3,
        repeat=8,
    ),
    Case(
        name="cogvideox-train-checkpointed",
        about=f"{_ABOUT}; with activation checkpointing, ours `light`",
        sizes={**TRAIN, "checkpointing": "light"},
        small=SMALL,
        ours=build_our_training,
        peer=_PEER,
        warmup=3,
        repeat=8,
    ),
)
