"""Checkpoints of other packages' codecs. Their networks differ from ours, so that no weight has a place: the reason is given."""

from __future__ import annotations

import pickle
from pathlib import Path
from zipfile import BadZipFile

import torch
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.weight_files import WeightFiles

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_VQGAN = (
    "it halves the image in every layer with 4 × 4 convolutions and leaky ReLU, and has GLU blocks and transposed convolutions in its "
    "decoder; task vqgan has normalised residual blocks at every level"
)
# Prefix of names that only this codec has → what it is, how it differs, and our task.
_CODECS = {
    "enc_spatial_transformer.": (
        "phenaki-pytorch's C-ViViT",
        "its attention has learned continuous position biases and convolutional position generators, and its patches are normalised; "
        "task cvivit has rotary positions and no norm",
        "cvivit",
    ),
    "enc_dec.encoders.": ("a VQGanVAE of muse-maskgit-pytorch or dalle2-pytorch", _VQGAN, "vqgan"),
    "encoders.": ("nuwa-pytorch's VQGanVAE", _VQGAN, "vqgan"),
}
_WRAPPERS = (
    "ema_model.",
    "online_model.",
    "module.",
    "cvivit.",
    "vae.",
)  # of EMA, DDP and the models that hold a codec


def refuse_codec(path: Path, package: str) -> InputError:
    """Read a checkpoint's names, without unpickling code. → the error that says why it has no place here"""
    names = [_unwrap(name) for name in _read_tensors(path)]
    for prefix, (what, difference, task) in _CODECS.items():
        found = sum(name.startswith(prefix) for name in names)
        if found:
            return InputError(
                f"{path} holds {what} ({len(names)} tensors, {found} of them {prefix}*). Its weights do not fit ours: {difference}. "
                f"Train task {task} with the same settings (kineo import SCRIPT --from {package} prints them), "
                f"wrap that codec as a task of your own (CONTRIBUTING.md), or train on its codebook ids with data.source=cache"
            )
    start = ", ".join(sorted(names)[:3])
    return InputError(
        f"{path} holds no codec of phenaki-pytorch, nuwa-pytorch, muse-maskgit-pytorch or dalle2-pytorch: it begins with {start}"
    )


def _unwrap(name: str) -> str:
    while prefix := next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def _read_tensors(path: Path) -> list[str]:
    """Names of a checkpoint's tensors, also of one that lies under model, as trainers save it."""
    if path.suffix == ".safetensors":
        return list(WeightFiles([path]))
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0][:200]
        raise InputError(
            f"{path} holds more than tensors, and nothing is unpickled: save the state_dict alone ({reason})"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, BadZipFile) as error:
        raise InputError(
            f"{path} is no checkpoint of torch: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}"
        ) from None
    if isinstance(tree, dict) and isinstance(tree.get("model"), dict):
        tree = tree["model"]
    names = [str(name) for name, value in tree.items() if isinstance(value, Tensor)] if isinstance(tree, dict) else []
    if not names:
        raise InputError(f"{path} holds no named tensors: save the state_dict of the codec")
    return names
