"""Opening a run's trained stages: config and checkpoint to a frozen Task, with the earlier stages that it refers to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kineograph.core.batch import Shape
from kineograph.core.config import StageConfig, Tree, merge, parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.lookup import find_source, find_task
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import BuildContext, Task, freeze, load_weights
from kineograph.data.config import DataConfig
from kineograph.train import checkpoint

OUTSIDE_TASK = ("data", "train", "players")  # sections of a stage that its Task does not see


@dataclass(frozen=True)
class StageSpec:
    """One stage of a resolved config."""

    name: str
    task: type[Task]
    config: StageConfig
    data: DataConfig


def read_stage(tree: Tree, name: str) -> StageSpec:
    """Parse stage `name` of a config tree."""
    where = f"stages.{name}"
    stage = tree.get("stages", {}).get(name)
    if not isinstance(stage, dict):
        raise ConfigError(f"there is no stage {name!r}: the stages are {', '.join(tree.get('stages', {})) or 'none'}")
    if not isinstance(stage.get("task"), str):
        raise ConfigError(f"{where}.task is required and not set")
    task = find_task(stage["task"], f"{where}.task")
    config = parse(task.Config, {key: value for key, value in stage.items() if key not in OUTSIDE_TASK}, where)
    data_tree = merge(tree.get("data") or {}, stage.get("data") or {})
    source = find_source(data_tree.get("source", DataConfig.model_fields["source"].default))
    data = parse(config_of(source), data_tree, "data" if not stage.get("data") else f"{where}.data")
    return StageSpec(name, task, config, data)


def config_of(source: Any) -> type[DataConfig]:
    """The config class of a data source. A user's Dataset class has none of its own: `data.dataset` wraps it."""
    if hasattr(source, "Config"):
        return source.Config
    return find_source("dataset").Config


class Stages:
    """Trained stages of a run and of the runs that it refers to, each loaded once."""

    def __init__(self, run: RunFolder, device: torch.device | str = "cpu", note: Callable[[str], None] = lambda line: None) -> None:
        self.run = run
        self.device = torch.device(device)
        self.note = note
        self._loaded: dict[tuple[Path, str, str], Task] = {}

    def load(self, reference: str, which: str | int = "last", ema: bool = True) -> Task:
        """`tokenizer` of this run, or `runs/x/tokenizer` of another; frozen, on the device."""
        run, name = self.locate(reference)
        key = (run.path.resolve(), name, f"{which}-{ema}")
        if key not in self._loaded:
            found = checkpoint.choose(run.checkpoints(name), which)
            task = build(run, name, found.state().get("assets", {}), self._sibling(run), self.note)
            load_weights(task, found.weights(ema))
            self._loaded[key] = freeze(task.to(self.device))  # type: ignore[assignment]
        return self._loaded[key]

    def digest(self, reference: str) -> str:
        """Identifies a stage's trained weights."""
        run, name = self.locate(reference)
        return checkpoint.choose(run.checkpoints(name)).digest()

    def locate(self, reference: str) -> tuple[RunFolder, str]:
        if "/" not in reference:
            return self.run, reference
        path = Path(reference)
        return RunFolder.existing(path.parent), path.name

    def _sibling(self, run: RunFolder) -> Callable[[str], Task]:
        """How a stage of `run` sees other stages: plain names are its own run's."""
        if run.path == self.run.path:
            return self.load
        return lambda name: self.load(name if "/" in name else f"{run.path}/{name}")


def build(run: RunFolder, name: str, assets: dict[str, str], stage: Callable[[str], Task], note: Callable[[str], None]) -> Task:
    """A stage's Task as its saved config says, with fresh weights."""
    spec = read_stage(run.config(), name)
    context = BuildContext(shape=spec.data.shape, stage=stage, assets=assets, note=note)
    return spec.task.build(spec.config, context)


def sampling_stage(run: RunFolder, wanted: str | None = None) -> str:
    """The stage that `kineo sample` draws with: the one asked for, or the last that is trained and can sample."""
    tree = run.config()
    names = list(tree["stages"])
    if wanted is not None:
        if wanted not in names:
            raise InputError(f"{run.path} has no stage {wanted!r}: the stages are {', '.join(names)}")
        return wanted
    for name in reversed(names):
        task = find_task(tree["stages"][name]["task"])
        if task.sample is not Task.sample and checkpoint.steps(run.checkpoints(name)):
            return name
    raise InputError(f"{run.path} has no trained stage that draws samples (stages: {', '.join(names)}); train a generator first")


def shape_of(run: RunFolder, stage: str) -> Shape:
    return read_stage(run.config(), stage).data.shape
