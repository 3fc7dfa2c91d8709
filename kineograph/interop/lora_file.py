"""LoRA files: those of diffusers, peft and kohya read into one form; diffusers' form written.

An adapter adds `scale · up · down` to a matrix, with scale = alpha / rank. Files differ in what they call the two factors and in where alpha is:

    diffusers   transformer.M.lora_A.weight, lora_B.weight (before: lora.down, lora.up)   header's lora_adapter_metadata; else alpha = rank
    peft        base_model.model.M.lora_A[.NAME].weight, …                                adapter_config.json beside it
    kohya       lora_transformer_M_with_underscores.lora_down.weight, lora_up.weight      .alpha tensors; else alpha = rank

An adapter of a fused `to_qkv` is taken apart into three for q, k and v, which share its `down`: so adapters of any origin fit.
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

from kineograph.core.config import load_file
from kineograph.core.errors import InputError
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
    """What is added to one matrix."""

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
"""By the module's name in diffusers: `transformer_blocks.0.attn1.to_q`."""


# Reading ---------------------------------------------------------------------------------------------------------


def read_lora(path: str | Path, modules: Iterable[str] = ()) -> Lora:
    """A file, or a folder that holds one. `modules` are the names that the model has: what kohya's underscores are undone with."""
    file = _located(Path(path).expanduser())
    found = WeightFiles([file])
    known = {name.replace(".", "_"): name for name in modules}
    factors: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, float] = {}
    strangers = []
    for key in found:
        if key.endswith(".alpha"):
            alphas[_module(key.removesuffix(".alpha"), known, file)] = float(found[key])
        elif match := _FACTOR.search(key):
            side = "down" if "A" in match.groups() or "down" in match.groups() else "up"
            factors.setdefault(_module(key[: match.start()], known, file), {})[side] = found[key]
        else:
            strangers.append(key)
    if strangers or not factors:
        what = f"holds {strangers[0]}" if strangers else "holds no adapter"
        raise InputError(
            f"{file} {what}: LoRA files of diffusers, peft and kohya are read, with lora_A and lora_B alone"
        )
    config = _peft_config(file) or _header(found, file)
    lora: Lora = {}
    for name, pair in factors.items():
        lora |= _apart(name, _adapter(name, pair, alphas.get(name), config, file))
    return lora


def read_header(path: str | Path) -> dict[str, str]:
    """What a LoRA file says beside its tensors."""
    return WeightFiles([_located(Path(path).expanduser())]).metadata()


def _located(path: Path) -> Path:
    if path.is_dir():
        for name in (FILE, _PEFT_FILE):
            if (path / name).is_file():
                return path / name
        raise InputError(f"{path} has neither {FILE} nor {_PEFT_FILE}")
    if not path.exists():
        raise InputError(f"{path} does not exist: give a .safetensors file, or a folder that holds {FILE}")
    if path.suffix != ".safetensors":
        raise InputError(f"{path} is not a .safetensors file: pickles are not read")
    return path


def _module(name: str, known: Mapping[str, str], file: Path) -> str:
    """A file's name of a module → diffusers'."""
    for prefix in _KOHYA:
        if name.startswith(prefix):
            flat = name.removeprefix(prefix)
            if flat not in known:
                raise InputError(f"{file}: {name} is no module of this model")
            return known[flat]
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    # The first form of diffusers kept adapters in attention processors: attn1.processor.to_q_lora
    name = re.sub(r"\.processor\.(to_[a-z_]+)_lora$", r".\1", name)
    return f"{name}.0" if name.endswith(".to_out") else name


def _peft_config(file: Path) -> dict[str, Any] | None:
    path = file.with_name(_PEFT_CONFIG)
    return load_file(path) if file.name == _PEFT_FILE and path.is_file() else None


def _header(found: WeightFiles, file: Path) -> dict[str, Any]:
    """What diffusers keeps of peft's config in the header."""
    text = found.metadata().get(_METADATA)
    if text is None:
        return {}
    try:
        return {key.removeprefix("transformer."): value for key, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        raise InputError(f"{file}: {_METADATA} in its header is not readable JSON") from None


def _adapter(name: str, pair: dict[str, Tensor], alpha: float | None, config: Mapping[str, Any], file: Path) -> Adapter:
    if len(pair) != 2:
        raise InputError(f"{file}: {name} has {next(iter(pair))} alone; an adapter is down (A) and up (B)")
    down, up = pair["down"], pair["up"]
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise InputError(
            f"{file}: {name} has down {tuple(down.shape)} and up {tuple(up.shape)}; rank × in and out × rank are read"
        )
    if config.get("use_dora"):
        raise InputError(f"{file}: {_METADATA} says use_dora, which is not read: plain LoRA is")
    rank = down.shape[0]
    if alpha is None:
        pattern = config.get("alpha_pattern") or {}
        own = [value for key, value in pattern.items() if re.fullmatch(rf"(?:.*\.)?(?:{key.removeprefix('^')})", name)]
        alpha = float(own[0] if own else config.get("lora_alpha") or rank)
        if config.get("use_rslora"):  # scale = alpha / √rank
            alpha *= math.sqrt(rank)
    return Adapter(down, up, alpha)


def _apart(name: str, adapter: Adapter) -> Lora:
    """An adapter of fused q, k and v is three with one `down`."""
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
    """`pytorch_lora_weights.safetensors` as diffusers writes it, with rank and alpha of every module in the header; and `header` beside them.
    `dtype`: None keeps the adapters' own."""
    tensors = {}
    for name, adapter in lora.items():
        tensors[f"transformer.{name}.lora_A.weight"] = adapter.down.detach().cpu().to(dtype).clone().contiguous()
        tensors[f"transformer.{name}.lora_B.weight"] = adapter.up.detach().cpu().to(dtype).clone().contiguous()
    ranks, alphas = ({name: getattr(a, key) for name, a in lora.items()} for key in ("rank", "alpha"))
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    described = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(lora),
        # ^: peft takes a pattern for the end of a name, and one name may be the end of another
        "rank_pattern": {f"^{name}": value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{name}": value for name, value in alphas.items() if value != alpha},
    }
    text = json.dumps({f"transformer.{key}": value for key, value in described.items()}, indent=2, sort_keys=True)
    path = folder / FILE
    save_file(tensors, path, metadata={"format": "pt", _METADATA: text, **(header or {})})
    return path


def merge_lora(
    state: Mapping[str, Tensor], lora: Mapping[str, Adapter], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors, by their names in diffusers, with the adapters added to their matrices; one at a time. The sum is rounded once, to
    `dtype` or else to the matrix's own."""
    for name in lora:
        if f"{name}.weight" not in state:
            raise InputError(f"the LoRA adapts {name}, which is no module of this model")
    for key, value in state.items():
        adapter = lora.get(key.removesuffix(".weight")) if key.endswith(".weight") else None
        if adapter is None:
            yield key, value
            continue
        delta = adapter.delta()
        if delta.shape != value.shape:
            raise InputError(
                f"the LoRA of {key} gives {tuple(delta.shape)}, but that matrix is {tuple(value.shape)}: it is of another model"
            )
        yield key, (value.float() + delta.to(value.device)).to(dtype or value.dtype)
