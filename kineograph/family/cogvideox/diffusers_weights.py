"""Conversion of weights and config to and from diffusers' CogVideoXTransformer3DModel.

Layers wrapped by peft keep their weights under `base_layer`, which is dropped from the names here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.weight_files import WeightFiles
from kineograph.family.cogvideox.network import NORM_EPS, Transformer
from kineograph.family.cogvideox.transformer_config import TransformerShape

if TYPE_CHECKING:
    from kineograph.family.cogvideox.task import CogVideoX

CLASS = "CogVideoXTransformer3DModel"
_MODULES = (  # ours, diffusers'; {} stays
    ("patch_in", "patch_embed.proj"),
    ("text_in", "patch_embed.text_proj"),
    ("time.linear_{}", "time_embedding.linear_{}"),
    ("ofs.linear_{}", "ofs_embedding.linear_{}"),
    ("blocks.{}.norm1.{}", "transformer_blocks.{}.norm1.{}"),
    ("blocks.{}.norm2.{}", "transformer_blocks.{}.norm2.{}"),
    ("blocks.{}.attention.to_out", "transformer_blocks.{}.attn1.to_out.0"),
    ("blocks.{}.attention.{}", "transformer_blocks.{}.attn1.{}"),
    ("blocks.{}.mlp.up", "transformer_blocks.{}.ff.net.0.proj"),
    ("blocks.{}.mlp.down", "transformer_blocks.{}.ff.net.2"),
    ("norm_final", "norm_final"),
    ("out_linear", "norm_out.linear"),
    ("out_norm", "norm_out.norm"),
    ("patch_out", "proj_out"),
)
_TABLE = ("positions.table", "patch_embed.pos_embedding")
_FUSED, _PARTS = ".to_qkv", (".to_q", ".to_k", ".to_v")


def _rules(forward: bool) -> list[tuple[re.Pattern[str], str]]:
    rules = []
    for pair in _MODULES:
        source, target = pair if forward else pair[::-1]
        pattern = re.escape(source).replace(r"\{\}", r"([^.]+)")
        rules.append((re.compile(pattern), target))
    return rules


_OUTWARD, _INWARD = _rules(True), _rules(False)


def _rename_module(module: str, rules: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, target in rules:
        match = pattern.fullmatch(module)
        if match:
            return target.format(*match.groups())
    return None


def module_to_diffusers(module: str) -> str | None:
    """`blocks.3.attention.to_q` → `transformer_blocks.3.attn1.to_q`; None if diffusers has no such module."""
    return _rename_module(module, _OUTWARD)


def module_from_diffusers(module: str) -> str | None:
    return _rename_module(module, _INWARD)


def diffusers_names(name: str) -> tuple[str, ...]:
    """diffusers' name of one of our parameters, or the three names of a fused one."""
    names = _names(name)
    assert names, name
    return names


def _names(name: str) -> tuple[str, ...]:
    """The same; empty if diffusers has no such parameter."""
    name = name.replace(".base_layer.", ".")
    if name == _TABLE[0]:
        return (_TABLE[1],)
    module, _, leaf = name.rpartition(".")
    modules = [module.removesuffix(_FUSED) + part for part in _PARTS] if module.endswith(_FUSED) else [module]
    found = [module_to_diffusers(part) for part in modules]
    return tuple(f"{part}.{leaf}" for part in found) if all(found) else ()


# Weights ---------------------------------------------------------------------------------------------------------


def _base_parameters(network: Transformer) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
    """Our parameters without adapters: name, tensor, diffusers' names."""
    for name, parameter in network.named_parameters():
        if ".lora_" not in name:
            yield name, parameter, diffusers_names(name)


