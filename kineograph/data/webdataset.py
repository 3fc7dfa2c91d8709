"""Tar shards, in webdataset's form. Files get an offset index, so that a sample anywhere in them is one seek away and they are
read like any other source: global order, exact epochs, exact resume. What can only be read from its beginning is streamed."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from kineograph.core.batch import Sample
from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.data.buckets import Bucket, Buckets, BucketsConfig, Extent, assign
from kineograph.data.config import Split
from kineograph.data.decode import reasons
from kineograph.data.extents import extent_of, measure_all, memory_of, refuse_many
from kineograph.data.shards import Shard, find_shards, unusable
from kineograph.data.split import select
from kineograph.data.tar_index import TarIndex, index_all
from kineograph.data.webdataset_samples import EMBEDDINGS, Assembly, Part, WebDatasetConfig

_OPEN_FILES = 64  # a thread
_TRIES = 100  # embeddings looked at until one can be read


class _Places(NamedTuple):
    """Where one field's members lie, a row a sample."""

    offsets: np.ndarray
    sizes: np.ndarray
    endings: np.ndarray  # number of the ending in the field's list; −1: the sample has none

    def take(self, rows: np.ndarray) -> _Places:
        return _Places(self.offsets[rows], self.sizes[rows], self.endings[rows])


class _Table:
    """All samples of all shards, as columns: there may be millions."""

    def __init__(self, indexes: Sequence[TarIndex], assembly: Assembly) -> None:
        keys = [key.encode("utf-8", "surrogateescape") for index in indexes for key in index.keys]
        self.keys = np.array(keys, dtype=np.bytes_)
        self.shards = np.repeat(np.arange(len(indexes), dtype=np.int32), [len(index.keys) for index in indexes])
        self.places: dict[str, _Places] = {}
        for field, endings in assembly.endings.items():
            columns = zip(*(index.find(endings) for index in indexes), strict=True)
            offsets, sizes, kinds = (np.concatenate(column) for column in columns)
            self.places[field] = _Places(offsets, sizes, kinds.astype(np.int16))
        self.rows: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, row: int) -> str:
        return self.keys[row].decode("utf-8", "surrogateescape")

    def fields(self, row: int) -> list[str]:
        return [field for field, places in self.places.items() if places.endings[row] >= 0]

    def keep(self, rows: np.ndarray) -> None:
        self.keys, self.shards = self.keys[rows], self.shards[rows]
        self.places = {field: places.take(rows) for field, places in self.places.items()}
        self.rows = {field: numbers[rows] for field, numbers in self.rows.items()}


