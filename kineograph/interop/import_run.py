"""`kineo import`: a run whose stages hold released weights as finished checkpoints.

    vae         task causal_vae, the folder's VAE
    generator   task cogvideox, its transformer, with q, k and v in one matrix

Tensors keep the precision of the folder. With `link` or a LoRA file nothing is copied: the generator refers to the folder
(`weights: DIR`), and its checkpoint holds adapters only: those of the file, or zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kineograph.codec.causal_vae import CausalVAE
from kineograph.codec.causal_vae_weights import weights_to_diffusers
from kineograph.core.atomic_folder import check_unoccupied, write_atomically
from kineograph.core.batch import Shape
from kineograph.core.config import Tree, parse
from kineograph.core.config_file import dump_yaml
from kineograph.core.errors import InputError
from kineograph.core.notes import Note, discard
from kineograph.core.run_folder import RunFolder
from kineograph.core.text_file import parse_json
from kineograph.core.weight_files import WeightFiles, check_shapes, check_weight
from kineograph.family.cogvideox import tuning
from kineograph.family.cogvideox.config import CogVideoXConfig
from kineograph.family.cogvideox.diffusers_weights import check_state, diffusers_names, read_shape
from kineograph.family.cogvideox.network import Transformer
from kineograph.interop import dalle2_config, sat_config, trainer_config
from kineograph.interop.lora_adapters import check_base, convert_lora, diffusers_modules, zero_adapters
from kineograph.interop.lora_file import read_lora
from kineograph.interop.released_model import ReleasedModel, read_diffusers, read_sat
from kineograph.run.plan import make_plan
from kineograph.stage.spec import Plan
from kineograph.train import checkpoint

WEIGHTS = ("diffusers", "sat")
SOURCES = (*WEIGHTS, "sat-config", "dalle2-config", *trainer_config.PACKAGES)
CODEC, GENERATOR = "vae", "generator"
CHECKPOINTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
STEP = 1  # imported stages are stages of one step, done


def import_weights(
    paths: Sequence[Path], source: str, run: Path | None, link: bool, lora: Path | None, note: Note
) -> str:
    """→ the new run folder, or the YAML of a config"""
    if source not in SOURCES:
        raise InputError(f"--from {source}: use {', '.join(SOURCES[:-1])} or {SOURCES[-1]}")
    if source not in WEIGHTS and (run is not None or link or lora is not None):
        raise InputError(f"--from {source} prints a YAML and writes no run: omit --run, --link and --lora")
    if source == "sat-config":
        return sat_config.translate(paths)
    if len(paths) != 1:
        raise InputError(f"--from {source} takes one {'folder' if source in WEIGHTS else 'file'}, not {len(paths)}")
    if source not in WEIGHTS:
        return translate_config(paths[0], source)
    return str(import_run(paths[0], source, run, link, lora, note))


def translate_config(path: Path, source: str) -> str:
    """→ the YAML of a file of dalle2-pytorch or of one of the packages of trainers"""
    if path.suffix.lower() in CHECKPOINTS:
        task = "cvivit" if source == "phenaki" else "vqgan"
        raise InputError(
            f"{path} is a checkpoint, and weights of that package do not fit: its codec has other layers than task {task} (docs/interop.md). "
            f"Train {task} with the same settings (kineo import SCRIPT --from {source} prints them), wrap that codec as a task of your own "
            "(CONTRIBUTING.md), or train on its codebook ids with data.source=cache"
        )
    return dalle2_config.translate(path) if source == "dalle2-config" else trainer_config.translate(path, source)


def import_run(
    path: Path,
    source: str,
    run: Path | None = None,
    link: bool = False,
    lora: Path | None = None,
    note: Note = discard,
) -> Path:
    """→ the run folder"""
    if source == "sat" and (link or lora is not None):
        raise InputError("--link and --lora need a diffusers folder: omit them with --from sat")
    model = read_diffusers(path) if source == "diffusers" else read_sat(path)
    target = run if run is not None else Path("runs") / (model.path.resolve().name or "imported")
    check_unoccupied(target, "--run")
    for line in model.notes:
        note(line)
    tree = build_config(model, target.name)
    tensors: dict[str, dict[str, Tensor]] = {}
    assets: dict[str, str] = {}
    if link or lora is not None:
        tensors[GENERATOR], assets = _link_generator(model, tree, lora, note)
    else:
        tensors[CODEC] = _convert_codec(model)
        tensors[GENERATOR] = _convert_generator(model, tree["stages"][GENERATOR])
    plan = make_plan(tree)
    with write_atomically(target, "--run") as folder:
        _write_run(RunFolder(folder), plan, tensors, assets, model)
    return target


def _write_run(
    run: RunFolder,
    plan: Plan,
    tensors: Mapping[str, Mapping[str, Tensor]],
    assets: dict[str, str],
    model: ReleasedModel,
) -> None:
    run.config_file.write_text(dump_yaml(plan.tree()), encoding="utf-8")
    digests: dict[str, str] = {}
    for name, group in tensors.items():
        for key, tensor in group.items():
            check_weight(key, tensor, model.path)
        state = {
            "assets": assets if name == GENERATOR else {},
            "config": plan.tree(),
            "references": dict(digests),
            "imported": str(model.path.resolve()),
        }
        digests[name] = checkpoint.save(run.checkpoints(name), STEP, {"model": group}, state).digest()


# Config ----------------------------------------------------------------------------------------------------------


def build_config(model: ReleasedModel, name: str) -> Tree:
    """The config of a run of these weights."""
    transformer = model.transformer
    length = transformer.config.get("max_text_seq_length", 226)
    if model.text is None:
        text = {"kind": "given", "width": transformer.config.get("text_embed_dim", 4096), "length": length}
    else:
        text = {"kind": "t5", "name": str(model.text.resolve()), "length": length, "padding": "read"}
    generator: Tree = {
        "task": "cogvideox",
        "codec": CODEC,
        **read_shape(transformer.config, f"{transformer.path}/config.json"),
        "text": text,
        "diffusion": model.diffusion.model_dump(mode="json"),
        "sample": {"solver": model.solver},
    }
    if generator.get("first_frame") and model.vae.config.get("invert_scale_latents"):
        generator["first_frame_inverse_scale"] = True
    if model.text is None:
        generator["null_text"] = "zeros"
    codec = model.codec.model_dump(mode="json") | {"perceptual": {"weight": 0.0}}
    return {
        "name": name,
        "prompts": ["a sailing boat on a calm sea at sunrise"],
        "data": {"size": list(model.size), "frames": model.frames, "fps": model.fps, "channels": model.channels},
        "train": {"steps": STEP, "validate_every": 0, "sample_every": 0, "ema": {"decay": 0.0}},
        "stages": {CODEC: codec, GENERATOR: generator},
    }


# Weights ---------------------------------------------------------------------------------------------------------


def _convert_codec(model: ReleasedModel) -> dict[str, Tensor]:
    """Ours and diffusers' names are the same."""
    part, side = model.vae, model.codec.spatial
    with torch.device("meta"):
        codec = CausalVAE(model.codec, Shape(1, side, side, model.channels, model.fps))
    expected = {name: tuple(value.shape) for name, value in weights_to_diffusers(codec).items()}
    if isinstance(part.state, WeightFiles):
        check_shapes(part.state, expected, part.path)
    elif part.state.keys() != expected.keys():
        different = sorted(part.state.keys() ^ expected.keys())
        raise InputError(f"{part.path} does not fit its own shapes: {different[0]} (diffusers' name)")
    return {name: part.state[name] for name in expected}


