"""`kineo train --resume-from SOURCE`: a run goes on, here, from a checkpoint that lies elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kineograph.core.config import Tree, dump_yaml
from kineograph.core.errors import InputError
from kineograph.core.run_folder import RunFolder, write_atomic, write_json
from kineograph.run.plan import make_plan, refuse_changes
from kineograph.run.resolve import comparable
from kineograph.stage.spec import Plan
from kineograph.train import checkpoint
from kineograph.train.remote_checkpoint import download_checkpoint, install_checkpoint, is_remote
from kineograph.train.trackers import read_json


class _RemoteCheckpoint(NamedTuple):
    source: str
    path: Path
    stage: str
    step: int
    config: Tree


def fetch_checkpoints(sources: Sequence[str], run: str | Path | None, note: Callable[[str], None]) -> None:
    """Put checkpoints from elsewhere into a run folder, new or begun, where training then finds them.

    A source that the run has taken up before is not fetched again, so that the same command resumes as ever.
    """
    if run is None:
        raise InputError("--resume-from needs --run: the folder in which the run shall go on")
    folder = RunFolder(run)
    memory = folder.path / "taken_up.json"
    known = read_json(memory)
    with ExitStack() as stack:
        found = []
        for source in dict.fromkeys(sources):
            if source in known and folder.exists():
                note(f"{source} was taken up before: going on with what is in {folder.path}")
                continue
            found.append(
                _read_checkpoint(
                    source, stack.enter_context(download_checkpoint(_as_url(source), folder.path.parent, note))
                )
            )
        if not found:
            return
        plan = _plan_run(folder, found)
        for item in found:
            _check_references(plan, folder, item, found)
        stack.enter_context(folder.lock())
        if not folder.exists():  # before the checkpoints: without any, a run starts at 0
            write_atomic(folder.config_file, dump_yaml(plan.tree()))
        for item in found:
            _install(folder, item, note)
            known[item.source] = {"stage": item.stage, "step": item.step}
            write_json(memory, known)


def _as_url(source: str) -> str:
    """A plain path will do too."""
    return source if is_remote(source) else f"file://{Path(source).expanduser().resolve()}"


def _read_checkpoint(source: str, path: Path) -> _RemoteCheckpoint:
    if not path.is_dir():
        raise InputError(f"--resume-from {source} holds weights alone: to start from them set stages.x.init={source}")
    state = checkpoint.Checkpoint(path, 0).state()
    stage, step, config = state.get("stage"), state.get("step"), state.get("config")
    if not (isinstance(stage, str) and isinstance(step, int) and isinstance(config, dict)):
        raise InputError(f"--resume-from {source}: its state.json does not say of which run, stage and step it is")
    return _RemoteCheckpoint(source, path, stage, step, config)


def _plan_run(folder: RunFolder, found: list[_RemoteCheckpoint]) -> Plan:
    """The run that all of them belong to, which is the one in `folder` where there is one."""
    saved = folder.config() if folder.exists() else found[0].config
    plan = make_plan(saved)
    for item in found:
        if item.stage not in [stage.name for stage in plan.stages]:
            raise InputError(f"--resume-from {item.source} is of stage {item.stage}, which {folder.path} does not have")
        refuse_changes(comparable(plan.tree()), comparable(make_plan(item.config).tree()))
    return plan


def _check_references(plan: Plan, folder: RunFolder, item: _RemoteCheckpoint, found: list[_RemoteCheckpoint]) -> None:
    """A stage means nothing without the codec that it was trained on: trained anew, that one would speak another language."""
    config = next(stage.spec.config for stage in plan.stages if stage.name == item.stage)
    for key in config.references:
        below = getattr(config, key)
        if not isinstance(below, str) or "/" in below or any(other.stage == below for other in found):
            continue
        if not checkpoint.saved_steps(folder.checkpoints(below)):
            raise InputError(
                f"--resume-from {item.source}: {item.stage} stands on {below}, of which {folder.path} has no checkpoint; "
                "give that one too, with a --resume-from of its own"
            )


def _install(folder: RunFolder, item: _RemoteCheckpoint, note: Callable[[str], None]) -> None:
    there = checkpoint.latest(folder.checkpoints(item.stage))
    if there is not None and there.step >= item.step:
        note(f"{item.source} is step {item.step} of {item.stage}: {folder.path} is at step {there.step} already")
        return
    install_checkpoint(item.path, folder.checkpoints(item.stage), item.step)
    note(f"{item.stage}: step {item.step} taken up from {item.source}")
