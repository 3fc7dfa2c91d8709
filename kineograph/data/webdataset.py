"""Tar shards in webdataset's format. Files get an offset index, so that any sample is one seek away and shards are read like any other
source: global order, exact epochs, exact resume. Pipes, URLs and compressed tars are streamed (webdataset_stream.py)."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kineograph.core.batch import Sample
from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.core.protocols import Source
from kineograph.core.safe_media import check_bytes
from kineograph.data.buckets import Bucket, BucketedSource, BucketsConfig, MediaInfo, assign_buckets
from kineograph.data.decode import decode_media, probe_media, raise_unreadable
from kineograph.data.fit_summary import MeasuresItems, has_colour
from kineograph.data.open_source import Split, select_split
from kineograph.data.probe import list_unreadable, probe_all
from kineograph.data.shards import Shard, find_shards, shards_error
from kineograph.data.tar import TarIndex, index_shards
from kineograph.data.webdataset_samples import (
    CAPTION_HELP,
    EMBEDDINGS,
    Member,
    Record,
    SampleDecoder,
    WebDatasetConfig,
)

_OPEN_FILES = 64  # per thread
_EMBEDDING_TRIES = 100  # embeddings read until one has a shape


class _Ranges(NamedTuple):
    """Byte ranges of one field's members, a row per sample."""

    offsets: np.ndarray
    sizes: np.ndarray
    suffixes: np.ndarray  # number of the suffix in the field's list; −1: the sample has none

    def take(self, rows: np.ndarray) -> _Ranges:
        return _Ranges(self.offsets[rows], self.sizes[rows], self.suffixes[rows])


class _Table:
    """All samples of all shards, as columns: there may be millions."""

    def __init__(self, indexes: Sequence[TarIndex], decoder: SampleDecoder) -> None:
        keys = [key.encode("utf-8", "surrogateescape") for index in indexes for key in index.keys]
        self.keys = np.array(keys, dtype=np.bytes_)
        self.shards = np.repeat(np.arange(len(indexes), dtype=np.int32), [len(index.keys) for index in indexes])
        self.ranges: dict[str, _Ranges] = {}
        for field, suffixes in decoder.suffixes.items():
            columns = zip(*(index.find(suffixes) for index in indexes), strict=True)
            offsets, sizes, kinds = (np.concatenate(column) for column in columns)
            self.ranges[field] = _Ranges(offsets, sizes, kinds.astype(np.int16))
        self.embedding_rows: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, row: int) -> str:
        return self.keys[row].decode("utf-8", "surrogateescape")

    def fields(self, row: int) -> list[str]:
        return [field for field, ranges in self.ranges.items() if ranges.suffixes[row] >= 0]

    def keep(self, rows: np.ndarray) -> None:
        self.keys, self.shards = self.keys[rows], self.shards[rows]
        self.ranges = {field: ranges.take(rows) for field, ranges in self.ranges.items()}
        self.embedding_rows = {field: numbers[rows] for field, numbers in self.embedding_rows.items()}


