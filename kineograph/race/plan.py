"""The plan of a race: the data, a config for each family that can learn them, and why each other family cannot.

A plan is a config in RACE/plans/FAMILY.yaml. One that is there is taken as it is, so it can be edited.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kineograph.core import distributed
from kineograph.core.config import Tree, merge, unknown_key
from kineograph.core.config_file import dump_yaml, load_file
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import numpy_rng
from kineograph.core.notes import discard
from kineograph.core.run_folder import write_atomic
from kineograph.core.trust import require_trust
from kineograph.data.file_listing import list_folder
from kineograph.data.media_config import CLIPS
from kineograph.data.open_source import DataConfig, open_source, parse_data_config
from kineograph.doctor.machine import release_memory
from kineograph.doctor.speed import time_steps
from kineograph.media.grids import select_evenly
from kineograph.race.recipe import RaceShape, fit_recipe, list_families
from kineograph.run.checks import check_stages
from kineograph.run.data_sheet import read_data_config
from kineograph.run.open_data import open_data
from kineograph.run.plan import make_plan
from kineograph.stage.build import PlanBuilder
from kineograph.stage.data import StageData
from kineograph.stage.spec import Plan

DIGITS: dict[str, dict[str, Tree]] = {
    "cuda": {
        "clips": {"size": 64, "frames": 17, "fps": 8, "digits": 2, "count": 50_000},
        "pictures": {"size": 64, "frames": 1, "digits": 2, "count": 50_000},
    },
    # What a CPU learns in minutes: one digit of 30, which moves left, right, up or down, or stands in one of nine places.
    "cpu": {
        "clips": {"size": 32, "frames": 9, "fps": 8, "channels": 1, "glyphs": 3, "directions": 4, "grid": 8, "speed": 1,
                  "bounce": False, "kept_out": 0, "count": 4000},
        "pictures": {"size": 32, "frames": 1, "glyphs": 3, "grid": 4, "count": 4000},
    },
}  # fmt: skip
SIZES, FRAMES = {"cuda": 64, "cpu": 32}, {"cuda": 17, "cpu": 9}  # of a folder that does not say
PROMPTS = 6  # on the sheet


@dataclass
class RacePlan:
    """The data of a race and a config for each family that can learn them."""

    name: str
    data: Tree
    shape: RaceShape
    plans: dict[str, Tree] = field(default_factory=dict)
    unable: dict[str, str] = field(default_factory=dict)  # family → why

    @property
    def config(self) -> DataConfig:
        return parse_data_config(self.data)


def read_data(what: str, settings: Sequence[str], frames: int | None, size: int | None, device: str) -> RacePlan:
    """`digits`, a folder, or a YAML with a `data` section. → a race without plans"""
    if what == "digits":
        name, tree = "digits", {"source": "moving_digits", **DIGITS[device]["pictures" if frames == 1 else "clips"]}
        if settings:
            raise InputError("digits are as the race draws them: for other ones, give a YAML file with a data section")
    else:
        path = Path(what)
        if not path.exists():
            raise InputError(f"{what} is neither digits, a folder nor a YAML file with a data section")
        name = path.stem if path.is_file() else path.resolve().name
        config = read_data_config(path, list(settings))
        tree = config.model_dump(mode="json", exclude_unset=True)
        is_clips = config.source == "folder" and _has_clips(Path(str(tree["folder"])))
        tree = {"size": SIZES[device], "frames": FRAMES[device] if is_clips else 1, **tree}
    changes = {"frames": frames, "size": size}
    tree = merge(tree, {key: value for key, value in changes.items() if value is not None})
    config = parse_data_config(tree)
    return RacePlan(name, tree, RaceShape(config.frames, *config.size))


def _has_clips(folder: Path) -> bool:
    return any(Path(name).suffix.lower() in CLIPS for name in list_folder(folder, "").media)


def choose_families(names: Sequence[str] | None) -> list[str]:
    known = list_families()
    for name in names or ():
        if name not in known:
            raise InputError(f"--families: {unknown_key(name, known).removeprefix('unknown key ')}")
    return list(dict.fromkeys(names or known))


def plan_race(race: RacePlan, families: Sequence[str], minutes: float, folder: Path, device: str) -> None:
    """Fill in a plan for each family, or why it cannot race. Writes nothing."""
    for family in families:
        file = plan_file(folder, family)
        tree = _read_plan(file) if file.exists() else fit_recipe(family, race.data, race.shape, device, minutes)
        try:
            plan, data = _check_plan(tree)
        except ConfigError as error:
            race.unable[family] = str(error)
            continue
        if not file.exists():
            tree = _fit_time(family, tree, plan, data, minutes)
        race.plans[family] = tree
    if not race.plans:
        reasons = "\n".join(f"{family}: {reason}" for family, reason in race.unable.items())
        remedy = "; add --frames 1 to race on pictures" if race.shape.frames > 1 else ""
        raise InputError(f"no family can race on {race.shape}{remedy}:\n{reasons}")


def _read_plan(file: Path) -> Tree:
    """A plan of the race's folder, which may come from elsewhere: code that nobody typed here is refused."""
    if not file.is_file():
        raise InputError(f"{file} is not a regular file: remove it")
    tree = load_file(file)
    require_trust(tree, str(file))
    return tree


