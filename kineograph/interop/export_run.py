"""`kineo export`: a run's weights as plain files, or a CogVideoX run as a folder that diffusers' pipelines load.

--to safetensors, for any family:

    DIR/run.yaml               the run's resolved config; not config.yaml, which would make the folder a run
    DIR/<stage>.safetensors    weights by their names in the task: EMA, or those of the last step
    DIR/<stage>.json           task, step, which weights, their checksum, and other assets (a learned vocabulary)
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kineograph.codec.causal_vae import CausalVAE
from kineograph.codec.causal_vae_weights import CLASS as VAE
from kineograph.codec.causal_vae_weights import config_to_diffusers, weights_to_diffusers
from kineograph.core.atomic_folder import check_unoccupied, write_atomically
from kineograph.core.errors import InputError
from kineograph.core.notes import Note, discard
from kineograph.core.run_folder import RunFolder, write_json
from kineograph.core.weight_files import DIFFUSERS_STEM, write_weights
from kineograph.family.cogvideox.diffusers_weights import CLASS as TRANSFORMER
from kineograph.family.cogvideox.diffusers_weights import diffusers_config, diffusers_state
from kineograph.family.cogvideox.task import CogVideoX
from kineograph.interop.diffusers_folder import INDEX
from kineograph.interop.lora_adapters import describe_base, extract_lora
from kineograph.interop.lora_file import merge_lora, write_lora
from kineograph.process.diffusers_scheduler import write_scheduler
from kineograph.stage.load import StageLoader
from kineograph.text.pretrained import find_tokenizer
from kineograph.train import checkpoint

TARGETS = ("diffusers", "safetensors")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "spiece.model", "special_tokens_map.json", "added_tokens.json"
)  # fmt: skip


def export_weights(
    run: Path, out: Path, target: str, checkpoint: str, online: bool, lora: bool, dtype: str | None, note: Note
) -> list[Path]:
    """→ the files written"""
    if target not in TARGETS:
        raise InputError(f"--to {target}: use {' or '.join(TARGETS)}")
    folder = RunFolder.existing(run)
    if target == "diffusers":
        return export_diffusers(folder, out, checkpoint, online, lora, dtype, note)
    if lora or dtype is not None:
        raise InputError("--lora and --dtype need --to diffusers: --to safetensors writes the weights as saved")
    return export_safetensors(folder, out, checkpoint, online, note)


def export_diffusers(
    run: RunFolder,
    target: Path,
    which: str = "last",
    online: bool = False,
    lora: bool = False,
    dtype: str | None = None,
    note: Note = discard,
) -> list[Path]:
    """Export the last CogVideoX stage as a pipeline folder, or its adapters as a LoRA file. → the files"""
    check_unoccupied(target)
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: use {', '.join(DTYPES)}")
    task = StageLoader(run, note=note).load(_find_generator(run), which, ema=not online)
    assert isinstance(task, CogVideoX)
    cast_to = DTYPES[dtype] if dtype else None
    if lora:
        adapters, header = extract_lora(task), describe_base(task)
        with write_atomically(target) as folder:
            write_lora(folder, adapters, header, cast_to)
    else:
        configs = _build_configs(task)
        _warn_positions(task, configs["transformer"]["sample_frames"], note)
        with write_atomically(target) as folder:
            _write_folder(folder, task, configs, cast_to, note)
    return sorted(path for path in target.rglob("*") if path.is_file())


def _find_generator(run: RunFolder) -> str:
    """The last trained CogVideoX stage."""
    stages = run.config()["stages"]
    for name in reversed(list(stages)):
        if stages[name]["task"] == "cogvideox" and checkpoint.saved_steps(run.checkpoints(name)):
            return name
    tasks = ", ".join(stage["task"] for stage in stages.values())
    raise InputError(
        f"{run.path} has no trained stage of task cogvideox (it has {tasks}): use --to safetensors, which exports every family"
    )


def _build_configs(task: CogVideoX) -> dict[str, dict[str, Any]]:
    """diffusers' configs. Refuses settings that diffusers does not have, before anything is written."""
    codec = task.codec
    if not isinstance(codec, CausalVAE):
        raise InputError(
            f"the codec is a {type(codec).__name__}, and diffusers' pipeline needs a causal_vae: export with --to safetensors"
        )
    texts = task.texts
    vae = config_to_diffusers(codec)
    if codec.config.scale != "auto":
        vae["scaling_factor"] = codec.config.scale  # as configured, not rounded to float32
    if task.config.first_frame_inverse_scale:
        vae["invert_scale_latents"] = True
    return {
        "transformer": diffusers_config(task.network, texts.width, texts.length, codec.config.temporal),
        "vae": vae,
        "scheduler": write_scheduler(task.config.diffusion, task.config.sample.solver),
    }


