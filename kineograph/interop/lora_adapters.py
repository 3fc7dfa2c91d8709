"""LoRA files as the adapters of a CogVideoX stage, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.core.errors import InputError
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

IDLE = "to_out"  # adapters that add nothing sit here
_OTHERS = "it was trained on another model; name the folder of that one"


def diffusers_modules(network: Transformer) -> list[str]:
    """Layers that an adapter may sit on, by their names in diffusers."""
    names = [module_to_diffusers(name) for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    return [name for name in names if name is not None]


def convert_lora(network: Transformer, lora: Lora, where: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A LoRA file's adapters under our names, and the stage's `lora` keys. `network` has q, k and v apart.

    One rank and alpha serve the whole stage: where the file has several, scales go into `up`, and smaller ranks are filled with zeros.
    """
    layers = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear)}
    rank = max(adapter.rank for adapter in lora.values())
    alphas = {(adapter.rank, adapter.alpha) for adapter in lora.values()}
    alpha = next(iter(alphas))[1] if len(alphas) == 1 else float(rank)
    own: dict[str, Tensor] = {}
    names = []
    for theirs, adapter in lora.items():
        name = module_from_diffusers(theirs)
        if name is None or name not in layers:
            raise InputError(f"{where} adapts {theirs}, which is no layer of this transformer: {_OTHERS}")
        out, into = layers[name].weight.shape
        if (adapter.up.shape[0], adapter.down.shape[1]) != (out, into):
            raise InputError(
                f"{where}: {theirs} is for a {adapter.up.shape[0]} × {adapter.down.shape[1]} matrix, and this transformer's is "
                f"{out} × {into}: {_OTHERS}"
            )
        missing = rank - adapter.rank
        own[f"{name}.lora_A.default.weight"] = F.pad(adapter.down.float(), (0, 0, 0, missing))
        own[f"{name}.lora_B.default.weight"] = F.pad(
            adapter.up.float() * (adapter.scale / (alpha / rank)), (0, missing)
        )
        names.append(name)
    return own, {"rank": rank, "alpha": alpha, "targets": _targets(names, list(layers))}


def zero_adapters(network: Transformer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Adapters that add nothing: `up` is zero."""
    own = {}
    for name, part in network.named_modules():
        if isinstance(part, nn.Linear) and name.endswith(f".{IDLE}"):
            out, into = part.weight.shape
            own[f"{name}.lora_A.default.weight"] = torch.full((1, into), into**-0.5, device="cpu")
            own[f"{name}.lora_B.default.weight"] = torch.zeros(out, 1, device="cpu")
    return own, {"rank": 1, "alpha": 1.0, "targets": [IDLE]}


def _targets(names: list[str], layers: list[str]) -> list[str]:
    """Ends of names where every layer that ends so is meant; else the whole name."""
    chosen: list[str] = []
    for name in names:
        parts = name.split(".")
        end = ".".join(parts[-2:] if parts[-1] == "linear" else parts[-1:])
        alike = [layer for layer in layers if layer == end or layer.endswith(f".{end}")]
        chosen.append(end if set(alike) <= set(names) else name)
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
        raise InputError("this stage has no adapters: it was trained with another tune than lora; leave --lora out")
    return lora


KEY = "kineograph_base"
_SHAPE = ("depth", "heads", "head_width", "time_width", "patch", "patch_time", "positions", "ofs")


def describe_shape(network: Transformer) -> dict[str, Any]:
    """What two transformers must have in common for one's adapters to mean something on the other."""
    channels = {"in_channels": network.read_channels, "out_channels": network.channels}
    return {key: getattr(network.shape, key) for key in _SHAPE} | channels | {"text_width": network.text_in.in_features}


def describe_base(task: CogVideoX) -> dict[str, str]:
    """For the header of a stage's adapters. Of a folder of weights its last name is told: where it lay is nobody's business."""
    mark = task.assets().get(tuning.ASSET)
    known = json.loads(mark) if mark is not None else {"digest": tuning.digest_weights(diffusers_state(task))}
    weights = {"digest": known["digest"]} | ({"name": Path(known["folder"]).name} if "folder" in known else {})
    return {KEY: json.dumps({"shape": describe_shape(task.network), "weights": weights}, sort_keys=True)}


def check_base(file: Path, network: Transformer, folder: str, digest: str, note: Callable[[str], None]) -> None:
    """Refuse a LoRA file that says it was made for a transformer of another shape than this one, of `folder`; say so where only the weights
    are others, as of a model that was trained on. Files that say nothing pass: what is known of them is the shape of each matrix."""
    text = read_header(file).get(KEY)
    if text is None:
        return
    try:
        told = json.loads(text)
        shape, weights = dict(told["shape"]), dict(told["weights"])
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{file}: {KEY} in its header is not readable: export it again") from None
    here = describe_shape(network)
    other = [key for key in here if key in shape and shape[key] != here[key]]
    name = weights.get("name", "a stage of a run")
    if other:
        listed = ", ".join(f"{key}={shape[key]} there and {here[key]} here" for key in other)
        raise InputError(
            f"{file} was trained on another model ({name}) than {folder} holds: {listed}; name the folder of that one"
        )
    if weights.get("digest") != digest:
        note(
            f"warning: {file} was trained on {name}, and {folder} holds other weights of the same shape (or the same in another precision): "
            "unless that is meant, name the folder of those"
        )
