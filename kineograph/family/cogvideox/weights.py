"""The transformer's weights and shape under the names of diffusers' CogVideoXTransformer3DModel, both ways and strict.

Adapters of peft may sit on our modules: a wrapped layer's own weights stand under `base_layer`, which the names here leave out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.family.cogvideox.network import NORM_EPS, Transformer
from kineograph.family.cogvideox.shapes import TransformerShape

if TYPE_CHECKING:
    from kineograph.family.cogvideox.task import CogVideoX

CLASS = "CogVideoXTransformer3DModel"
_MODULES = (  # ours, theirs; {} is a number or a name that stays as it is
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


def _renamed(module: str, rules: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, target in rules:
        match = pattern.fullmatch(module)
        if match:
            return target.format(*match.groups())
    return None


def module_to_diffusers(module: str) -> str | None:
    """`blocks.3.attention.to_q` → `transformer_blocks.3.attn1.to_q`; None for what diffusers has not."""
    return _renamed(module, _OUTWARD)


def module_from_diffusers(module: str) -> str | None:
    return _renamed(module, _INWARD)


def diffusers_names(name: str) -> tuple[str, ...]:
    """Of one of our parameters: its name there, or three, which ours has one below the other."""
    names = _names(name)
    assert names, name
    return names


def _names(name: str) -> tuple[str, ...]:
    """The same; nothing for what is no parameter of ours."""
    name = name.replace(".base_layer.", ".")
    if name == _TABLE[0]:
        return (_TABLE[1],)
    module, _, leaf = name.rpartition(".")
    modules = [module.removesuffix(_FUSED) + part for part in _PARTS] if module.endswith(_FUSED) else [module]
    found = [module_to_diffusers(part) for part in modules]
    return tuple(f"{part}.{leaf}" for part in found) if all(found) else ()


# Weights ---------------------------------------------------------------------------------------------------------


def _own(network: Transformer) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
    """Our parameters without adapters: name, tensor, their names."""
    for name, parameter in network.named_parameters():
        if ".lora_" not in name:
            yield name, parameter, diffusers_names(name)


def _their_shape(network: Transformer, name: str, value: Tensor, parts: int) -> tuple[int, ...]:
    if name.replace(".base_layer.", ".") == "patch_in.weight" and network.shape.patch_time == 1:
        return (value.shape[0], network.read_channels, network.shape.patch, network.shape.patch)  # a convolution there
    return (value.shape[0] // parts, *value.shape[1:])


def diffusers_shapes(network: Transformer) -> dict[str, tuple[int, ...]]:
    """Every name that diffusers' state dict has for this network, with its shape."""
    return {
        theirs: _their_shape(network, name, value, len(names))
        for name, value, names in _own(network)
        for theirs in names
    }