def _build_network(model: ReleasedModel, stage: Tree, fused: bool = True) -> Transformer:
    """The transformer on the meta device, after a check that its weights fit."""
    config = parse(CogVideoXConfig, stage, f"stages.{GENERATOR}")
    height, width = (side // model.codec.spatial for side in model.size)
    base = ((model.frames - 1) // model.codec.temporal + 1, height, width)
    theirs = model.transformer.config
    text = (theirs.get("text_embed_dim", 4096), theirs.get("max_text_seq_length", 226))
    with torch.device("meta"):
        network = Transformer(config, model.codec.latent_channels, *text, base, fused)
    check_state(network, model.transformer.state, str(model.transformer.path))
    return network


def _convert_generator(model: ReleasedModel, stage: Tree) -> dict[str, Tensor]:
    state, weights = model.transformer.state, dict[str, Tensor]()
    for name, parameter in _build_network(model, stage).named_parameters():
        parts = [state[theirs] for theirs in diffusers_names(name)]
        weights[f"network.{name}"] = (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(parameter.shape)
    return weights


def _link_generator(
    model: ReleasedModel, tree: Tree, lora: Path | None, note: Note
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Make the stage refer to the folder. → its adapters, and the asset that identifies the folder's weights"""
    folder = str(model.path.resolve())
    stage = {key: value for key, value in tree["stages"][GENERATOR].items() if key != "codec"} | {"weights": folder}
    network = _build_network(model, stage, fused=False)
    asset = tuning.describe_base_weights(folder, model.transformer.state)
    if lora is None:
        adapters, keys = zero_adapters(network)
    else:
        check_base(lora, network, str(model.path), parse_json(asset)["digest"], note)
        adapters, keys = convert_lora(network, read_lora(lora, diffusers_modules(network)), str(lora))
    tree["stages"] = {GENERATOR: stage | {"tune": "lora", "lora": keys}}
    return {f"network.{name}": value for name, value in adapters.items()}, {tuning.ASSET: asset}
