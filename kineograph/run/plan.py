"""Turn what was typed into a checked plan and its run folder. A run that exists is the base of its own continuation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from kineograph.core.config import Config, Tree, merge, parse, shorten
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.run_folder import RunFolder
from kineograph.core.text_file import read_text, split_lines
from kineograph.data.open_source import LOCATION_KEYS
from kineograph.run.layers import changed_keys, is_override, read_config
from kineograph.stage.spec import Plan, StagePlan, read_stage
from kineograph.train import checkpoint
from kineograph.train.config import PlayerConfig, TrainConfig

Resume = Literal["auto", "never", "must"]
# Keys of train.* that a resumed run may change, beside *_every.
MAY_CHANGE = ("steps", "epochs", "keep_last", "workers", "watchdog", "parallel", "health")


class RunConfig(Config):
    """The top of a config. Each stage is parsed by the Task that it names."""

    name: str = Field("run", pattern=r"^(\.?[^./][^/]*|\.\.[^/]+)$", max_length=200)
    """Default folder: runs/<name>."""
    preset: str | None = None
    """A preset that this file extends."""
    resolved: bool = False
    """Set in a run's own config.yaml: it holds every value, and nothing is looked up in a preset."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of all random numbers of the run."""
    prompts: list[str] | str = "auto"
    """Prompts of the samples drawn during training: a list, a file with one prompt per line, or auto = validation captions."""
    data: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = Field(default_factory=dict)


def resolve_run(
    arguments: Sequence[str], run: str | Path | None = None, resume: Resume = "auto", extra: Tree | None = None
) -> tuple[Plan, RunFolder]:
    """Read presets, files and overrides into a plan, and find its run folder."""
    if not arguments and run is None:
        raise ConfigError("name a preset or a YAML or JSON file (kineo presets lists the presets)")
    fresh = read_config(arguments, extra) if any(not is_override(argument) for argument in arguments) else {}
    folder = RunFolder(run if run is not None else Path("runs") / parse(RunConfig, fresh).name)
    if folder.path.resolve() == folder.path.resolve().parent:
        raise InputError(f"--run {folder.path} is the root of the file system: give a folder for this run alone")
    if not folder.exists():
        if resume == "must":
            raise InputError(f"--resume must: {folder.path} holds no run to resume")
        if folder.path.is_file():
            raise InputError(f"{folder.path} is a file: give --run a folder")
        return make_plan(fresh), folder
    if resume == "never":
        raise InputError(f"--resume never: {folder.path} holds a run already; give --run another folder")
    saved = folder.config()
    if fresh and not any(checkpoint.saved_steps(folder.checkpoints(name)) for name in saved.get("stages", {})):
        return make_plan(fresh), folder  # without a checkpoint there is nothing to continue
    # The saved config contains the preset already, as it was when the run began.
    changes = [a for a in arguments if not (a == saved.get("preset") and not os.path.isfile(a))]
    plan = make_plan(read_config(changes, extra, base=saved))
    refuse_changes(drop_origin(make_plan(saved).tree()), drop_origin(plan.tree()))
    return plan, folder


def drop_origin(tree: Tree) -> Tree:
    """A config without the keys in which two copies of one run may differ."""
    return {key: value for key, value in tree.items() if key not in ("name", "preset")}


def make_plan(tree: Tree) -> Plan:
    """Check a merged tree; a ConfigError names the key that is wrong."""
    top = parse(RunConfig, tree)
    if not top.stages:
        raise ConfigError("stages is empty: name a preset (kineo presets lists them) or give a file with stages")
    parse(TrainConfig, top.train, "train")
    stages = tuple(_plan_stage(tree, name) for name in top.stages)
    _check_references(stages)
    return Plan(top.name, top.preset, top.seed, _read_prompts(top.prompts), stages)


def _plan_stage(tree: Tree, name: str) -> StagePlan:
    if not name.isidentifier():
        raise ConfigError(f"stages.{name}: a stage's name is also the name of a folder; use letters, digits and _")
    stage = tree["stages"][name]
    where = f"stages.{name}.train" if stage.get("train") else "train"
    train = parse(TrainConfig, merge(tree.get("train") or {}, stage.get("train") or {}), where)
    spec = read_stage(tree, name)
    # A Task may build fewer players than it names (a codec without a discriminator).
    names, settings = spec.config.player_names(), stage.get("players") or {}
    for player in settings:
        if player not in names:
            raise ConfigError(
                f"unknown key stages.{name}.players.{player}: the players of {spec.config.task} are {', '.join(names)}"
            )
    shared = {key: value for key, value in train.model_dump().items() if key in PlayerConfig.model_fields}
    players = {
        player: parse(PlayerConfig, merge(shared, settings.get(player) or {}), f"stages.{name}.players.{player}")
        for player in names
    }
    return StagePlan(spec, train, players)


def _check_references(stages: tuple[StagePlan, ...]) -> None:
    """Refuse a stage that names a later one; another run's stage is named by its path."""
    earlier: list[str] = []
    for stage in stages:
        config = stage.spec.config
        for key in (*config.references, *config.sample_references):
            name = getattr(config, key)
            if isinstance(name, str) and "/" not in name and name not in earlier:
                raise ConfigError(
                    f"stages.{stage.name}.{key}={name}: no earlier stage has that name; the earlier stages are "
                    f"{', '.join(earlier) or 'none'} (or give the path of another run's stage: runs/NAME/STAGE)"
                )
        earlier.append(stage.name)


def _read_prompts(prompts: list[str] | str) -> list[str] | str:
    """Copy a file's prompts into the config, so that the run no longer depends on the file."""
    if isinstance(prompts, list) and not prompts:
        raise ConfigError("prompts is an empty list: give at least one, or auto for validation captions")
    if prompts == "auto" or isinstance(prompts, list):
        return prompts
    path = Path(prompts)
    if not os.path.isfile(path):
        raise ConfigError(
            f"prompts={shorten(prompts)}: no such file; give a list, a text file with one prompt per line, or auto"
        )
    lines = [line.strip() for line in split_lines(read_text(path, "prompts=")) if line.strip()]
    if not lines:
        raise ConfigError(f"prompts={prompts}: the file has no lines")
    return lines


def refuse_changes(saved: Tree, changed: Tree) -> None:
    """Refuse to resume with a config that would make it another run."""
    # The players inherit train.K: name the cause before its effects.
    for key in sorted(changed_keys(saved, changed), key=lambda key: (".players." in key, key)):
        parts = key.split(".")
        section, *rest = parts[2:] if parts[0] == "stages" and len(parts) > 2 else parts
        may_change = section == "train" and rest and (rest[0] in MAY_CHANGE or rest[0].endswith("_every"))
        may_change = may_change or (
            section == "data" and rest and rest[0] in LOCATION_KEYS
        )  # the items are compared later
        if parts[0] != "prompts" and not may_change:
            raise ConfigError(
                f"{key} differs from the saved run ({_value_at(saved, parts)!r} there, {_value_at(changed, parts)!r} now): "
                "a resumed run may change only train.steps, train.epochs, train.*_every, train.keep_last, train.workers, train.watchdog, "
                "train.parallel, train.health, prompts and where the data lie (data.folder, data.shards); give --run another folder for a new run"
            )


def _value_at(tree: Any, parts: list[str]) -> Any:
    for part in parts:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
