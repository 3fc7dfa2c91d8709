"""The released CogVideoX VAE and ours: their configs side by side, and weights that go from one to the other under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kineograph.codec.causal_vae import CausalVAE, CausalVAEConfig
from kineograph.core.batch import Shape
from kineograph.core.config import load_file, parse
from kineograph.core.errors import InputError
from kineograph.core.weight_files import DIFFUSERS_STEM, check_shapes, open_weights

CLASS = "AutoencoderKLCogVideoX"
SCALES = {"2b": 1.15258426, "5b": 0.7}
"""What the released VAEs multiply latents by."""
_SAME = {
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
}  # what ours has no other way of


def config_from_diffusers(theirs: Mapping[str, Any], where: str = "vae/config.json", **changed: Any) -> CausalVAEConfig:
    """diffusers' config.json → ours. Its chunks are of 2 latents, with norms over each. `changed` are keys of ours to set otherwise, such as
    `tile`."""
    if theirs.get("_class_name", CLASS) != CLASS:
        raise InputError(f"{where} is of a {theirs['_class_name']}: causal_vae reads {CLASS}")
    for key, value in _FIXED.items():
        if theirs.get(key, value) != value:
            raise InputError(f"{where}: {key}={theirs[key]!r} is not known here; the released VAEs have {value!r}")
    keys = {ours: theirs[key] for key, ours in _SAME.items() if key in theirs}
    return parse(CausalVAEConfig, {"scale": SCALES["2b"], **keys, **changed}, where)


def config_to_diffusers(task: CausalVAE) -> dict[str, Any]:
    """Ours → diffusers' config.json, with the scale as it is now."""
    config, shape, levels = task.config, task.shape, len(task.config.widths)
    if config.norm != "chunk" or config.chunk != 2 or config.temporal != 4:
        raise InputError(
            f"norm={config.norm}, chunk={config.chunk}, temporal={config.temporal}: diffusers' {CLASS} normalises over chunks of 2 latents "
            "and 8 frames, so it would decode this VAE's latents to other pixels; train with norm=chunk, chunk=2, temporal=4"
        )
    same = {key: getattr(config, ours) for key, ours in _SAME.items()}
    return {
        "_class_name": CLASS,
        **{key: list(value) if isinstance(value, tuple) else value for key, value in same.items()},
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
    """What diffusers' class has of it: encoder and decoder, under their own names."""
    return {name: value for name, value in task.state_dict().items() if name.startswith(("encoder.", "decoder."))}


def load_diffusers_vae(folder: Path, shape: Shape, **changed: Any) -> CausalVAE:
    """The VAE of a diffusers folder, or of its vae/, strict: every name must be there in its shape, and nothing else."""
    folder = folder / "vae" if (folder / "vae").is_dir() else folder
    place = folder / "config.json"
    if not place.is_file():
        raise InputError(f"{place} does not exist: name a diffusers folder, or its vae/")
    config = config_from_diffusers(load_file(place), str(place), **changed)
    task, weights = CausalVAE(config, shape), open_weights(folder, DIFFUSERS_STEM)
    check_shapes(weights, {name: value.shape for name, value in weights_to_diffusers(task).items()}, folder)
    task.load_state_dict(dict(weights), strict=False)
    return task
