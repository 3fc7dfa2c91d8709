"""What of the transformer trains: everything, adapters, or what some patterns name. The rest is frozen and in no optimizer; it is in no
checkpoint either where a folder has it."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from kineograph.core.config import load_file
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import freeze, is_fake_or_meta
from kineograph.core.weight_files import DIFFUSERS_STEM, WeightFiles, open_weights
from kineograph.family.cogvideox.config import CogVideoXConfig, LoraConfig, check_folder
from kineograph.family.cogvideox.network import Transformer
from kineograph.family.cogvideox.shapes import TransformerShape
from kineograph.family.cogvideox.weights import renamed, shape_of
from kineograph.process.diffusers_scheduler import compare_diffusion, read_scheduler, unsupported_scheduler_options

ASSET = "cogvideox/base.json"
_SAMPLED = 4096  # values of a tensor that tell it apart from another


def choose(network: Transformer, config: CogVideoXConfig) -> None:
    """Freeze what does not train, and put adapters in where they are asked for. Once, when the weights are there."""
    if config.tune == "full":
        return
    if config.adapts:
        add_adapters(network, config.lora)
    else:
        assert isinstance(config.tune, tuple)
        chosen = _matching(network, config.tune)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in chosen)
    if config.weights is not None:
        _freeze_rest(network)


def _matching(network: Transformer, patterns: tuple[str, ...]) -> set[str]:
    names = [name for name, _ in network.named_parameters()]
    chosen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise ConfigError(
                f"tune={pattern!r} fits no parameter: they are named like {names[0]} and {next(n for n in names if n.startswith('blocks.'))}"
            )
        chosen |= set(found)
    return chosen


def _freeze_rest(network: Transformer) -> None:
    """Module by module, the outermost that hold nothing trainable."""

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
    """Low-rank adapters by peft, in float32 whatever the layers below are kept in; what they add is 0 at first."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(f"lora.targets={target!r} fits no layer: they end with {', '.join(ends)}")
    network.requires_grad_(False)
    if is_fake_or_meta() and not torch.empty(0).is_meta:
        return _add_sizes(network, config)
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


_ADAPTER = "default"  # as peft calls the only one


class _Sized(nn.Module):
    """A layer with an adapter where a run is estimated, under peft's names: peft moves what it makes, and tensors without numbers cannot be
    moved."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({_ADAPTER: nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({_ADAPTER: nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.lora_A[_ADAPTER], self.lora_B[_ADAPTER]
        return self.base_layer(x) + up(down(x.to(next(down.parameters()).dtype)))


def _add_sizes(network: Transformer, config: LoraConfig) -> None:
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear) and f".{name}".endswith(tuple(f".{target}" for target in config.targets)):
            holder, _, last = name.rpartition(".")
            setattr(network.get_submodule(holder), last, _Sized(module, config.rank))


# The weights below -----------------------------------------------------------------------------------------------


def remap_init(
    network: Transformer, config: CogVideoXConfig, given: dict[str, Tensor], where: str
) -> dict[str, Tensor]:
    """Weights of another stage by the names here: with q, k and v in one matrix or apart, below adapters or not. Whatever does not train, and
    is in no folder, must be among them."""
    prefix = "network."
    base = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
    adapters = [name for name in base if ".lora_" in name]
    if adapters and not config.adapts:
        raise InputError(
            f"{where} has adapters, and tune={config.tune if config.tune == 'full' else list(config.tune)} has no place for them: "
            "put them into the weights (kineo export RUN --to diffusers DIR) and set weights=DIR in place of init"
        )
    taken = {f"{prefix}{name}": value for name, value in renamed(network, base).items()}
    frozen = {f"{prefix}{name}": p.shape for name, p in network.named_parameters() if not p.requires_grad}
    fits = {name for name, shape in frozen.items() if name in taken and taken[name].shape == shape}
    missing = [name for name in frozen if name not in fits] if config.weights is None else []
    if missing:
        raise InputError(
            f"{where} has no {missing[0].removeprefix(prefix)} of this shape ({len(missing)} of {len(frozen)} tensors that do not train are not "
            "there): name a stage whose checkpoint holds all of such a transformer, or give the folder that has it (weights=DIR)"
        )
    kept = {name: value for name, value in given.items() if not name.startswith(prefix) or ".lora_" in name}
    return kept | taken


def released_weights(folder: str) -> WeightFiles:
    """The transformer's, in a folder of diffusers' form; tensors are read when they are asked for."""
    check_folder(folder)
    return open_weights(Path(folder).expanduser() / "transformer", DIFFUSERS_STEM)


def check_first_frame(config: CogVideoXConfig, stage: str) -> None:
    """How latents of first frames are scaled stands in the VAE's config.json, and the network was trained with it."""
    place = Path(str(config.weights)).expanduser() / "vae" / "config.json"
    if not config.first_frame or not place.is_file():
        return
    inverse = bool(load_file(place).get("invert_scale_latents"))
    if inverse != config.first_frame_inverse_scale:
        raise ConfigError(
            f"{place} has invert_scale_latents={str(inverse).lower()}: set stages.{stage}.first_frame_inverse_scale={str(inverse).lower()}, or the "
            "first frame will not be what the weights know"
        )


