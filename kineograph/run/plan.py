"""Turn what was typed into a checked plan and its run folder. A run that exists is the base of its own continuation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from kineograph.core.config import Config, Tree, merge, parse, shorten
from kineograph.core.errors import ConfigError, InputError, UnknownKey
from kineograph.core.prompt import Prompt
from kineograph.core.run_folder import RunFolder
from kineograph.data.open_source import is_location
from kineograph.run.layers import changed_keys, is_override, read_config
from kineograph.run.misplaced_keys import explain_misplaced_key
from kineograph.sample.prompt_file import parse_prompt, read_prompts, refuse_scenes
from kineograph.stage.spec import BatchConfig, Plan, StagePlan, read_stage
from kineograph.train import checkpoint
from kineograph.train.config import PlayerConfig, TrainConfig

Resume = Literal["auto", "never", "must"]
# Keys of train.* that a resumed run may change, beside *_every.
MAY_CHANGE = (
    "steps",
    "epochs",
    "minutes",
    "minutes_share",
    "validate_epochs",
    "keep_last",
    "workers",
    "keep_decoded",
    "watchdog",
    "parallel",
    "health",
)


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
    prompts: list[str | dict[str, Any]] | str = "auto"
    """Prompts of the samples drawn during training: a list, a file, or auto = validation captions. A prompt is a caption, or a mapping
    with prompt, negative, image, mask, seed and frames."""
    sample: BatchConfig = BatchConfig()
    """How samples are drawn, during training and by `kineo sample`."""
    evaluate: BatchConfig = BatchConfig()
    """How metrics are computed, during training and by `kineo evaluate`."""
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
    with _explain_unknown_keys(fresh):
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
    try:
        plan = make_plan(read_config(changes, extra, base=saved))
        refuse_changes(drop_origin(make_plan(saved).tree()), drop_origin(plan.tree()), folder.path)
    except ConfigError as error:
        _refuse_other_preset(fresh.get("preset"), saved, folder.path)
        raise error from None
    return plan, folder


def _refuse_other_preset(given: str | None, saved: Tree, run: Path) -> None:
    """Name the preset of a run that was opened with another one: its keys would be named one by one."""
    origin = saved.get("preset")
    if given is None or given == origin:
        return
    made_of = origin or ", ".join(f"{name}: {stage.get('task')}" for name, stage in saved["stages"].items())
    raise ConfigError(
        f"{run} holds a run of {made_of}, not of {given}: to train {given}, give --run another folder; "
        f"to continue the run there, leave {given} out (kineo train --run {run})"
    )


def drop_origin(tree: Tree) -> Tree:
    """A config without the keys in which two copies of one run may differ."""
    return {key: value for key, value in tree.items() if key not in ("name", "preset")}


def make_plan(tree: Tree) -> Plan:
    """Check a merged tree; a ConfigError names the key that is wrong."""
    with _explain_unknown_keys(tree):
        return _make_plan(tree)


@contextmanager
def _explain_unknown_keys(tree: Tree) -> Iterator[None]:
    try:
        yield
    except UnknownKey as error:
        raise ConfigError(explain_misplaced_key(error.key, tree) or str(error)) from None


def _make_plan(tree: Tree) -> Plan:
    top = parse(RunConfig, tree)
    if not top.stages:
        raise ConfigError("stages is empty: name a preset (kineo presets lists them) or give a file with stages")
    parse(TrainConfig, top.train, "train")
    stages = tuple(_plan_stage(tree, name) for name in top.stages)
    _check_references(stages)
    prompts = _read_prompts(top.prompts)
    return Plan(top.name, top.preset, top.seed, prompts, stages, top.sample, top.evaluate)


def _plan_stage(tree: Tree, name: str) -> StagePlan:
    if not name.isidentifier():
        raise ConfigError(f"stages.{name}: a stage's name is also the name of a folder; use letters, digits and _")
    stage = tree["stages"][name]
    for section in ("data", "train", "players"):
        _check_mapping(f"stages.{name}.{section}", stage.get(section))
    spec = read_stage(tree, name)
    where = f"stages.{name}.train" if stage.get("train") else "train"
    given = merge(tree.get("train") or {}, stage.get("train") or {})
    train = parse(TrainConfig, given, where)
    # A Task may build fewer players than it names (a codec without a discriminator).
    names, settings = spec.config.player_names(), stage.get("players") or {}
    for player, own in settings.items():
        _check_mapping(f"stages.{name}.players.{player}", own)
        if player not in names:
            raise ConfigError(
                f"unknown key stages.{name}.players.{player}: the players of {spec.config.task} are {', '.join(names)}"
            )
    shared = {key: value for key, value in train.model_dump().items() if key in PlayerConfig.model_fields}
    players = {}
    for player in names:
        defaults = {
            key: value for key, value in spec.config.player_defaults.get(player, {}).items() if key not in given
        }
        keys = merge(shared | defaults, settings.get(player) or {})
        players[player] = parse(PlayerConfig, keys, f"stages.{name}.players.{player}")
    return StagePlan(spec, train, players)


def _check_mapping(key: str, value: Any) -> None:
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{key}={shorten(str(value))}: give a mapping of keys to values")


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


def _read_prompts(prompts: list[str | dict[str, Any]] | str) -> list[Prompt] | str:
    """Copy a file's prompts into the config, so that the run no longer depends on the file."""
    if prompts == "auto":
        return "auto"
    if isinstance(prompts, list):
        if not prompts:
            raise ConfigError("prompts is an empty list: give at least one, or auto for validation captions")
        trees = [{"prompt": entry} if isinstance(entry, str) else entry for entry in prompts]
        read = [parse_prompt(tree, f"prompts.{number}") for number, tree in enumerate(trees)]
    elif os.path.isfile(prompts):
        try:
            read = read_prompts(prompts)
        except InputError as error:
            raise ConfigError(f"prompts={error}") from None
    else:
        raise ConfigError(
            f"prompts={shorten(prompts)}: no such file; give a list, a text file with one prompt per line, a .jsonl file, or auto"
        )
    refuse_scenes(read, "remove it; kineo story draws stories")
    return read


