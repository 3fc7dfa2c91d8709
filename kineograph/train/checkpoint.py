"""Checkpoints: complete, atomic, checksummed. Tensors are safetensors, the rest is JSON; nothing is pickled.

    <stage>/checkpoints/step-00000100/
        model.safetensors      every player's weights and buffers, by their names in the task
        ema.safetensors        the same names with averaged weights, if any player has an EMA
        optimizer.safetensors  moments by player and parameter name
        state.json             step, scaler, best score, data position, phase, assets, resolved config
        manifest.json          size and sha256 of each file, written last
        phase.json             what a finished phase changed of the state: phase, best score

With several ranks `model`, `ema` and `optimizer` are folders of shards (distributed_checkpoint.py). Everything that
reads a checkpoint takes both forms, on any number of ranks.

A checkpoint is written to a temporary folder, flushed, then renamed: a folder of that name is complete. The manifest
detects later damage (a flipped bit, a lost shard); `latest` then falls back to the checkpoint before. Only phase.json
changes later, and it is replaced atomically.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kineograph.core import distributed
from kineograph.core.errors import InputError, NotTrained, RunFailed
from kineograph.core.notes import Note, discard
from kineograph.core.run_folder import sync_folder, write_json
from kineograph.core.text_file import parse_json, read_regular
from kineograph.train.checkpoint_folder import (
    STEP_NAME,
    find_odd_value,
    phase_digest,
    read_best,
    read_state,
    saved_steps,
    step_folder,
)

DISK_REMEDY = "free disk space or fix the permissions"
ONE_FILE, SHARDED = 1, 2  # formats of the manifest
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk. `kind` is model, ema or optimizer."""

    path: Path
    step: int

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Read full tensors."""
        with _explain_removal(self.path):
            if self._file(kind).is_file():
                return load_file(self._file(kind))
            from kineograph.train import distributed_checkpoint

            return distributed_checkpoint.read(self.path / kind)

    def load_into(self, kind: str, targets: Mapping[str, Tensor]) -> None:
        """Copy saved values into `targets`. Of a DTensor each rank reads its own shard."""
        from kineograph.train import distributed_checkpoint

        shapes = self.shapes(kind)
        for name, target in targets.items():
            if tuple(target.shape) != shapes[name]:
                raise InputError(
                    f"{self.path}: {kind} {name} has shape {list(shapes[name])}, and this task needs {list(target.shape)}; "
                    "load it with the config it was trained with"
                )
        file = self._file(kind)
        distributed_checkpoint.load_into(file if file.is_file() else self.path / kind, targets)

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the full tensors, without reading them."""
        if self.is_sharded:
            from kineograph.train import distributed_checkpoint

            return distributed_checkpoint.read_shapes(self.path / kind)
        if not self._file(kind).is_file():  # a pipe would block
            raise FileNotFoundError(f"{self._file(kind)} is missing, or not a regular file")
        with safe_open(self._file(kind), framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  not a dict

    @property
    def is_sharded(self) -> bool:
        return (self.path / "model").is_dir()

    def has(self, kind: str) -> bool:
        return self._file(kind).is_file() or any((self.path / kind).glob(f"*{_SUFFIX}"))

    def _file(self, kind: str) -> Path:
        return self.path / f"{kind}{_SUFFIX}"

    def state(self) -> dict[str, Any]:
        with _explain_removal(self.path):
            return read_state(self.path)

    @property
    def phase(self) -> Any:
        """The phase that comes next: `train`, or one that follows this step."""
        return self.state().get("phase", "train")

    def weights(self, ema: bool = True) -> dict[str, Tensor]:
        """Read the weights to sample with: averaged ones if there are any."""
        return self.tensors(self._weights_kind(ema))

    def weight_shapes(self, ema: bool = True) -> dict[str, tuple[int, ...]]:
        """Shapes of `weights`, without reading them."""
        return self.shapes(self._weights_kind(ema))

    def _weights_kind(self, ema: bool) -> str:
        return "ema" if ema and self.has("ema") else "model"

    def digest(self, ema: bool = True) -> str:
        """A hash that identifies the weights, for caches made with them."""
        kind = self._weights_kind(ema)
        with _explain_removal(self.path):
            files = _read_manifest(self.path)["files"]
        if f"{kind}{_SUFFIX}" in files:
            return files[f"{kind}{_SUFFIX}"]["sha256"]
        shards = [f"{file} {files[file]['sha256']}" for file in sorted(files) if file.startswith(f"{kind}/")]
        return hashlib.sha256("\n".join(shards).encode()).hexdigest()


@contextmanager
def _explain_removal(path: Path) -> Iterator[None]:
    """Readers hold no lock, so a run that trains may prune the checkpoint that is being read: say so."""
    try:
        yield
    except Exception:
        if path.is_dir():
            raise
        raise InputError(
            f"{path} was removed while it was read, because training goes on there: run the command again"
        ) from None


# Writing -------------------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Checkpoint:
    """Write checkpoint `step` of a stage, completely or not at all."""
    copies = {kind: _copy_to_host(group) for kind, group in tensors.items()}
    write(folder, step, copies, json.dumps({"step": step, **state}, ensure_ascii=False))
    return checkpoint_at(folder, step)


def write(folder: Path, step: int, tensors: Mapping[str, dict[str, Tensor]], state: str) -> None:
    """Write checkpoint `step` from host tensors that share no memory."""
    temporary = None
    try:
        temporary = prepare(folder, step)
        if temporary is not None:
            for kind, group in tensors.items():
                save_file(group, temporary / f"{kind}{_SUFFIX}")
            commit(temporary, step, state, {path.name: flush_and_hash(path) for path in sorted(temporary.iterdir())})
    except (OSError, SafetensorError) as error:
        raise save_error(folder, step, temporary, error) from error


def prepare(folder: Path, step: int) -> Path | None:
    """Make an empty temporary folder; None if the checkpoint is there already, since a step always has the same state.

    The name holds the process id: a process that survived a killed run may still write to its own.
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
    """Add the state and the manifest to the written tensors, then rename the folder. `files`: their sizes and hashes."""
    folder, target = temporary.parent, checkpoint_at(temporary.parent, step).path
    (temporary / "state.json").write_text(state, encoding="utf-8")
    entries = {**files, "state.json": flush_and_hash(temporary / "state.json")}
    shard_folders = {str(Path(name).parent) for name in files} - {"."}
    for name in shard_folders:
        sync_folder(temporary / name)
    manifest = {"format": SHARDED if shard_folders else ONE_FILE, "step": step, "files": dict(sorted(entries.items()))}
    write_json(temporary / "manifest.json", manifest)
    replaced = folder / f".replaced-{target.name}"
    if target.exists():  # a damaged one
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(target, replaced)
    os.replace(temporary, target)
    sync_folder(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def save_error(
    folder: Path, step: int, temporary: Path | None, error: BaseException | str, remedy: str = DISK_REMEDY
) -> RunFailed:
    """Remove what was written and return the error to raise."""
    if temporary is not None and distributed.is_first():
        shutil.rmtree(temporary, ignore_errors=True)
    path = checkpoint_at(folder, step).path
    return RunFailed(
        f"cannot save {path}: {error}; {remedy} and run the same command to go on from the last checkpoint"
    )


def update_state(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Atomically replace these keys of a saved step's state."""
    path = checkpoint_at(folder, step).path
    write_json(path / "phase.json", {**state, "sha256": phase_digest(path, state)})


def _copy_to_host(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU and without shared memory, which tied weights have and safetensors refuses."""
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
    """Flush a file to disk. → its size and checksum."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


# Checking ------------------------------------------------------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    return parse_json(read_regular(path / "manifest.json"))


def find_damage(path: Path) -> str | None:
    """Compare every byte of a checkpoint with its manifest. → the first difference; None if it is complete.

    Resuming asks several times: a checkpoint that has not changed since is not read again.
    """
    key = (path.resolve(), _stat_files(path))
    if key not in _damage:
        _damage[key] = _compare_with_manifest(path)
    return _damage[key]


FileStats = tuple[tuple[str, int, int, int], ...]
_damage: dict[tuple[Path, FileStats], str | None] = {}


def _stat_files(path: Path) -> FileStats:
    stats = []
    for file in path.rglob("*"):
        with suppress(OSError):
            stat = file.stat()
            stats.append((str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(stats))


def _compare_with_manifest(path: Path) -> str | None:
    try:
        manifest = _read_manifest(path)
        files, version = manifest["files"], manifest.get("format", ONE_FILE)
        names = [name for name in files if is_checkpoint_file(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is missing or damaged"
    if version not in (ONE_FILE, SHARDED):
        return f"its format {version} is newer than this version of Kineograph reads"
    if len(names) < len(files) or not any(name.startswith("model") for name in names) or "state.json" not in names:
        return "manifest.json does not list the files of a checkpoint"
    for name, entry in files.items():
        damage = _compare_file(path / name, entry) or _find_disorder(path / name)
        if damage is not None:
            return f"{name} {damage}"
    return _compare_steps(path, manifest)


def is_checkpoint_file(name: str) -> bool:
    """A file, or a shard in a folder; nothing that leads elsewhere."""
    parts = PurePosixPath(name).parts
    return 1 <= len(parts) <= 2 and not any(part in ("..", "/") for part in parts) and "/".join(parts) == name


def _find_disorder(path: Path) -> str | None:
    """The fault of a file that matches its checksum: both may come from elsewhere."""
    try:
        if path.suffix == _SUFFIX:
            with safe_open(path, framework="pt"):
                return None
        state = parse_json(read_regular(path)) if path.name == "state.json" else {}
    except (OSError, ValueError, SafetensorError) as error:
        return f"cannot be read: {error}"
    if not isinstance(state, dict):
        return "is not a JSON object"
    odd = find_odd_value(state)
    if odd is None and "stepper" in state:  # a state to resume from
        odd = next((key for key in ("best", "best_step", "elapsed") if key not in state), None)
    return f"has no usable {odd}" if odd is not None else None


def _compare_steps(path: Path, manifest: Mapping[str, Any]) -> str | None:
    """The folder's name, the manifest and the state must be of one step."""
    state = parse_json(read_regular(path / "state.json"))
    named = STEP_NAME.fullmatch(path.name)
    steps = [each.get("step") for each in (manifest, state) if "step" in each] + ([int(named[1])] if named else [])
    if not all(isinstance(step, int) and step == steps[0] for step in steps):
        return f"its name, manifest and state are of different steps ({', '.join(map(str, steps))})"
    return None


def _compare_file(path: Path, entry: Mapping[str, Any]) -> str | None:
    try:
        status = path.stat()
        size = status.st_size
        if not S_ISREG(status.st_mode):
            return "is not a regular file"
        if size != entry["bytes"]:
            return f"has {size} bytes instead of {entry['bytes']}"
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return None if digest == entry["sha256"] else "does not match its checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (KeyError, TypeError):
        return "has no size and checksum in the manifest"


# Finding -------------------------------------------------------------------------------------------------------------


def checkpoint_at(folder: Path, step: int) -> Checkpoint:
    return Checkpoint(step_folder(folder, step), step)


def latest(folder: Path, note: Note = discard) -> Checkpoint | None:
    """The newest complete checkpoint. Names damaged ones to `note` and skips them."""
    for step in reversed(saved_steps(folder)):
        candidate = checkpoint_at(folder, step)
        damage = find_damage(candidate.path)
        if damage is None:
            return candidate
        note(f"{candidate.path} is damaged ({damage}): falling back to the checkpoint before it")
    return None


def latest_on_all_ranks(folder: Path, note: Note = discard) -> Checkpoint | None:
    """What `latest` finds on rank 0, for all ranks, so that all go on from the same step.

    Raises InputError if every checkpoint is damaged: to begin anew would prune what may still be repaired.
    """
    own = latest(folder, note) if distributed.is_first() else None
    newest = saved_steps(folder)[-1:] if own is None and distributed.is_first() else []
    damage = [find_damage(checkpoint_at(folder, step).path) for step in newest]
    step, damage = distributed.broadcast_object([None if own is None else own.step, damage])
    if damage:
        raise InputError(
            f"every checkpoint in {folder} is damaged (the newest: {damage[0]}): put back a copy of one, or remove the folder to train "
            "the stage from step 0"
        )
    if not distributed.is_active():
        return own
    if step is not None and not checkpoint_at(folder, step).path.is_dir():
        raise InputError(
            f"rank {distributed.rank()} does not see {checkpoint_at(folder, step).path}, which rank 0 sees: put the run folder on a disk "
            "that all machines share"
        )
    if not distributed.is_first():
        for other in saved_steps(folder):
            if step is None or other >= step:
                path = checkpoint_at(folder, other).path
                _damage[path.resolve(), _stat_files(path)] = None if other == step else "rank 0 found it damaged"
    return None if step is None else checkpoint_at(folder, step)


def select(folder: Path, which: str | int = "last") -> Checkpoint:
    """The checkpoint that `--checkpoint` names: `last`, `best`, or a step."""
    available = saved_steps(folder)
    if not available:
        raise NotTrained(f"{folder} has no checkpoint yet: train first, or name another run")
    steps = ", ".join(map(str, available))
    if which == "last":
        newest = latest(folder, _note_once)
        if newest is not None:
            return newest
        if saved_steps(folder) != available:  # training goes on: it pruned these and wrote newer ones
            return select(folder, which)
        raise InputError(f"{folder}: every checkpoint is damaged ({steps})")
    if which == "best":
        best = read_best(folder)
        if not best:
            raise InputError(
                f"{folder} has no best checkpoint: it was trained without validation; use --checkpoint last"
            )
        which = best["step"]
    try:
        step = int(which)
    except (ValueError, TypeError):
        raise InputError(f"--checkpoint {which}: use last, best or a step of {steps}") from None
    if step not in available:
        raise InputError(f"{folder} has no checkpoint of step {step}: there are {steps}")
    damage = find_damage(checkpoint_at(folder, step).path)
    if damage:
        raise InputError(f"{checkpoint_at(folder, step).path} is damaged: {damage}")
    return checkpoint_at(folder, step)


_noted: set[str] = set()


def _note_once(line: str) -> None:
    """A command selects the same checkpoint several times."""
    if line not in _noted:
        _noted.add(line)
        distributed.on_first_rank(distributed.print_note)(line)


def write_best(folder: Path, step: int, loss: float) -> None:
    write_json(folder / "best.json", {"step": step, "loss": loss})


# Removing ------------------------------------------------------------------------------------------------------------


def prune(folder: Path, keep_last: int, newest: int, is_snapshot: Callable[[int], bool] = lambda step: False) -> None:
    """Delete all checkpoints but the last `keep_last` up to step `newest`, the best one, and snapshots.

    Checkpoints beyond `newest`, which was just written, are damaged: the run resumed from before them.
    """
    best = read_best(folder)
    keep = set([step for step in saved_steps(folder) if step <= newest][-keep_last:])
    if best:
        keep.add(best["step"])
    for step in saved_steps(folder):
        if step not in keep and not (step <= newest and is_snapshot(step)):
            path = checkpoint_at(folder, step).path
            # Rename first, so that a kill half-way leaves no partial checkpoint under its name.
            hidden = path.with_name(f".removing-{path.name}")
            os.replace(path, hidden)
            shutil.rmtree(hidden, ignore_errors=True)
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted save or removal left behind. Only the holder of the run's lock may call this."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith((".writing-", ".replaced-", ".removing-")):
                shutil.rmtree(path, ignore_errors=True)
