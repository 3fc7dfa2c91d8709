"""The files of a folder and its subfolders: images and clips, their masks, and the rest."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kineograph.core.config import shorten
from kineograph.core.errors import InputError, NoData
from kineograph.data.captions import Problem
from kineograph.data.loss_masks import pair_masks
from kineograph.data.media_config import CLIPS, IMAGES, media_kind
from kineograph.data.shards import SUFFIXES


class Listing(NamedTuple):
    """Files of a folder: names relative to it, with /, sorted."""

    media: list[str]
    others: list[str]
    problems: list[Problem]
    masks: dict[str, str]
    """Of the media that have one; masks themselves are not among the media."""


def list_folder(root: Path, key: str = "data.folder=") -> Listing:
    """All files below `root`, following links, without hidden ones. `key` names the path's origin in errors."""
    if not root.exists():
        raise NoData(f"{key}{root} does not exist")
    if not root.is_dir():
        raise InputError(f"{key}{root} is a file: give the folder that holds it{_name_source(root) if key else ''}")
    media: list[str] = []
    others: list[str] = []
    problems: list[Problem] = []
    visited: set[tuple[int, int]] = set()

    waiting = [""]  # no recursion: folders may nest deeper than Python does
    while waiting:
        prefix = waiting.pop()
        folder = os.path.join(root, prefix)
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in visited:  # a link to a parent
                continue
            visited.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            reason = "no permission" if isinstance(error, PermissionError) else str(error.strerror)
            if not prefix:
                raise InputError(f"{key}{root} cannot be read: {reason}") from None
            problems.append(Problem(shorten(prefix.rstrip("/"), 200), f"{reason} to read this folder"))
            continue
        inner = []
        for entry in ordered:
            name = prefix + entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                inner.append(name + "/")
            elif media_kind(entry.name):
                media.append(name)
            elif entry.is_file():  # not a pipe or device, which would block
                others.append(name)
        waiting += reversed(inner)
    masks = pair_masks(media)
    unmasked = set(media) - set(masks.values())
    return Listing(sorted(unmasked), sorted(others), problems, masks)


def _name_source(root: Path, name: str = "") -> str:
    """What to set for an array or a tar, which folders do not read."""
    file = (name or root.name).lower()
    if file.endswith((".npy", ".npz")):
        return "; for arrays set data.source=memmap"
    return f"; for tar shards set data.source=webdataset data.shards={root}" if file.endswith(SUFFIXES) else ""


def refuse_empty(root: Path, listing: Listing, key: str = "data.folder=") -> None:
    if listing.media:
        return
    images, clips = (", ".join(suffix[1:] for suffix in suffixes) for suffixes in (IMAGES, CLIPS))
    suffixes = Counter(PurePosixPath(name).suffix.lower() or "(no suffix)" for name in listing.others)
    found = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(6))
    hint = next(filter(None, (_name_source(root, name) for name in listing.others)), "")
    if not hint and listing.problems:
        hint = f"; {listing.problems[0].path}: {listing.problems[0].reason}"
    raise InputError(
        f"{key}{root} holds nothing to train on: looked for images ({images}) and clips ({clips}), also in subfolders, "
        f"and found {found or 'no files at all'}{hint}"
    )
