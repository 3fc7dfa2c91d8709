"""A stage's Task ready to train: built, and where `init` names other weights, started from those that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kineograph.core import weight_cache
from kineograph.core.capabilities import RemapsInit
from kineograph.core.errors import InputError
from kineograph.core.noise import key_of
from kineograph.core.notes import Note
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import Task, find_codec, load_weights, task_state_dict
from kineograph.core.weight_files import WeightFiles
from kineograph.stage.build import build_task
from kineograph.stage.data import StageData
from kineograph.stage.load import StageLoader, locate_stage
from kineograph.stage.spec import Plan, StagePlan
from kineograph.text import TextConfig
from kineograph.text.learned import ASSET, LearnedText
from kineograph.train import checkpoint
from kineograph.train.remote_checkpoint import download_checkpoint, is_remote

_BYTES = 259  # size of a vocabulary that learned no words: 256 bytes and three special tokens
_CAPTION_SAMPLE = 256  # captions whose tokens are counted
_LISTED = 4  # tensors named in a log line before it counts the rest


@dataclass(frozen=True)
class _Init:
    """What `init` names: a stage's checkpoint, or a file of weights alone."""

    checkpoint: checkpoint.Checkpoint | None = None
    file: Path | None = None


def build_for_training(plan: Plan, stage: StagePlan, loader: StageLoader, data: StageData, note: Note) -> Task:
    """Build a stage to train, with the weights that it starts from. A checkpoint of its own is loaded later, by the Trainer."""
    with _open_init(stage, loader, note) as init:
        task = build_untrained(plan, stage, loader, data, note, init.checkpoint if init else None)
        if init is not None:
            _copy_weights(task, stage, loader, init, note)
    _warn_of_cut_captions(task, stage, data, note)
    return task


def build_untrained(
    plan: Plan,
    stage: StagePlan,
    loader: StageLoader,
    data: StageData,
    note: Note,
    init: checkpoint.Checkpoint | None = None,
) -> Task:
    """Build a stage with fresh weights. It keeps the vocabulary of its checkpoint, or of the `init` whose embeddings it takes over."""
    seed = plan.stage_seed(stage.name)
    torch.manual_seed(key_of(seed, "init") >> 1)
    own = checkpoint.latest(loader.run.checkpoints(stage.name))
    if own is not None:
        loader.check_fit(loader.run, stage.name, own, ema=False)
    saved = own or init or _find_checkpoint(stage, loader)
    assets = saved.state().get("assets") if saved else None
    task = build_task(stage.spec, loader.load, note, assets, data.captions, seed)
    _warn_of_longer_clips(task, stage, note)
    return task


