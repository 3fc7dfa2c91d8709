"""`kineo train --resume-from SOURCE`: continue a run in this folder from a checkpoint that lies elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kineograph.core.config import Tree
from kineograph.core.errors import InputError
from kineograph.core.notes import Note
from kineograph.core.run_folder import RunFolder, read_json, write_json
from kineograph.core.trust import require_trust
from kineograph.run.plan import drop_origin, make_plan, refuse_changes
from kineograph.stage.spec import Plan
from kineograph.train import checkpoint
from kineograph.train.remote_checkpoint import download_checkpoint, install_checkpoint, is_remote


class _RemoteCheckpoint(NamedTuple):
    source: str
    path: Path
    stage: str
    step: int
    config: Tree


def fetch_checkpoints(sources: Sequence[str], run: str | Path | None, note: Note) -> None:
    """Put checkpoints from elsewhere into a new or existing run folder, where training then finds them.

    taken_up.json lists the sources that were fetched: the same command resumes without fetching them again.
    """
    if run is None:
        raise InputError("--resume-from needs --run, the folder in which the run continues")
    folder = RunFolder(run)
    known = read_json(folder.path / "taken_up.json")
    with ExitStack() as stack:
        fetched: list[_RemoteCheckpoint] = []
        for source in dict.fromkeys(sources):
            if source in known and folder.exists():
                note(f"{source} was fetched before: continuing with {folder.path}")
                continue
            url = source if is_remote(source) else Path(source).expanduser().resolve().as_uri()
            path = stack.enter_context(download_checkpoint(url, folder.path.parent, note))
            fetched.append(_read_checkpoint(source, path))
        if not fetched:
            return
        plan = _plan_run(folder, fetched)
        for item in fetched:
            _check_references(plan, folder, item, fetched)
        stack.enter_context(folder.lock())
        if not folder.exists():  # before the checkpoints: a run without any starts at 0
            folder.write_config(plan.tree())
        for item in fetched:
            _install(folder, item, note)
            known[item.source] = {"stage": item.stage, "step": item.step}
            write_json(folder.path / "taken_up.json", known)


def _read_checkpoint(source: str, path: Path) -> _RemoteCheckpoint:
    if not path.is_dir():
        raise InputError(f"--resume-from {source} holds weights alone: to start from them set stages.x.init={source}")
    state = checkpoint.Checkpoint(path, 0).state()
    stage, step, config = state.get("stage"), state.get("step"), state.get("config")
    if not (isinstance(stage, str) and isinstance(step, int) and isinstance(config, dict)):
        raise InputError(
            f"--resume-from {source}: its state.json names no run, stage and step; use a checkpoint of kineo train"
        )
    require_trust(config, f"--resume-from {source}")
    return _RemoteCheckpoint(source, path, stage, step, config)


def _plan_run(folder: RunFolder, fetched: list[_RemoteCheckpoint]) -> Plan:
    """The plan that all checkpoints belong to: that of `folder` if it exists."""
    plan = make_plan(folder.config() if folder.exists() else fetched[0].config)
    for item in fetched:
        if item.stage not in [stage.name for stage in plan.stages]:
            raise InputError(f"--resume-from {item.source} is of stage {item.stage}, which {folder.path} does not have")
        refuse_changes(drop_origin(plan.tree()), drop_origin(make_plan(item.config).tree()))
    return plan


def _check_references(plan: Plan, folder: RunFolder, item: _RemoteCheckpoint, fetched: list[_RemoteCheckpoint]) -> None:
    """Refuse a stage without the stages it was trained on: a codec trained anew would give other tokens."""
    config = next(stage.spec.config for stage in plan.stages if stage.name == item.stage)
    for key in config.references:
        reference = getattr(config, key)
        if not isinstance(reference, str) or "/" in reference or any(other.stage == reference for other in fetched):
            continue
        if not checkpoint.saved_steps(folder.checkpoints(reference)):
            raise InputError(
                f"--resume-from {item.source}: {item.stage} needs {reference}, of which {folder.path} has no checkpoint; "
                "add a --resume-from for it"
            )


def _install(folder: RunFolder, item: _RemoteCheckpoint, note: Note) -> None:
    latest = checkpoint.latest(folder.checkpoints(item.stage))
    if latest is not None and latest.step >= item.step:
        note(f"{item.source} is step {item.step} of {item.stage}: {folder.path} is at step {latest.step} already")
        return
    install_checkpoint(item.path, folder.checkpoints(item.stage), item.step)
    note(f"{item.stage}: step {item.step} from {item.source}")