class WebDataset(BucketedSource, MeasuresItems):
    Config = WebDatasetConfig
    caption_help = CAPTION_HELP

    def __init__(
        self,
        config: WebDatasetConfig,
        shards: Sequence[Shard],
        decoder: SampleDecoder,
        table: _Table,
        split: Split,
        stamps: Sequence[str],
    ) -> None:
        self.config, self.shards, self.decoder, self._table = config, list(shards), decoder, table
        self.fields = decoder.fields
        self.resample = config.resample and split == "train"
        self.skipped: dict[str, str] = {}
        self._stamps = stamps
        self._files = threading.local()

    @classmethod
    def open(cls, config: WebDatasetConfig, split: Split, seed: int) -> Source:
        shards = find_shards(config.shards, config.start_shard, config.end_shard, config.shard_width)
        has_streams = any(shard.is_stream for shard in shards)
        if config.buckets is not None and (not config.pixels or has_streams):
            why = "data.pixels=false reads none"
            if config.pixels:
                why = "a stream's samples cannot be measured in advance: download the shards"
            raise ConfigError(f"data.buckets sorts images and clips by size, and {why}; or remove data.buckets")
        if has_streams:
            from kineograph.data.webdataset_stream import open_stream

            return open_stream(config, shards, split)
        readable: list[Shard] = []
        indexes: list[TarIndex] = []
        skipped: dict[str, str] = {}
        for shard, index in zip(shards, index_shards(shards), strict=True):
            if isinstance(index, OSError):
                skipped[shard.name] = f"the shard cannot be read: {index.strerror or index}"
                continue
            readable.append(shard)
            indexes.append(index)
            if index.problem:
                skipped[shard.name] = f"the shard {index.problem}"
        _check_shard_count(shards, len(indexes), skipped, config.max_unreadable)
        return cls._open_indexed(config, split, readable, indexes, skipped)

    @classmethod
    def _open_indexed(
        cls,
        config: WebDatasetConfig,
        split: Split,
        shards: list[Shard],
        indexes: list[TarIndex],
        skipped: dict[str, str],
    ) -> WebDataset:
        decoder = SampleDecoder(config, split, shards)
        table = _Table(indexes, decoder)
        decoder.has_captions = bool((table.ranges["caption"].suffixes >= 0).any())
        source = cls(config, shards, decoder, table, split, [index.stamp for index in indexes])
        source._drop_incomplete(skipped, indexes)
        source._learn_shapes()
        if config.buckets is not None:
            source._assign_buckets(config.buckets)
        selected = select_split([source.identity(row) for row in range(len(table))], split, config)
        table.keep(selected.indices)
        source.buckets = source.buckets and source.buckets.subset(selected.indices)
        source.note = "; ".join(filter(None, [source.note, selected.note])) or None
        return source

    def _drop_incomplete(self, skipped: dict[str, str], indexes: Sequence[TarIndex]) -> None:
        """Drop samples that lack a required member or embedding, and count them."""
        table, total = self._table, len(self._table)
        kept = np.ones(total, bool)
        complete = np.ones(total, bool)
        for ranges in table.ranges.values():
            complete &= ranges.suffixes >= 0
        for row in np.flatnonzero(~complete).tolist():
            reason = self.decoder.missing_reason(table.fields(row))
            if reason:
                kept[row], skipped[self.identity(row)] = False, reason
        for field in self.decoder.aligned:
            table.embedding_rows[field] = np.full(total, -1, np.int64)
        for row in np.flatnonzero(kept).tolist() if self.decoder.aligned else ():
            rows, reason = self.decoder.find_rows(int(table.shards[row]), table.key(row))
            if reason:
                kept[row], skipped[self.identity(row)] = False, reason
            for field, number in rows.items():
                table.embedding_rows[field][row] = number
        dropped = total - int(kept.sum())
        if dropped > self.config.max_unreadable * total or dropped == total:
            raise InputError(_describe_dropped(dropped, total, skipped, indexes, self.config))
        if skipped:
            common = "; ".join(f"{count} × {reason}" for reason, count in Counter(skipped.values()).most_common(3))
            self.note = f"data.shards: {len(self.shards)} shards, {dropped} of {total} samples are left out: {common}"
        self.skipped = skipped
        table.keep(np.flatnonzero(kept))

    def _assign_buckets(self, config: BucketsConfig) -> None:
        """Assign every sample to a bucket; drop those that cannot be probed."""
        names = [self.identity(row) for row in range(len(self._table))]
        shards = self._table.shards.tolist()
        trim = f"\0{self.config.trim}" if self.config.trim else ""
        stamps = [f"{name}\0{self._stamps[shard]}{trim}" for name, shard in zip(names, shards, strict=True)]
        infos = probe_all(stamps, self.measure, "\n".join(shard.url for shard in self.shards), "data.shards")
        self.skipped |= list_unreadable(names, infos, self.config.max_unreadable)
        self._table.keep(np.flatnonzero([isinstance(info, MediaInfo) for info in infos]))
        readable = [info for info in infos if isinstance(info, MediaInfo)]
        self.buckets = assign_buckets(readable, config, self.config.base_shape, self.config.fps)

    def _learn_shapes(self) -> None:
        for field in set(EMBEDDINGS) & set(self._table.ranges):
            for row in np.flatnonzero(self._table.ranges[field].sizes > 0)[:_EMBEDDING_TRIES].tolist():
                with suppress(Unreadable):
                    self.decoder.learn_shapes({field: self._read_member(field, row, field)})
                    break

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        return self.read_as(index, self.buckets.shape(index) if self.buckets else self.config.base_shape, rng)

    def read_as(self, index: int, shape: Bucket, rng: np.random.Generator) -> Sample:
        return self.decoder.decode(self._read_record(index, self._table.fields(index)), rng, shape)

    def measure(self, index: int) -> MediaInfo:
        name = self.identity(index)
        member = self._read_member("media", index, name)
        info = probe_media(member.data, f".{member.suffix}", name, limits=self.config.limits)
        with raise_unreadable(name):
            return self.config.trim.measure(info)

    def is_coloured(self, index: int) -> bool:
        name = self.identity(index)
        member, options = self._read_member("media", index, name), self.config.decode_options("validation")
        options = replace(options, channels=3, frames=1)
        clip = decode_media(member.data, f".{member.suffix}", name, options, np.random.default_rng(0))
        return has_colour(clip.pixels)

    def caption(self, index: int) -> str | None:
        return next(iter(self.captions(index)), None)

    def captions(self, index: int) -> Sequence[str]:
        fields = [field for field in self._table.fields(index) if field == "caption"]
        with suppress(Unreadable):  # counted when the sample is read
            return self.decoder.decode_captions(self._read_record(index, fields))
        return ()

    def has_several_captions(self) -> bool:
        kinds = np.unique(self._table.ranges["caption"].suffixes)
        may_list = any(self.decoder.suffixes["caption"][kind].endswith("json") for kind in kinds if kind >= 0)
        return (may_list or self.config.caption_lines == "several") and super().has_several_captions()

    def identity(self, index: int) -> str:
        return f"{self.shards[self._table.shards[index]].name}:{self._table.key(index)}"

    def list_missing_captions(self) -> list[str]:
        """By the names of the members, unless they are refused: else an empty caption is counted when its sample is read."""
        if self.config.uncaptioned == "refuse":
            return [self.identity(row) for row in range(len(self)) if not self.captions(row)]
        return [self.identity(row) for row in np.flatnonzero(self._table.ranges["caption"].suffixes < 0).tolist()]

    def item_states(self) -> list[str]:
        shards = [
            "\0".join([shard.url, stamp, *(aligned.stamp(number) for aligned in self.decoder.aligned.values())])
            for number, (shard, stamp) in enumerate(zip(self.shards, self._stamps, strict=True))
        ]
        # A key may occur twice in a shard, so include the members' offsets.
        offsets = zip(*(ranges.offsets.tolist() for ranges in self._table.ranges.values()), strict=True)
        return [
            f"{shards[shard]}\0{self.identity(row)}\0{at}"
            for row, (shard, at) in enumerate(zip(self._table.shards.tolist(), offsets, strict=True))
        ]

    def items_digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        offsets = zip(*(ranges.offsets.tolist() for ranges in self._table.ranges.values()), strict=True)
        for row, at in enumerate(offsets):
            digest.update(f"{self.identity(row)}\0{at}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self.config.model_dump_json().encode(), digest_size=16)
        for shard, stamp in zip(self.shards, self._stamps, strict=True):
            digest.update(f"{shard.name}\0{stamp}\n".encode("utf-8", "surrogateescape"))
        for aligned in self.decoder.aligned.values():
            digest.update(aligned.stamp().encode())
        return digest.hexdigest()

    def _read_record(self, index: int, fields: Sequence[str]) -> Record:
        name, table = self.identity(index), self._table
        rows = {field: int(numbers[index]) for field, numbers in table.embedding_rows.items()}
        members = {field: self._read_member(field, index, name) for field in fields}
        return Record(name, int(table.shards[index]), rows, members)

    def _read_member(self, field: str, index: int, name: str) -> Member:
        ranges = self._table.ranges[field]
        size = int(ranges.sizes[index])
        with raise_unreadable(name):
            check_bytes(size, self.config.limits)
            data = os.pread(self._file_descriptor(int(self._table.shards[index])), size, int(ranges.offsets[index]))
        if len(data) < size:
            raise Unreadable(name, "the shard became shorter while it was read")
        return Member(data, self.decoder.suffixes[field][ranges.suffixes[index]])

    def _file_descriptor(self, shard: int) -> int:
        """An open file of this thread; the least recently used are closed."""
        files: OrderedDict[int, Any] = self._files.__dict__.setdefault("open", OrderedDict())
        if shard not in files:
            if len(files) >= _OPEN_FILES:
                files.popitem(last=False)[1].close()
            files[shard] = open(self.shards[shard].url, "rb", buffering=0)  # noqa: SIM115
        files.move_to_end(shard)
        return files[shard].fileno()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files=threading.local())