def _their_shape(network: Transformer, name: str, value: Tensor, parts: int) -> tuple[int, ...]:
    if name.replace(".base_layer.", ".") == "patch_in.weight" and network.shape.patch_time == 1:
        return (
            value.shape[0],
            network.read_channels,
            network.shape.patch,
            network.shape.patch,
        )  # a convolution in diffusers
    return (value.shape[0] // parts, *value.shape[1:])


def diffusers_shapes(network: Transformer) -> dict[str, tuple[int, ...]]:
    """Names and shapes of diffusers' state dict for this network."""
    return {
        theirs: _their_shape(network, name, value, len(names))
        for name, value, names in _base_parameters(network)
        for theirs in names
    }


def check_state(network: Transformer, state: Mapping[str, Any], where: str = "the state dict") -> None:
    """Refuse a state dict with missing or unknown names or other shapes."""
    expected = diffusers_shapes(network)
    missing, unknown = [key for key in expected if key not in state], [key for key in state if key not in expected]
    for problem, keys in (("lacks", missing), ("has the unknown", unknown)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise InputError(
                f"{where} {problem} {', '.join(keys[:3])}{more}: it does not fit this shape of CogVideoX; "
                "set shape (and positions, first_frame, ofs) as in the folder's transformer/config.json"
            )
    shape_of: Callable[[str], Any] = state.shape if isinstance(state, WeightFiles) else lambda key: state[key].shape
    for key, shape in expected.items():
        if tuple(shape_of(key)) != shape:
            raise InputError(
                f"{where}: {key} is {_size(shape_of(key))}, and this network needs {_size(shape)}: set its shape as in the folder's "
                "transformer/config.json"
            )


def _size(shape: Any) -> str:
    return " × ".join(str(side) for side in shape)


@torch.no_grad()
def load_network(network: Transformer, state: Mapping[str, Tensor], where: str = "the state dict") -> None:
    """Load a diffusers state dict tensor by tensor, so that a lazy mapping is never in memory as a whole."""
    check_state(network, state, where)
    for _, parameter, names in _base_parameters(network):
        rows = parameter.shape[0] // len(names)
        for number, theirs in enumerate(names):
            place = parameter[number * rows : (number + 1) * rows] if len(names) > 1 else parameter
            place.copy_(state[theirs].reshape(place.shape))


@torch.no_grad()
def network_state(network: Transformer) -> dict[str, Tensor]:
    """Our weights as a diffusers state dict; slices of fused matrices are views."""
    found: dict[str, Tensor] = {}
    for name, parameter, names in _base_parameters(network):
        shape = _their_shape(network, name, parameter, len(names))
        for theirs, part in zip(names, parameter.detach().chunk(len(names)), strict=True):
            found[theirs] = part.reshape(shape)
    return found


def rename_weights(network: Transformer, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename another network's parameters to fit this one; unknown ones are dropped."""
    theirs: dict[str, Tensor] = {}
    for name, whole in given.items():
        names = () if ".lora_" in name else _names(name)
        theirs |= dict(zip(names, whole.chunk(len(names)) if names else (), strict=True))
    found: dict[str, Tensor] = {}
    for name, _, names in _base_parameters(network):
        if name in given:
            found[name] = given[name]
        elif all(part in theirs for part in names):
            found[name] = torch.cat([theirs[part] for part in names]) if len(names) > 1 else theirs[names[0]]
    return found


def diffusers_state(task: CogVideoX) -> dict[str, Tensor]:
    """The base weights, without adapters."""
    return network_state(task.network)


# Adapters --------------------------------------------------------------------------------------------------------


def _adapters(network: Transformer) -> Iterator[tuple[str, Tensor]]:
    """diffusers' name and parameter of every adapter, such as transformer_blocks.0.attn1.to_q.lora_A.weight."""
    for name, parameter in network.named_parameters():
        module, mark, rest = name.partition(".lora_")  # … .lora_A.default.weight
        if mark:
            theirs = module_to_diffusers(module)
            assert theirs is not None, name
            yield f"{theirs}.lora_{rest.replace('.default.', '.')}", parameter


def lora_state(task: CogVideoX) -> dict[str, Tensor]:
    """Adapters under diffusers' module names, with peft's `lora_A.weight` and `lora_B.weight`."""
    return {name: parameter.detach() for name, parameter in _adapters(task.network)}


# Shapes ----------------------------------------------------------------------------------------------------------


def diffusers_config(network: Transformer, text_width: int, text_length: int, time_factor: int = 4) -> dict[str, Any]:
    """config.json of diffusers' class for this network."""
    shape = network.shape
    rotary, timed = shape.positions != "sincos", shape.patch_time > 1
    if rotary and (shape.grid == "slice") != timed:
        raise InputError(
            f"grid={shape.grid} with patch_time={shape.patch_time} cannot be exported: diffusers' pipelines slice if patch_time > 1 "
            "and resize otherwise"
        )
    return {
        "_class_name": CLASS,
        "num_attention_heads": shape.heads,
        "attention_head_dim": shape.head_width,
        "in_channels": network.read_channels,
        "out_channels": network.channels,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "time_embed_dim": shape.time_width,
        "ofs_embed_dim": shape.time_width if shape.ofs else None,
        "text_embed_dim": text_width,
        "num_layers": shape.depth,
        "dropout": 0.0,
        "attention_bias": True,
        "sample_width": network.base_size[1],
        "sample_height": network.base_size[0],
        "sample_frames": (network.base_frames - 1) * time_factor + 1,
        "patch_size": shape.patch,
        "patch_size_t": shape.patch_time if timed else None,
        "temporal_compression_ratio": time_factor,
        "max_text_seq_length": text_length,
        "activation_fn": "gelu-approximate",
        "timestep_activation_fn": "silu",
        "norm_elementwise_affine": True,
        "norm_eps": NORM_EPS,
        "spatial_interpolation_scale": shape.space_scale,
        "temporal_interpolation_scale": shape.time_scale,
        "use_rotary_positional_embeddings": rotary,
        "use_learned_positional_embeddings": shape.positions == "rotary+learned",
        "patch_bias": not timed,
    }


_DEFAULTS: dict[str, Any] = {  # defaults of diffusers' class
    "num_attention_heads": 30, "attention_head_dim": 64, "in_channels": 16, "out_channels": 16, "flip_sin_to_cos": True, "freq_shift": 0,
    "time_embed_dim": 512, "ofs_embed_dim": None, "num_layers": 30, "attention_bias": True, "sample_width": 90, "sample_height": 60,
    "sample_frames": 49, "patch_size": 2, "patch_size_t": None, "temporal_compression_ratio": 4, "activation_fn": "gelu-approximate",
    "timestep_activation_fn": "silu", "norm_elementwise_affine": True, "norm_eps": NORM_EPS, "spatial_interpolation_scale": 1.875,
    "temporal_interpolation_scale": 1.0, "use_rotary_positional_embeddings": False, "use_learned_positional_embeddings": False,
}  # fmt: skip
_ALWAYS = (
    "flip_sin_to_cos", "freq_shift", "attention_bias", "activation_fn", "timestep_activation_fn", "norm_elementwise_affine", "norm_eps"
)  # fmt: skip


def read_shape(config: Mapping[str, Any], where: str = "transformer/config.json") -> dict[str, Any]:
    """Our keys for a config.json of diffusers' class."""
    full = {**_DEFAULTS, **{key: value for key, value in config.items() if key in _DEFAULTS}}
    for key in _ALWAYS:
        if full[key] != _DEFAULTS[key]:
            raise InputError(f"{where}: {key}={full[key]!r} is not supported: {_DEFAULTS[key]!r} is")
    if full["in_channels"] not in (full["out_channels"], 2 * full["out_channels"]):
        raise InputError(
            f"{where}: in_channels={full['in_channels']} is neither out_channels={full['out_channels']} nor twice that"
        )
    rotary, timed = full["use_rotary_positional_embeddings"], full["patch_size_t"]
    found: dict[str, Any] = {
        "depth": full["num_layers"],
        "heads": full["num_attention_heads"],
        "head_width": full["attention_head_dim"],
        "time_width": full["time_embed_dim"],
        "patch": full["patch_size"],
        "patch_time": timed or 1,
        "positions": "sincos",
        "base_size": [full["sample_height"], full["sample_width"]],
        "base_frames": (full["sample_frames"] - 1) // full["temporal_compression_ratio"] + 1,
        "first_frame": full["in_channels"] == 2 * full["out_channels"],
        "ofs": bool(full["ofs_embed_dim"]),
    }
    if rotary:
        found["positions"] = "rotary+learned" if full["use_learned_positional_embeddings"] else "rotary"
        found["grid"] = "slice" if timed else "resize"
    else:
        found |= {
            "space_scale": full["spatial_interpolation_scale"],
            "time_scale": full["temporal_interpolation_scale"],
        }
    return {key: value for key, value in found.items() if value != _default_value(TransformerShape, key)}


def _default_value(model: type[TransformerShape], key: str) -> Any:
    default = model.model_fields[key].default
    return list(default) if isinstance(default, tuple) else default
