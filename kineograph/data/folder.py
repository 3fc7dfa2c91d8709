"""A folder of pictures and clips, with whatever captions lie in it. Nothing needs to be converted or listed beforehand."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple
from unicodedata import normalize

import numpy as np

from kineograph.core.batch import Sample
from kineograph.core.errors import InputError, NoData, Unreadable
from kineograph.data.buckets import Bucket, Buckets, Extent, assign
from kineograph.data.captions import Captions, Problem, Span, find_captions, read_caption
from kineograph.data.config import Split
from kineograph.data.decode import CLIPS, IMAGES, MediaConfig, kind_of, read_media
from kineograph.data.extents import extent_of, measure_all, memory_of, refuse_many
from kineograph.data.split import select
from kineograph.data.transforms import pad


class FolderConfig(MediaConfig):
    source: str = "folder"
    folder: str
    """Searched with all its subfolders; hidden files are left out."""
    sketches: str | None = None
    """Folder of sketches, each named as its picture or clip (the ending may differ), cropped and timed alike; null: none."""
    sketch_channels: Literal[1, 2, 3, 4] = 1
    """Channels of the sketches, as data.channels."""


class Listing(NamedTuple):
    """What a folder holds: names relative to it, with /, sorted."""

    media: list[str]
    others: list[str]
    problems: list[Problem]


def list_folder(root: Path, key: str = "data.folder=") -> Listing:
    """All files below `root`, links followed, hidden ones left out. `key` is where the path came from, for messages."""
    if not root.exists():
        raise NoData(f"{key}{root} does not exist")
    if not root.is_dir():
        raise InputError(f"{key}{root} is a file: give the folder that holds it")
    media: list[str] = []
    others: list[str] = []
    problems: list[Problem] = []
    seen: set[str] = set()

    def walk(folder: Path, prefix: str) -> None:
        real = os.path.realpath(folder)
        if real in seen:  # a link that leads back up
            return
        seen.add(real)
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except PermissionError:
            if not prefix:
                raise InputError(f"{key}{root} cannot be read: no permission") from None
            problems.append(Problem(prefix.rstrip("/"), "no permission to read this folder"))
            return
        for entry in entries:
            name = prefix + entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                walk(Path(entry.path), name + "/")
            else:
                (media if kind_of(entry.name) else others).append(name)

    walk(root, "")
    return Listing(sorted(media), sorted(others), problems)


def _refuse_empty(root: Path, listing: Listing) -> None:
    if listing.media:
        return
    looked = f"pictures ({', '.join(suffix[1:] for suffix in IMAGES)}) and clips ({', '.join(suffix[1:] for suffix in CLIPS)})"
    kinds = Counter(PurePosixPath(name).suffix.lower() or "(no ending)" for name in listing.others)
    found = ", ".join(f"{count} {suffix}" for suffix, count in kinds.most_common(6))
    hint = ""
    if kinds[".npy"]:
        hint = "; for arrays set data.source=memmap"
    elif kinds[".tar"]:
        hint = f"; for tar shards set data.source=webdataset data.shards={root}"
    elif listing.problems:
        hint = f"; {listing.problems[0].path}: {listing.problems[0].reason}"
    raise InputError(
        f"data.folder={root} holds nothing to train on: looked for {looked}, also in subfolders, and found {found or 'no files at all'}{hint}"
    )


class Item(NamedTuple):
    """A file, or the part of a clip that has a caption of its own."""

    name: str
    span: Span | None = None

    @property
    def identity(self) -> str:
        part = f"@{self.span.start:g}-{self.span.end:g}" if self.span is not None else ""
        return normalize("NFC", self.name) + part


_WHOLE: Sequence[Span | None] = (None,)


def items_of(names: Iterable[str], captions: Captions) -> list[Item]:
    """What is trained on: files, and in place of those with captioned parts these."""
    return [Item(name, span) for name in names for span in captions.spans.get(name, _WHOLE)]


class Folder:
    Config = FolderConfig

    def __init__(
        self,
        config: FolderConfig,
        items: list[Item],
        captions: Captions,
        split: Split,
        note: str | None,
        problems: list[Problem],
        buckets: Buckets | None = None,
        skipped: dict[str, str] | None = None,
    ) -> None:
        self.config = config
        self.root = Path(config.folder).expanduser()
        self.items = items
        self.buckets = buckets
        """What goes where, with data.buckets."""
        self.skipped = skipped or {}
        """Items that could not be measured for it."""
        self.note = note
        self.problems = problems
        """What is odd but not fatal: metadata rows without a file, text that is not UTF-8."""
        self._given = captions.given
        self._sidecar = captions.sidecar
        self.gives = frozenset({"pixels", "sketch"} if config.sketches is not None else {"pixels"})
        names = [item.name for item in items]
        self._sketches = _sketch_files(config, names) if config.sketches is not None else {}
        self._wanted = config.wanted(split)

    @classmethod
    def open(cls, config: FolderConfig, split: Split, seed: int) -> Folder:
        root = Path(config.folder).expanduser()
        listing = list_folder(root)
        _refuse_empty(root, listing)
        captions = find_captions(root, listing.media, listing.others)
        part = select([normalize("NFC", name) for name in listing.media], split, config)
        chosen = {listing.media[index] for index in part.indices}
        items = items_of(listing.media, captions)  # all parts of a file are in one split
        problems = listing.problems + captions.problems
        if config.buckets is None:
            items = [item for item in items if item.name in chosen]
            return cls(config, items, captions, split, part.note, problems)
        extents = _extents(root, items)
        bad = {item.identity: e.reason for item, e in zip(items, extents, strict=True) if isinstance(e, Unreadable)}
        refuse_many(bad, len(items), config.max_unreadable)
        good = [(item, e) for item, e in zip(items, extents, strict=True) if isinstance(e, Extent)]
        buckets = assign([extent for _, extent in good], config.buckets, config.usual, config.fps)
        mine = [place for place, (item, _) in enumerate(good) if item.name in chosen]  # shapes are those of all splits
        skipped = {item.identity: bad[item.identity] for item in items if item.name in chosen and item.identity in bad}
        items = [good[place][0] for place in mine]
        return cls(config, items, captions, split, part.note, problems, buckets.only(mine), skipped)

    def __len__(self) -> int:
        return len(self.items)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        return self.read_as(index, self.buckets.shape(index) if self.buckets else self.config.usual, rng)

    def read_as(self, index: int, shape: Bucket, rng: np.random.Generator) -> Sample:
        """The item as a clip of this shape, whichever its bucket is."""
        item, wanted = self.items[index], self._wanted.shaped(shape)
        name = item.name
        if item.span is not None:
            wanted = replace(wanted, span=item.span[:2])
        same = deepcopy(rng)  # a sketch is cropped, turned and timed by the same draws
        clip = read_media(self.root / name, item.identity, wanted, rng)
        pixels, mask = pad(clip.pixels, shape.frames)
        sample = Sample(
            pixels=pixels, frame_mask=mask, fps=clip.fps or self.config.shape.fps, caption=self.caption(index)
        )
        if self._sketches:
            path = self._sketches[name]
            drawn = read_media(path, path.name, replace(wanted, channels=self.config.sketch_channels), same)
            if len(drawn.pixels) != len(clip.pixels):
                raise Unreadable(
                    name, f"its sketch {path} has {len(drawn.pixels)} frames where it has {len(clip.pixels)}"
                )
            sample.extra["sketch"], _ = pad(drawn.pixels, shape.frames)
        return sample

    def caption(self, index: int) -> str | None:
        name, span = self.items[index]
        if span is not None:
            return span.text or None
        text = self._given.get(name)
        if text is None and name in self._sidecar:
            try:
                text = read_caption(self.root / self._sidecar[name])
            except (OSError, UnicodeDecodeError):  # `kineo data check` says why
                text = None
            self._given[name] = text or ""
        return text or None

    def identity(self, index: int) -> str:
        return self.items[index].identity

    def missing_captions(self) -> list[str]:
        return [item.identity for index, item in enumerate(self.items) if self.caption(index) is None]

    def states(self) -> list[str]:
        """Of each item: what differs once its file or its caption is another."""
        return [
            f"{item.name}\0{_stamp(self.root, item)}\0{self.caption(index)}" for index, item in enumerate(self.items)
        ]

    def fingerprint(self) -> str:
        """Changes when a file comes, goes, grows or is written again, or when it would be read differently."""
        digest = hashlib.blake2b(self.config.model_dump_json().encode(), digest_size=16)
        for item in self.items:
            digest.update(f"{_stamp(self.root, item)}\n".encode("utf-8", "surrogateescape"))
        for index in range(len(self)):
            digest.update(f"{self.caption(index)}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def _stamp(root: Path, item: Item) -> str:
    """The item and the state of its file."""
    try:
        stat = (root / item.name).stat()
        return f"{item.identity}\0{stat.st_size}\0{stat.st_mtime_ns}"
    except OSError:
        return f"{item.identity}\0gone"


def _extents(root: Path, items: list[Item]) -> list[Extent | Unreadable]:
    def measure(place: int) -> Extent:
        item = items[place]
        extent = extent_of(root / item.name, PurePosixPath(item.name).suffix, item.identity)
        if item.span is None:
            return extent
        seconds = min(item.span.end, extent.seconds) - item.span.start
        if seconds <= 0:
            raise Unreadable(
                item.identity, f"its clip begins at {item.span.start:g} s, and it has {extent.seconds:.3g} s"
            )
        return extent._replace(frames=max(1, round(extent.frames * seconds / extent.seconds)), seconds=seconds)

    return measure_all([_stamp(root, item) for item in items], measure, memory_of(str(root)), f"data.folder={root}")


def _sketch_files(config: FolderConfig, names: list[str]) -> dict[str, Path]:
    """The sketch of each item, by name without its ending; all of them must be there."""
    root = Path(config.sketches or "").expanduser()
    found = {
        str(PurePosixPath(name).with_suffix("")): root / name for name in list_folder(root, "data.sketches=").media
    }
    missing = [name for name in names if str(PurePosixPath(name).with_suffix("")) not in found]
    if missing:
        raise InputError(
            f"data.sketches={config.sketches} has no sketch for {len(missing)} of {len(names)} items, the first of them {missing[0]}: "
            "name each sketch as its picture or clip"
        )
    return {name: found[str(PurePosixPath(name).with_suffix(""))] for name in names}


SOURCE = Folder
