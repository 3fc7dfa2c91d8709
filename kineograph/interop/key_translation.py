"""Config keys of another project → ours, one by one. A key that nobody takes is listed as not translated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kineograph.core.config import Tree, merge, nest
from kineograph.core.config_file import dump_yaml
from kineograph.run.plan import make_plan

Convert = Callable[[Any], Any]
Row = tuple[str, str | None, Convert]
"""Their key, ours, and the converter. A ValueError leaves the key untranslated; ours=None: it is always so here."""
SECTIONS = ("name", "seed", "prompts", "data", "train", "stages")


class KeyTranslation:
    """Keys are taken from a foreign tree; those left at the end were not translated."""

    def __init__(self, tree: Tree) -> None:
        self.left = flatten_lists(tree)
        self.ours: Tree = {}
        self.remarks: list[str] = []
        self.moved: dict[str, str] = {}
        """Their key → ours, of the keys that `move` has translated."""

    def take(self, key: str, convert: Convert = lambda value: value) -> Any:
        """Remove a key and return its value; None if it is missing or cannot be converted."""
        if key not in self.left:
            return None
        try:
            value = convert(self.left[key])
        except (ValueError, TypeError, AttributeError, IndexError, OverflowError):
            return None
        del self.left[key]
        return value

    def put(self, key: str, value: Any) -> None:
        self.ours = merge(self.ours, nest(key, value))

    def get(self, key: str) -> Any:
        """The value that was put under one of our keys; None if there is none."""
        place: Any = self.ours
        for part in key.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place

    def move(self, theirs: str, ours: str, convert: Convert = lambda value: value) -> Any:
        """Take a key and put it under ours, unless another key already put another value there. → the value"""
        original = self.left.get(theirs)
        value = self.take(theirs, convert)
        if value is None:
            return None
        before = self.get(ours)
        if before is not None and before != value:
            self.left[theirs] = original
            return None
        self.put(ours, value)
        self.moved[theirs] = ours
        return value

    def move_all(self, rows: Iterable[Row]) -> None:
        for theirs, ours, convert in rows:
            if ours is None:
                self.take(theirs, convert)
            else:
                self.move(theirs, ours, convert)

    def remark(self, text: str) -> None:
        self.remarks.append(f"# {text}")

    def render(self, source: str, lists_moved: bool = True) -> str:
        """The YAML, checked, between comments: remarks before it, after it where each key of `source` went."""
        ours: Tree = {key: self.ours[key] for key in SECTIONS if key in self.ours}
        if ours.get("stages"):
            make_plan(self._drop_missing_prompts(ours))
        moved = [f"# {theirs} → {ours_}" for theirs, ours_ in self.moved.items() if lists_moved]
        left = [f"# not translated: {key} = {json.dumps(value, default=str)}" for key, value in self.left.items()]
        return "\n".join([f"# Kineograph's form of {source}", *self.remarks, dump_yaml(ours).rstrip(), *moved, *left])

    def _drop_missing_prompts(self, ours: Tree) -> Tree:
        """Without a file of prompts that lies on another machine."""
        prompts = ours.get("prompts")
        if not isinstance(prompts, str) or Path(prompts).expanduser().exists():
            return ours
        self.remark(f"prompts={prompts}: no such file here; write it, or set prompts=auto")
        return {key: value for key, value in ours.items() if key != "prompts"}


class Part:
    """The keys of one section of theirs, and the place of ours that they go to. Our keys that begin with a dot are in that place."""

    def __init__(self, keys: KeyTranslation, theirs: str, ours: str) -> None:
        self.keys, self.theirs, self.ours = keys, theirs, ours

    def find(self, key: str) -> str:
        """The full name of one of our keys."""
        return f"{self.ours}{key}" if key.startswith(".") or not key else key

    def take(self, key: str, convert: Convert = lambda value: value) -> Any:
        return self.keys.take(f"{self.theirs}.{key}", convert)

    def put(self, key: str, value: Any) -> None:
        self.keys.put(self.find(key), value)

    def get(self, key: str = "") -> Any:
        return self.keys.get(self.find(key))

    def move(self, key: str, ours: str, convert: Convert = lambda value: value) -> Any:
        return self.keys.move(f"{self.theirs}.{key}", self.find(ours), convert)

    def record_move(self, key: str, ours: str) -> None:
        """List a key that was taken and put by hand."""
        self.keys.moved[f"{self.theirs}.{key}"] = self.find(ours)

    def move_all(self, rows: Iterable[Row]) -> None:
        self.keys.move_all(
            (f"{self.theirs}.{key}", ours if ours is None else self.find(ours), convert) for key, ours, convert in rows
        )


def flatten_lists(tree: Any, prefix: str = "") -> Tree:
    """Dotted keys; entries of a list of mappings by their index."""
    flat: Tree = {}
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            value = {str(number): entry for number, entry in enumerate(value)}
        if isinstance(value, dict) and value:
            flat |= flatten_lists(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# Converters --------------------------------------------------------------------------------------------------------


def class_name(*known: str) -> Convert:
    """The last part of a dotted target, if it is one of `known`."""

    def convert(value: Any) -> Any:
        last = str(value).rpartition(".")[2]
        if last not in known:
            raise ValueError
        return last

    return convert


def number(value: Any) -> int | float:
    """YAML reads 1e-4 as a string."""
    if isinstance(value, bool):
        raise ValueError
    result = float(value)
    return int(result) if result.is_integer() and not isinstance(value, float) and "e" not in str(value) else result


def count(value: Any) -> int:
    result = float(value)
    if isinstance(value, bool) or not result.is_integer():
        raise ValueError
    return int(result)


def up_to(limit: int) -> Convert:
    """A count of at least 1 and at most `limit`, where lists are made of it."""

    def convert(value: Any) -> int:
        if not 1 <= count(value) <= limit:
            raise ValueError
        return count(value)

    return convert


def counts(value: Any) -> list[int]:
    if isinstance(value, str):
        raise ValueError
    return [count(part) for part in value]


def numbers(value: Any) -> list[int | float]:
    if isinstance(value, str):
        raise ValueError
    return [number(part) for part in value]


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def only(*allowed: Any) -> Convert:
    """A value that needs no translation: it is always so here."""

    def convert(value: Any) -> None:
        if value not in allowed:
            raise ValueError

    return convert


def equal(expected: Any) -> Convert:
    """This value only; any other stays untranslated."""

    def convert(value: Any) -> Any:
        numeric = all(isinstance(part, (int, float)) for part in (value, expected))
        if not (math.isclose(value, expected) if numeric else value == expected):
            raise ValueError
        return value

    return convert


def choose(known: dict[Any, Any]) -> Convert:
    """Ours by theirs; any other value stays untranslated."""

    def convert(value: Any) -> Any:
        if value not in known:
            raise ValueError
        return known[value]

    return convert
