"""Folders of data that the page shows: checked in a process of their own, searched and shown page by page."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from kineograph.core.config import Config
from kineograph.core.text_file import parse_json
from kineograph.studio.run_details import read_config, stage_names, stage_task
from kineograph.studio.run_files import MEDIA
from kineograph.studio.runs import Run, make_id
from kineograph.studio.workers import run_worker

PAGE = 48  # items shown at once
KEPT = 8  # checks in memory
CODECS = Path(__file__).parents[1] / "codec"


class CheckForm(Config):
    """What the page lets one choose of `kineo data check`."""

    buckets: bool = False
    size: str = Field("256", pattern=r"^[0-9]{1,5}(x[0-9]{1,5})?$")
    frames: int = Field(1, ge=1, le=65_536)
    fps: float | None = Field(None, gt=0, le=1_000)
    several: bool = False
    """Every line of a text file is a caption of its own."""

    def settings(self) -> list[str]:
        """As typed after `kineo data check FOLDER`."""
        found = ["caption_lines=several"] if self.several else []
        if self.buckets:
            size = f"[{self.size.replace('x', ', ')}]" if "x" in self.size else self.size
            found += [f"size={size}", f"frames={self.frames}", "buckets={}"]
            found += [f"fps={self.fps:g}"] if self.fps is not None else []
        return found


@dataclass(frozen=True)
class DatasetItem:
    """An image, a clip or a part of one."""

    name: str
    captions: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    width: int = 0  # 0: it cannot be read
    height: int = 0
    frames: int = 1
    seconds: float = 0.0  # 0: a still image
    start: float | None = None  # second at which a part of a clip begins
    end: float | None = None
    bucket: str = ""
    place: Mapping[str, Any] | None = None  # in a tar or an array: MemberPlace or ArrayPlace of data/check_report.py

    @property
    def key(self) -> str:
        """Its name in addresses: parts of a clip share that of their file."""
        if self.start is None:
            return self.name
        return f"{self.name}@{self.start:.10g}-{'' if self.end is None else f'{self.end:.10g}'}"

    @property
    def file(self) -> str:
        """Below the folder."""
        return self.name if self.place is None else str(self.place["file"])

    @property
    def member(self) -> str:
        """The file, or its member in a tar: its suffix tells the format."""
        return self.name if self.place is None else str(self.place.get("member", ""))

    @property
    def is_array(self) -> bool:
        return self.place is not None and "array" in self.place

    @property
    def media_type(self) -> str | None:
        """What browsers can show of it as it is."""
        return MEDIA.get(Path(self.member).suffix.lower()) if self.start is None else None

    @property
    def is_readable(self) -> bool:
        return self.width > 0

    @property
    def has_address(self) -> bool:
        """Whether its name can be written in an address: it may not be UTF-8."""
        return self.name.isprintable()

    def matches(self, words: Sequence[str]) -> bool:
        """Whether its captions and its name hold all these words, in lower case."""
        text = "\n".join((self.name, *self.captions)).lower()
        return all(word in text for word in words)


@dataclass(frozen=True)
class Check:
    """What a check found, or that it is still under way."""

    began: float
    seconds: float | None = None  # None: it is under way
    error: str = ""
    lines: tuple[str, ...] = ()
    items: tuple[DatasetItem, ...] = ()
    buckets: tuple[dict[str, Any], ...] = ()
    problems: tuple[tuple[str, str], ...] = ()  # of files that are no items

    @cached_property
    def _by_key(self) -> dict[str, DatasetItem]:
        return {item.key: item for item in self.items}

    def find_item(self, key: str) -> DatasetItem | None:
        return self._by_key.get(key)

    @property
    def is_done(self) -> bool:
        return self.seconds is not None


@dataclass(frozen=True)
class Selection:
    """One page of the items that a search finds."""

    items: Sequence[DatasetItem]
    total: int
    page: int
    pages: int


@dataclass
class Dataset:
    """A folder that was given with --data."""

    id: str
    path: Path  # resolved
    _checks: dict[tuple[str, ...], Check] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, form: CheckForm, again: bool = False) -> Check:
        """What is known; a check that was never made, or is asked for again, begins in the background."""
        key = tuple(form.settings())
        with self._lock:
            known = self._checks.get(key)
            if known is not None and not (again and known.is_done):
                return known
            while len(self._checks) >= KEPT:
                self._checks.pop(next(iter(self._checks)))
            begun = self._checks[key] = Check(time.time())
        threading.Thread(target=self._run, args=(key, begun), daemon=True).start()
        return begun

    def _run(self, key: tuple[str, ...], begun: Check) -> None:
        with _ONE_AT_A_TIME:
            found = run_check(self.path, key, begun)
        with self._lock:
            self._checks[key] = found

    def find_item(self, key: str) -> DatasetItem | None:
        """An item of any check: only these are served."""
        with self._lock:
            checks = list(self._checks.values())
        return next((item for check in checks if (item := check.find_item(key)) is not None), None)


_ONE_AT_A_TIME = threading.Lock()  # checks use every core


def open_datasets(folders: Sequence[Path]) -> dict[str, Dataset]:
    paths = dict.fromkeys(Path(folder).resolve() for folder in folders)
    return {make_id(path): Dataset(make_id(path), path) for path in paths}


def run_check(folder: Path, settings: Sequence[str], begun: Check) -> Check:
    """Check a folder in a process of its own."""
    command = [sys.executable, "-P", "-m", "kineograph.studio.dataset_worker", str(folder), *settings]
    try:
        with run_worker(command) as process:
            tree = parse_json(process.communicate()[0])
        if not isinstance(tree, dict):
            raise ValueError
        problems = tuple((str(path), str(reason)) for path, reason in tree.get("problems", ()))
        items = tuple(_make_item(item) for item in tree.get("items", ()))
    except (OSError, ValueError, TypeError, KeyError):
        return replace(begun, seconds=time.time() - begun.began, error="the process that checks data has failed")
    return replace(
        begun,
        seconds=time.time() - begun.began,
        error=str(tree.get("error", "")),
        lines=tuple(tree.get("lines", ())),
        items=items,
        buckets=tuple(tree.get("buckets", ())),
        problems=problems,
    )


def _make_item(tree: Mapping[str, Any]) -> DatasetItem:
    return DatasetItem(**{**tree, "captions": tuple(tree["captions"]), "problems": tuple(tree["problems"])})


def select_items(check: Check, search: str = "", show: str = "", page: int = 1) -> Selection:
    """The items that hold all words of a search; `show` keeps those with problems, without a caption, or of a bucket."""
    words = search.lower().split()
    found = [item for item in check.items if item.matches(words)]
    if show == "problems":
        found = [item for item in found if item.problems]
    elif show == "uncaptioned":
        found = [item for item in found if not item.captions]
    elif show:
        found = [item for item in found if item.bucket == show]
    pages = max(1, -(-len(found) // PAGE))
    page = min(max(1, page), pages)
    return Selection(found[(page - 1) * PAGE : page * PAGE], len(found), page, pages)


def format_command(dataset: Dataset, form: CheckForm) -> str:
    """The command that prints the same."""
    return shlex.join(["kineo", "data", "check", str(dataset.path), *form.settings()])


# Runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodecStage:
    """A trained tokenizer or autoencoder, which can rebuild an item."""

    run: Run
    stage: str
    task: str


def find_codecs(runs: Sequence[Run]) -> list[CodecStage]:
    """The codecs of some runs that have a checkpoint: stages that others name as their codec, or whose task lies in codec/."""
    found = []
    for run in runs:
        tree = read_config(run.path)
        stages = tree.get("stages") or {}
        named = [keys.get("codec") for keys in stages.values() if isinstance(keys, dict)]
        for stage in stage_names(tree):
            task = stage_task(tree, stage)
            is_codec = stage in named or (task.isidentifier() and (CODECS / f"{task}.py").is_file())
            if is_codec and stage.isidentifier() and (run.path / stage / "checkpoints").is_dir():
                found.append(CodecStage(run, stage, task))
    return found


def find_data_folders(runs: Sequence[Run]) -> dict[Path, list[Run]]:
    """The folders that configs of runs name as their data → these runs."""
    found: dict[Path, list[Run]] = {}
    for run in runs:
        tree = read_config(run.path)
        stages = (tree.get("stages") or {}).values()
        parts = [tree.get("data"), *(keys.get("data") for keys in stages if isinstance(keys, dict))]
        folders = [part.get("folder") for part in parts if isinstance(part, dict)]
        for folder in sorted({folder for folder in folders if isinstance(folder, str) and folder}):
            found.setdefault(Path(folder), []).append(run)
    return found