def _check_shard_count(shards: Sequence[Shard], readable: int, skipped: dict[str, str], limit: float) -> None:
    unreadable = len(shards) - readable
    if not readable or unreadable > limit * len(shards):
        name, reason = next(iter(skipped.items()))
        raise shards_error(
            shards,
            f"{unreadable} of the {len(shards)} shards of data.shards cannot be read (data.max_unreadable={limit:g}), "
            f"for example {name}: {reason}",
        )


def _describe_dropped(
    dropped: int, total: int, skipped: dict[str, str], indexes: Sequence[TarIndex], config: WebDatasetConfig
) -> str:
    if not total:
        problem = next((index.problem for index in indexes if index.problem), "")
        reason = f"a shard {problem}" if problem else "members must be named KEY.jpg, KEY.txt …"
        return f"data.shards={config.shards!r} holds no samples: {reason}"
    (reason, _), *_ = Counter(skipped.values()).most_common(1)
    if reason.startswith("no caption"):
        reason += "; data.uncaptioned=empty trains such samples on the null text, a higher data.max_unreadable leaves them out"
    suffixes = sorted({suffix for index in indexes for suffix in index.suffixes})
    return (
        f"{dropped} of {total} samples in data.shards cannot be used (data.max_unreadable={config.max_unreadable:g}), most often: {reason}. "
        f"Their members end with {', '.join(suffixes[:12])}: set data.media, data.captions, data.image_embed … to what should be read"
    )


SOURCE = WebDataset
