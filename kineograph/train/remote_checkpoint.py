"""Checkpoints and weights from elsewhere: `https://…`, `file://…`, or a W&B artifact `wandb:entity/project/name:version`.

A checkpoint is a folder (over HTTP its manifest.json says what is in it) or a tar of one; weights alone are a safetensors file. Whatever
comes is checked against its manifest before anything reads it, and nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from kineograph.core.errors import InputError
from kineograph.train import checkpoint
from kineograph.train.trackers import import_wandb

TARS = (".tar", ".tar.gz", ".tgz")
_WANDB = "wandb:"
_TIMEOUT = 60.0  # seconds without a byte
_CHUNK = 1 << 20


def is_remote(source: str) -> bool:
    """Whether this names something to fetch, and not a path or a stage."""
    return source.startswith(("http://", "https://", "file://", _WANDB))


@contextmanager
def download_checkpoint(source: str, near: Path, note: Callable[[str], None]) -> Iterator[Path]:
    """Inside, a checkpoint's folder or a safetensors file, whole and checked; afterwards it is gone unless it was moved.

    It lies in a hidden folder below `near`, so that moving it from there is one rename.
    """
    made = _missing_parents(near)
    near.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".fetching-", dir=near))
    try:
        note(f"fetching {source}")
        yield _checked(source, _bring(source, place))
    finally:
        shutil.rmtree(place, ignore_errors=True)
        for folder in made:  # what failed leaves nothing behind
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def check_reachable(source: str) -> None:
    """Whether it is there, without fetching it."""
    if source.startswith(_WANDB):
        _artifact(source)
    elif (local := _local(source)) is not None:
        if not local.exists():
            raise InputError(f"{source}: no such file")
    else:
        with _opened(source if _is_one_file(source) else f"{source.rstrip('/')}/manifest.json", source):
            pass


def _missing_parents(folder: Path) -> list[Path]:
    """Innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _bring(source: str, place: Path) -> Path:
    """→ a file or folder: below `place`, or where it lies on this machine."""
    if source.startswith(_WANDB):
        folder = place / "artifact"
        try:
            _artifact(source).download(root=str(folder))
        except (OSError, ValueError) as error:
            raise InputError(f"{source} cannot be fetched: {error}") from None
        return folder
    local = _local(source)
    if local is None:
        if not _is_one_file(source):
            return _download_folder(source.rstrip("/"), place / "checkpoint")
        local = _download(source, place / Path(unquote(urlsplit(source).path)).name, source)
    elif not local.exists():
        raise InputError(f"{source}: no such file")
    elif local.is_dir():
        return Path(shutil.copytree(local, place / "checkpoint"))
    if not local.name.endswith(TARS):
        return local
    return _unpacked(local, place / "unpacked", source)


def _local(source: str) -> Path | None:
    return Path(unquote(urlsplit(source).path)) if source.startswith("file://") else None


def _is_one_file(source: str) -> bool:
    return urlsplit(source).path.endswith((".safetensors", *TARS))


# HTTP ------------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(url: str, source: str) -> Iterator[Any]:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
            yield answer
    except (OSError, ValueError) as error:  # HTTPError, URLError, timeouts and torn connections are OSErrors
        reason = getattr(error, "reason", None) or error
        code = f"{error.code} " if isinstance(error, urllib.error.HTTPError) else ""
        raise InputError(f"{source} cannot be fetched: {url} answers {code}{reason}") from None


def _download(url: str, path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(url, source) as answer, open(path, "wb") as file:
        shutil.copyfileobj(answer, file, _CHUNK)
        expected = answer.headers.get("Content-Length")
    if expected is not None and path.stat().st_size != int(expected):
        raise InputError(
            f"{source} cannot be fetched: {path.stat().st_size} of {expected} bytes of {url} came; run the same command again"
        )
    return path


def _download_folder(url: str, folder: Path) -> Path:
    """A checkpoint's folder on a web server: the manifest names its files."""
    manifest = _download(f"{url}/manifest.json", folder / "manifest.json", url)
    try:
        names = list(json.loads(manifest.read_text(encoding="utf-8"))["files"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{url}/manifest.json is not the manifest of a checkpoint") from None
    for name in names:
        parts = PurePosixPath(name).parts  # a file, or one of a folder of shards
        if not 1 <= len(parts) <= 2 or any(part in ("..", "/") for part in parts) or "/".join(parts) != name:
            raise InputError(f"{url}/manifest.json names {name!r}, which is no file's name")
        _download(f"{url}/{name}", folder / name, url)
    try:
        _download(f"{url}/phase.json", folder / "phase.json", url)
    except InputError:  # there is none until a phase is finished
        (folder / "phase.json").unlink(missing_ok=True)
    return folder


# Archives and artifacts ------------------------------------------------------------------------------------------


def _unpacked(path: Path, folder: Path, source: str) -> Path:
    try:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")  # refuses paths and links that lead outside
    except (tarfile.TarError, OSError, EOFError) as error:
        raise InputError(f"{source} is not a tar that can be unpacked: {error}") from None
    return folder


def _artifact(source: str) -> Any:
    module = import_wandb(f"{source} is kept by wandb")
    try:
        return module.Api().artifact(source.removeprefix(_WANDB))
    except (module.errors.Error, ValueError) as error:
        raise InputError(
            f"{source} cannot be fetched: {error}; it is wandb:ENTITY/PROJECT/NAME:VERSION, and `wandb login` may be needed"
        ) from None


def _checked(source: str, found: Path) -> Path:
    """The checkpoint or the weights in what came."""
    if found.is_file():
        if found.suffix != ".safetensors":
            raise InputError(
                f"{source} is neither a checkpoint's folder, a tar of one ({', '.join(TARS)}) nor a file.safetensors"
            )
        return found
    holding = sorted(path.parent for path in found.rglob("manifest.json"))
    if len(holding) > 1:
        names = ", ".join(path.relative_to(found).as_posix() for path in holding)
        raise InputError(f"{source} holds {len(holding)} checkpoints ({names}): name one of them")
    if holding:
        fault = checkpoint.find_damage(holding[0])
        if fault:
            raise InputError(f"{source} is not a whole checkpoint: {fault}")
        return holding[0]
    weights = sorted(found.rglob("*.safetensors"))
    if len(weights) != 1:
        raise InputError(f"{source} holds neither a checkpoint (manifest.json) nor one safetensors file")
    return weights[0]


def install_checkpoint(found: Path, folder: Path, step: int) -> None:
    """A fetched checkpoint becomes the one of step `step`, whole or not at all."""
    target = checkpoint.checkpoint_at(folder, step).path
    folder.mkdir(parents=True, exist_ok=True)
    if target.exists():
        if checkpoint.find_damage(target) is None:
            return
        shutil.rmtree(target)
    os.replace(found, target)
