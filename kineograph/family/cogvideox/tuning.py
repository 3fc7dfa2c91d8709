"""Fine-tuning: which parameters train (all, LoRA adapters, or patterns), and checks against the pretrained folder.

Frozen parameters are in no optimizer, and in no checkpoint if they come from a folder.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from kineograph.core.config_file import load_file
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.notes import Note
from kineograph.core.task import freeze, is_fake_or_meta
from kineograph.core.text_file import parse_json
from kineograph.core.weight_files import DIFFUSERS_STEM, WeightFiles, open_weights
from kineograph.family.cogvideox.config import CogVideoXConfig, LoraConfig, check_weights_folder
from kineograph.family.cogvideox.diffusers_weights import read_shape, rename_weights
from kineograph.family.cogvideox.network import Transformer
from kineograph.family.cogvideox.transformer_config import TransformerShape
from kineograph.process.diffusers_scheduler import compare_diffusion, read_scheduler, unsupported_scheduler_options

ASSET = "cogvideox/base.json"
_SAMPLED = 4096  # values per tensor in the digest


def select_trainable(network: Transformer, config: CogVideoXConfig) -> None:
    """Add adapters and freeze what does not train. Call once, after the weights are loaded."""
    if config.tune == "full":
        return
    if config.uses_lora:
        add_adapters(network, config.lora)
    else:
        assert isinstance(config.tune, tuple)
        chosen = _match_parameters(network, config.tune)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in chosen)
    if config.weights is not None:
        _freeze_rest(network)


def _match_parameters(network: Transformer, patterns: tuple[str, ...]) -> set[str]:
    names = [name for name, _ in network.named_parameters()]
    chosen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise ConfigError(
                f"tune={pattern!r} matches no parameter; names look like {names[0]} and {next(n for n in names if n.startswith('blocks.'))}"
            )
        chosen |= set(found)
    return chosen


def _freeze_rest(network: Transformer) -> None:
    """Freeze the outermost modules without trainable parameters."""

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if not any(p.requires_grad for p in child.parameters()):
                if any(True for _ in child.parameters()):
                    freeze(child)
            else:
                visit(child)

    visit(network)


# Adapters --------------------------------------------------------------------------------------------------------


def add_adapters(network: Transformer, config: LoraConfig) -> None:
    """Add LoRA adapters with peft, in float32; they start at zero."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(f"lora.targets={target!r} matches no layer; suffixes are {', '.join(ends)}")
    network.requires_grad_(False)
    if is_fake_or_meta() and not torch.empty(0).is_meta:
        return _add_fake_adapters(network, config)
    chosen = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha or config.rank,  # type: ignore[arg-type]
        target_modules=list(config.targets),
        lora_dropout=config.dropout,
        init_lora_weights=True,
    )
    inject_adapter_in_model(chosen, network)
    for name, parameter in network.named_parameters():
        adapter = ".lora_" in name
        parameter.requires_grad_(adapter)
        if adapter:
            parameter.data = parameter.data.float()


_ADAPTER = "default"  # peft's name


class _FakeLoraLinear(nn.Module):
    """A LoRA layer on fake tensors, under peft's names: peft moves tensors, which fake ones do not support."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({_ADAPTER: nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({_ADAPTER: nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.lora_A[_ADAPTER], self.lora_B[_ADAPTER]
        return self.base_layer(x) + up(down(x.to(next(down.parameters()).dtype)))


def _add_fake_adapters(network: Transformer, config: LoraConfig) -> None:
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear) and f".{name}".endswith(tuple(f".{target}" for target in config.targets)):
            holder, _, last = name.rpartition(".")
            setattr(network.get_submodule(holder), last, _FakeLoraLinear(module, config.rank))


# Pretrained weights -----------------------------------------------------------------------------------------------


def remap_init(
    network: Transformer, config: CogVideoXConfig, given: dict[str, Tensor], where: str
) -> dict[str, Tensor]:
    """Rename another stage's weights to fit this network (fused or separate q, k, v; with or without adapters). Frozen
    parameters must be among them unless a folder has them."""
    prefix = "network."
    base = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
    adapters = [name for name in base if ".lora_" in name]
    if adapters and not config.uses_lora:
        raise InputError(
            f"{where} has adapters, and tune={config.tune if config.tune == 'full' else list(config.tune)} has none: "
            "merge them with `kineo export RUN --to diffusers DIR` and set weights=DIR instead of init"
        )
    taken = {f"{prefix}{name}": value for name, value in rename_weights(network, base).items()}
    frozen = {f"{prefix}{name}": p.shape for name, p in network.named_parameters() if not p.requires_grad}
    fits = {name for name, shape in frozen.items() if name in taken and taken[name].shape == shape}
    missing = [name for name in frozen if name not in fits] if config.weights is None else []
    if missing:
        raise InputError(
            f"{where} lacks {len(missing)} of {len(frozen)} frozen tensors, such as {missing[0].removeprefix(prefix)}: "
            "name a stage whose checkpoint holds the whole transformer, or set weights=DIR"
        )
    kept = {name: value for name, value in given.items() if not name.startswith(prefix) or ".lora_" in name}
    return kept | taken


def open_transformer_weights(folder: str) -> WeightFiles:
    """The transformer's weights in a diffusers folder, read lazily."""
    check_weights_folder(folder)
    return open_weights(Path(folder).expanduser() / "transformer", DIFFUSERS_STEM)