def check_positions(network: Transformer, folder: str, stage: str) -> None:
    """Where a token stands is told to the network by numbers that no tensor's shape gives away: the folder's config.json has them."""
    place = Path(folder).expanduser() / "transformer" / "config.json"
    if not place.is_file():
        return
    shape = network.shape
    theirs = TransformerShape.model_validate(shape_of(load_file(place), str(place)))
    keys = ["positions"]
    if shape.positions == "sincos":
        keys += ["space_scale", "time_scale"]
    else:
        keys += ["grid"] + ["base_size"] * (shape.grid == "resize")
    for key in keys:
        wanted = getattr(theirs, key)
        found = network.base_size if key == "base_size" else getattr(shape, key)
        if found != wanted:
            said = f"[{wanted[0]},{wanted[1]}]" if key == "base_size" else wanted
            raise ConfigError(
                f"{place} has {key}={said}, and the stage {found}: set stages.{stage}.{key}={said}, or the weights will not know where tokens are"
            )


def check_scheduler(config: CogVideoXConfig, stage: str, note: Callable[[str], None]) -> None:
    """The folder's schedule is what its weights were trained with: a stage with another one is refused. What differs in drawing is told."""
    place = Path(str(config.weights)).expanduser() / "scheduler" / "scheduler_config.json"
    if not place.is_file():
        return
    said = load_file(place)
    theirs, _ = read_scheduler(said, said.get("_class_name", "CogVideoXDDIMScheduler"), place)
    for key, (wanted, found) in compare_diffusion(theirs, config.diffusion).items():
        shown = str(wanted).lower() if isinstance(wanted, bool) else wanted
        raise ConfigError(
            f"{place} says diffusion.{key}={shown}, and the stage has {found}: set stages.{stage}.diffusion.{key}={shown}, or take the file out of "
            "the folder to train with another schedule"
        )
    for line in unsupported_scheduler_options(said, place):
        note(f"warning: {line}")


def digest(state: Mapping[str, Tensor]) -> str:
    """Tells weights apart by a few thousand values of each tensor: a second instead of minutes."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        value = state[name]
        flat = value.reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous()
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(some.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def base_asset(folder: str, state: Mapping[str, Tensor]) -> str:
    return json.dumps({"folder": folder, "digest": digest(state)})


def check_base(asset: str, state: Mapping[str, Tensor], folder: str) -> None:
    """Adapters belong to the weights that they were trained on."""
    saved = json.loads(asset)
    if saved["digest"] != digest(state):
        raise InputError(
            f"weights={folder} holds other weights than the ones that this stage was trained on ({saved['folder']}): "
            "put those back; adapters and parts fit no others"
        )
