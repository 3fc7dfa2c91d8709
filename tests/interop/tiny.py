"""Tiny random models and pipelines of diffusers."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
from transformers import T5Config, T5EncoderModel, T5Tokenizer

LETTERS = "▁abcdefghijklmnopqrstuvwxyz0123456789"
TEXT_LENGTH = 12


def tiny_transformer(**changes: Any) -> CogVideoXTransformer3DModel:
    torch.manual_seed(1)
    shape = {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16,
        "num_layers": 2, "sample_width": 4, "sample_height": 4, "sample_frames": 5, "max_text_seq_length": TEXT_LENGTH,
    }  # fmt: skip
    model = CogVideoXTransformer3DModel(**(shape | changes))
    with torch.no_grad():  # norms begin as ones and zeros, where a mix-up would not show
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tiny_vae(**changes: Any) -> AutoencoderKLCogVideoX:
    torch.manual_seed(2)
    shape = {
        "down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4, "block_out_channels": (8, 8, 8, 16),
        "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2, "temporal_compression_ratio": 4, "scaling_factor": 0.7,
        "sample_height": 32, "sample_width": 32,
    }  # fmt: skip
    return AutoencoderKLCogVideoX(**(shape | changes)).eval()


def tiny_pipeline(**transformer: Any) -> CogVideoXPipeline:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [(letter, -3.0) for letter in LETTERS]
    torch.manual_seed(3)
    text = T5Config(vocab_size=len(pieces), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu")  # fmt: skip
    return CogVideoXPipeline(
        tokenizer=T5Tokenizer(vocab=pieces, extra_ids=0),
        text_encoder=T5EncoderModel(text).eval(),
        vae=tiny_vae(),
        transformer=tiny_transformer(**transformer),
        scheduler=CogVideoXDDIMScheduler(
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            clip_sample=False,
            snr_shift_scale=1.0,
        ),
    )


def answer(model: CogVideoXTransformer3DModel) -> torch.Tensor:
    """What a tiny transformer says to fixed inputs."""
    source = torch.Generator().manual_seed(4)
    latents = torch.randn(2, 2, model.config.in_channels, 4, 4, generator=source)
    text = torch.randn(2, TEXT_LENGTH, 16, generator=source)
    with torch.no_grad():
        return model(latents, text, torch.tensor([3, 900])).sample
