"""The files of each split of a folder: folders named train, validation and test at its top are the splits that the data's author made;
other files are held out by share.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from unicodedata import normalize

from kineograph.core.errors import InputError
from kineograph.data.open_source import Split, select_split

if TYPE_CHECKING:
    from kineograph.data.folder import FolderConfig

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


def exclude_validation_folder(names: list[str], root: Path, config: FolderConfig) -> list[str]:
    """The names outside data.validation_folder, which may be a subfolder of data.folder but must not contain it."""
    if config.validation_folder is None:
        return names
    main, held_out = root.resolve(), Path(config.validation_folder).expanduser().resolve()
    if main.is_relative_to(held_out):
        raise InputError(
            f"data.validation_folder={config.validation_folder} contains data.folder={config.folder}: give a folder with other items"
        )
    folders = {name: name.rpartition("/")[0] for name in names}
    # Resolved, since a link inside data.folder may lead there.
    excluded = {folder for folder in set(folders.values()) if (main / folder).resolve().is_relative_to(held_out)}
    return [name for name in names if folders[name] not in excluded]


def select_files(names: list[str], split: Split, config: FolderConfig) -> tuple[set[str], str | None]:
    """The files of a split, and a line for the log."""
    groups = group_by_split_folder(names) if config.split_folders else {}
    own_validation = config.validation_folder is not None
    if split in groups and split != "train":
        return set(groups[split]), None
    # Splits that have no folder are held out of the training items.
    shares = {
        "validation": 0.0 if own_validation or "validation" in groups else config.validation,
        "test": 0.0 if "test" in groups else config.test,
    }
    chosen, note = _select_by_share(groups.get("train", names), split, config.model_copy(update=shares))
    if split == "train":
        notes = [note] if note else []
        if groups:
            text = describe_split_folders(names)
            notes.append(f"data.folder={config.folder}: {text}; data.split_folders=false splits all of them by share")
        if own_validation:
            unused = ", not those of the folder validation" if "validation" in groups else ""
            notes.append(
                f"data.validation_folder={config.validation_folder}: its items are the validation split{unused}"
            )
        note = "; ".join(notes) or None
    return chosen, note


def _select_by_share(names: list[str], split: Split, config: FolderConfig) -> tuple[set[str], str | None]:
    if config.split_by == "file":
        selected = select_split([normalize("NFC", name) for name in names], split, config)
        return {names[index] for index in selected.indices}, selected.note
    parents = [PurePosixPath(name).parent.as_posix() for name in names]
    folders = sorted(set(parents))
    selected = select_split([normalize("NFC", folder) for folder in folders], split, config)
    chosen = {folders[index] for index in selected.indices}
    return {name for name, parent in zip(names, parents, strict=True) if parent in chosen}, selected.note
