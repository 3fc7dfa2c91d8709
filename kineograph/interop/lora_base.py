"""The transformer that a LoRA file was made for: told in the file's header, and held against the one that it is put on.

Adapters have the shape of the matrices that they sit on and know nothing of the rest: those of a shallow transformer fit a deep one of the
same width. So the header says, beside what diffusers reads there, the whole shape, and which weights these were.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kineograph.core.errors import InputError
from kineograph.family.cogvideox import tuning
from kineograph.family.cogvideox.network import Transformer
from kineograph.family.cogvideox.task import CogVideoX
from kineograph.family.cogvideox.weights import diffusers_state
from kineograph.interop.lora import header_of

KEY = "kineograph_base"
_SHAPE = ("depth", "heads", "head_width", "time_width", "patch", "patch_time", "positions", "ofs")


def shape_told(network: Transformer) -> dict[str, Any]:
    """What two transformers must have in common for one's adapters to mean something on the other."""
    channels = {"in_channels": network.read_channels, "out_channels": network.channels}
    return {key: getattr(network.shape, key) for key in _SHAPE} | channels | {"text_width": network.text_in.in_features}


def base_header(task: CogVideoX) -> dict[str, str]:
    """For the header of a stage's adapters. Of a folder of weights its last name is told: where it lay is nobody's business."""
    mark = task.assets().get(tuning.ASSET)
    known = json.loads(mark) if mark is not None else {"digest": tuning.digest(diffusers_state(task))}
    weights = {"digest": known["digest"]} | ({"name": Path(known["folder"]).name} if "folder" in known else {})
    return {KEY: json.dumps({"shape": shape_told(task.network), "weights": weights}, sort_keys=True)}


def check_base(file: Path, network: Transformer, folder: str, digest: str, note: Callable[[str], None]) -> None:
    """Refuse a LoRA file that says it was made for a transformer of another shape than this one, of `folder`; say so where only the weights
    are others, as of a model that was trained on. Files that say nothing pass: what is known of them is the shape of each matrix."""
    text = header_of(file).get(KEY)
    if text is None:
        return
    try:
        told = json.loads(text)
        shape, weights = dict(told["shape"]), dict(told["weights"])
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{file}: {KEY} in its header is not readable: export it again") from None
    here = shape_told(network)
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
