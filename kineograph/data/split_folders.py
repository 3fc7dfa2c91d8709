"""Folders named train, validation and test at the top of a data folder: the splits that the data's author made."""

from __future__ import annotations

from collections.abc import Sequence

from kineograph.data.open_source import Split

_NAMES: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}


def group_by_split_folder(names: Sequence[str]) -> dict[Split, list[str]]:
    """Media names by split; empty unless there are a train folder and a validation or test folder.

    The folders may also lie inside images/ or videos/. Names outside them are training items.
    """
    folders = [_split_of(name) for name in names]
    # One such name alone may be a class of pictures: bus/, car/, train/.
    if "train" not in folders or not {"validation", "test"} & set(folders):
        return {}
    groups: dict[Split, list[str]] = {}
    for name, split in zip(names, folders, strict=True):
        groups.setdefault(split or "train", []).append(name)
    return groups


def describe_split_folders(names: Sequence[str]) -> str | None:
    """Say which folders are splits, with their counts; None if there are none."""
    groups = group_by_split_folder(names)
    if not groups:
        return None
    order: tuple[Split, ...] = ("train", "validation", "test")
    counts = ", ".join(f"{split} {len(groups[split])}" for split in order if split in groups)
    outside = sum(_split_of(name) is None for name in names)
    others = f", of which {outside} outside these folders are training items" if outside else ""
    return f"folders named as splits are the splits (files: {counts}{others})"


def _split_of(name: str) -> Split | None:
    parts = name.split("/")[:-1]
    top = parts[1:2] if parts and parts[0] in ("images", "videos") else parts[:1]
    return _NAMES.get(top[0].lower()) if top else None
