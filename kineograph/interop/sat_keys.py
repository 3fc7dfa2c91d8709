"""SAT's config keys, ours, and converters of values. sat_config.py translates what depends on several keys."""

from __future__ import annotations

import re
from typing import Any

from kineograph.codec.causal_vae_weights import SCALES
from kineograph.interop.key_translation import Convert, Row, class_name, count, flag, number, only

NET, MODULES = "model.network_config.params", "model.network_config.params.modules"
LORA = f"{MODULES}.lora_config.params"
DATA, ADAM = "data.params", "deepspeed.optimizer.params"
DRAW = "model.sampler_config.params"
TEXT = "model.conditioner_config.params.emb_models.0"
VAE = "model.first_stage_config.params"
DENOISER = "model.denoiser_config.params"
LOSS = "model.loss_fn_config.params.sigma_sampler_config.params"
STAGE = "stages.generator"
RELEASED_FOLDER = "released"


def folder_name(text: Any) -> str:
    return re.sub(r"[^\w.-]+", "-", str(text)).strip("-") or "sat"


def single_entry(value: Any) -> Any:
    """The entry of a list that has one."""
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    if isinstance(value, str):
        return value
    raise ValueError


def patch_size(value: Any) -> tuple[int, int]:
    """2 or [2, 2, 2] → frames, pixels on a side"""
    sides = [count(side) for side in value] if isinstance(value, list) else [1, count(value), count(value)]
    time, height, width = sides
    if height != width:
        raise ValueError
    return time, height


def path_under(prefix: str) -> Convert:

    def convert(value: Any) -> Any:
        if not str(value).startswith(prefix):
            raise ValueError
        return value

    return convert


TABLE: list[Row] = [
    ("args.experiment_name", "name", folder_name),
    ("args.seed", "seed", count),
    ("args.train_iters", "train.steps", count),
    ("args.log_interval", "train.log_every", count),
    ("args.save_interval", "train.save_every", count),
    ("args.num_workers", "train.workers", count),
    ("args.lr", "train.lr", number),
    ("args.train_data", "data.folder", single_entry),
    ("args.checkpoint_activations", "train.checkpointing", flag),
    ("args.only_log_video_latents", "train.show", lambda value: "latents" if flag(value) else "media"),
    ("args.model_parallel_size", None, only(1)),
    (f"{NET}.transformer_args.model_parallel_size", None, only(1)),
    ("deepspeed.gradient_clipping", "train.clip", number),
    (f"{ADAM}.lr", "train.lr", number),
    (f"{ADAM}.betas", "train.betas", lambda value: [number(part) for part in value]),
    (f"{ADAM}.eps", "train.eps", number),
    (f"{ADAM}.weight_decay", "train.weight_decay", number),
    (f"{DATA}.video_size", "data.size", lambda value: [count(side) for side in value]),
    (f"{DATA}.fps", "data.fps", number),
    (f"{DATA}.skip_frms_num", "data.skip_frames", count),
    (f"{DATA}.max_num_frames", "data.frames", count),
    (f"{NET}.num_layers", f"{STAGE}.depth", count),
    (f"{NET}.num_attention_heads", f"{STAGE}.heads", count),
    (f"{NET}.time_embed_dim", f"{STAGE}.time_width", count),
    (f"{NET}.transformer_args.checkpoint_activations", "train.checkpointing", flag),
    (f"{NET}.elementwise_affine", None, only(True)),
    (f"{MODULES}.adaln_layer_config.params.qk_ln", None, only(True)),
    (f"{MODULES}.pos_embed_config.params.text_length", f"{STAGE}.text.length", count),
    (f"{TEXT}.params.max_length", f"{STAGE}.text.length", count),
    (f"{TEXT}.params.model_dir", f"{STAGE}.text.name", str),
    (f"{TEXT}.is_trainable", None, only(False)),
    (f"{TEXT}.input_key", None, only("txt")),
    (f"{TEXT}.ucg_rate", f"{STAGE}.caption_dropout", number),
    ("model.noised_image_dropout", f"{STAGE}.image.dropout", number),
    (f"{DENOISER}.num_idx", f"{STAGE}.diffusion.steps", count),
    (f"{DENOISER}.quantize_c_noise", None, only(False)),
    (f"{LOSS}.num_idx", f"{STAGE}.diffusion.steps", count),
    (f"{LOSS}.uniform_sampling", None, only(True)),
    ("model.loss_fn_config.params.offset_noise_level", None, only(0, 0.0)),
    ("model.loss_fn_config.params.fixed_frames", None, only(0)),
    (f"{DRAW}.fixed_frames", None, only(0)),
    (f"{DRAW}.num_steps", f"{STAGE}.sample.steps", count),
    (f"{DRAW}.guider_config.params.scale", f"{STAGE}.sample.guidance", number),
    (f"{DRAW}.guider_config.params.exp", None, only(5)),
    ("model.scale_factor", None, only(*SCALES.values())),  # the released VAEs'
    (f"{VAE}.loss_config.target", None, class_name("Identity")),
    (f"{VAE}.regularizer_config.target", None, class_name("DiagonalGaussianRegularizer")),
]
# Classes that need no translation: CogVideoX always does what they do.
CLASSES = {
    "model.network_config.target": "DiffusionTransformer",
    f"{MODULES}.patch_embed_config.target": "ImagePatchEmbeddingMixin",
    f"{MODULES}.adaln_layer_config.target": "AdaLNMixin",
    f"{MODULES}.final_layer_config.target": "FinalLayerMixin",
    f"{MODULES}.lora_config.target": "LoraMixin",
    "model.denoiser_config.target": "DiscreteDenoiser",
    f"{DENOISER}.weighting_config.target": "EpsWeighting",
    f"{DENOISER}.scaling_config.target": "VideoScaling",
    "model.conditioner_config.target": "GeneralConditioner",
    f"{TEXT}.target": "FrozenT5Embedder",
    "model.loss_fn_config.target": "VideoDiffusionLoss",
    "model.loss_fn_config.params.sigma_sampler_config.target": "DiscreteSampling",
    f"{VAE.removesuffix('.params')}.target": "VideoAutoencoderInferenceWrapper",
    f"{VAE}.encoder_config.target": "ContextParallelEncoder3D",
    f"{VAE}.decoder_config.target": "ContextParallelDecoder3D",
    "data.target": "SFTDataset",
}
DISCRETIZATIONS = (f"{DENOISER}.discretization_config", f"{LOSS}.discretization_config", f"{DRAW}.discretization_config")  # fmt: skip
SAMPLERS = {"VPSDEDPMPP2MSampler": "dpm_solver_sde", "VideoDDIMSampler": "ddim"}
GUIDERS = {"DynamicCFG": "cosine", "VanillaCFG": "constant"}
