"""A stage of a config, typed: its Task, data, training and players; and the plan of a run, which is its stages in order."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from kineograph.core.config import Config, StageConfig, Tree, merge, parse
from kineograph.core.errors import ConfigError
from kineograph.core.noise import key_of
from kineograph.core.prompt import Prompt, dump_prompts
from kineograph.core.registry import find_task
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.data.open_source import DataConfig, drop_other_source_keys, parse_data_config
from kineograph.train.config import PlayerConfig, TrainConfig

_OUTSIDE_TASK = ("data", "train", "players")  # sections of a stage that its Task does not read


class BatchConfig(Config):
    """Sections `sample` and `evaluate` of a run."""

    batch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Samples at a time; auto: on a GPU as many as fit into its free memory, at most 32."""

    @property
    def rows(self) -> int | None:
        return None if self.batch == "auto" else self.batch


@dataclass(frozen=True)
class StageSpec:
    """The parts that a stage is built of: its Task, the Task's config and the data it reads."""

    name: str
    task: type[Task]
    config: StageConfig
    data: DataConfig

    def referenced_stages(self) -> dict[str, str]:
        """Key of the config → the stage that it names, for stages that this one is trained on top of."""
        named = {key: getattr(self.config, key) for key in self.config.references}
        return {key: stage for key, stage in named.items() if isinstance(stage, str)}


@dataclass(frozen=True)
class StagePlan:
    """A stage and how it is trained."""

    spec: StageSpec
    train: TrainConfig
    players: dict[str, PlayerConfig]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def title(self) -> str:
        """For errors."""
        return f"stage {self.name} ({self.spec.config.task})"


@dataclass(frozen=True)
class Plan:
    """A run: its stages in the order in which they are trained."""

    name: str
    preset: str | None
    seed: int
    prompts: list[Prompt] | str
    stages: tuple[StagePlan, ...]
    sample: BatchConfig
    evaluate: BatchConfig

    def stage(self, name: str) -> StagePlan:
        return next(stage for stage in self.stages if stage.name == name)

    def stage_seed(self, name: str) -> int:
        """Each stage draws its own random numbers."""
        return key_of(self.seed, name) >> 1

    @property
    def trackers(self) -> tuple[str, ...]:
        """Those of all stages."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.train.trackers))

    def tree(self) -> Tree:
        """The fully resolved config, which repeats the run."""
        return {
            "name": self.name,
            "preset": self.preset,
            "resolved": True,
            "seed": self.seed,
            "prompts": self.prompts if isinstance(self.prompts, str) else dump_prompts(self.prompts),
            "sample": self.sample.model_dump(mode="json"),
            "evaluate": self.evaluate.model_dump(mode="json"),
            "stages": {stage.name: _stage_tree(stage) for stage in self.stages},
        }


def _stage_tree(stage: StagePlan) -> Tree:
    return {
        **stage.spec.config.model_dump(mode="json"),
        "data": stage.spec.data.model_dump(mode="json"),
        "train": stage.train.model_dump(mode="json"),
        "players": {name: player.model_dump(mode="json") for name, player in stage.players.items()},
    }


def read_batch(tree: Tree, section: Literal["sample", "evaluate"]) -> int | None:
    """`sample.batch` or `evaluate.batch` of a run; None: as many as fit."""
    return parse(BatchConfig, tree.get(section) or {}, section).rows


def read_stage(tree: Tree, name: str) -> StageSpec:
    """Parse stage `name` of a config tree."""
    where = f"stages.{name}"
    stages = tree.get("stages", {})
    stage = stages.get(name)
    if not isinstance(stage, dict):
        raise ConfigError(f"there is no stage {name!r}: the stages are {', '.join(stages) or 'none'}")
    if not isinstance(stage.get("task"), str):
        raise ConfigError(f"{where}.task is required and not set{_suggest_stage(name, stages)}")
    task = find_task(stage["task"], f"{where}.task")
    keys = {key: value for key, value in stage.items() if key not in _OUTSIDE_TASK}
    if task.Config.inherits_sample is not None and not tree.get("resolved"):
        keys = merge({"sample": _inherited_sample(tree, task, stage)}, keys)
    config = parse(task.Config, keys, where)
    own = stage.get("data") or {}
    if tree.get("resolved") and own.get("source") == "folder":
        own = {"split_folders": False, **own}  # runs from before this key split all items by share
    data_tree = merge(drop_other_source_keys(tree.get("data") or {}, own), own)
    return StageSpec(name, task, config, parse_data_config(data_tree, where=f"{where}.data" if own else "data"))


def _suggest_stage(name: str, stages: Tree) -> str:
    """A hint for a stage without a task: its name may be misspelled."""
    others = [other for other, stage in stages.items() if isinstance(stage, dict) and "task" in stage]
    if not others:
        return ""
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.5)
    return f": did you mean stages.{close[0]}?" if close else f": the stages are {', '.join(others)}"


def _inherited_sample(tree: Tree, task: type[Task], stage: Tree) -> Tree:
    """The `sample` keys that a stage takes over from the stage it draws like, which may be of another run."""
    run, _, name = str(stage.get(str(task.Config.inherits_sample))).rpartition("/")
    if run:
        folder = RunFolder(run)
        tree = folder.config() if folder.exists() else {}
    sample = (tree.get("stages", {}).get(name) or {}).get("sample")
    options: Any = task.Config.model_fields["sample"].annotation
    # Whether the generator uses a critic does not concern the critic itself.
    known = options.model_fields.keys() - {"critic"}
    return {key: value for key, value in sample.items() if key in known} if isinstance(sample, dict) else {}
