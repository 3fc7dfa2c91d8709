"""A checked plan of a run: every stage's task, data, training and players, typed; and back to the tree that is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from kineograph.core.config import Config, Tree, merge, parse
from kineograph.core.errors import ConfigError
from kineograph.core.lines import lines_of
from kineograph.run.layers import changed_keys
from kineograph.stage.spec import Plan, StagePlan, StageSpec, read_stage
from kineograph.train.config import PlayerConfig, TrainConfig

MAY_CHANGE = (
    "steps",
    "keep_last",
    "workers",
    "watchdog",
    "parallel",
)  # of train.*, beside *_every, when a run is taken up again


class RunConfig(Config):
    """The top of a config. Stages are parsed by the Task that each names."""

    name: str = Field("run", pattern=r"^[^/]+$")
    """Default folder: runs/<name>."""
    preset: str | None = None
    """A preset that this file extends."""
    resolved: bool = False
    """Written into a run's own config.yaml: every value stands there, nothing is looked up."""
    seed: int = Field(0, ge=0)
    prompts: list[str] | str = "auto"
    """What training samples show: a list, a file with a prompt a line, or auto = validation captions."""
    data: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = Field(default_factory=dict)


def make_plan(tree: Tree) -> Plan:
    """Check a merged tree; a ConfigError names the key that is wrong."""
    top = parse(RunConfig, tree)
    if not top.stages:
        raise ConfigError("stages is empty: name a preset (kineo presets lists them) or give a file with stages")
    parse(TrainConfig, top.train, "train")
    stages = tuple(_plan_stage(tree, name) for name in top.stages)
    _check_references(stages)
    return Plan(top.name, top.preset, top.seed, _prompts(top.prompts), stages)


def _plan_stage(tree: Tree, name: str) -> StagePlan:
    if not name.isidentifier():
        raise ConfigError(f"stages.{name}: a stage's name is a folder's name too; use letters, digits and _")
    stage = tree["stages"][name]
    where = f"stages.{name}.train" if stage.get("train") else "train"
    train_tree = merge(tree.get("train") or {}, stage.get("train") or {})
    train = parse(TrainConfig, train_tree, where)
    spec = read_stage(tree, name)
    known = PlayerConfig.model_fields.keys()
    base = {key: value for key, value in train.model_dump().items() if key in known}
    names = list(_players(spec))
    given = stage.get("players") or {}
    for player in given:
        if player not in names:
            raise ConfigError(
                f"unknown key stages.{name}.players.{player}: the players of {spec.config.task} are {', '.join(names)}"
            )
    players = {
        player: parse(PlayerConfig, merge(base, given.get(player) or {}), f"stages.{name}.players.{player}")
        for player in names
    }
    return StagePlan(spec, train, players)


def _players(spec: StageSpec) -> tuple[str, ...]:
    """Players this stage may have; a Task may build fewer (a codec without a discriminator)."""
    return spec.config.player_names()


def _check_references(stages: tuple[StagePlan, ...]) -> None:
    """A stage that names another must name an earlier one (or one of another run: a path)."""
    earlier: list[str] = []
    for stage in stages:
        config = stage.spec.config
        for key in (*config.references, *config.draws_with):
            wanted = getattr(config, key)
            if isinstance(wanted, str) and "/" not in wanted and wanted not in earlier:
                raise ConfigError(
                    f"stages.{stage.name}.{key}={wanted}: no stage of that name stands before it; there are {', '.join(earlier) or 'none'} "
                    f"(or give the path of another run's stage: runs/NAME/STAGE)"
                )
        earlier.append(stage.name)


def _prompts(prompts: list[str] | str) -> list[str] | str:
    """A file's lines are taken into the config, so that the run no longer depends on the file."""
    if prompts == "auto":
        return prompts
    if isinstance(prompts, list):
        if not prompts:
            raise ConfigError("prompts is an empty list: give at least one, or auto for validation captions")
        return prompts
    path = Path(prompts)
    if not path.is_file():
        raise ConfigError(f"prompts={prompts}: no such file; give a list, a text file with a prompt a line, or auto")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts={prompts} is not UTF-8 text: {error}; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"prompts={prompts} cannot be read: {error.strerror}") from None
    lines = [line.strip() for line in lines_of(text) if line.strip()]
    if not lines:
        raise ConfigError(f"prompts={prompts}: the file has no lines")
    return lines


def refuse_changes(saved: Tree, wanted: Tree) -> None:
    """On resume only lengths and cadences may change; anything else would make another run of it."""
    # What `train.K` sets is passed on to the players: name the cause before its effects.
    for key in sorted(changed_keys(saved, wanted), key=lambda key: (".players." in key, key)):
        parts = key.split(".")
        top = parts[2:] if parts[0] == "stages" and len(parts) > 2 else parts
        is_train = top[0] == "train" and len(top) > 1
        allowed = parts[0] == "prompts" or (is_train and (top[1] in MAY_CHANGE or top[1].endswith("_every")))
        if not allowed:
            raise ConfigError(
                f"{key} differs from the saved run ({_at(saved, parts)!r} there, {_at(wanted, parts)!r} now): a run that goes on may change only "
                "train.steps, train.*_every, train.keep_last, train.workers, train.watchdog, train.parallel and prompts; "
                "use --run with another folder for a new run"
            )


def _at(tree: Any, parts: list[str]) -> Any:
    for part in parts:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
