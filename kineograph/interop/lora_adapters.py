"""LoRA files ⇄ the adapters of a CogVideoX stage, and a check that both are for the same transformer.

Adapters have the shape of their matrices only: those of a shallow transformer fit a deep one of the same width. So the header of an
exported file also describes the whole transformer and its weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.core.notes import Note
from kineograph.core.text_file import parse_json
from kineograph.family.cogvideox import tuning
from kineograph.family.cogvideox.diffusers_weights import (
    diffusers_state,
    lora_state,
    module_from_diffusers,
    module_to_diffusers,
)
from kineograph.family.cogvideox.network import Transformer
from kineograph.family.cogvideox.task import CogVideoX
from kineograph.interop.lora_file import Adapter, Lora, read_header

ZERO_TARGET = "to_out"  # zero adapters are on these layers
_REMEDY = "it was trained on another model; give the folder of that one"


def diffusers_modules(network: Transformer) -> list[str]:
    """The linear layers, which adapters can be on, by diffusers' names."""
    names = [module_to_diffusers(name) for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    return [name for name in names if name is not None]


def convert_lora(network: Transformer, lora: Lora, where: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """→ a LoRA file's adapters by our names, and the stage's `lora` keys. `network` has separate q, k and v.

    A stage has one rank and alpha: where the file has several, scales are multiplied into `up` and ranks padded with zeros.
    """
    layers = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear)}
    rank = max(adapter.rank for adapter in lora.values())
    alphas = {(adapter.rank, adapter.alpha) for adapter in lora.values()}
    alpha = next(iter(alphas))[1] if len(alphas) == 1 else float(rank)
    adapters: dict[str, Tensor] = {}
    names = []
    for theirs, adapter in lora.items():
        name = module_from_diffusers(theirs)
        if name is None or name not in layers:
            raise InputError(f"{where} adapts {theirs}, which is not a layer of this transformer: {_REMEDY}")
        out, into = layers[name].weight.shape
        if (adapter.up.shape[0], adapter.down.shape[1]) != (out, into):
            raise InputError(
                f"{where}: {theirs} is for a {adapter.up.shape[0]} × {adapter.down.shape[1]} matrix; this transformer's is "
                f"{out} × {into}: {_REMEDY}"
            )
        missing = rank - adapter.rank
        adapters[f"{name}.lora_A.default.weight"] = F.pad(adapter.down.float(), (0, 0, 0, missing))
        adapters[f"{name}.lora_B.default.weight"] = F.pad(
            adapter.up.float() * (adapter.scale / (alpha / rank)), (0, missing)
        )
        names.append(name)
    return adapters, {"rank": rank, "alpha": alpha, "targets": _shorten_targets(names, list(layers))}


def zero_adapters(network: Transformer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """→ adapters with `up` = 0, and the stage's `lora` keys"""
    adapters = {}
    for name, part in network.named_modules():
        if isinstance(part, nn.Linear) and name.endswith(f".{ZERO_TARGET}"):
            out, into = part.weight.shape
            adapters[f"{name}.lora_A.default.weight"] = torch.full((1, into), into**-0.5, device="cpu")
            adapters[f"{name}.lora_B.default.weight"] = torch.zeros(out, 1, device="cpu")
    return adapters, {"rank": 1, "alpha": 1.0, "targets": [ZERO_TARGET]}


def _shorten_targets(names: list[str], layers: list[str]) -> list[str]:
    """The last part of a name, where all layers with that ending are adapted; else the whole name."""
    chosen: list[str] = []
    for name in names:
        parts = name.split(".")
        end = ".".join(parts[-2:] if parts[-1] == "linear" else parts[-1:])
        matching = [layer for layer in layers if layer == end or layer.endswith(f".{end}")]
        chosen.append(end if set(matching) <= set(names) else name)
    return list(dict.fromkeys(chosen))


def extract_lora(task: CogVideoX) -> Lora:
    """A trained stage's adapters by diffusers' names."""
    state = lora_state(task)
    chosen = task.config.lora
    lora: Lora = {}
    for key, down in state.items():
        name, mark, _ = key.partition(".lora_A.")
        if mark:
            lora[name] = Adapter(down, state[f"{name}.lora_B.weight"], float(chosen.alpha or down.shape[0]))
    if not lora:
        raise InputError("this stage has no adapters (it was not trained with tune: lora): omit --lora")
    return lora


KEY = "kineograph_base"
_SHAPE = ("depth", "heads", "head_width", "time_width", "patch", "patch_time", "positions", "ofs")


def describe_shape(network: Transformer) -> dict[str, Any]:
    """The settings that two transformers must share for adapters to be interchangeable."""
    channels = {"in_channels": network.read_channels, "out_channels": network.channels}
    return {key: getattr(network.shape, key) for key in _SHAPE} | channels | {"text_width": network.text_in.in_features}


def describe_base(task: CogVideoX) -> dict[str, str]:
    """The transformer of a stage, for the header of its LoRA file. Names the weights' folder without its path."""
    mark = task.assets().get(tuning.ASSET)
    known = parse_json(mark) if mark is not None else {"digest": tuning.digest_weights(diffusers_state(task))}
    weights = {"digest": known["digest"]} | ({"name": Path(known["folder"]).name} if "folder" in known else {})
    return {KEY: json.dumps({"shape": describe_shape(task.network), "weights": weights}, sort_keys=True)}


def check_base(file: Path, network: Transformer, folder: str, digest: str, note: Note) -> None:
    """Refuse a LoRA file for a transformer of another shape than that of `folder`; warn if only the weights differ.

    Files without our header pass: only the shapes of their matrices are known.
    """
    text = read_header(file).get(KEY)
    if text is None:
        return
    try:
        base = parse_json(text)
        shape, weights = dict(base["shape"]), dict(base["weights"])
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{file}: {KEY} in its header is not readable: export it again") from None
    own = describe_shape(network)
    different = [key for key in own if key in shape and shape[key] != own[key]]
    name = weights.get("name", "a stage of a run")
    if different:
        listed = ", ".join(f"{key}={shape[key]} there and {own[key]} here" for key in different)
        raise InputError(
            f"{file} was trained on another model ({name}) than {folder} holds: {listed}; give the folder of that one"
        )
    if weights.get("digest") != digest:
        note(
            f"warning: {file} was trained on {name}; {folder} holds other weights of the same shape, or the same in another precision. "
            "Unless you mean to, give the folder of those"
        )
