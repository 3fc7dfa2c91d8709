"""Filling a cache: look up the keys of all items, divide the missing ones over the processes, encode and append them.

The next fill finds the rows that an interrupted one appended. Processes of one group divide the items exactly. Separate commands
skip rows that others have appended by the time they get to them; at worst they encode an item twice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kineograph.cache.encoders import Encoders
from kineograph.cache.keys import item_keys, set_key, stand_in_keys, to_bytes
from kineograph.cache.pack import KINDS, SIDE_FIELDS, PackWriter
from kineograph.cache.store import CacheSet, PackIndex, SetHeader, is_complete
from kineograph.core import distributed, heartbeat
from kineograph.core.batch import Batch, Shape
from kineograph.core.errors import InputError, RunFailed, Stopped
from kineograph.core.notes import Note
from kineograph.core.task import Task
from kineograph.data.buckets import Bucket
from kineograph.data.loader import Loader
from kineograph.train.config import TrainConfig
from kineograph.train.precision import autocast, resolve_precision
from kineograph.train.stop import StopRequest

BATCH = 256  # items that are encoded and written together, at most
BATCH_BYTES = 256 * 2**20  # of pixels, likewise
PACK = 4096  # items a pack, at most
PACK_BYTES = 2 * 2**30  # of pixels, likewise
_POLL = 0.5  # seconds between looks at what other processes have appended


@dataclass
class CacheContent:
    """The rows that a stage's cache should hold."""

    stage: str
    folder: Path  # of the packs and sets
    loader: Loader  # of the training data, for one process
    shape: Shape  # of the stage's clips
    recipe: str  # the key of how items are encoded
    precision: str  # cache_precision
    vocabulary: int | None = None  # of the codec, for tokens
    codec: str = ""  # digest of the codec's weights

    @property
    def usual(self) -> Bucket:
        """The clip shape of items without buckets."""
        return Bucket(self.shape.frames, self.shape.height, self.shape.width)

    @cached_property
    def keys(self) -> np.ndarray:
        """The key of each item."""
        return item_keys(self.loader.source, self.loader.buckets, self.usual)

    @cached_property
    def path(self) -> Path:
        """The folder of the set."""
        return self.folder / set_key(self.recipe, self.keys, self.loader.buckets)


