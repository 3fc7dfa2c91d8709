"""The released CogVideoX VAE: its config ⇄ ours, and its weights, whose names are the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kineograph.codec.causal_vae import CausalVAE, CausalVAEConfig
from kineograph.core.batch import Shape
from kineograph.core.config import parse
from kineograph.core.config_file import load_file
from kineograph.core.errors import InputError
from kineograph.core.weight_files import DIFFUSERS_STEM, check_shapes, open_weights

CLASS = "AutoencoderKLCogVideoX"
SCALES = {"2b": 1.15258426, "5b": 0.7}
"""Latent scales of the released VAEs."""
_KEYS = {
    "block_out_channels": "widths",
    "layers_per_block": "layers",
    "latent_channels": "latent_channels",
    "norm_num_groups": "groups",
    "scaling_factor": "scale",
}  # diffusers' key → ours
_FIXED: dict[str, Any] = {
    "temporal_compression_ratio": 4,
    "act_fn": "silu",
    "norm_eps": 1e-6,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "shift_factor": None,
    "latents_mean": None,
    "latents_std": None,
}  # settings that ours cannot change


def config_from_diffusers(theirs: Mapping[str, Any], where: str = "vae/config.json", **changed: Any) -> CausalVAEConfig:
    """diffusers' config.json → ours. `changed`: our keys to override, such as `tile`."""
    if theirs.get("_class_name", CLASS) != CLASS:
        raise InputError(f"{where} is of a {theirs['_class_name']}: causal_vae needs {CLASS}")
    for key, value in _FIXED.items():
        if theirs.get(key, value) != value:
            raise InputError(
                f"{where}: {key}={theirs[key]!r} is not supported; only {value!r} is, as in the released VAEs"
            )
    keys = {ours: theirs[key] for key, ours in _KEYS.items() if key in theirs}
    return parse(CausalVAEConfig, {"scale": SCALES["2b"], **keys, **changed}, where)


def config_to_diffusers(task: CausalVAE) -> dict[str, Any]:
    """Ours → diffusers' config.json, with the current scale"""
    config, shape, levels = task.config, task.shape, len(task.config.widths)
    if config.norm != "chunk" or config.chunk != 2 or config.temporal != 4:
        raise InputError(
            f"norm={config.norm}, chunk={config.chunk}, temporal={config.temporal}: diffusers' {CLASS} would decode this VAE's latents "
            "differently; train with norm=chunk, chunk=2, temporal=4"
        )
    keys = {key: getattr(config, ours) for key, ours in _KEYS.items()}
    return {
        "_class_name": CLASS,
        **{key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()},
        **_FIXED,
        "scaling_factor": float(task.scale),
        "in_channels": shape.channels,
        "out_channels": shape.channels,
        "down_block_types": ["CogVideoXDownBlock3D"] * levels,
        "up_block_types": ["CogVideoXUpBlock3D"] * levels,
        "sample_height": shape.height,
        "sample_width": shape.width,
    }


def weights_to_diffusers(task: CausalVAE) -> dict[str, Tensor]:
    """The encoder's and decoder's weights; diffusers' names are the same."""
    return {name: value for name, value in task.state_dict().items() if name.startswith(("encoder.", "decoder."))}


def load_diffusers_vae(folder: Path, shape: Shape, **changed: Any) -> CausalVAE:
    """Load the VAE of a diffusers folder, or of its vae/; all names and shapes must match."""
    folder = folder / "vae" if (folder / "vae").is_dir() else folder
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{path} does not exist: give a diffusers folder, or its vae/")
    config = config_from_diffusers(load_file(path), str(path), **changed)
    task, weights = CausalVAE(config, shape), open_weights(folder, DIFFUSERS_STEM)
    check_shapes(weights, {name: value.shape for name, value in weights_to_diffusers(task).items()}, folder)
    task.load_state_dict(dict(weights), strict=False)
    return task
