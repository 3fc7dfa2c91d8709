"""Shards that can only be read from their beginning (pipes, URLs, compressed tars).

The shards of epoch 0, then those of epoch 1 … stand in one endless row, each epoch in an order of its own. Reader number r of R
(processes × workers) takes places r, r + R, r + 2 R … of it. So every shard comes once an epoch, each goes to one reader, and
nobody ever runs out: with fewer shards than readers, a reader's first shard is another one's of the next epoch. A reader with
short shards is further along in the row than one with long ones; all make the same number of steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kineograph.core.batch import Sample
from kineograph.core.errors import InputError, RunFailed, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.data.config import Split
from kineograph.data.order import drawn, items
from kineograph.data.shards import Shard, unusable
from kineograph.data.split import place_of
from kineograph.data.tar_stream import samples
from kineograph.data.webdataset_samples import Assembly, Part, WebDatasetConfig

ENDLESS = 2**40
_LEAST, _MOST = 2_000, 20_000  # samples that are looked at, for those that are kept and for captions
_ENOUGH = 4  # shards before their share of failures is judged


class Record(NamedTuple):
    """An encoded sample."""

    name: str
    shard: int
    rows: dict[str, int]
    parts: dict[str, Part]


def open_stream(config: WebDatasetConfig, shards: Sequence[Shard], split: Split) -> Streamed | Kept:
    """Training streams; what validation and test need lies in memory."""
    head = _head(config, tuple(shards))
    if split == "train":
        return Streamed(config, shards, head)
    if split == "test" and config.test == 0:
        raise InputError("there is no test split: data.test is 0; set data.test=0.1, for one")
    note = None
    records = head.kept[split]
    if not records and split == "validation" and config.validation == 0:
        records, note = head.kept["train"], "validating on training data: data.validation=0"
    if not records:
        raise InputError(
            f"none of the first {head.looked_at} samples of data.shards belongs to the {split} split: raise data.{split} (it is {config.model_dump()[split]:g})"
        )
    return Kept(config, shards, split, records, head.captioned, note)


class _Head(NamedTuple):
    """What the first samples show."""

    kept: dict[Split, list[Record]]
    captions: list[str]  # of training
    captioned: bool
    looked_at: int
    skipped: dict[str, str]


@lru_cache(maxsize=4)
def _head_of(text: str, shards: tuple[Shard, ...]) -> _Head:
    config = WebDatasetConfig.model_validate_json(text)
    assembly = Assembly(config, "train", shards)
    assembly.captioned = False  # unknown yet
    kept: dict[Split, list[Record]] = {"train": [], "validation": [], "test": []}
    due: list[Split] = ["train", *(name for name in ("validation", "test") if config.model_dump()[name] > 0)]  # type: ignore[list-item]
    captions: list[str] = []
    skipped: dict[str, str] = {}
    looked_at = 0
    for number, shard in enumerate(shards):
        try:
            for record in _records(assembly, config, number, shard, skipped):
                looked_at += 1
                split = split_of(record.name, config)
                if len(kept[split]) < config.kept:
                    kept[split].append(record)
                if split == "train" and "caption" in record.parts:
                    with suppress(Unreadable):
                        captions.append(assembly.caption(record.parts["caption"], record.name) or "")
                enough = looked_at >= _LEAST and all(len(kept[name]) >= config.kept for name in due)
                if enough or looked_at >= _MOST:
                    break
            else:
                continue
            break
        except Unreadable as error:
            skipped[error.path] = error.reason
    if not looked_at:
        name, reason = next(iter(skipped.items()), (shards[0].name, "no samples in it"))
        raise unusable(
            shards, f"no sample in the {len(shards)} shards of data.shards can be used, for instance {name}: {reason}"
        )
    everything = [record for records in kept.values() for record in records]
    captioned = any("caption" in record.parts for record in everything)
    if captioned and config.uncaptioned == "skip":
        kept = {name: [record for record in records if "caption" in record.parts] for name, records in kept.items()}
    return _Head(kept, captions, captioned, looked_at, skipped)


def _head(config: WebDatasetConfig, shards: tuple[Shard, ...]) -> _Head:
    return _head_of(config.model_dump_json(), shards)  # training and validation ask for the same


def split_of(identity: str, config: WebDatasetConfig) -> Split:
    """As data/split.py assigns them, of one sample alone."""
    place = place_of(identity)
    return "validation" if place < config.validation else "test" if place < config.validation + config.test else "train"


def _records(
    assembly: Assembly, config: WebDatasetConfig, number: int, shard: Shard, skipped: dict[str, str]
) -> Iterator[Record]:
    """The usable samples of one shard; raises Unreadable at the end of one that is not whole."""
    wanted = {ending for endings in assembly.endings.values() for ending in endings}
    for key, members in samples(shard, config.pipe_timeout, wanted.__contains__):
        name = f"{shard.name}:{key}"
        parts: dict[str, Part] = {}
        for field, endings in assembly.endings.items():
            ending = next((ending for ending in endings if ending in members), None)
            if ending is not None:
                parts[field] = Part(members[ending], ending)
        reason = assembly.lacking(parts)
        rows, rowless = assembly.rows(number, key)
        if reason or rowless:
            skipped[name] = reason or str(rowless)
        else:
            yield Record(name, number, rows, parts)


class Streamed:
    """The training split of shards that are streamed. The loader asks for `records` where other sources are asked for items."""

    Config = WebDatasetConfig

    def __init__(self, config: WebDatasetConfig, shards: Sequence[Shard], head: _Head) -> None:
        self.config, self.shards = config, list(shards)
        self.assembly = _assembly(config, "train", shards, head.captioned, head.kept["train"])
        self.gives = self.assembly.gives
        self.skipped = dict(head.skipped)
        self.note = (
            f"data.shards: {len(shards)} shards are streamed: their order is shuffled, then samples in a buffer of {config.shuffle_buffer}; "
            "what a step sees depends on train.workers, and resume goes back to the beginning of the oldest shard that was not done with"
        )
        self._captions = head.captions

    def __len__(self) -> int:
        return ENDLESS

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        raise RunFailed(
            f"sample {index} of a stream cannot be read by its number: download the shards to read them in any order"
        )

    def caption(self, index: int) -> str | None:
        """Of the first samples: what is known without reading it all."""
        return self._captions[index % len(self._captions)] or None if self._captions else None

    def identity(self, index: int) -> str:
        return f"stream:{index}"

    def missing_captions(self) -> list[str]:
        return [] if self.assembly.captioned else [f"{self.shards[0].name} …"]

    def records(
        self, seed: int, reader: int, readers: int, begun: int, skipped: dict[str, str]
    ) -> Iterator[tuple[int, Record]]:
        """Without end, shuffled in a buffer: (this reader's oldest shard that is not done with, encoded sample)."""
        # Nothing waits longer than an epoch of this reader, so that a sample does not meet its own return in the buffer.
        patience = -(-len(self.shards) // readers)
        buffer: list[tuple[int, Record]] = []
        waiting: Counter[int] = Counter()  # shard → its samples in the buffer
        turn, rng, late = -1, None, False

        def take(place: int) -> tuple[int, Record]:
            buffer[place], buffer[-1] = buffer[-1], buffer[place]
            oldest = min(waiting)
            of, record = buffer.pop()
            waiting[of] -= 1
            if not waiting[of]:
                del waiting[of]
            return oldest, record

        for now, record in self._in_order(seed, reader, readers, begun, skipped):
            if now != turn or rng is None:
                turn, rng = now, numpy_rng(seed, "shuffle", reader, now)
                while buffer and (late or min(waiting) <= turn - patience):
                    late = True
                    yield take(int(rng.integers(len(buffer))))
                late = False
            buffer.append((turn, record))
            waiting[turn] += 1
            if len(buffer) >= self.config.shuffle_buffer:
                yield take(int(rng.integers(len(buffer))))

    def _in_order(
        self, seed: int, reader: int, readers: int, begun: int, skipped: dict[str, str]
    ) -> Iterator[tuple[int, Record]]:
        turn, failed, empty = begun, 0, 0
        order = drawn if self.config.resample else items
        while True:
            number = int(order(seed, np.array([turn * readers + reader]), len(self.shards))[0])
            found = False
            try:
                for record in _records(self.assembly, self.config, number, self.shards[number], skipped):
                    if split_of(record.name, self.config) == "train":
                        found = True
                        yield turn, record
            except Unreadable as error:
                skipped[error.path] = error.reason
                failed += 1
            turn += 1
            empty = 0 if found else empty + 1
            self._refuse(failed, turn - begun, empty, skipped)

    def _refuse(self, failed: int, read: int, empty: int, skipped: dict[str, str]) -> None:
        limit = self.config.max_unreadable
        if empty < max(len(self.shards), _ENOUGH) and not (read >= _ENOUGH and failed > max(limit * read, 1)):
            return
        name, reason = next(reversed(skipped.items()), ("data.shards", "no samples of the training split"))
        raise RunFailed(
            f"{failed} of the last {read} shards could not be read to their end (data.max_unreadable={limit:g}), the last one {name}: {reason}"
        )

    def decode(self, record: Record, rng: np.random.Generator) -> Sample:
        return self.assembly.sample(record.name, record.shard, record.rows, record.parts, rng)


class Kept:
    """A few samples of a stream, encoded as they came, in memory."""

    Config = WebDatasetConfig

    def __init__(
        self,
        config: WebDatasetConfig,
        shards: Sequence[Shard],
        split: Split,
        records: list[Record],
        captioned: bool,
        note: str | None,
    ) -> None:
        self.config, self._records, self.note = config, records, note
        self.assembly = _assembly(config, split, shards, captioned, records)
        self.gives = self.assembly.gives

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        record = self._records[index]
        return self.assembly.sample(record.name, record.shard, record.rows, record.parts, rng)

    def caption(self, index: int) -> str | None:
        record = self._records[index]
        try:
            return self.assembly.caption(record.parts["caption"], record.name) if "caption" in record.parts else None
        except Unreadable:
            return None

    def identity(self, index: int) -> str:
        return self._records[index].name

    def missing_captions(self) -> list[str]:
        return [record.name for record in self._records if "caption" not in record.parts]


def _assembly(
    config: WebDatasetConfig, split: Split, shards: Sequence[Shard], captioned: bool, records: list[Record]
) -> Assembly:
    made = Assembly(config, split, shards)
    made.captioned = captioned
    for record in records:
        with suppress(Unreadable):
            made.learn_shapes(record.parts)
    return made
