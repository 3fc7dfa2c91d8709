"""LoRA files: reads those of diffusers, peft and kohya, writes those of diffusers.

An adapter adds `scale · up · down` to a matrix, with scale = alpha / rank. Names of the factors and the place of alpha differ:

    diffusers   transformer.M.lora_A.weight, lora_B.weight (before: lora.down, lora.up)   header's lora_adapter_metadata; else alpha = rank
    peft        base_model.model.M.lora_A[.NAME].weight, …                                adapter_config.json beside it
    kohya       lora_transformer_M_with_underscores.lora_down.weight, lora_up.weight      .alpha tensors; else alpha = rank

An adapter of a fused `to_qkv` is split into three for q, k and v that share its `down`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kineograph.core.config_file import load_file
from kineograph.core.errors import InputError
from kineograph.core.text_file import parse_json
from kineograph.core.weight_files import WeightFiles

FILE = "pytorch_lora_weights.safetensors"
_PEFT_FILE, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_METADATA = "lora_adapter_metadata"
_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.", "unet.")
_KOHYA = ("lora_transformer_", "lora_unet_")
_FACTOR = re.compile(
    r"\.(?:lora_(?P<letter>[AB])(?:\.[A-Za-z0-9_]+)?|lora[._](?P<word>down|up)|(?P<flat>down|up))\.weight$"
)


@dataclass(frozen=True)
class Adapter:
    """The low-rank update of one matrix."""

    down: Tensor
    """rank × in"""
    up: Tensor
    """out × rank"""
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def delta(self) -> Tensor:
        """scale · up · down, out × in, float32."""
        return self.scale * (self.up.float() @ self.down.float())


Lora = dict[str, Adapter]
"""Adapters by diffusers' module names: `transformer_blocks.0.attn1.to_q`."""


# Reading ---------------------------------------------------------------------------------------------------------


def read_lora(path: str | Path, modules: Iterable[str] = ()) -> Lora:
    """Read a file, or a folder that holds one. `modules`: the model's module names, to undo kohya's underscores."""
    file = _find_file(Path(path).expanduser())
    tensors = WeightFiles([file])
    known = {name.replace(".", "_"): name for name in modules}
    factors: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, float] = {}
    unknown = []
    for key in tensors:
        if key.endswith(".alpha"):
            alphas[_to_diffusers_name(key.removesuffix(".alpha"), known, file)] = float(tensors[key])
        elif match := _FACTOR.search(key):
            side = "down" if "A" in match.groups() or "down" in match.groups() else "up"
            factors.setdefault(_to_diffusers_name(key[: match.start()], known, file), {})[side] = tensors[key]
        else:
            unknown.append(key)
    if unknown or not factors:
        content = unknown[0] if unknown else "no adapter"
        raise InputError(
            f"{file} holds {content}: give a LoRA file of diffusers, peft or kohya, with lora_A and lora_B only"
        )
    config = _read_peft_config(file) or _read_peft_metadata(tensors, file)
    lora: Lora = {}
    for name, pair in factors.items():
        lora |= _split_qkv(name, _build_adapter(name, pair, alphas.get(name), config, file))
    return lora


def read_header(path: str | Path) -> dict[str, str]:
    """The metadata in a LoRA file's header."""
    return WeightFiles([_find_file(Path(path).expanduser())]).metadata()


def _find_file(path: Path) -> Path:
    if path.is_dir():
        for name in (FILE, _PEFT_FILE):
            if (path / name).is_file():
                return path / name
        raise InputError(f"{path} has neither {FILE} nor {_PEFT_FILE}")
    if not path.exists():
        raise InputError(f"{path} does not exist: give a .safetensors file, or a folder that holds {FILE}")
    if path.suffix != ".safetensors":
        raise InputError(f"{path} is not a .safetensors file: pickles are refused")
    return path


def _to_diffusers_name(name: str, known: Mapping[str, str], file: Path) -> str:
    """A file's module name → diffusers'"""
    for prefix in _KOHYA:
        if name.startswith(prefix):
            flat = name.removeprefix(prefix)
            if flat not in known:
                raise InputError(f"{file}: {name} is not a module of this model")
            return known[flat]
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    # diffusers first kept adapters in attention processors: attn1.processor.to_q_lora
    name = re.sub(r"\.processor\.(to_[a-z_]+)_lora$", r".\1", name)
    return f"{name}.0" if name.endswith(".to_out") else name