def _warn_positions(task: CogVideoX, frames: int, note: Note) -> None:
    if task.config.positions == "rotary+learned" and task.latents[0] != task.network.base_frames:
        note(
            f"warning: diffusers uses the learned positions for clips of {frames} frames only. This stage was trained on "
            f"{task.shape.frames} frames: diffusers' samples will differ from kineo sample's"
        )


def _write_folder(
    folder: Path,
    task: CogVideoX,
    configs: dict[str, dict[str, Any]],
    dtype: torch.dtype | None,
    note: Note,
) -> None:
    version = _version()
    for name, config in configs.items():
        (folder / name).mkdir()
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        write_json(folder / name / file, version | config)
    state: Iterable[tuple[str, Tensor]] = diffusers_state(task).items()
    if task.config.uses_lora:
        state = merge_lora(dict(state), extract_lora(task), dtype)
    write_weights(folder / "transformer", DIFFUSERS_STEM, _cast(state, dtype))
    codec = task.codec
    assert isinstance(codec, CausalVAE)
    write_weights(folder / "vae", DIFFUSERS_STEM, _cast(weights_to_diffusers(codec).items(), dtype))
    text = _write_text(folder, task, note)
    write_json(
        folder / INDEX,
        {
            "_class_name": "CogVideoXImageToVideoPipeline" if task.config.first_frame else "CogVideoXPipeline",
            **version,
            "scheduler": ["diffusers", configs["scheduler"]["_class_name"]],
            "text_encoder": ["transformers", "T5EncoderModel"] if text else [None, None],
            "tokenizer": ["transformers", "T5Tokenizer"] if text else [None, None],
            "transformer": ["diffusers", TRANSFORMER],
            "vae": ["diffusers", VAE],
        },
    )


def _write_text(folder: Path, task: CogVideoX, note: Note) -> bool:
    """Copy the T5 encoder and its tokenizer. → whether there are any"""
    config = task.config.text
    source = Path(config.name or "").expanduser()
    if config.kind != "t5" or not source.is_dir():
        encoder = f"kind {config.kind}" if config.kind != "t5" else f"{config.name}, not a local folder"
        note(
            f"the text encoder ({encoder}) is not exported: load the pipeline with text_encoder=None, tokenizer=None and pass prompt_embeds"
        )
        return False
    if config.padding != "read":
        note(
            "text.padding=hidden: this stage was trained with zeros after a caption's end; diffusers' pipeline uses T5's embeddings there"
        )
    if task.config.null_text != "empty":
        note(
            f"null_text={task.config.null_text}: diffusers' pipeline guides away from the empty caption; pass negative_prompt_embeds"
        )
    tokenizer = Path(find_tokenizer(str(source)))
    if tokenizer == source:  # both in one folder
        (folder / "text_encoder").mkdir()
        (folder / "tokenizer").mkdir()
        for path in sorted(source.iterdir()):
            if path.is_file():
                shutil.copyfile(path, folder / ("tokenizer" if path.name in _TOKENIZER_FILES else "text_encoder") / path.name)  # fmt: skip
    else:
        shutil.copytree(source, folder / "text_encoder")
        shutil.copytree(tokenizer, folder / "tokenizer")
    return True


def _cast(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, value in tensors:
        yield name, value if dtype is None else value.to(dtype)


def _version() -> dict[str, str]:
    try:
        return {"_diffusers_version": metadata.version("diffusers")}
    except metadata.PackageNotFoundError:  # its files can be written without it
        return {}


def export_safetensors(
    run: RunFolder,
    target: Path,
    which: str = "last",
    online: bool = False,
    note: Note = discard,
) -> list[Path]:
    """Export every trained stage. → the files"""
    check_unoccupied(target)
    tree = run.config()
    trained = [name for name in tree["stages"] if checkpoint.saved_steps(run.checkpoints(name))]
    if not trained:
        raise InputError(f"{run.path} has no trained stage to export: train it first")
    chosen = {}
    for name in trained:  # a step number is the last stage's; others may not have it
        own = which if which in ("last", "best") or name == trained[-1] else "last"
        chosen[name] = checkpoint.select(run.checkpoints(name), own)
    for name in tree["stages"]:
        if name not in trained:
            note(f"{name} is not exported: it has no checkpoint")
    with write_atomically(target) as folder:
        shutil.copyfile(run.config_file, folder / "run.yaml")
        for name, saved in chosen.items():
            ema = not online and saved.has("ema")
            file = folder / f"{name}.safetensors"
            if saved.is_sharded:
                save_file(saved.weights(ema=ema), file)
            else:
                shutil.copyfile(saved.path / f"{'ema' if ema else 'model'}.safetensors", file)
            description = {
                "task": tree["stages"][name]["task"],
                "step": saved.step,
                "weights": "ema" if ema else "online",
                "sha256": checkpoint.flush_and_hash(file)["sha256"],
                "assets": saved.state().get("assets", {}),
            }
            write_json(folder / f"{name}.json", description)
    return sorted(target.iterdir())
