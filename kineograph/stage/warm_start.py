"""A stage's Task with its starting weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task, load_weights, task_state_dict
from kineograph.core.weight_files import WeightFiles
from kineograph.stage.build import _saved
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import StagePlan
from kineograph.text.learned import ASSET, LearnedText
from kineograph.train import checkpoint
from kineograph.train.remote_checkpoint import download_checkpoint, is_remote

_BYTES = 259  # tokens of a vocabulary that learned nothing: 256 bytes and three special ones, the same everywhere
_NAMED = 4  # tensors that a line of the log names before it counts the rest


@contextmanager
def brought_init(stage: StagePlan, folder: RunFolder, note: Callable[[str], None]) -> Iterator[Path | None]:
    """Inside, the file or checkpoint that an `init` which lies elsewhere names; None where nothing is to be fetched."""
    init = stage.spec.config.init
    if init is None or not is_remote(init) or checkpoint.latest(folder.checkpoints(stage.name)) is not None:
        yield None
        return
    with download_checkpoint(init, folder.stage(stage.name), note) as found:
        yield found


def warm_start(
    task: Task, stage: StagePlan, stages: StageLoader, note: Callable[[str], None], brought: Path | None = None
) -> None:
    """Copy what fits from `init`, unless the stage has begun: then its own checkpoint holds everything."""
    init = stage.spec.config.init
    if init is None or checkpoint.latest(stages.run.checkpoints(stage.name)) is not None:
        return
    if brought is not None and brought.is_file():
        given, words = checkpoint.read_safetensors(brought), None
    elif init.endswith(".safetensors") and not is_remote(init):
        given, words = checkpoint.read_safetensors(Path(init)), None
    else:
        found = _saved(brought) or _trained(init, stages)
        given, words = found.weights(), found.state().get("assets", {}).get(ASSET)
        _compare_codecs(found, stage, stages, note)
    given, left = _fitted(task, stage, given, words)
    own = task_state_dict(task)
    taken = {name: given[name] for name in own if name not in left}
    load_weights(task, own | taken)
    note(f"{stage.name}: {len(taken)} of {len(own)} tensors taken from {init}{_told(left)}")


def check_start(task: Task, stage: StagePlan, stages: StageLoader, untrained: Callable[[str], Task]) -> None:
    """Refuse an `init` whose weights do not fit, before anything is trained: by names and shapes, of which nothing is read but headers.

    `untrained` builds an earlier stage of the plan that has no checkpoint yet. What is to be fetched is looked at when it is there.
    """
    init = stage.spec.config.init
    if init is None or is_remote(init) or checkpoint.latest(stages.run.checkpoints(stage.name)) is not None:
        return
    if init.endswith(".safetensors"):
        found = WeightFiles([Path(init)])
        shapes = {name: found.shape(name) for name in found}
    else:
        run, name = stages.locate(init)
        saved = checkpoint.latest(run.checkpoints(name))
        made = task_state_dict(untrained(init)) if saved is None else {}
        shapes = saved.shapes("model") if saved else {name: tuple(value.shape) for name, value in made.items()}
    _fitted(task, stage, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, None)


def _fitted(
    task: Task, stage: StagePlan, given: dict[str, Tensor], words: str | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights that a stage starts from by their names here; and what of the stage they cannot fill, and why. At least one must fit."""
    where = f"stages.{stage.name}.init={stage.spec.config.init}"
    renamed = task.remap_init(given, where)
    own = task_state_dict(task)
    left = _misfits(own, renamed, _of_other_words(task, words))
    if len(left) == len(own):
        raise InputError(
            f"{where}: none of its {len(given)} tensors fits a name and shape of this stage: start from weights of a {stage.spec.config.task}"
        )
    return renamed, left


def _trained(init: str, stages: StageLoader) -> checkpoint.Checkpoint:
    run, name = stages.locate(init)
    return checkpoint.select(run.checkpoints(name))


def _compare_codecs(
    found: checkpoint.Checkpoint, stage: StagePlan, stages: StageLoader, note: Callable[[str], None]
) -> None:
    """Say so where the weights that a stage starts from know another codec's tokens or latents, which mean something else."""
    config, known = stage.spec.config, found.state().get("references", {})
    codec = stages.codec_of(config) if "codec" in config.references and known else None
    if codec is not None and codec[1] not in known.values():
        note(
            f"warning: {stage.name}: {config.init} was trained with another codec than {codec[0]}, whose tokens mean something else: "
            f"unless that is meant, set stages.{stage.name}.codec to the codec of {config.init}"
        )


def _of_other_words(task: Task, words: str | None) -> set[str]:
    """Embeddings of learned vocabularies whose rows may stand for other words where the weights come from.

    `words` is the vocabulary there; None where it is not known.
    """
    return {
        f"{name}.tokens.weight"
        for name, module in task.named_modules()
        if isinstance(module, LearnedText) and module.vocabulary.size > _BYTES and module.vocabulary.text != words
    }


def _misfits(own: dict[str, Tensor], given: dict[str, Tensor], other_words: set[str]) -> dict[str, str]:
    """Tensors of the stage that cannot be taken, and why."""
    left = {}
    for name, value in own.items():
        if name not in given:
            left[name] = "not there"
        elif given[name].shape != value.shape:
            left[name] = "of another shape"
        elif name in other_words:
            left[name] = "of a vocabulary that is not known to be this one"
    return left


def _told(left: dict[str, str]) -> str:
    """`; not there: a, b and 3 more; of another shape: c`"""
    parts = []
    for why in dict.fromkeys(left.values()):
        names = [name for name, reason in left.items() if reason == why]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        parts.append(f"; {why}: {', '.join(names[:_NAMED])}{more}")
    return "".join(parts)