def _read_peft_config(file: Path) -> dict[str, Any] | None:
    path = file.with_name(_PEFT_CONFIG)
    return load_file(path) if file.name == _PEFT_FILE and path.is_file() else None


def _read_peft_metadata(tensors: WeightFiles, file: Path) -> dict[str, Any]:
    """peft's config as diffusers keeps it in the header."""
    text = tensors.metadata().get(_METADATA)
    if text is None:
        return {}
    try:
        return {key.removeprefix("transformer."): value for key, value in parse_json(text).items()}
    except (ValueError, AttributeError):
        raise InputError(f"{file}: {_METADATA} in its header is not readable JSON") from None


def _build_adapter(
    name: str, pair: dict[str, Tensor], alpha: float | None, config: Mapping[str, Any], file: Path
) -> Adapter:
    if len(pair) != 2:
        raise InputError(f"{file}: {name} has only {next(iter(pair))}; an adapter needs down (A) and up (B)")
    down, up = pair["down"], pair["up"]
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise InputError(
            f"{file}: {name} has down {tuple(down.shape)} and up {tuple(up.shape)}; they must be rank × in and out × rank"
        )
    if config.get("use_dora"):
        raise InputError(f"{file}: {_METADATA} has use_dora, which is not supported: give a plain LoRA")
    rank = down.shape[0]
    if alpha is None:
        pattern = config.get("alpha_pattern") or {}
        matching = [
            value for key, value in pattern.items() if re.fullmatch(rf"(?:.*\.)?(?:{key.removeprefix('^')})", name)
        ]
        alpha = float(matching[0] if matching else config.get("lora_alpha") or rank)
        if config.get("use_rslora"):  # scale = alpha / √rank
            alpha *= math.sqrt(rank)
    return Adapter(down, up, alpha)


def _split_qkv(name: str, adapter: Adapter) -> Lora:
    """Split an adapter of fused q, k and v into three with the same `down`."""
    if not name.endswith(".to_qkv"):
        return {name: adapter}
    stem = name.removesuffix(".to_qkv")
    return {
        f"{stem}.to_{letter}": Adapter(adapter.down, part.contiguous(), adapter.alpha)
        for letter, part in zip("qkv", adapter.up.chunk(3), strict=True)
    }


# Writing ---------------------------------------------------------------------------------------------------------


def write_lora(
    folder: Path,
    lora: Mapping[str, Adapter],
    header: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write `pytorch_lora_weights.safetensors` as diffusers does, with ranks and alphas in the header, and `header` besides.

    `dtype`: None keeps the adapters' own.
    """
    tensors = {}
    for name, adapter in lora.items():
        tensors[f"transformer.{name}.lora_A.weight"] = adapter.down.detach().cpu().to(dtype).clone().contiguous()
        tensors[f"transformer.{name}.lora_B.weight"] = adapter.up.detach().cpu().to(dtype).clone().contiguous()
    ranks, alphas = ({name: getattr(a, key) for name, a in lora.items()} for key in ("rank", "alpha"))
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    config = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(lora),
        # ^: peft matches a pattern with the end of a name, and one name may end with another
        "rank_pattern": {f"^{name}": value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{name}": value for name, value in alphas.items() if value != alpha},
    }
    text = json.dumps({f"transformer.{key}": value for key, value in config.items()}, indent=2, sort_keys=True)
    path = folder / FILE
    save_file(tensors, path, metadata={"format": "pt", _METADATA: text, **(header or {})})
    return path


def merge_lora(
    state: Mapping[str, Tensor], lora: Mapping[str, Adapter], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors (diffusers' names) with the adapters added, rounded once to `dtype` or the matrix's own."""
    for name in lora:
        if f"{name}.weight" not in state:
            raise InputError(
                f"the LoRA adapts {name}, which is not a module of this model: import it with the model it was trained on"
            )
    for key, value in state.items():
        adapter = lora.get(key.removesuffix(".weight")) if key.endswith(".weight") else None
        if adapter is None:
            yield key, value
            continue
        delta = adapter.delta()
        if delta.shape != value.shape:
            raise InputError(
                f"the LoRA of {key} has shape {tuple(delta.shape)}, and that matrix {tuple(value.shape)}: it was trained on another model"
            )
        yield key, (value.float() + delta.to(value.device)).to(dtype or value.dtype)
