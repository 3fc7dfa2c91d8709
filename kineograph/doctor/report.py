"""`kineo doctor` and `kineo train --dry-run`: the machine, and what a run will need of it, before anything is spent."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import torch

from kineograph.core import distributed, kernels
from kineograph.core.distributed import World
from kineograph.doctor import machine
from kineograph.doctor.estimate import ROOM, Estimate, data_world, estimate
from kineograph.doctor.sharded_memory import count_shards
from kineograph.doctor.step_trace import Memory
from kineograph.stage.build import PlanBuilder
from kineograph.stage.data import StageData, count_workers, find_missing_weights
from kineograph.stage.spec import Plan
from kineograph.train.precision import resolve_precision

_LABEL = 14  # characters
"""The key of each source that says where its data lie."""


# The machine -----------------------------------------------------------------------------------------------------


def report_environment(out: Callable[[str], None]) -> None:
    from kineograph import __version__

    total, available = machine.memory()
    line = _line(out)
    line("kineograph", f"{__version__}, Python {platform.python_version()}, {machine.system()}")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    line("torch", f"{torch.__version__}, {cuda}" + (f", driver {machine.driver()}" if machine.driver() else ""))
    line(
        "cpu",
        f"{machine.cores()} cores, {size(available)} of {size(total)} memory free, {machine.matmul_rate() / 1e9:.0f} GFLOP/s in float32",
    )
    for index, gpu in enumerate(machine.gpus()):
        line(f"cuda:{index}", f"{gpu.name}, {size(gpu.free)} of {size(gpu.memory)} free")
        why = kernels.explain_missing(torch.device("cuda", index))
        if why is not None:
            line(
                "",
                f"without FlashAttention 3, which is faster over long clips ({why}): kineo weights get {kernels.NAME}",
            )
    line("disk", f"{size(machine.disk_free(Path('runs')))} free where runs are written")
    device = distributed.resolve_device()
    compiles = "on" if device.type == "cuda" else "off"
    line(
        "auto picks",
        f"device {device}, precision {resolve_precision('auto', device)}, compile {compiles}, {_workers()} data workers",
    )
    find_missing_weights = [name for name in machine.NEEDED if machine.version_of(name) is None]
    line("packages", ", ".join(f"{name} {found}" for name in machine.NEEDED if (found := machine.version_of(name))))
    for name in find_missing_weights:
        line("missing", f"{name}: pip install -e . installs everything that is needed")
    for name, purpose, remedy in machine.OPTIONAL:
        found = machine.version_of(name)
        line(
            "optional",
            f"{name} {found}, for {purpose}" if found else f"{name} is not installed, for {purpose}: {remedy}",
        )


def _workers() -> int:
    from kineograph.train.config import TrainConfig

    return count_workers(TrainConfig())


# A plan ----------------------------------------------------------------------------------------------------------


def report_plan(
    plan: Plan, data: dict[str, StageData], out: Callable[[str], None], world: World, memory: int | None = None
) -> None:
    builder = PlanBuilder(plan, data, out)
    seconds: list[float | None] = []
    for stage in plan.stages:
        if stage.name not in data:
            out(f"{stage.name}: skipped, as stages.{stage.name}.skip says\n")
            continue
        found = estimate(builder, stage, data[stage.name], memory=memory, world=world)
        for text in describe_estimate(found, data[stage.name]):
            out(text)
        out("")
        seconds.append(found.seconds)
    known = [value for value in seconds if value is not None]
    if known and len(known) == len(seconds):
        where = "this machine" if world.processes == 1 else f"{world.processes} devices like this one"
        out(f"{plan.name}: about {clock(sum(known))} for all stages on {where}, without validation and pictures")


def describe_estimate(found: Estimate, data: StageData) -> list[str]:
    """One stage, in lines."""
    lines: list[str] = []
    line = _line(lines.append)
    train, memory = found.stage.train, found.memory
    players = (
        f" ({', '.join(f'{name} {count(n)}' for name, n in found.trained.items())})" if len(found.trained) > 1 else ""
    )
    frozen = f", {count(found.frozen)} frozen" if found.frozen else ""
    lines.append(
        f"{found.stage.name}: {found.task}, {count(sum(found.trained.values()))} parameters to train{players}{frozen}"
    )
    shape = found.stage.spec.data.shape
    items = len(data.source)
    lacks = find_missing_weights(found.stage, data, hub=False)
    if lacks is not None:
        line("MISSING", f"{lacks}; estimated without")
    line("data", f"{found.stage.spec.data.source}, {f'{items:,} items' if items < 2**32 else 'endless'}")
    clip = f"{shape.frames} frame{'s' * (shape.frames > 1)} of {shape.height} × {shape.width}, {shape.channels} channel{'s' * (shape.channels > 1)}"
    line(
        "clip",
        clip
        + (f" → {found.code}" if found.code else "")
        + (f"; {found.tokens:,} in a sequence" if found.tokens else ""),
    )
    parts = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer, "EMA": memory.ema}
    parts |= {"text encoder": memory.text} if memory.text else {}
    parts |= {"gathered blocks": memory.gathered} if memory.gathered else {}
    listed = " · ".join(f"{name} {size(part)}" for name, part in parts.items())
    kind = "measured" if found.measured else "estimated"
    line(
        "memory",
        f"{listed} · activations {size(memory.activations)} (micro-batch {found.micro}, {found.precision}) = {size(memory.total)}, {kind}",
    )
    for place, text in enumerate(_shared(found)):
        line("" if place else "processes", text)
    if found.traced:
        line("", f"activations are scaled up from a few samples: {found.traced}")
    line("fits" if found.fits else "DOES NOT FIT", _fitting(found))
    for place, (switch, lean) in enumerate(found.savings.items()):
        line("" if place else "less memory", _saving(found, switch, lean))
    if found.together is not None:
        switches, lean = found.together
        line("together", f"{' '.join(switches)}: {size(lean.total)}, fits")
    line("arithmetic", f"{operations(found.flops)} a step of {train.batch_size} sample{'s' * (train.batch_size > 1)}")
    lines += _pace(found)
    return lines


def _shared(found: Estimate) -> list[str]:
    """How the processes that are meant share the stage, and what of that the estimate does not know."""
    train, world = found.stage.train, found.world
    if world.processes == 1:
        return []
    parallel, sizes = train.parallel, train.parallel.mesh_shape(*world)
    rows = f"{train.batch_size // data_world(train, world)} of a step's {train.batch_size} samples"
    lines = [f"{world.processes}, {rows} each; the memory is that of one of them"]
    over = count_shards(parallel, sizes)
    if over > 1:
        lines.append(
            f"blocks lie in parts over {over} of them, what is outside of blocks is whole in each; gathered blocks are reckoned, not measured"
        )
        lines.append(f"while it judges, all blocks are gathered: {size(found.judged)} more, and fewer activations")
    if parallel.layout == "hybrid" and parallel.shard is None:
        lines.append(f"{world.local} to a machine, as far as is known here: train.parallel.shard says it for sure")
    if sizes.tensor > 1:
        lines.append(f"matrices of blocks are cut over {sizes.tensor}")
    if parallel.model_ranks > 1:
        key = "tensor" if sizes.tensor > 1 else "sequence"
        lines.append(f"activations are those of a process without train.parallel.{key}: each will have fewer")
    return lines


def _saving(found: Estimate, switch: str, lean: Memory) -> str:
    fits = "" if found.fits else ", fits" if lean.total <= ROOM * found.free else ", does not fit yet"
    return f"{switch}: {size(found.memory.total - lean.total)} less, {size(lean.total)} in all{fits}"


def _fitting(found: Estimate) -> str:
    room = f"{size(found.memory.total)} of {size(found.free)} {'on' if found.target.imagined else 'free on'} {found.target}"
    largest = found.largest_batch()
    if found.fits:
        return f"{room}; micro-batches up to about {largest:,} would"
    if largest == 0:
        alone = [switch for switch, saved in found.savings.items() if saved.total <= ROOM * found.free]
        return f"{room}; " + (f"what helps: {', or '.join(alone)}" if alone else _not_one(found))
    remedies = [f"train.accumulate={_enough(found, largest)} (micro-batches of at most {largest})"]
    remedies += [
        switch
        for switch, saved in found.savings.items()
        if not switch.startswith("train.accumulate") and saved.total <= ROOM * found.free
    ]
    return f"{room}; what helps: {', or '.join(remedies)}, or train.batch_size={min(largest, found.stage.train.batch_size)}"


def _not_one(found: Estimate) -> str:
    """What helps when the memory does not even hold one sample, and no switch alone is enough."""
    if found.together is not None:
        return f"what helps: {' with '.join(found.together[0])}"
    state, room = found.memory.total - found.memory.activations, ROOM * found.free
    lean = found.savings.get("train.checkpointing=true")
    if lean is not None and state + lean.activations / found.micro <= room:
        fitting = max(1, int((room - state) / (lean.activations / found.micro)))
        return f"what helps: train.checkpointing=true with train.accumulate={_enough(found, fitting)}"
    remedy = "make clips smaller (data.frames, data.size)" if state < room else "make the model smaller"
    return f"weights, gradients, optimizer and EMA take {size(state)}, one sample {size(found.sample_bytes)}: {remedy} or use a larger device"


def _enough(found: Estimate, largest: int) -> int:
    """The fewest micro-batches a step, each small enough."""
    train = found.stage.train
    share = train.batch_size // data_world(train, found.world)
    return next(k for k in range(1, share + 1) if share % k == 0 and share // k <= largest)


def _pace(found: Estimate) -> list[str]:
    lines: list[str] = []
    line = _line(lines.append)
    train, speed = found.stage.train, found.speed
    if speed is None or found.step_seconds is None or found.seconds is None:
        line("speed", f"not probed: {found.unprobed}")
        return lines
    how = f"{speed.steps} steps of {speed.samples} sample{'s' * (speed.samples > 1)} on {found.device}"
    eager = (
        ", without torch.compile, which makes training faster"
        if found.device.type == "cuda" and not speed.compiled and train.compile
        else ""
    )
    if found.world.processes > 1:
        how += f", as one of {found.world.processes} processes that had nothing to exchange"
    line(
        "speed",
        f"{3600 / found.step_seconds:,.0f} steps an hour, {train.batch_size / found.step_seconds:,.0f} samples/s (probed: {how}{eager})",
    )
    if found.step_seconds > 1.2 * speed.step_seconds:
        workers = count_workers(train, found.world.local)
        why = "readers do not keep up" if workers else "reading waits for computing"
        line(
            "",
            f"{why} ({1000 * speed.read_seconds:.1f} ms a sample): raise train.workers, now {workers}, to {min(machine.cores(), 2 * workers + 1)}",
        )
    if found.device.type == "cpu" and (load := machine.busy()) > 0.5:
        line(
            "",
            f"other processes keep this machine busy ({load:.1f} a core over the last minute): alone, training is faster",
        )
    line("time", f"{clock(found.seconds)} for {train.steps:,} steps, without validation and pictures")
    return lines


# Numbers for people ----------------------------------------------------------------------------------------------


def _line(out: Callable[[str], None]) -> Callable[[str, str], None]:
    return lambda label, text: out(f"  {label:<{_LABEL}}{text}")


def size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def operations(number: float) -> str:
    return f"{number / 1e12:,.3g} TFLOP" if number >= 1e12 else f"{number / 1e9:.3g} GFLOP"


def count(number: int) -> str:
    for limit, unit in ((1e9, "billion"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return str(number)


def clock(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