def plan_file(folder: Path, family: str) -> Path:
    return folder / "plans" / f"{family}.yaml"


def write_plans(race: RacePlan, folder: Path) -> None:
    for family, tree in race.plans.items():
        file = plan_file(folder, family)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            head = f"# {family} in a race on {race.name}, {race.shape}. Edit it before its first run; the race takes it as it is.\n"
            write_atomic(file, head + dump_yaml(tree))


def _check_plan(tree: Tree) -> tuple[Plan, dict[str, StageData]]:
    """Refuse a plan that cannot be trained: sizes that do not fit, data without captions."""
    plan = make_plan(tree)
    data: dict[str, StageData] = {}
    for stage in plan.stages:
        data[stage.name] = open_data(stage, plan.seed, note=discard, opened=data)
    check_stages(plan, data)
    return plan, data


def _fit_time(family: str, tree: Tree, plan: Plan, data: dict[str, StageData], minutes: float) -> Tree:
    """Time steps of every stage: split batches that do not fit into memory, and refuse a time in which no stage makes a step."""
    builder = PlanBuilder(plan, data, discard)
    for stage in plan.stages:
        device, batch = distributed.resolve_device(stage.train.device), stage.train.batch_size
        accumulate = 1
        while True:
            try:
                micro = -(-batch // accumulate)
                speed, _ = time_steps(builder, stage, data[stage.name], device, micro, micro)
                break
            except torch.OutOfMemoryError:
                release_memory()
                if accumulate >= batch:
                    raise InputError(f"{family}: one sample of stage {stage.name} does not fit into memory") from None
                accumulate *= 2
        if accumulate > 1:
            tree["stages"][stage.name]["train"]["accumulate"] = accumulate
        seconds, step = stage.train.seconds or math.inf, accumulate * speed.step_seconds
        if seconds < step:
            enough = math.ceil(100 * minutes * step / seconds) / 100
            raise InputError(
                f"--minutes {minutes:g} is too short: stage {stage.name} of {family} has {seconds:.2g} s of it, and one step takes "
                f"about {step:.2g} s; give --minutes {enough:g} or more, or leave {family} out with --families"
            )
    release_memory()
    return tree


def choose_prompts(config: DataConfig, count: int = PROMPTS) -> tuple[list[str], list[torch.Tensor]]:
    """Captions of held-out items, and the items."""
    source = open_source(config, "validation", 0)
    captions: list[str] = []
    clips: list[torch.Tensor] = []
    for index in select_evenly(len(source), 4 * count):
        sample = source.read(index, numpy_rng(0, index, "race"))
        if sample.caption and sample.pixels is not None and sample.caption not in captions and len(captions) < count:
            captions.append(sample.caption)
            clips.append(sample.pixels)
    return captions, clips