class CacheFiller:
    """Encodes what a cache lacks: the work of one process."""

    def __init__(
        self,
        content: CacheContent,
        task: Task,
        train: TrainConfig,
        device: torch.device,
        stop: StopRequest,
        note: Note,
    ) -> None:
        self.content, self.task, self.train, self.device, self.stop = content, task, train, device, stop
        self.loader, self.buckets = content.loader, content.loader.buckets
        self.precision = resolve_precision(train.precision, device)
        shapes = len(self.buckets.shapes) if self.buckets is not None else 1
        self.encoders = Encoders(task, device, train.compile is not False and not train.deterministic, shapes, note)
        self.index = PackIndex(content.folder, content.recipe)
        self.encoded = 0  # items, by this process
        self.share = 0  # items that it has to encode
        self._progress = -1  # per cent, as shown last

    @torch.no_grad()
    def fill(self) -> int:
        """Encode the items that have no row yet and write the set. → how many were encoded, by all processes."""
        was_training = self.task.training
        self.task.eval()
        try:
            self._encode_missing()
        finally:
            self.task.train(was_training)
        if distributed.is_first() and not is_complete(self.content.path):
            self._write_set()
        results = distributed.all_gather_object([self.encoded, self.loader.skipped])
        for _, skipped in results:
            self.loader.skipped.update(skipped)
        return sum(encoded for encoded, _ in results)

    def _encode_missing(self) -> None:
        items = np.arange(len(self.content.keys))
        missing = self._select_missing(items)
        # Separate commands may append at this moment: all processes must divide the same items.
        while len(set(distributed.all_gather_object(hashlib.sha256(missing.tobytes()).hexdigest()))) > 1:
            missing = self._select_missing(items)
        self.loader.count_as_read(len(items) - len(missing))
        packs = self._divide(missing)
        self.share = sum(len(items) for _, items in packs)
        for shape, items in packs:
            self._encode(items, shape, missing)
        # No collective here: one process may need much longer than another.
        missing, since = self._select_missing(missing), time.monotonic()
        while len(missing):
            self._raise_if_stopped()
            if time.monotonic() - since > self.train.timeout:
                raise RunFailed(
                    f"no other process has encoded anything for {self.train.timeout:g} s: run the same command to go on"
                )
            time.sleep(_POLL)
            before, missing = len(missing), self._select_missing(missing)
            since = time.monotonic() if len(missing) < before else since

    def _select_missing(self, items: np.ndarray) -> np.ndarray:
        return items[self._find(items)[:, 0] < 0]

    def _write_set(self) -> None:
        rows = self._find(np.arange(len(self.content.keys)))
        used, first, rows[:, 0] = np.unique(rows[:, 0], return_index=True, return_inverse=True)
        header: dict[str, Any] = {"packs": [self.index.packs[number].folder.name for number in used]}
        if self.buckets is not None:
            header |= {"shapes": self.buckets.shapes, "bucket_of": self.buckets.item_buckets[first].tolist()}
            header |= {"usual": self.content.usual, "buckets": self.buckets.config}
        CacheSet(self.content.path, SetHeader.model_validate(header), rows).write()

    def _find(self, items: np.ndarray) -> np.ndarray:
        """N 2: the pack and row of each of these items, or of what stands in for it; −1 where there is none."""
        self.index.refresh()
        keys = self.content.keys[items]
        rows = self.index.find(keys)
        absent = rows[:, 0] < 0
        rows[absent] = self.index.find(stand_in_keys(keys[absent], self.content.path.name))
        return rows

    def _divide(self, missing: np.ndarray) -> list[tuple[Bucket | None, np.ndarray]]:
        """This process's packs. Batches are dealt out in turn, so they do not depend on the number of processes."""
        groups: list[tuple[Bucket | None, np.ndarray]] = [(None, missing)]
        if self.buckets is not None:
            of = self.buckets.item_buckets[missing]
            groups = [(shape, missing[of == bucket]) for bucket, shape in enumerate(self.buckets.shapes)]
        batches = [
            (shape, items[start : start + self._batch_size(shape)])
            for shape, items in groups
            for start in range(0, len(items), self._batch_size(shape))
        ]
        packs: list[tuple[Bucket | None, list[np.ndarray]]] = []
        for shape, items in batches[distributed.rank() :: distributed.world()]:
            limit = max(1, min(PACK, PACK_BYTES // self._pixel_bytes(shape)))
            if not packs or packs[-1][0] != shape or sum(map(len, packs[-1][1])) + len(items) > limit:
                packs.append((shape, []))
            packs[-1][1].append(items)
        # Separate commands begin at different packs and skip what they find appended when they come round.
        start = os.getpid() % len(packs) if packs and distributed.world() == 1 else 0
        return [(shape, np.concatenate(parts)) for shape, parts in packs[start:] + packs[:start]]

    def _encode(self, items: np.ndarray, shape: Bucket | None, missing: np.ndarray) -> None:
        """Append these items to a pack of their own, except those that another command has appended meanwhile."""
        items = self._select_missing(items)
        writer: PackWriter | None = None
        start = 0
        try:
            for batch in self.loader.ordered_batches(items, self._batch_size(shape), shape):
                part, start = items[start : start + len(batch)], start + len(batch)
                with autocast(self.precision, self.device):
                    remaining = self.share - self.encoded - len(batch)
                    fields = self.encoders.encode(batch, self._micro_batch(shape), remaining)
                fields = self._select_fields(fields, batch, (shape or self.content.usual).frames)
                if writer is None:
                    if not self.encoded:
                        self._check_disk(fields, shape, missing)
                    writer = self._create_pack(fields, len(items))
                identities = [self.loader.source.identity(item) for item in part.tolist()]
                texts = batch.texts or [(caption,) for caption in batch.captions or ()]
                writer.append(fields, self._row_keys(part), identities, texts)
                self.encoded += len(batch)
                heartbeat.beat()
                self._show_progress()
                self._raise_if_stopped()
        except OSError as error:
            raise RunFailed(
                f"cannot write the cache of {self.content.stage} to {self.content.folder}: {error.strerror or error}; free disk "
                f"space or fix the permissions and run the same command to go on ({self.encoded} items of this call are kept)"
            ) from error
        finally:
            if writer is not None:
                with suppress(OSError):  # a full disk refuses what is still buffered
                    writer.close()

    def _raise_if_stopped(self) -> None:
        if self.stop:
            raise Stopped(
                f"stopped by {self.stop.signal_name} while encoding the data of {self.content.stage} ({self.encoded} items encoded by this call); "
                "run the same command to go on"
            )

    def _select_fields(self, fields: dict[str, Tensor], batch: Batch, frames: int) -> dict[str, Tensor]:
        """The fields of a row: one of KINDS, what goes with it, and the batch's frame mask and fps."""
        kind = next(kind for kind in KINDS if kind in fields)
        selected = {name: fields[name] for name in (kind, *SIDE_FIELDS) if name in fields}
        if frames > 1:  # clips may stand beside stills and shorter ones
            full = torch.ones(len(batch), frames, dtype=torch.bool)
            selected["frame_mask"] = batch.frame_mask if batch.frame_mask is not None else full
        fps = torch.full((len(batch),), self.content.shape.fps)
        return selected | {"fps": batch.fps if batch.fps is not None else fps}

    def _create_pack(self, fields: dict[str, Tensor], count: int) -> PackWriter:
        content = self.content
        return PackWriter(
            PackWriter.create_folder(content.folder),
            count,
            fields,
            vocabulary=content.vocabulary,
            precision=content.precision,
            key=content.recipe,
            codec=content.codec,
        )

    def _row_keys(self, items: np.ndarray) -> list[bytes]:
        keys = self.content.keys[items]
        replaced = np.array([item in self.loader.replaced for item in items.tolist()])
        keys = np.where(replaced, stand_in_keys(keys, self.content.path.name), keys)
        return [to_bytes(key) for key in keys]

    def _batch_size(self, shape: Bucket | None) -> int:
        return max(1, min(BATCH, BATCH_BYTES // self._pixel_bytes(shape)))

    def _micro_batch(self, shape: Bucket | None) -> int:
        """As many rows as training takes at a time: what fits there fits here."""
        rows = self.train.batch_size
        if self.buckets is not None:
            rows = self.buckets.batch_sizes(rows)[self.buckets.shapes.index(shape or self.content.usual)]
        return max(1, rows // (self.train.accumulate * distributed.data_world()))

    def _pixel_bytes(self, shape: Bucket | None) -> int:
        clip = shape or self.content.usual
        return clip.frames * clip.height * clip.width * self.content.shape.channels

    def _check_disk(self, fields: dict[str, Tensor], shape: Bucket | None, missing: np.ndarray) -> None:
        """Refuse what the disk has no room for, judging by the first batch: the others in proportion to their pixels."""
        content, wide = self.content, 4 if self.content.precision == "fp32" else 2
        each = sum(value[0].numel() * (wide if value.is_floating_point() else 2) for value in fields.values())
        needed = float(each * len(missing))
        if self.buckets is not None:
            pixels = sum(self._pixel_bytes(self.buckets.shape(item)) for item in missing.tolist())
            needed = each * pixels / self._pixel_bytes(shape)
        content.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(content.folder).free
        if needed > free:
            raise InputError(
                f"stage {content.stage}: {len(missing)} items to cache need about {needed / 2**30:.3g} GiB, and {content.folder} has "
                f"{free / 2**30:.3g} GiB free: free disk space, or set stages.{content.stage}.cache=false to encode while training"
            )

    def _show_progress(self) -> None:
        """One line that is overwritten on a terminal; elsewhere a line for every ten per cent."""
        terminal, percent = sys.stderr.isatty(), 100 * self.encoded // max(1, self.share)
        step = 1 if terminal else 10
        if not distributed.is_first() or percent // step == self._progress // step:
            return
        self._progress = percent
        end = "\r" if terminal and self.encoded < self.share else "\n"
        line = f"{self.content.stage}  encoding {self.encoded}/{self.share} ({percent} %)"
        print(line, end=end, file=sys.stderr, flush=True)
