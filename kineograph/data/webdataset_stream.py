"""Shards that can only be read from their beginning (pipes, URLs, compressed tars).

The shards of epoch 0, then those of epoch 1 … form one endless sequence, each epoch in its own order. Reader r of R (processes × workers)
takes positions r, r + R, r + 2 R … of it. So every shard comes once per epoch, each goes to one reader, and no reader runs out, even with
fewer shards than readers. Readers of short shards advance further than others; all make the same number of steps.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kineograph.core.batch import Sample
from kineograph.core.errors import InputError, RunFailed, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Source, Stream
from kineograph.data.open_source import Split, hash_to_unit
from kineograph.data.order import ItemOrder
from kineograph.data.shards import Shard, shards_error
from kineograph.data.tar import stream_samples
from kineograph.data.webdataset_samples import CAPTION_HELP, Member, Record, SampleDecoder, WebDatasetConfig

ENDLESS = 2**40
_MIN_HEAD, _MAX_HEAD = 2_000, 20_000  # samples read at the start, for the held-out splits and for captions
_MIN_SHARDS = 4  # shards read before the share of failures is judged


def open_stream(config: WebDatasetConfig, shards: Sequence[Shard], split: Split) -> Source:
    """Training is streamed; validation and test are the first samples, in temporary files."""
    head = _read_head(config.model_dump_json(), tuple(shards))  # cached for the other splits
    if split == "train":
        return WebDatasetStream(config, shards, head)
    if split == "test" and config.test == 0:
        raise InputError("there is no test split: data.test is 0; set data.test=0.1, for example")
    note = None
    records = head.kept[split]
    if not records and split == "validation" and config.validation == 0:
        records, note = head.kept["train"], "validating on training data: data.validation=0"
    if not records:
        share = config.validation if split == "validation" else config.test
        raise InputError(
            f"none of the first {head.samples} samples of data.shards belongs to the {split} split: raise data.{split} (it is {share:g})"
        )
    return StreamHead(config, shards, split, records, head.has_captions, note)


def _remove_own(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


class RecordFile(Sequence[Record]):
    """Encoded samples in a temporary file, which is deleted when this process ends: held-out samples take no memory."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="kineograph-stream-")
        # Not TemporaryDirectory: a forked process that drops its copy would delete the file of this one.
        weakref.finalize(self, _remove_own, folder, os.getpid())
        self._path = os.path.join(folder, "samples")
        self._rows: list[tuple[str, int, dict[str, int], dict[str, tuple[int, int, str]]]] = []
        self._size = 0

    def append(self, record: Record) -> None:
        places: dict[str, tuple[int, int, str]] = {}
        with open(self._path, "ab") as file:
            for field, member in record.members.items():
                file.write(member.data)
                places[field] = (self._size, len(member.data), member.suffix)
                self._size += len(member.data)
        self._rows.append((record.name, record.shard, record.rows, places))

    def keep(self, fields: Collection[str]) -> None:
        """Drop the samples without these fields."""
        self._rows = [row for row in self._rows if set(fields) <= row[3].keys()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        name, shard, rows, places = self._rows[index]
        members = {}
        with open(self._path, "rb") as file:
            for field, (start, size, suffix) in places.items():
                file.seek(start)
                members[field] = Member(file.read(size), suffix)
        return Record(name, shard, rows, members)


class _Head(NamedTuple):
    """The first samples of a stream."""

    kept: dict[Split, RecordFile]
    captions: list[str]  # of the training split
    missing: list[str]  # training samples without one
    has_captions: bool
    samples: int
    skipped: dict[str, str]


@lru_cache(maxsize=4)
def _read_head(config_json: str, shards: tuple[Shard, ...]) -> _Head:
    config = WebDatasetConfig.model_validate_json(config_json)
    decoder = SampleDecoder(config, "train", shards)
    decoder.has_captions = False  # not known yet
    kept: dict[Split, RecordFile] = {"train": RecordFile(), "validation": RecordFile(), "test": RecordFile()}
    captions: list[str] = []
    missing: list[str] = []
    skipped: dict[str, str] = {}

    shares = {"train": 1.0, "validation": config.validation, "test": config.test}
    # Twice as many samples as hold so many of the smallest split on average.
    limit = max(_MAX_HEAD, round(2 * config.kept / min(share for share in shares.values() if share)))

    def is_enough(count: int) -> bool:
        full = {name for name, records in kept.items() if len(records) >= config.kept}
        return count >= limit or (
            count >= _MIN_HEAD and all(not share or name in full for name, share in shares.items())
        )

    count = 0
    for record in _iterate_head(decoder, config, shards, skipped):
        count += 1
        split = assign_split(record.name, config)
        if len(kept[split]) < config.kept:
            kept[split].append(record)
        if split == "train":
            with suppress(Unreadable):
                texts = decoder.decode_captions(record)
                captions += texts
                missing += [] if texts else [record.name]
        if is_enough(count):
            break
    if not count:
        name, reason = next(iter(skipped.items()), (shards[0].name, "no samples in it"))
        raise shards_error(
            shards, f"no sample in the {len(shards)} shards of data.shards can be used, for example {name}: {reason}"
        )
    has_captions = any("caption" in record.members for records in kept.values() for record in records)
    if has_captions and config.uncaptioned == "skip":
        for records in kept.values():
            records.keep({"caption"})
        missing = []
    return _Head(kept, captions, missing, has_captions, count, skipped)


def _iterate_head(
    decoder: SampleDecoder, config: WebDatasetConfig, shards: Sequence[Shard], skipped: dict[str, str]
) -> Iterator[Record]:
    failed = 0
    for number, shard in enumerate(shards):
        try:
            yield from _iterate_records(decoder, config, number, shard, skipped)
        except Unreadable as error:
            skipped[error.path] = error.reason
            failed += 1
        read = number + 1
        if read >= _MIN_SHARDS and failed == read:  # thousands more would fail one by one
            return


def assign_split(identity: str, config: WebDatasetConfig) -> Split:
    """The split of one sample, as in data/open_source.py."""
    position = hash_to_unit(identity, config.split_seed)
    if position < config.validation:
        return "validation"
    return "test" if position < config.validation + config.test else "train"


def _iterate_records(
    decoder: SampleDecoder, config: WebDatasetConfig, number: int, shard: Shard, skipped: dict[str, str]
) -> Iterator[Record]:
    """The usable samples of one shard; raises Unreadable at the end of a damaged one."""
    wanted = {suffix for suffixes in decoder.suffixes.values() for suffix in suffixes}
    for key, files in stream_samples(shard, config.pipe_timeout, wanted.__contains__, config.limits):
        name = f"{shard.name}:{key}"
        members: dict[str, Member] = {}
        for field, suffixes in decoder.suffixes.items():
            suffix = next((suffix for suffix in suffixes if suffix in files), None)
            if suffix is not None:
                members[field] = Member(files[suffix], suffix)
        rows, no_row = decoder.find_rows(number, key)
        reason = decoder.missing_reason(members) or no_row
        if reason:
            skipped[name] = reason
        else:
            yield Record(name, number, rows, members)


class WebDatasetStream(Stream):
    """The training split of streamed shards."""

    Config = WebDatasetConfig
    caption_help = CAPTION_HELP

    def __init__(self, config: WebDatasetConfig, shards: Sequence[Shard], head: _Head) -> None:
        self.config, self.shards = config, list(shards)
        self.decoder = _build_decoder(config, "train", shards, head.has_captions, head.kept["train"])
        self.fields = self.decoder.fields
        self.skipped = dict(head.skipped)
        self.note = (
            f"data.shards: {len(shards)} shards are streamed"
            + (
                f": their order is shuffled, then samples in a buffer of {config.shuffle_buffer}; "
                if config.shuffle
                else "; "
            )
            + "batches depend on train.workers, and resume restarts at the beginning of the oldest unfinished shard"
        )
        self._captions, self._missing = head.captions, head.missing

    def __len__(self) -> int:
        return ENDLESS

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        raise RunFailed(f"sample {index} of a stream cannot be read by index: download the shards for random access")

    def caption(self, index: int) -> str | None:
        """Captions of the first samples, repeated."""
        return self._captions[index % len(self._captions)] or None if self._captions else None

    def identity(self, index: int) -> str:
        return f"stream:{index}"

    def list_missing_captions(self) -> list[str]:
        """Of the first samples; later ones are counted when they are read."""
        if not self.decoder.has_captions:
            return [f"{self.shards[0].name} …"]
        return self._missing

    def records(
        self, seed: int, reader: int, readers: int, first_shard: int, skipped: dict[str, str]
    ) -> Iterator[tuple[int, Record]]:
        """Endless, through a shuffle buffer: (this reader's oldest unfinished shard, encoded sample)."""
        # No sample waits longer than an epoch of this reader, so that it never meets its own repetition in the buffer.
        max_age = -(-len(self.shards) // readers)
        buffer: list[tuple[int, Record]] = []
        buffered: Counter[int] = Counter()  # shard → its samples in the buffer
        current, rng = -1, numpy_rng(seed, "shuffle", reader, -1)

        def pop() -> tuple[int, Record]:
            index = int(rng.integers(len(buffer)))
            buffer[index], buffer[-1] = buffer[-1], buffer[index]
            oldest = min(buffered)
            shard, record = buffer.pop()
            buffered[shard] -= 1
            if not buffered[shard]:
                del buffered[shard]
            return oldest, record

        for shard, record in self._iterate_in_order(seed, reader, readers, first_shard, skipped):
            if shard != current:
                current, rng = shard, numpy_rng(seed, "shuffle", reader, shard)
                if buffer and min(buffered) <= current - max_age:
                    while buffer:
                        yield pop()
            buffer.append((current, record))
            buffered[current] += 1
            if len(buffer) >= (self.config.shuffle_buffer if self.config.shuffle else 1):
                yield pop()

    def _iterate_in_order(
        self, seed: int, reader: int, readers: int, first_shard: int, skipped: dict[str, str]
    ) -> Iterator[tuple[int, Record]]:
        turn, failed, empty = first_shard, 0, 0
        order = ItemOrder(len(self.shards), seed, self.config.resample, self.config.shuffle)
        while True:
            number = int(order.pick(np.array([turn * readers + reader]))[0])
            is_empty = True
            try:
                for record in _iterate_records(self.decoder, self.config, number, self.shards[number], skipped):
                    if assign_split(record.name, self.config) == "train":
                        is_empty = False
                        yield turn, record
            except Unreadable as error:
                skipped[error.path] = error.reason
                failed += 1
            turn += 1
            empty = empty + 1 if is_empty else 0
            self._check_failures(failed, turn - first_shard, empty, skipped)

    def _check_failures(self, failed: int, count: int, empty: int, skipped: dict[str, str]) -> None:
        """Stop if too many shards are damaged, or if all are empty."""
        limit = self.config.max_unreadable
        too_many = count >= _MIN_SHARDS and failed > max(limit * count, 1)
        if too_many or empty >= max(len(self.shards), _MIN_SHARDS):
            name, reason = next(reversed(skipped.items()), ("data.shards", "no samples of the training split"))
            raise RunFailed(
                f"{failed} of the last {count} shards could not be read to their end (data.max_unreadable={limit:g}), the last one {name}: {reason}"
            )

    def decode(self, record: Record, rng: np.random.Generator) -> Sample:
        return self.decoder.decode(record, rng)


class StreamHead(Source):
    """A few encoded samples of a stream, in a temporary file."""

    Config = WebDatasetConfig

    def __init__(
        self,
        config: WebDatasetConfig,
        shards: Sequence[Shard],
        split: Split,
        records: Sequence[Record],
        has_captions: bool,
        note: str | None,
    ) -> None:
        self.config, self._records, self.note = config, records, note
        self.decoder = _build_decoder(config, split, shards, has_captions, records)
        self.fields = self.decoder.fields

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        return self.decoder.decode(self._records[index], rng)

    def caption(self, index: int) -> str | None:
        return next(iter(self.captions(index)), None)

    def captions(self, index: int) -> Sequence[str]:
        with suppress(Unreadable):
            return self.decoder.decode_captions(self._records[index])
        return ()

    def identity(self, index: int) -> str:
        return self._records[index].name

    def list_missing_captions(self) -> list[str]:
        if self.decoder.has_captions and self.config.uncaptioned == "skip":
            return []  # empty captions are counted when their samples are read
        return [record.name for index, record in enumerate(self._records) if not self.captions(index)]


def _build_decoder(
    config: WebDatasetConfig, split: Split, shards: Sequence[Shard], has_captions: bool, records: Sequence[Record]
) -> SampleDecoder:
    decoder = SampleDecoder(config, split, shards)
    decoder.has_captions, decoder.is_stream = has_captions, True
    for record in records:
        with suppress(Unreadable):
            decoder.learn_shapes(record.members)
    return decoder