def check_first_frame(config: CogVideoXConfig, stage: str) -> None:
    """Refuse a scaling of first frames that differs from the folder's VAE config."""
    place = Path(str(config.weights)).expanduser() / "vae" / "config.json"
    if not config.first_frame or not place.is_file():
        return
    inverse = bool(load_file(place).get("invert_scale_latents"))
    if inverse != config.first_frame_inverse_scale:
        raise ConfigError(
            f"{place} has invert_scale_latents={str(inverse).lower()}: "
            f"set stages.{stage}.first_frame_inverse_scale={str(inverse).lower()}"
        )


def check_positions(network: Transformer, folder: str, stage: str) -> None:
    """Refuse position options that differ from the folder's config: no tensor shape would reveal it."""
    place = Path(folder).expanduser() / "transformer" / "config.json"
    if not place.is_file():
        return
    shape = network.shape
    theirs = TransformerShape.model_validate(read_shape(load_file(place), str(place)))
    keys = ["positions"]
    if shape.positions == "sincos":
        keys += ["space_scale", "time_scale"]
    else:
        keys += ["grid"] + ["base_size"] * (shape.grid == "resize")
    for key in keys:
        wanted = getattr(theirs, key)
        found = network.base_size if key == "base_size" else getattr(shape, key)
        if found != wanted:
            shown = f"[{wanted[0]},{wanted[1]}]" if key == "base_size" else wanted
            raise ConfigError(f"{place} has {key}={shown}, and the stage has {found}: set stages.{stage}.{key}={shown}")


def check_scheduler(config: CogVideoXConfig, stage: str, note: Note) -> None:
    """Refuse a noise schedule that differs from the folder's; warn about sampling options that are not supported."""
    place = Path(str(config.weights)).expanduser() / "scheduler" / "scheduler_config.json"
    if not place.is_file():
        return
    scheduler = load_file(place)
    theirs, _ = read_scheduler(scheduler, scheduler.get("_class_name", "CogVideoXDDIMScheduler"), place)
    for key, (wanted, found) in compare_diffusion(theirs, config.diffusion).items():
        shown = str(wanted).lower() if isinstance(wanted, bool) else wanted
        raise ConfigError(
            f"{place} has diffusion.{key}={shown}, and the stage has {found}: set stages.{stage}.diffusion.{key}={shown}, "
            "or remove the file to train with another schedule"
        )
    for line in unsupported_scheduler_options(scheduler, place):
        note(f"warning: {line}")


def digest_weights(state: Mapping[str, Tensor]) -> str:
    """Digest of a few thousand values per tensor: a second instead of minutes."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        value = state[name]
        flat = value.reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous()
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(some.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def describe_base_weights(folder: str, state: Mapping[str, Tensor]) -> str:
    return json.dumps({"folder": folder, "digest": digest_weights(state)})


def check_base_weights(asset: str, state: Mapping[str, Tensor], folder: str) -> None:
    """Refuse base weights other than those that the stage was trained on."""
    saved = parse_json(asset)
    if saved["digest"] != digest_weights(state):
        raise InputError(
            f"weights={folder} differs from the weights that this stage was trained on ({saved['folder']}): restore those"
        )