def check_state(network: Transformer, state: Mapping[str, Any], where: str = "the state dict") -> None:
    """Refuse a state that lacks a name, has one too many, or another shape."""
    expected = diffusers_shapes(network)
    missing, strangers = [key for key in expected if key not in state], [key for key in state if key not in expected]
    for problem, keys in (("lacks", missing), ("holds the unknown", strangers)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise InputError(
                f"{where} {problem} {', '.join(keys[:3])}{more}: not of this shape of CogVideoX; "
                "set shape (and positions, first_frame, ofs) as the folder's transformer/config.json says"
            )
    shape_of: Callable[[str], Any] = getattr(state, "shape", lambda key: state[key].shape)
    for key, shape in expected.items():
        if tuple(shape_of(key)) != shape:
            raise InputError(
                f"{where}: {key} is {_size(shape_of(key))}, and this network's is {_size(shape)}: set its shape as the folder's "
                "transformer/config.json says"
            )


def _size(shape: Any) -> str:
    return " × ".join(str(side) for side in shape)


@torch.no_grad()
def load_network(network: Transformer, state: Mapping[str, Tensor], where: str = "the state dict") -> None:
    """Copy a diffusers state dict in, tensor by tensor, so that a mapping that reads when asked never lies in memory as a whole."""
    check_state(network, state, where)
    for _, parameter, names in _own(network):
        rows = parameter.shape[0] // len(names)
        for number, theirs in enumerate(names):
            place = parameter[number * rows : (number + 1) * rows] if len(names) > 1 else parameter
            place.copy_(state[theirs].reshape(place.shape))


@torch.no_grad()
def network_state(network: Transformer) -> dict[str, Tensor]:
    """Our weights as a diffusers state dict; parts of fused matrices are views."""
    found: dict[str, Tensor] = {}
    for name, parameter, names in _own(network):
        shape = _their_shape(network, name, parameter, len(names))
        for theirs, part in zip(names, parameter.detach().chunk(len(names)), strict=True):
            found[theirs] = part.reshape(shape)
    return found


def renamed(network: Transformer, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of another of our networks by the names that they have in this one; what is not there is left out."""
    theirs: dict[str, Tensor] = {}
    for name, whole in given.items():
        names = () if ".lora_" in name else _names(name)
        theirs |= dict(zip(names, whole.chunk(len(names)) if names else (), strict=True))
    found: dict[str, Tensor] = {}
    for name, _, names in _own(network):
        if name in given:
            found[name] = given[name]
        elif all(part in theirs for part in names):
            found[name] = torch.cat([theirs[part] for part in names]) if len(names) > 1 else theirs[names[0]]
    return found


def diffusers_state(task: CogVideoX) -> dict[str, Tensor]:
    """The weights below adapters, where there are any."""
    return network_state(task.network)


# Adapters --------------------------------------------------------------------------------------------------------


def _adapters(network: Transformer) -> Iterator[tuple[str, Tensor]]:
    """`transformer_blocks.0.attn1.to_q.lora_A.weight` and the parameter that it names."""
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
            f"grid={shape.grid} with patch_time={shape.patch_time} has no counterpart in diffusers: its pipelines slice where patch_time > 1 "
            "and resize elsewhere"
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


_DEFAULTS: dict[str, Any] = {  # of diffusers' class, where a config.json leaves a key out
    "num_attention_heads": 30, "attention_head_dim": 64, "in_channels": 16, "out_channels": 16, "flip_sin_to_cos": True, "freq_shift": 0,
    "time_embed_dim": 512, "ofs_embed_dim": None, "num_layers": 30, "attention_bias": True, "sample_width": 90, "sample_height": 60,
    "sample_frames": 49, "patch_size": 2, "patch_size_t": None, "temporal_compression_ratio": 4, "activation_fn": "gelu-approximate",
    "timestep_activation_fn": "silu", "norm_elementwise_affine": True, "norm_eps": NORM_EPS, "spatial_interpolation_scale": 1.875,
    "temporal_interpolation_scale": 1.0, "use_rotary_positional_embeddings": False, "use_learned_positional_embeddings": False,
}  # fmt: skip
_ALWAYS = (
    "flip_sin_to_cos", "freq_shift", "attention_bias", "activation_fn", "timestep_activation_fn", "norm_elementwise_affine", "norm_eps"
)  # fmt: skip


def shape_of(config: Mapping[str, Any], where: str = "transformer/config.json") -> dict[str, Any]:
    """Our keys for a config.json of diffusers' class."""
    full = {**_DEFAULTS, **{key: value for key, value in config.items() if key in _DEFAULTS}}
    for key in _ALWAYS:
        if full[key] != _DEFAULTS[key]:
            raise InputError(f"{where}: {key}={full[key]!r} is not what CogVideoX has here: {_DEFAULTS[key]!r}")
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
    return {key: value for key, value in found.items() if value != _plain(TransformerShape, key)}


def _plain(model: type[TransformerShape], key: str) -> Any:
    default = model.model_fields[key].default
    return list(default) if isinstance(default, tuple) else default
