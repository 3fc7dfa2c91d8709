"""A stage of a config: its Task, config, data, training and players, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kineograph.core.config import StageConfig, Tree, merge, parse
from kineograph.core.errors import ConfigError
from kineograph.core.registry import find_task
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.data.config import DataConfig, drop_other_source_keys
from kineograph.data.open_source import data_config
from kineograph.train.config import PlayerConfig, TrainConfig

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
    keys = {key: value for key, value in stage.items() if key not in OUTSIDE_TASK}
    if task.Config.draws_like is not None and not tree.get("resolved"):
        known: Any = task.Config.model_fields["sample"].annotation
        alike = _sample_of(tree, stage.get(task.Config.draws_like))
        # Whether its generator uses a critic of its own says nothing of this one.
        keys = merge(
            {"sample": {key: alike[key] for key in alike if key in known.model_fields and key != "critic"}}, keys
        )
    config = parse(task.Config, keys, where)
    own = stage.get("data") or {}
    data_tree = merge(drop_other_source_keys(tree.get("data") or {}, own), own)
    data = data_config(data_tree, where="data" if not stage.get("data") else f"{where}.data")
    return StageSpec(name, task, config, data)


def _sample_of(tree: Tree, reference: Any) -> Tree:
    """The `sample` section of a stage of this config or of another run's; empty where there is none yet, which is refused elsewhere."""
    run, _, name = str(reference).rpartition("/")
    if run:
        folder = RunFolder(run)
        tree = folder.config() if folder.exists() else {}
    found = (tree.get("stages", {}).get(name) or {}).get("sample")
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class StagePlan:
    spec: StageSpec
    train: TrainConfig
    players: dict[str, PlayerConfig]

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True)
class Plan:
    name: str
    preset: str | None
    seed: int
    prompts: list[str] | str
    stages: tuple[StagePlan, ...]

    def tree(self) -> Tree:
        """Fully resolved: enough to repeat the run."""
        return {
            "name": self.name,
            "preset": self.preset,
            "resolved": True,
            "seed": self.seed,
            "prompts": self.prompts,
            "stages": {stage.name: _stage_tree(stage) for stage in self.stages},
        }


def _stage_tree(stage: StagePlan) -> Tree:
    return {
        **stage.spec.config.model_dump(mode="json"),
        "data": stage.spec.data.model_dump(mode="json"),
        "train": stage.train.model_dump(mode="json"),
        "players": {name: player.model_dump(mode="json") for name, player in stage.players.items()},
    }
