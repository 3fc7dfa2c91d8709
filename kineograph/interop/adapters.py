"""LoRA files as the adapters of a CogVideoX stage, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.family.cogvideox.network import Transformer
from kineograph.family.cogvideox.task import CogVideoX
from kineograph.family.cogvideox.weights import lora_state, module_from_diffusers, module_to_diffusers
from kineograph.interop.lora import Adapter, Lora

IDLE = "to_out"  # adapters that add nothing sit here
_OTHERS = "it was trained on another model; name the folder of that one"


def diffusers_modules(network: Transformer) -> list[str]:
    """Layers that an adapter may sit on, by their names in diffusers."""
    names = [module_to_diffusers(name) for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    return [name for name in names if name is not None]


def own_adapters(network: Transformer, lora: Lora, where: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
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


def idle_adapters(network: Transformer) -> tuple[dict[str, Tensor], dict[str, Any]]:
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


def lora_of(task: CogVideoX) -> Lora:
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
