"""Download checkpoints and weights: any URL that fsspec opens (`https://…`, `file://…`), or a W&B artifact `wandb:…`.

A checkpoint is a folder, whose manifest.json lists its files, or a tar of one; weights alone are a safetensors file.
Everything is checked against its manifest before it is read, and nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from kineograph.core.errors import InputError
from kineograph.core.notes import Note
from kineograph.core.remote_files import (
    await_answer,
    check_disk,
    describe_failure,
    download,
    is_url,
    open_filesystem,
)
from kineograph.core.tar_reader import DAMAGED, TarDamaged, TarReader, decompress
from kineograph.core.text_file import parse_json, read_regular
from kineograph.train import checkpoint
from kineograph.train.trackers import import_wandb

TARS = (".tar", ".tar.gz", ".tgz")
_WANDB = "wandb:"
_MAX_JSON = 2**26  # bytes


def is_remote(source: str) -> bool:
    """Whether this is a URL or an artifact, and not a path or a stage."""
    return source.startswith(_WANDB) or is_url(source)


@contextmanager
def download_checkpoint(source: str, near: Path, note: Note) -> Iterator[Path]:
    """Yield a checked checkpoint folder or safetensors file, and delete it afterwards unless it was moved.

    It lies in a hidden folder in `near`, so that moving it is one rename. A failure leaves nothing behind.
    """
    new_folders = [path for path in (near, *near.parents) if not path.exists()]  # innermost first
    near.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".fetching-", dir=near))
    try:
        note(f"fetching {source}")
        yield _verify_download(source, _download(source, temporary))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in new_folders:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def check_reachable(source: str) -> None:
    """Raise an InputError unless `source` is there, without downloading it."""
    if source.startswith(_WANDB):
        _find_artifact(source)
        return
    path = _local_path(source)
    if path is not None:
        if not path.exists():
            raise InputError(f"{source}: no such file")
        return
    url = source if _is_one_file(source) else f"{source.rstrip('/')}/manifest.json"
    with _explain_errors(source, url):
        filesystem, remote_path = open_filesystem(url)
        if not await_answer(lambda: filesystem.exists(remote_path)):
            raise FileNotFoundError


def install_checkpoint(path: Path, folder: Path, step: int) -> None:
    """Move a downloaded checkpoint into a stage's folder as that of step `step`, unless a complete one is there."""
    target = checkpoint.checkpoint_at(folder, step).path
    folder.mkdir(parents=True, exist_ok=True)
    if target.exists():
        if checkpoint.find_damage(target) is None:
            return
        shutil.rmtree(target)
    os.replace(path, target)


# Downloading ---------------------------------------------------------------------------------------------------------


def _download(source: str, temporary: Path) -> Path:
    """Return a file or folder in `temporary`, or the local file that `source` names."""
    if source.startswith(_WANDB):
        artifact = _find_artifact(source)
        with _explain_errors(source, source):
            artifact.download(root=str(temporary / "artifact"))
        return temporary / "artifact"
    path = _local_path(source)
    if path is None and not _is_one_file(source):
        return _download_folder(source.rstrip("/"), temporary / "checkpoint")
    if path is None:
        path = _download_file(source, temporary / Path(unquote(urlsplit(source).path)).name, source)
    elif not path.exists():
        raise InputError(f"{source}: no such file")
    elif path.is_dir():
        return _copy_folder(source, path, temporary)
    return _unpack(path, temporary / "unpacked", source) if path.name.endswith(TARS) else path


def _copy_folder(source: str, path: Path, temporary: Path) -> Path:
    if temporary.resolve().is_relative_to(path.resolve()):
        raise InputError(
            f"{source} holds the run folder itself: name one checkpoint, such as STAGE/checkpoints/step-00000100"
        )
    special = next((file for file in path.rglob("*") if not (file.is_file() or file.is_dir())), None)
    if special is not None:
        raise InputError(f"{source} is refused: {special} is not a regular file")
    try:
        return Path(shutil.copytree(path, temporary / "checkpoint"))
    except OSError as error:
        raise InputError(f"{source} cannot be copied to {temporary.parent}: {error}") from None


