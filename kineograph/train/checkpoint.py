"""Checkpoints: complete, atomic, checksummed; tensors in safetensors, the rest in JSON; nothing is pickled.

    <stage>/checkpoints/step-00000100/
        model.safetensors      every player's weights and buffers, by their names in the task
        ema.safetensors        the same names with averaged weights (when any player averages)
        optimizer.safetensors  moments by player and parameter name
        state.json             step, scaler, best score, data position, phase, assets, resolved config
        manifest.json          size and sha256 of each file, written last
        phase.json             what a finished phase changed of the state: phase, best score

Where several processes train, `model`, `ema` and `optimizer` are folders of safetensors instead, to which each process wrote its part
(distributed_checkpoint.py); `tensors`, `load_into` and whatever else reads a checkpoint here takes both forms, on any number of processes.

A checkpoint is written beside its place, flushed, then renamed, so that whatever has the name is complete. The manifest
catches what went wrong later (a full disk, a flipped bit, a lost shard); `latest` then says so and falls back to the one before. Only
phase.json comes later, and is replaced as a whole: the weights of a step are saved before they are judged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kineograph.core import distributed
from kineograph.core.errors import InputError, NotTrained, RunFailed
from kineograph.core.run_folder import sync_folder, write_json

_NAME = re.compile(r"step-(\d{8,})")
ONE_FILE, SHARDED = 1, 2  # formats: a file a kind of tensors, or a folder of what each process wrote
_SUFFIX = ".safetensors"
Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk."""

    path: Path
    step: int

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Whole tensors, in whatever parts they were written."""
        file = self.path / f"{name}{_SUFFIX}"
        with _still_there(self.path):
            if file.is_file():
                return load_file(file)
            from kineograph.train import distributed_checkpoint

            return distributed_checkpoint.read(self.path / name)

    def load_into(self, name: str, targets: Mapping[str, Tensor]) -> None:
        """Copy saved values into these tensors. Of a DTensor, each process reads its own shard alone."""
        from kineograph.train import distributed_checkpoint

        shapes = self.shapes(name)
        for key, target in targets.items():
            if tuple(target.shape) != shapes[key]:
                raise InputError(
                    f"{self.path}: {name} {key} has shape {list(shapes[key])}, and this task needs {list(target.shape)}; "
                    "load it with the config it was trained with"
                )
        file = self.path / f"{name}{_SUFFIX}"
        distributed_checkpoint.load_into(file if file.is_file() else self.path / name, targets)

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Of whole tensors, without reading them."""
        file = self.path / f"{name}{_SUFFIX}"
        if self.is_sharded:
            from kineograph.train import distributed_checkpoint

            return distributed_checkpoint.read_shapes(self.path / name)
        with safe_open(file, framework="pt") as opened:
            return {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118  not a dict

    @property
    def is_sharded(self) -> bool:
        """Whether several processes wrote it, each its part."""
        return (self.path / "model").is_dir()

    def has(self, name: str) -> bool:
        return bool(self._files(name))

    def _files(self, name: str) -> list[Path]:
        file = self.path / f"{name}{_SUFFIX}"
        return [file] if file.is_file() else sorted((self.path / name).glob(f"*{_SUFFIX}"))

    def state(self) -> dict[str, Any]:
        with _still_there(self.path):
            return json.loads((self.path / "state.json").read_text(encoding="utf-8")) | self._later()

    @property
    def phase(self) -> Any:
        """What the run does next: `train`, or a phase that follows this step."""
        return self.state().get("phase", "train")

    def _later(self) -> dict[str, Any]:
        """A phase.json that cannot be read costs the phases of one step, which are then gone through again."""
        try:
            later = json.loads((self.path / "phase.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return later if isinstance(later, dict) else {}

    def weights(self, ema: bool = True) -> dict[str, Tensor]:
        """Weights to sample with: averaged where they exist."""
        return self.tensors("ema" if ema and self.has("ema") else "model")

    def digest(self, ema: bool = True) -> str:
        """Identifies the weights, for caches made with them."""
        name = "ema" if ema and self.has("ema") else "model"
        with _still_there(self.path):
            files = _manifest(self.path)["files"]
        if f"{name}{_SUFFIX}" in files:
            return files[f"{name}{_SUFFIX}"]["sha256"]
        parts = [f"{file} {files[file]['sha256']}" for file in sorted(files) if file.startswith(f"{name}/")]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@contextmanager
def _still_there(path: Path) -> Iterator[None]:
    """Whoever reads holds no lock: training may go on meanwhile, and its next save may remove what is read."""
    try:
        yield
    except Exception:
        if path.is_dir():
            raise
        raise InputError(
            f"{path} was removed while it was read: training goes on there and keeps its newest checkpoints; run the command again"
        ) from None


# Writing ---------------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Checkpoint:
    """Write checkpoint `step` of a stage here and now. Either all of it is there afterwards, or nothing is changed."""
    separate = {name: _separate(group) for name, group in tensors.items()}
    write(folder, step, separate, json.dumps({"step": step, **state}, ensure_ascii=False))
    return checkpoint_at(folder, step)


def write(folder: Path, step: int, tensors: Mapping[str, dict[str, Tensor]], state: str) -> None:
    """The same from tensors on the host that share no memory."""
    temporary = None
    try:
        temporary = prepare(folder, step)
        if temporary is not None:
            for name, group in tensors.items():
                save_file(group, temporary / f"{name}{_SUFFIX}")
            commit(temporary, step, state, {path.name: flush_and_hash(path) for path in sorted(temporary.iterdir())})
    except (OSError, SafetensorError) as error:
        raise save_error(folder, step, temporary, error) from error


def prepare(folder: Path, step: int) -> Path | None:
    """An empty place to write to, until the checkpoint is complete; None where it is there already: the same step gives the same state.

    The place bears this process's number: one that outlived its killed fellows may still write to theirs.
    """
    target = checkpoint_at(folder, step).path
    temporary = folder / f".writing-{target.name}-{os.getpid()}"
    if target.exists() and find_damage(target) is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    return temporary


def commit(temporary: Path, step: int, state: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    """All tensors lie in the temporary place, with these fingerprints: add the state and the manifest, then the name."""
    folder, target = temporary.parent, checkpoint_at(temporary.parent, step).path
    (temporary / "state.json").write_text(state, encoding="utf-8")
    listed = {**files, "state.json": flush_and_hash(temporary / "state.json")}
    nested = {str(Path(name).parent) for name in files} - {"."}
    for name in nested:
        sync_folder(temporary / name)
    manifest = {"format": SHARDED if nested else ONE_FILE, "step": step, "files": dict(sorted(listed.items()))}
    write_json(temporary / "manifest.json", manifest)
    aside = folder / f".replaced-{target.name}"
    if target.exists():  # a damaged one that the run was taken up before
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(target, aside)
    os.replace(temporary, target)
    sync_folder(folder)
    shutil.rmtree(aside, ignore_errors=True)


def save_error(
    folder: Path, step: int, temporary: Path | None, error: BaseException | str, remedy: str = "make room or permission"
) -> RunFailed:
    if temporary is not None and distributed.is_first():
        shutil.rmtree(temporary, ignore_errors=True)
    return RunFailed(
        f"cannot save {checkpoint_at(folder, step).path}: {error}; {remedy} and run the same command to go on from the last checkpoint"
    )


def update_state(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Change these keys of a saved step's state: the old ones or the new ones are there, never a mixture."""
    write_json(checkpoint_at(folder, step).path / "phase.json", state)


def _separate(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, none sharing memory with another: safetensors refuses that, and tied weights have it."""
    seen: set[int] = set()
    result = {}
    for name, value in group.items():
        value = value.detach().cpu().contiguous()
        if value.untyped_storage().data_ptr() in seen:
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        result[name] = value
    return result


def flush_and_hash(path: Path) -> dict[str, Any]:
    """Flush a file to disk and tell its size and checksum."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / "manifest.json").read_text(encoding="utf-8"))


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None when every byte is as it was written. A run that is taken up asks several times: what has not been
    touched since is not read again."""
    key = (path.resolve(), _signature(path))
    if key not in _judged:
        _judged[key] = _problem(path)
    return _judged[key]


_judged: dict[tuple[Path, Signature], str | None] = {}  # what `problem` found in this process


def _signature(path: Path) -> Signature:
    """Names, sizes and times of change of all files."""
    found = []
    for file in path.rglob("*"):
        with suppress(OSError):
            stat = file.stat()
            found.append((str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(found))


def _problem(path: Path) -> str | None:
    try:
        manifest = _manifest(path)
        files, version = manifest["files"], manifest.get("format", ONE_FILE)
    except (OSError, ValueError, KeyError, TypeError):
        return "manifest.json is missing or damaged"
    if version not in (ONE_FILE, SHARDED):
        return f"its format {version} is newer than this version of Kineograph reads"
    faults = ((name, _fault(path / name, expected)) for name, expected in files.items())
    return next((f"{name} {fault}" for name, fault in faults if fault is not None), None)


def _fault(file: Path, expected: Mapping[str, Any]) -> str | None:
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            return f"has {size} bytes instead of {expected['bytes']}"
        return None if _digest(file) == expected["sha256"] else "does not match its checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending; complete or not."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def checkpoint_at(folder: Path, step: int) -> Checkpoint:
    return Checkpoint(folder / f"step-{step:08d}", step)


def latest(folder: Path, note: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """The newest checkpoint that is complete; damaged ones are named and passed over."""
    for step in reversed(saved_steps(folder)):
        found = checkpoint_at(folder, step)
        fault = find_damage(found.path)
        if fault is None:
            return found
        note(f"{found.path} is damaged ({fault}): falling back to the checkpoint before it")
    return None


def latest_on_all_ranks(folder: Path, note: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """What `latest` finds in the first process, for all: others take its word, so that none goes on from another step."""
    found = latest(folder, note) if distributed.is_first() else None
    if not distributed.is_active():
        return found
    step = distributed.broadcast_object(None if found is None else found.step)
    if step is not None and not checkpoint_at(folder, step).path.is_dir():
        raise InputError(
            f"rank {distributed.rank()} does not see {checkpoint_at(folder, step).path}, which rank 0 sees: put the run folder on a disk all machines share"
        )
    for other in saved_steps(folder) if not distributed.is_first() else ():
        if step is None or other >= step:
            path = checkpoint_at(folder, other).path
            _judged[path.resolve(), _signature(path)] = None if other == step else "the first process found it damaged"
    return None if step is None else checkpoint_at(folder, step)


def select(folder: Path, which: str | int = "last") -> Checkpoint:
    """`last`, `best`, or a step."""
    available = saved_steps(folder)
    if not available:
        raise NotTrained(f"{folder} has no checkpoint yet: train first, or name another run")
    if which == "last":
        found = latest(folder)
        if found is None:
            if (
                saved_steps(folder) != available
            ):  # training goes on: what was there is removed, and newer ones are written
                return select(folder, which)
            raise InputError(f"{folder}: every checkpoint is damaged ({', '.join(map(str, available))})")
        return found
    if which == "best":
        score = read_best(folder)
        if score is None:
            raise InputError(
                f"{folder} has no best checkpoint: it was trained without validation; use --checkpoint last"
            )
        which = score["step"]
    try:
        step = int(which)
    except ValueError:
        raise InputError(
            f"--checkpoint {which}: use last, best or a step of {', '.join(map(str, available))}"
        ) from None
    if step not in available:
        raise InputError(f"{folder} has no checkpoint of step {step}: there are {', '.join(map(str, available))}")
    fault = find_damage(checkpoint_at(folder, step).path)
    if fault:
        raise InputError(f"{checkpoint_at(folder, step).path} is damaged: {fault}")
    return checkpoint_at(folder, step)


def read_best(folder: Path) -> dict[str, Any] | None:
    """Step and loss of the best checkpoint."""
    try:
        return json.loads((folder / "best.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_best(folder: Path, step: int, loss: float) -> None:
    write_json(folder / "best.json", {"step": step, "loss": loss})


def prune(folder: Path, keep_last: int, newest: int, snapshot: Callable[[int], bool] = lambda step: False) -> None:
    """Delete all but the last `keep_last` up to step `newest`, which was just written, the best, and snapshots; and what an interrupted save left.

    What lies beyond `newest` is damaged: the run was taken up before it.
    """
    score = read_best(folder)
    keep = set([step for step in saved_steps(folder) if step <= newest][-keep_last:]) | (
        {score["step"]} if score else set()
    )
    for step in saved_steps(folder):
        if step not in keep and not (step <= newest and snapshot(step)):
            _remove(checkpoint_at(folder, step).path)
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted save or removal left behind. Only the holder of the run's lock calls this."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith((".writing-", ".replaced-", ".removing-")):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Out of sight first, so that a kill half-way leaves no half checkpoint under its name."""
    hidden = path.with_name(f".removing-{path.name}")
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Weights of one safetensors file, with an error for people."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from None