def _warn_of_cut_captions(task: Task, stage: StagePlan, data: StageData, note: Note) -> None:
    text = dict(stage.spec.config).get("text")
    encoder = next((module for module in task.modules() if isinstance(module, TextEncoder)), None)
    if not isinstance(text, TextConfig) or "captions" not in text.reads() or encoder is None:
        return
    captions = data.captions()
    sample = captions[:: -(-len(captions) // _CAPTION_SAMPLE) or 1]
    cut = encoder.count_cut(sample)
    if cut:
        note(
            f"{stage.name}: {cut} of {len(sample)} captions are cut to {encoder.length} tokens; "
            f"raise stages.{stage.name}.text.length"
        )


def _warn_of_longer_clips(task: Task, stage: StagePlan, note: Note) -> None:
    """A video codec encodes any length, but beyond the length that it was trained on latents drift and frames smear."""
    codec = find_codec(task)
    frames = stage.spec.data.shape.frames
    if codec is not None and 1 < codec.shape.frames < frames:
        note(
            f"warning: {stage.name}: the codec was trained on clips of {codec.shape.frames} frames, and these have {frames}: "
            "later frames may be decoded badly; train the codec on clips of this length"
        )


def _find_checkpoint(stage: StagePlan, loader: StageLoader) -> checkpoint.Checkpoint | None:
    """The checkpoint that `init` names, or None: `init` is a file or lies elsewhere, or that stage is not trained yet."""
    init = stage.spec.config.init
    if init is None or init.endswith(".safetensors") or is_remote(init):
        return None
    run, name = locate_stage(init, loader.run)
    return checkpoint.latest(run.checkpoints(name))


@contextmanager
def _open_init(stage: StagePlan, loader: StageLoader, note: Note) -> Iterator[_Init | None]:
    """Fetch the weights that a stage starts from, if they lie elsewhere; None without `init`, or once the stage has its own checkpoint."""
    init = stage.spec.config.init
    if init is None or checkpoint.latest(loader.run.checkpoints(stage.name)) is not None:
        yield None
    elif is_remote(init):
        with download_checkpoint(init, loader.run.stage(stage.name), note) as path:
            yield _Init(checkpoint.Checkpoint(path, 0)) if path.is_dir() else _Init(file=path)
    elif init.endswith(".safetensors"):
        yield _Init(file=Path(init))
    else:
        run, name = locate_stage(init, loader.run)
        yield _Init(checkpoint.select(run.checkpoints(name)))


def _copy_weights(task: Task, stage: StagePlan, loader: StageLoader, init: _Init, note: Note) -> None:
    """Copy the tensors that fit and list those that do not."""
    if init.checkpoint is not None:
        weights, vocabulary = init.checkpoint.weights(), init.checkpoint.state().get("assets", {}).get(ASSET)
        _compare_codecs(init.checkpoint, stage, loader, note)
    else:
        assert init.file is not None
        weights, vocabulary = weight_cache.load(init.file), None
    weights, misfits = _match_weights(task, stage, weights, vocabulary)
    own = task_state_dict(task)
    taken = {name: weights[name] for name in own if name not in misfits}
    load_weights(task, own | taken)
    note(f"{stage.name}: {len(taken)} of {len(own)} tensors taken from {stage.spec.config.init}{_describe(misfits)}")


def check_init_shapes(task: Task, stage: StagePlan, loader: StageLoader, build: Callable[[str], Task]) -> None:
    """Refuse an `init` whose weights do not fit, before anything is trained; only headers are read.

    `build` builds an earlier stage of the plan that has no checkpoint yet. Remote weights are checked once they are fetched.
    """
    init = stage.spec.config.init
    if init is None or is_remote(init) or checkpoint.latest(loader.run.checkpoints(stage.name)) is not None:
        return
    saved = _find_checkpoint(stage, loader)
    if init.endswith(".safetensors"):
        files = WeightFiles([Path(init)])
        shapes = {name: files.shape(name) for name in files}
    elif saved is not None:
        shapes = saved.shapes("model")
    else:
        shapes = {name: tuple(value.shape) for name, value in task_state_dict(build(init)).items()}
    _match_weights(task, stage, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, None)


def _match_weights(
    task: Task, stage: StagePlan, weights: dict[str, Tensor], vocabulary: str | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """→ the weights by their names in `task`; and the tensors of `task` that they do not fill, with the reason. Refuses if none fits."""
    where = f"stages.{stage.name}.init={stage.spec.config.init}"
    renamed = task.remap_init(weights, where) if isinstance(task, RemapsInit) else weights
    own = task_state_dict(task)
    other_words = _find_other_vocabularies(task, vocabulary)
    misfits: dict[str, str] = {}
    for name, value in own.items():
        if name not in renamed:
            misfits[name] = "not there"
        elif renamed[name].shape != value.shape:
            misfits[name] = "of another shape"
        elif name in other_words:
            misfits[name] = "of a vocabulary that may be another one"
    if len(misfits) == len(own):
        raise InputError(
            f"{where}: none of its {len(weights)} tensors fits a name and shape of this stage: "
            f"use weights of a {stage.spec.config.task}"
        )
    return renamed, misfits


def _find_other_vocabularies(task: Task, vocabulary: str | None) -> set[str]:
    """Word embeddings whose rows may stand for other words in the `init`, whose `vocabulary` this is (None: not known)."""
    return {
        f"{name}.tokens.weight"
        for name, module in task.named_modules()
        if isinstance(module, LearnedText) and module.vocabulary.size > _BYTES and module.vocabulary.text != vocabulary
    }


def _compare_codecs(init: checkpoint.Checkpoint, stage: StagePlan, loader: StageLoader, note: Note) -> None:
    """Warn if the `init` was trained on another codec, whose tokens or latents mean something else."""
    digests = init.state().get("references", {})
    if not digests or "codec" not in stage.spec.config.references:
        return
    codec = loader.find_codec(stage.spec)
    if codec is not None and codec[1] not in digests.values():
        source = stage.spec.config.init
        note(
            f"warning: {stage.name}: {source} was trained with another codec than {codec[0]}, whose tokens mean something else: "
            f"if that is not intended, set stages.{stage.name}.codec to the codec of {source}"
        )


def _describe(misfits: dict[str, str]) -> str:
    """`; not there: a, b and 3 more; of another shape: c`"""
    parts = []
    for reason in dict.fromkeys(misfits.values()):
        names = [name for name, other in misfits.items() if other == reason]
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        parts.append(f"; {reason}: {', '.join(names[:_LISTED])}{more}")
    return "".join(parts)