def _local_path(source: str) -> Path | None:
    return Path(unquote(urlsplit(source).path)) if source.startswith("file://") else None


def _is_one_file(source: str) -> bool:
    return urlsplit(source).path.endswith((".safetensors", *TARS))


@contextmanager
def _explain_errors(source: str, url: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each filesystem and wandb has errors of its own
        raise InputError(f"{source} cannot be fetched: {describe_failure(url, error)}") from None


def _download_file(url: str, path: Path, source: str, most: float = math.inf) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _explain_errors(source, url):
        filesystem, remote_path = open_filesystem(url)
        download(filesystem, remote_path, str(path), most)
    return path


def _download_folder(url: str, folder: Path) -> Path:
    """Download a checkpoint's manifest and the files that it lists."""
    manifest = _download_file(f"{url}/manifest.json", folder / "manifest.json", url, _MAX_JSON)
    try:
        sizes = {name: int(entry["bytes"]) for name, entry in parse_json(read_regular(manifest))["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise InputError(f"{url}/manifest.json is not the manifest of a checkpoint") from None
    for name, size in sizes.items():
        if not checkpoint.is_checkpoint_file(name):
            raise InputError(f"{url}/manifest.json names {name!r}, which is not a file of a checkpoint")
        _download_file(f"{url}/{name}", folder / name, url, size)
    try:
        _download_file(f"{url}/phase.json", folder / "phase.json", url, _MAX_JSON)
    except InputError:  # there is none until a phase is finished
        (folder / "phase.json").unlink(missing_ok=True)
    return folder


def _unpack(path: Path, folder: Path, source: str) -> Path:
    try:
        with open(path, "rb") as file:
            tar = TarReader(decompress(file))
            for member in tar:
                parts = PurePosixPath(member.name).parts
                if ".." in parts or "/" in parts:
                    raise InputError(
                        f"{source} is refused: {member.name!r} leads outside of the folder it is unpacked to"
                    )
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(target, "wb") as copy:
                    for part in tar.read_parts(member):
                        copy.write(part)
                        check_disk(target)
    except (TarDamaged, *DAMAGED, OSError) as error:
        raise InputError(f"{source} is not a tar that can be unpacked: {error}") from None
    return folder


def _find_artifact(source: str) -> Any:
    module = import_wandb(f"{source} is kept by wandb")
    try:
        return module.Api().artifact(source.removeprefix(_WANDB))
    except (module.errors.Error, ValueError) as error:
        raise InputError(
            f"{source} cannot be fetched: {error}; use wandb:ENTITY/PROJECT/NAME:VERSION, and log in with `wandb login`"
        ) from None


def _verify_download(source: str, path: Path) -> Path:
    """Find the checkpoint or the weights in what was downloaded, and check them."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise InputError(
                f"{source} is neither a checkpoint's folder, a tar of one ({', '.join(TARS)}) nor a file.safetensors"
            )
        return path
    checkpoints = sorted(manifest.parent for manifest in path.rglob("manifest.json"))
    if len(checkpoints) > 1:
        names = ", ".join(each.relative_to(path).as_posix() for each in checkpoints)
        raise InputError(f"{source} holds {len(checkpoints)} checkpoints ({names}): name one of them")
    if checkpoints:
        damage = checkpoint.find_damage(checkpoints[0])
        if damage:
            raise InputError(f"{source} is not a complete checkpoint: {damage}")
        return checkpoints[0]
    weights = sorted(path.rglob("*.safetensors"))
    if len(weights) != 1:
        raise InputError(f"{source} holds neither a checkpoint (manifest.json) nor one safetensors file")
    return weights[0]
