"""`kineo import DIR --from diffusers|sat`: a run whose stages hold released weights as finished checkpoints.

    vae         task causal_vae, the folder's VAE
    generator   task cogvideox, its transformer, with q, k and v in one matrix

Tensors are written as they are stored, in the folder's own precision; a stage's file is made of mapped tensors, a checkpoint at a time. With
`link` nothing is copied: the generator refers to the folder (`weights: DIR`) and its checkpoint holds adapters alone, which add nothing; with a
LoRA file they are its.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kineograph.codec.causal_vae import CausalVAE
from kineograph.codec.causal_vae_weights import weights_to_diffusers
from kineograph.core.batch import Shape
from kineograph.core.config import Tree, dump_yaml, parse
from kineograph.core.errors import InputError
from kineograph.core.run_folder import RunFolder
from kineograph.core.weight_files import WeightFiles, check_shapes
from kineograph.family.cogvideox import tuning
from kineograph.family.cogvideox.config import CogVideoXConfig
from kineograph.family.cogvideox.diffusers_weights import check_state, diffusers_names, read_shape
from kineograph.family.cogvideox.network import Transformer
from kineograph.interop.atomic_folder import check_unoccupied, write_atomically
from kineograph.interop.lora_adapters import check_base, convert_lora, diffusers_modules, zero_adapters
from kineograph.interop.lora_file import read_lora
from kineograph.interop.released_model import ReleasedModel, read_diffusers, read_sat
from kineograph.run.plan import make_plan
from kineograph.stage.spec import Plan
from kineograph.train import checkpoint

CODEC, GENERATOR = "vae", "generator"
STEP = 1  # of the checkpoints: a stage of one step that was made


def import_run(
    path: Path,
    source: str,
    run: Path | None = None,
    link: bool = False,
    lora: Path | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Path:
    """→ the run folder."""
    if source == "sat" and (link or lora is not None):
        raise InputError("--link and --lora refer to a diffusers folder: --from sat has none to refer to")
    found = read_diffusers(path) if source == "diffusers" else read_sat(path)
    target = run if run is not None else Path("runs") / (found.path.resolve().name or "imported")
    check_unoccupied(target, "--run")
    for line in found.notes:
        note(line)
    tree = run_tree(found, target.name)
    tensors: dict[str, dict[str, Tensor]] = {}
    assets: dict[str, str] = {}
    if link or lora is not None:
        tensors[GENERATOR], assets = _linked(found, tree, lora, note)
    else:
        tensors[CODEC] = _codec_weights(found)
        tensors[GENERATOR] = _generator_weights(found, tree["stages"][GENERATOR])
    plan = make_plan(tree)
    with write_atomically(target, "--run") as folder:
        _write(RunFolder(folder), plan, tensors, assets, found)
    return target


def _write(
    run: RunFolder,
    plan: Plan,
    tensors: Mapping[str, Mapping[str, Tensor]],
    assets: dict[str, str],
    found: ReleasedModel,
) -> None:
    run.config_file.write_text(dump_yaml(plan.tree()), encoding="utf-8")
    digests: dict[str, str] = {}
    for name, group in tensors.items():
        state = {
            "assets": assets if name == GENERATOR else {},
            "config": plan.tree(),
            "references": dict(digests),
            "imported": str(found.path.resolve()),
        }
        digests[name] = checkpoint.save(run.checkpoints(name), STEP, {"model": group}, state).digest()


# Config ----------------------------------------------------------------------------------------------------------


def run_tree(found: ReleasedModel, name: str) -> Tree:
    """The config of a run of these weights."""
    part = found.transformer
    generator: Tree = {
        "task": "cogvideox",
        "codec": CODEC,
        **read_shape(part.config, f"{part.where}/config.json"),
        "text": _text(found),
        "diffusion": found.diffusion.model_dump(mode="json"),
        "sample": {"solver": found.solver},
    }
    if generator.get("first_frame") and found.vae.config.get("invert_scale_latents"):
        generator["first_frame_inverse_scale"] = True
    if found.text is None:
        generator["null_text"] = "zeros"
    codec = found.codec.model_dump(mode="json") | {"perceptual": {"weight": 0.0}}
    return {
        "name": name,
        "prompts": ["a sailing boat on a calm sea at sunrise"],
        "data": {"size": list(found.size), "frames": found.frames, "fps": found.fps, "channels": found.channels},
        "train": {"steps": STEP, "validate_every": 0, "sample_every": 0, "ema": {"decay": 0.0}},
        "stages": {CODEC: codec, GENERATOR: generator},
    }


def _text(found: ReleasedModel) -> Tree:
    config = found.transformer.config
    length = config.get("max_text_seq_length", 226)
    if found.text is None:
        return {"kind": "given", "width": config.get("text_embed_dim", 4096), "length": length}
    return {"kind": "t5", "name": str(found.text.resolve()), "length": length, "padding": "read"}


# Weights ---------------------------------------------------------------------------------------------------------


def _codec_weights(found: ReleasedModel) -> dict[str, Tensor]:
    """The names are the same on both sides."""
    part, side = found.vae, found.codec.spatial
    with torch.device("meta"):
        codec = CausalVAE(found.codec, Shape(1, side, side, found.channels, found.fps))
    expected = {name: tuple(value.shape) for name, value in weights_to_diffusers(codec).items()}
    if isinstance(part.state, WeightFiles):
        check_shapes(part.state, expected, part.where)
    elif part.state.keys() != expected.keys():
        strange = sorted(part.state.keys() ^ expected.keys())
        raise InputError(f"{part.where} does not fit its own shapes: {strange[0]} (by its name in diffusers)")
    return {name: part.state[name] for name in expected}


def network_of(found: ReleasedModel, stage: Tree, fused: bool = True) -> Transformer:
    """The transformer without numbers, after its weights were found to fit."""
    config = parse(CogVideoXConfig, stage, f"stages.{GENERATOR}")
    theirs = found.transformer.config
    height, width = (side // found.codec.spatial for side in found.size)
    base = ((found.frames - 1) // found.codec.temporal + 1, height, width)
    text = (theirs.get("text_embed_dim", 4096), theirs.get("max_text_seq_length", 226))
    with torch.device("meta"):
        network = Transformer(config, found.codec.latent_channels, *text, base, fused)
    check_state(network, found.transformer.state, str(found.transformer.where))
    return network


def _generator_weights(found: ReleasedModel, stage: Tree) -> dict[str, Tensor]:
    state, own = found.transformer.state, dict[str, Tensor]()
    for name, parameter in network_of(found, stage).named_parameters():
        parts = [state[theirs] for theirs in diffusers_names(name)]
        own[f"network.{name}"] = (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(parameter.shape)
    return own


def _linked(
    found: ReleasedModel, tree: Tree, lora: Path | None, note: Callable[[str], None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Nothing is copied: the stage stands on the folder, and its own weights are adapters. → them, and the folder's mark."""
    place = str(found.path.resolve())
    stage = {key: value for key, value in tree["stages"][GENERATOR].items() if key != "codec"} | {"weights": place}
    network = network_of(found, stage, fused=False)
    mark = tuning.describe_base_weights(place, found.transformer.state)
    if lora is None:
        own, keys = zero_adapters(network)
    else:
        check_base(lora, network, str(found.path), json.loads(mark)["digest"], note)
        own, keys = convert_lora(network, read_lora(lora, diffusers_modules(network)), str(lora))
    tree["stages"] = {GENERATOR: stage | {"tune": "lora", "lora": keys}}
    return {f"network.{name}": value for name, value in own.items()}, {tuning.ASSET: mark}