def refuse_changes(saved: Tree, changed: Tree, run: Path | None = None) -> None:
    """Refuse to resume with a config that would make it another run; name the way to begin one from its weights."""
    # The players inherit train.K: name the cause before its effects.
    for key in sorted(changed_keys(saved, changed), key=lambda key: (".players." in key, key)):
        parts = key.split(".")
        section, *rest = parts[2:] if parts[0] == "stages" and len(parts) > 2 else parts
        may_change = section == "train" and rest and (rest[0] in MAY_CHANGE or rest[0].endswith("_every"))
        # Where the data lie: the items are compared later.
        may_change = may_change or (section == "data" and is_location(".".join(rest)))
        if parts[0] not in ("prompts", "sample", "evaluate") and not may_change:
            raise ConfigError(
                f"{key} differs from the saved run ({_get_value(saved, parts)!r} there, {_get_value(changed, parts)!r} now): "
                "a resumed run may change only train.steps, train.epochs, train.minutes, train.minutes_share, train.*_every, "
                "train.validate_epochs, train.keep_last, "
                "train.workers, train.keep_decoded, train.watchdog, train.parallel, train.health, prompts, sample.batch, "
                "evaluate.batch and where the data lie (data.folder, data.shards); "
                + _describe_new_run(parts, saved, run)
            )


def _describe_new_run(parts: list[str], saved: Tree, run: Path | None) -> str:
    """How to begin another run, from the weights of this one where it has the stage."""
    if parts[-1] == "init":
        return "init starts a new run: give --run another folder"
    names = list(saved.get("stages") or {})
    stage = parts[1] if parts[0] == "stages" and len(parts) > 1 else names[-1] if names else None
    if stage not in names:
        return "give --run another folder for a new run"
    return (
        f"give --run another folder for a new run, and stages.{stage}.init={run or 'RUN'}/{stage} "
        "to start it from the weights of this one"
    )


def _get_value(tree: Any, parts: list[str]) -> Any:
    for part in parts:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