class WebDataset:
    Config = WebDatasetConfig

    def __init__(
        self,
        config: WebDatasetConfig,
        shards: Sequence[Shard],
        assembly: Assembly,
        table: _Table,
        split: Split,
        stamps: Sequence[str],
    ) -> None:
        self.config, self.shards, self.assembly, self._table = config, list(shards), assembly, table
        self.gives = assembly.gives
        self.resample = config.resample and split == "train"
        self.skipped: dict[str, str] = {}
        """Samples and shards that are known to be of no use, with the reason."""
        self.note: str | None = None
        self.buckets: Buckets | None = None
        """What goes where, with data.buckets."""
        self._stamps = stamps
        self._files = threading.local()

    @classmethod
    def open(cls, config: WebDatasetConfig, split: Split, seed: int) -> Any:
        shards = find_shards(config.shards, config.start_shard, config.end_shard, config.shard_width)
        if config.buckets is not None and (not config.pixels or any(shard.streamed for shard in shards)):
            why = (
                "a stream's samples cannot be measured before they come: download the shards"
                if config.pixels
                else "data.pixels=false reads none"
            )
            raise ConfigError(f"data.buckets sorts pictures and clips by size, and {why}; or leave data.buckets out")
        if any(shard.streamed for shard in shards):
            from kineograph.data.webdataset_stream import open_stream

            return open_stream(config, shards, split)
        skipped: dict[str, str] = {}
        good: list[tuple[Shard, TarIndex]] = []
        for shard, index in zip(shards, index_all(shards), strict=True):
            if isinstance(index, OSError):
                skipped[shard.name] = f"the shard cannot be read: {index.strerror or index}"
            else:
                good.append((shard, index))
                if index.problem:
                    skipped[shard.name] = f"the shard {index.problem}"
        _refuse_shards(shards, len(good), skipped, config.max_unreadable)
        shards, indexes = [shard for shard, _ in good], [index for _, index in good]
        assembly = Assembly(config, split, shards)
        table = _Table(indexes, assembly)
        assembly.captioned = bool((table.places["caption"].endings >= 0).any())
        source = cls(config, shards, assembly, table, split, [index.stamp for index in indexes])
        source._leave_out(skipped, indexes)
        source._learn_shapes()
        if config.buckets is not None:
            source._sort(config.buckets)
        part = select([source.identity(row) for row in range(len(table))], split, config)
        table.keep(part.indices)
        source.buckets = source.buckets and source.buckets.only(part.indices)
        source.note = "; ".join(filter(None, [source.note, part.note])) or None
        return source

    def _leave_out(self, skipped: dict[str, str], indexes: Sequence[TarIndex]) -> None:
        """Drop samples that lack something which all need, and count them."""
        table, total = self._table, len(self._table)
        kept = np.ones(total, bool)
        whole = np.ones(total, bool)
        for places in table.places.values():
            whole &= places.endings >= 0
        for row in np.flatnonzero(~whole).tolist():
            reason = self.assembly.lacking(table.fields(row))
            if reason:
                kept[row], skipped[self.identity(row)] = False, reason
        for field in self.assembly.aligned:
            table.rows[field] = np.full(total, -1, np.int64)
        for row in np.flatnonzero(kept).tolist() if self.assembly.aligned else ():
            rows, reason = self.assembly.rows(int(table.shards[row]), table.key(row))
            if reason:
                kept[row], skipped[self.identity(row)] = False, reason
            for field, number in rows.items():
                table.rows[field][row] = number
        lost = total - int(kept.sum())
        if lost > self.config.max_unreadable * total or lost == total:
            raise InputError(_too_many(lost, total, skipped, indexes, self.config))
        if skipped:
            common = "; ".join(f"{count} × {reason}" for reason, count in Counter(skipped.values()).most_common(3))
            self.note = f"data.shards: {len(self.shards)} shards, {lost} of {total} samples are left out: {common}"
        self.skipped = skipped
        table.keep(np.flatnonzero(kept))

    def _sort(self, config: BucketsConfig) -> None:
        """Every sample to a bucket; drops those whose pictures cannot be measured."""
        names = [self.identity(row) for row in range(len(self._table))]

        def measure(row: int) -> Extent:
            part = self._part("media", row, names[row])
            return extent_of(part.data, f".{part.ending}", names[row])

        stamps = [
            f"{name}\0{self._stamps[shard]}" for name, shard in zip(names, self._table.shards.tolist(), strict=True)
        ]
        memory = memory_of("\n".join(shard.place for shard in self.shards))
        found = measure_all(stamps, measure, memory, "data.shards")
        bad = {name: error.reason for name, error in zip(names, found, strict=True) if isinstance(error, Unreadable)}
        refuse_many(bad, len(names), self.config.max_unreadable)
        self.skipped |= bad
        self._table.keep(np.flatnonzero([isinstance(extent, Extent) for extent in found]))
        extents = [extent for extent in found if isinstance(extent, Extent)]
        self.buckets = assign(extents, config, self.config.usual, self.config.fps)

    def _learn_shapes(self) -> None:
        for field in set(EMBEDDINGS) & set(self._table.places):
            having = np.flatnonzero(self._table.places[field].sizes > 0)[:_TRIES].tolist()
            for row in having:
                with suppress(Unreadable):
                    self.assembly.learn_shapes({field: self._part(field, row, field)})
                    break

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        return self.read_as(index, self.buckets.shape(index) if self.buckets else self.config.usual, rng)

    def read_as(self, index: int, shape: Bucket, rng: np.random.Generator) -> Sample:
        """The sample as a clip of this shape, whichever its bucket is."""
        name, table = self.identity(index), self._table
        parts = {field: self._part(field, index, name) for field in table.fields(index)}
        rows = {field: int(numbers[index]) for field, numbers in table.rows.items()}
        return self.assembly.sample(name, int(table.shards[index]), rows, parts, rng, shape)

    def caption(self, index: int) -> str | None:
        if self._table.places["caption"].endings[index] < 0:
            return None
        name = self.identity(index)
        try:
            return self.assembly.caption(self._part("caption", index, name), name)
        except Unreadable:  # counted when the sample is read
            return None

    def identity(self, index: int) -> str:
        return f"{self.shards[self._table.shards[index]].name}:{self._table.key(index)}"

    def missing_captions(self) -> list[str]:
        """By what lies in the tars; a caption that turns out to be empty is counted when its sample is read."""
        return [self.identity(row) for row in np.flatnonzero(self._table.places["caption"].endings < 0).tolist()]

    def states(self) -> list[str]:
        """Of each sample: what differs once its shard, or the embeddings that go with it, were written again."""
        shards = [
            "\0".join([shard.place, stamp, *(aligned.stamp(number) for aligned in self.assembly.aligned.values())])
            for number, (shard, stamp) in enumerate(zip(self.shards, self._stamps, strict=True))
        ]
        # Keys may come twice in a shard, so where members lie counts too.
        offsets = zip(*(places.offsets.tolist() for places in self._table.places.values()), strict=True)
        return [
            f"{shards[shard]}\0{self.identity(row)}\0{at}"
            for row, (shard, at) in enumerate(zip(self._table.shards.tolist(), offsets, strict=True))
        ]

    def fingerprint(self) -> str:
        """Changes when a shard comes, goes or is written again, or when it would be read differently."""
        digest = hashlib.blake2b(self.config.model_dump_json().encode(), digest_size=16)
        for shard, stamp in zip(self.shards, self._stamps, strict=True):
            digest.update(f"{shard.name}\0{stamp}\n".encode("utf-8", "surrogateescape"))
        for aligned in self.assembly.aligned.values():
            digest.update(aligned.stamp().encode())
        return digest.hexdigest()

    def _part(self, field: str, index: int, name: str) -> Part:
        """One member's bytes: exactly its range, straight into the object that the decoder reads."""
        places = self._table.places[field]
        size = int(places.sizes[index])
        with reasons(name):
            data = os.pread(self._handle(int(self._table.shards[index])), size, int(places.offsets[index]))
        if len(data) < size:
            raise Unreadable(name, "the shard became shorter while it was read")
        return Part(data, self.assembly.endings[field][places.endings[index]])

    def _handle(self, shard: int) -> int:
        """An open file of this thread; the ones used longest ago are closed."""
        if not hasattr(self._files, "open"):
            self._files.open = OrderedDict()
        files: OrderedDict[int, Any] = self._files.open
        if shard not in files:
            if len(files) >= _OPEN_FILES:
                files.popitem(last=False)[1].close()
            files[shard] = open(self.shards[shard].place, "rb", buffering=0)  # noqa: SIM115
        files.move_to_end(shard)
        return files[shard].fileno()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files=threading.local())


def _refuse_shards(shards: Sequence[Shard], good: int, skipped: dict[str, str], limit: float) -> None:
    bad = len(shards) - good
    if not good or bad > limit * len(shards):
        name, reason = next(iter(skipped.items()))
        raise unusable(
            shards,
            f"{bad} of the {len(shards)} shards of data.shards cannot be read (data.max_unreadable={limit:g}), "
            f"for instance {name}: {reason}",
        )


def _too_many(
    lost: int, total: int, skipped: dict[str, str], indexes: Sequence[TarIndex], config: WebDatasetConfig
) -> str:
    if not total:
        return f"data.shards={config.shards!r} holds no samples: members are named KEY.jpg, KEY.txt …"
    (reason, _), *_ = Counter(skipped.values()).most_common(1)
    endings = sorted({ending for index in indexes for ending in index.endings})
    return (
        f"{lost} of {total} samples in data.shards cannot be used (data.max_unreadable={config.max_unreadable:g}), most often: {reason}. "
        f"Members there end with {', '.join(endings[:12])}: data.media, data.captions and data.image_embed … name what is read"
    )


SOURCE = WebDataset
