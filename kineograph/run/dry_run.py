"""`kineo doctor` and `kineo train --dry-run`: everything that comes before training, and nothing that writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kineograph.core import distributed
from kineograph.core.config import Tree
from kineograph.core.distributed import World
from kineograph.core.errors import InputError, NoData
from kineograph.core.run_folder import RunFolder
from kineograph.data.source import BlankSource, source_name
from kineograph.doctor import machine
from kineograph.doctor.report import report_environment, report_plan, size
from kineograph.run import layers
from kineograph.run.checks import check_stages
from kineograph.run.launch import read_launcher_env
from kineograph.run.plan import make_plan
from kineograph.run.stage_data import open_data
from kineograph.stage.data import StageData
from kineograph.stage.spec import Plan

_PLACES = {"folder": "folder", "memmap": "folder", "cache": "folder", "webdataset": "shards"}


def examine(
    arguments: Sequence[str],
    out: Callable[[str], None] = print,
    memory: float | None = None,
    processes: int | None = None,
) -> None:
    """Without arguments the environment; with a preset, files or overrides also what each stage needs.

    `memory`: GiB of a GPU that the run is meant for, in place of the device that is here. `processes`: those that will train, in place of
    those that a launcher started.
    """
    for option, value in (("--memory", memory), ("--processes", processes)):
        if value is not None and not arguments:
            raise InputError(f"{option} {value:g} says what a preset or file is to fit into: name one")
    with distributed.single_process():
        report_environment(out)
        if arguments:
            plan, world = make_plan(_with_places(layers.read_config(arguments))), planned_world(processes)
            out("")
            data = _open(plan, out, world, without_data=True, elsewhere=memory is not None)
            report_plan(plan, data, out, world, None if memory is None else int(memory * 2**30))


def _with_places(tree: Tree) -> Tree:
    """Where a source's data lie need not be said yet: what they are estimated for is data.frames × data.size."""
    tree["data"] = _with_place(tree.get("data") or {})
    for stage in (tree.get("stages") or {}).values():
        if stage.get("data"):
            stage["data"] = _with_place(stage["data"])
    return tree


def _with_place(data: Tree) -> Tree:
    key = _PLACES.get(source_name(data)) if data.get("source") else None
    return data if key is None or data.get(key) else {**data, key: "(not said)"}


def dry_run(
    arguments: Sequence[str],
    run: str | Path | None = None,
    resume: str = "auto",
    out: Callable[[str], None] = print,
    processes: int | None = None,
) -> None:
    """Everything that comes before training, and nothing that writes: resolve, check the data, build, estimate."""
    from kineograph.run.plan import resolve_run
    from kineograph.train.trackers import check_trackers

    with distributed.single_process():
        plan, folder = resolve_run(arguments, run, resume)  # type: ignore[arg-type]
        check_trackers(plan.stages[0].train.trackers)
        there = "exists, so training would go on there" if folder.exists() else "is new"
        out(f"run folder {folder.path} {there}; {size(machine.disk_free(folder.path))} of disk are free")
        world = planned_world(processes)
        report_plan(plan, _open(plan, out, world, folder), out, world)
        out("dry run: nothing was trained and nothing was written")


def planned_world(processes: int | None) -> World:
    """Those that a launcher started, or as many as are asked for: on machines with as many GPUs as this one, or on one where it has no more
    than one."""
    place = read_launcher_env()
    if processes is None:
        return World(place.world, place.local_world) if place is not None else World()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return World(processes, min(processes, gpus) if gpus > 1 else processes)


def _open(
    plan: Plan,
    out: Callable[[str], None],
    world: World,
    folder: RunFolder | None = None,
    without_data: bool = False,
    elsewhere: bool = False,
) -> dict[str, StageData]:
    """Open and scan the data of every stage that trains; `without_data`: where there are none, blank clips of their shape stand in. `elsewhere`:
    the run is meant for another machine's GPU."""
    data: dict[str, StageData] = {}
    for stage in plan.stages:
        if stage.spec.config.skip:
            continue
        try:
            data[stage.name] = open_data(stage, plan.seed, note=out, opened=data)
        except NoData as error:
            if not without_data:
                raise
            out(f"{stage.name}: {error}")
            out(f"{stage.name}: estimated without data, for clips of data.frames × data.size")
            blank = BlankSource(stage.spec.data.shape)
            data[stage.name] = StageData(stage, plan.seed, blank, blank, {})
    building = world.processes > 1  # one alone is built for the estimate
    check_stages(plan, data, folder, building, planned=world, elsewhere=elsewhere)
    return data
