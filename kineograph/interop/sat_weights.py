"""CogVideoX weights of SAT → diffusers' names. torch's tensors-only unpickler reads the files; no code runs.

    transformer/<iteration>/mp_rank_00_model_states.pt   {module: {model.diffusion_model.…}}, and transformer/latest names the iteration
    vae/3d-vae.pt                                        {state_dict: {encoder.…, decoder.…, loss.…}}

Beyond renaming:

    query_key_value            q, k and v concatenated in dimension 0
    adaLN_modulations          twelve parts: shift, scale, gate of attention and of the MLP for video, then for text; diffusers separates
                               those of attention (norm1) from those of the MLP (norm2)
    decoder.up.N               numbered from the other end than in diffusers
    matrix_A.n, matrix_B.n     LoRA factors of q, k, v (or dense); the adapted matrix is then called original
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.interop.lora_file import Adapter, Lora

_NETWORK = "model.diffusion_model."
_CODEC = "first_stage_model."
_TABLES = re.compile(r"(freqs_sin|freqs_cos|embed_tokens|position_embeddings?)(\.|$)")  # derived or unused
_RENAMES = (
    (r"transformer\.final_layernorm\.", "norm_final."),
    (r"transformer\.layers\.(\d+)\.input_layernorm\.", r"transformer_blocks.\1.norm1.norm."),
    (r"transformer\.layers\.(\d+)\.post_attention_layernorm\.", r"transformer_blocks.\1.norm2.norm."),
    (r"transformer\.layers\.(\d+)\.attention\.dense\.", r"transformer_blocks.\1.attn1.to_out.0."),
    (r"transformer\.layers\.(\d+)\.mlp\.dense_h_to_4h\.", r"transformer_blocks.\1.ff.net.0.proj."),
    (r"transformer\.layers\.(\d+)\.mlp\.dense_4h_to_h\.", r"transformer_blocks.\1.ff.net.2."),
    (r"mixins\.adaln_layer\.query_layernorm_list\.(\d+)\.", r"transformer_blocks.\1.attn1.norm_q."),
    (r"mixins\.adaln_layer\.key_layernorm_list\.(\d+)\.", r"transformer_blocks.\1.attn1.norm_k."),
    (r"time_embed\.0\.", "time_embedding.linear_1."),
    (r"time_embed\.2\.", "time_embedding.linear_2."),
    (r"ofs_embed\.0\.", "ofs_embedding.linear_1."),
    (r"ofs_embed\.2\.", "ofs_embedding.linear_2."),
    (r"mixins\.patch_embed\.", "patch_embed."),
    (r"mixins\.final_layer\.norm_final\.", "norm_out.norm."),
    (r"mixins\.final_layer\.linear\.", "proj_out."),
    (r"mixins\.final_layer\.adaLN_modulation\.1\.", "norm_out.linear."),
)
_QKV = re.compile(r"transformer\.layers\.(\d+)\.attention\.query_key_value\.(weight|bias)")
_ADALN = re.compile(r"mixins\.adaln_layer\.adaLN_modulations\.(\d+)\.1\.(weight|bias)")
_LORA = re.compile(r"transformer\.layers\.(\d+)\.attention\.(query_key_value|dense)\.matrix_([AB])\.(\d)")
_POSITIONS = "mixins.pos_embed.pos_embedding"
_VAE_RENAMES = (
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.down\.(\d+)\.block\.", r".down_blocks.\1.resnets."),
    (r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
)
_UP = re.compile(r"\.up\.(\d+)\.(block|upsample)\.")


def read_sat_file(path: Path) -> dict[str, Tensor]:
    """The state dict inside a SAT checkpoint, mapped from the file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(
            f"{path} cannot be read as tensors ({line[:160]}): it may be truncated, or hold Python objects, which are never unpickled "
            "here; save its state dict alone"
        ) from None
    for key in ("model", "module", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(
            f"{path} holds no state dict: save a mapping of names to tensors, at the top or under module or state_dict"
        )
    return state


def locate_sat(folder: Path) -> dict[str, Path]:
    """The `transformer` and `vae` files of a SAT folder, as far as they exist."""
    files: dict[str, Path] = {}
    base = folder / "transformer" if (folder / "transformer").is_dir() else folder
    latest = base / "latest"
    inner = base / latest.read_text(encoding="utf-8").strip() if latest.is_file() else base
    states = sorted(inner.glob("mp_rank_*_model_states.pt"))
    if len(states) > 1:
        raise InputError(f"{inner} holds {len(states)} model-parallel parts: merge them into mp_rank_00 first")
    if latest.is_file() and not states:
        raise InputError(f"{latest} names {inner.name}, but {inner} has no mp_rank_00_model_states.pt")
    if states:
        files["transformer"] = states[0]
    codecs = sorted((folder / "vae").glob("*.pt"))
    if len(codecs) > 1:
        raise InputError(
            f"{folder / 'vae'} holds several .pt files: {', '.join(path.name for path in codecs)}; keep one"
        )
    if codecs:
        files["vae"] = codecs[0]
    if not files:
        raise InputError(
            f"{folder} holds no SAT weights: neither transformer/latest with mp_rank_00_model_states.pt nor vae/*.pt"
        )
    return files


# Transformer -----------------------------------------------------------------------------------------------------


def convert_transformer(sat: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Rename a transformer's tensors; unknown names are an error. LoRA factors are ignored: see `extract_adapters`."""
    inside = {
        key.replace(".original.", "."): value for key, value in _select_network(sat).items() if not _LORA.fullmatch(key)
    }
    state: dict[str, Tensor] = {}
    for key, value in inside.items():
        if key == _POSITIONS:
            if _has_learned_positions(inside):
                state["patch_embed.pos_embedding"] = value
        elif match := _QKV.fullmatch(key):
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                state[f"transformer_blocks.{match[1]}.attn1.to_{letter}.{match[2]}"] = part
        elif match := _ADALN.fullmatch(key):
            parts = value.chunk(12)
            block = f"transformer_blocks.{match[1]}"
            state[f"{block}.norm1.linear.{match[2]}"] = torch.cat([*parts[0:3], *parts[6:9]])
            state[f"{block}.norm2.linear.{match[2]}"] = torch.cat([*parts[3:6], *parts[9:12]])
        elif not _TABLES.search(key):
            state[_rename(key, where)] = value
    return state


def _select_network(sat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The transformer's tensors without their prefix; all tensors if none has it."""
    inside = {key.removeprefix(_NETWORK): value for key, value in sat.items() if key.startswith(_NETWORK)}
    return inside or dict(sat)


def extract_adapters(sat: Mapping[str, Tensor], where: Path) -> Lora:
    """The LoRA adapters of a SAT checkpoint by diffusers' names. SAT's alpha is 1."""
    factors: dict[str, dict[str, Tensor]] = {}
    for key, value in _select_network(sat).items():
        if match := _LORA.fullmatch(key):
            number, layer, side, part = match.groups()
            if int(part) > (2 if layer == "query_key_value" else 0):
                raise InputError(f"{where} holds {key}: only adapters of q, k, v and dense can be read")
            name = f"to_{'qkv'[int(part)]}" if layer == "query_key_value" else "to_out.0"
            factors.setdefault(f"transformer_blocks.{number}.attn1.{name}", {})[side] = value
    for name, pair in factors.items():
        if len(pair) != 2:
            raise InputError(f"{where}: the adapter of {name} (diffusers' name) lacks one of its two matrices")
    return {name: Adapter(pair["A"], pair["B"], alpha=1.0) for name, pair in factors.items()}


def _has_learned_positions(inside: Mapping[str, Tensor]) -> bool:
    """Whether the table was learned (5B-I2V, whose input also has an image's channels) or is 2B's fixed sines."""
    patch, out = inside.get("mixins.patch_embed.proj.weight"), inside.get("mixins.final_layer.linear.weight")
    return patch is not None and out is not None and patch[0].numel() != out.shape[0]


def _rename(key: str, where: Path) -> str:
    for pattern, name in _RENAMES:
        if re.match(pattern, key):
            return re.sub(pattern, name, key, count=1)
    raise InputError(f"{where} holds {key}, which is not part of SAT's CogVideoX transformer")


def infer_transformer_config(state: Mapping[str, Tensor], where: Path) -> dict[str, Any]:
    """diffusers' transformer config from the shapes of the tensors, which do not tell the size of frames."""
    try:
        patch, text = state["patch_embed.proj.weight"], state["patch_embed.text_proj.weight"]
        head = state["transformer_blocks.0.attn1.norm_q.weight"].shape[0]
        out, time = state["proj_out.weight"], state["time_embedding.linear_1.weight"]
    except KeyError as error:
        raise InputError(f"{where} lacks {error.args[0]} (diffusers' name)") from None
    width = patch.shape[0]
    layers = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("transformer_blocks."))
    patch_in_time = patch.dim() == 2  # 1.5: a linear layer over 2 × 2 × 2 patches
    cells = 8 if patch_in_time else 4
    rotary = patch_in_time or layers > 30 or "patch_embed.pos_embedding" in state
    config = {
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "in_channels": patch.shape[1] // cells if patch_in_time else patch.shape[1],
        "out_channels": out.shape[0] // cells,
        "time_embed_dim": time.shape[0],
        "text_embed_dim": text.shape[1],
        "num_layers": layers,
        "patch_size": 2,
        "patch_size_t": 2 if patch_in_time else None,
        "max_text_seq_length": 224 if patch_in_time else 226,
        "use_rotary_positional_embeddings": rotary,
        "use_learned_positional_embeddings": "patch_embed.pos_embedding" in state,
        "patch_bias": not patch_in_time and "patch_embed.proj.bias" in state,
    }
    if "ofs_embedding.linear_1.weight" in state:
        config["ofs_embed_dim"] = state["ofs_embedding.linear_1.weight"].shape[1]
    return config


# VAE -------------------------------------------------------------------------------------------------------------


def convert_vae(sat: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Encoder and decoder by diffusers' names; the networks of the losses are dropped."""
    inside = {key.removeprefix(_CODEC): value for key, value in sat.items() if key.startswith(_CODEC)} or dict(sat)
    inside = {key: value for key, value in inside.items() if not key.startswith("loss.")}
    ups = [int(match[1]) for key in inside if (match := _UP.search(key))]
    state = {}
    for key, value in inside.items():
        if not key.startswith(("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")):
            raise InputError(f"{where} holds {key}, which is not part of SAT's CogVideoX VAE")
        for pattern, name in _VAE_RENAMES:
            key = re.sub(pattern, name, key, count=1)
        if match := _UP.search(key):
            kind = "resnets" if match[2] == "block" else "upsamplers.0"
            key = f"{key[: match.start()]}.up_blocks.{max(ups) - int(match[1])}.{kind}.{key[match.end() :]}"
        state[key] = value
    return state


def infer_vae_config(state: Mapping[str, Tensor], where: Path) -> dict[str, Any]:
    """diffusers' VAE config from the shapes of the tensors."""
    try:
        latent = state["decoder.conv_in.conv.weight"].shape[1]
        first = state["encoder.conv_in.conv.weight"]
    except KeyError as error:
        raise InputError(f"{where} lacks {error.args[0]} (diffusers' name)") from None
    widths: dict[int, int] = {}
    layers = 0
    for key, value in state.items():
        if match := re.fullmatch(r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.conv1\.conv\.weight", key):
            widths[int(match[1])] = value.shape[0]
            layers = max(layers, int(match[2]) + 1)
    return {
        "in_channels": first.shape[1],
        "out_channels": first.shape[1],
        "block_out_channels": [widths[level] for level in sorted(widths)],
        "latent_channels": latent,
        "layers_per_block": layers,
    }
