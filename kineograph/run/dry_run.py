"""`kineo doctor` and `kineo train --dry-run`: everything that comes before training, and nothing that writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from kineograph.core import distributed
from kineograph.core.config import Tree
from kineograph.core.distributed import World
from kineograph.core.errors import InputError, NoData
from kineograph.core.notes import Note
from kineograph.core.run_folder import RunFolder
from kineograph.core.units import format_size
from kineograph.data.open_source import BlankSource, source_name
from kineograph.doctor import machine
from kineograph.doctor.estimate import Estimate, estimate_stage
from kineograph.doctor.report import report_environment, report_plan
from kineograph.run.checks import check_stages
from kineograph.run.launch import read_launcher_env
from kineograph.run.layers import read_config
from kineograph.run.open_data import open_data, resolve_epochs
from kineograph.run.plan import Resume, make_plan, resolve_run
from kineograph.stage.build import PlanBuilder
from kineograph.stage.data import StageData
from kineograph.stage.spec import Plan
from kineograph.train import checkpoint
from kineograph.train.trackers import check_trackers
from kineograph.train.trainer import saved_cursor

# The key of each source that names its files.
_PATH_KEYS = {"folder": "folder", "memmap": "folder", "cache": "folder", "webdataset": "shards"}


def examine(arguments: Sequence[str], memory: float | None = None, processes: int | None = None) -> None:
    """Report the environment; with a preset, files or overrides also what each stage takes.

    `memory`: GiB of the GPU to estimate for, instead of the device that is here. `processes`: the number that will train,
    instead of those that a launcher started.
    """
    for option, value in (("--memory", memory), ("--processes", processes)):
        if value is not None and not arguments:
            raise InputError(f"{option} {value:g} needs a preset or file to estimate: name one")
    with distributed.single_process():
        report_environment(print)
        if arguments:
            plan, world = make_plan(_fill_paths(read_config(arguments))), planned_world(processes)
            print()
            plan, data = _open_data(plan, print, world, blank_if_missing=True, elsewhere=memory is not None)
            report_plan(plan, data, print, world, None if memory is None else int(memory * 2**30))


def estimate_plan(arguments: Sequence[str], memory: int, note: Note) -> Iterator[Estimate]:
    """Each stage that trains, on one GPU of `memory` bytes, with more and more settings together. Nothing is timed."""
    with distributed.single_process():
        plan = make_plan(_fill_paths(read_config(arguments)))
        plan, data = _open_data(plan, note, World(), blank_if_missing=True, elsewhere=True)
        builder = PlanBuilder(plan, data, note)
        for stage in plan.stages:
            if stage.name in data:
                yield estimate_stage(builder, stage, data[stage.name], timed=False, memory=memory, combine_all=True)


def _fill_paths(tree: Tree) -> Tree:
    """Let the paths of the data be missing: the estimate depends on data.frames and data.size only."""
    tree["data"] = _fill_path(tree.get("data") or {})
    for stage in (tree.get("stages") or {}).values():
        if stage.get("data"):
            stage["data"] = _fill_path(stage["data"])
    return tree


def _fill_path(data: Tree) -> Tree:
    key = _PATH_KEYS.get(source_name(data)) if data.get("source") else None
    return data if key is None or data.get(key) else {**data, key: "(not given)"}


def dry_run(
    arguments: Sequence[str],
    run: str | Path | None = None,
    resume: Resume = "auto",
    out: Note = print,
    processes: int | None = None,
) -> None:
    """Do everything that comes before training and write nothing: resolve, check the data, build, estimate."""
    with distributed.single_process():
        plan, folder = resolve_run(arguments, run, resume)
        check_trackers(plan.trackers, plan.stages[0].train.hub)
        state = "exists, so training would resume there" if folder.exists() else "is new"
        out(f"run folder {folder.path} {state}; {format_size(machine.free_disk(folder.path))} of disk are free")
        world = planned_world(processes)
        found = {stage.name: checkpoint.latest(folder.checkpoints(stage.name), out) for stage in plan.stages}
        trains = {stage.name: stage.train for stage in plan.stages}
        saved = {name: saved_cursor(trains[name], newest) for name, newest in found.items() if newest is not None}
        plan, data = _open_data(plan, out, world, folder)
        report_plan(plan, data, out, world, saved=saved)
        out("dry run: nothing was trained and nothing was written")


def planned_world(processes: int | None) -> World:
    """The processes that a launcher started, or `processes`: on machines with as many GPUs as this one, if it has several."""
    launched = read_launcher_env()
    if processes is None:
        return World(launched.world, launched.local_world) if launched is not None else World()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return World(processes, min(processes, gpus) if gpus > 1 else processes)


def _open_data(
    plan: Plan,
    out: Note,
    world: World,
    folder: RunFolder | None = None,
    blank_if_missing: bool = False,
    elsewhere: bool = False,
) -> tuple[Plan, dict[str, StageData]]:
    """Open and scan the data of every stage that trains. → the plan with its steps, and the data. `elsewhere`: on the GPU of another machine."""
    data: dict[str, StageData] = {}
    for stage in plan.stages:
        if stage.spec.config.skip:
            continue
        try:
            data[stage.name] = open_data(stage, plan.seed, note=out, opened=data)
        except NoData as error:
            if not blank_if_missing:
                raise
            out(f"{stage.name}: {error}")
            out(f"{stage.name}: estimated without data, for clips of data.frames × data.size")
            blank = BlankSource(stage.spec.data.shape)
            data[stage.name] = StageData(stage, plan.seed, blank, blank, {})
    plan = resolve_epochs(plan, data, out, world)
    # For one process the estimate builds each stage anyway.
    check_stages(plan, data, folder, building=world.processes > 1, planned=world, elsewhere=elsewhere)
    return plan, data
