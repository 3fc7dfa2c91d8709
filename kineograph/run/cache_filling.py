"""A stage's data on their way into a cache: shard by shard, what was encoded before is copied and the rest encoded."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kineograph.core import distributed, heartbeat
from kineograph.core.batch import Batch, Shape
from kineograph.core.errors import InputError, Stopped
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.data.buckets import Bucket, Buckets, BucketsConfig
from kineograph.data.cache import BF16, KINDS, read_header
from kineograph.data.cache_earlier import Earlier
from kineograph.data.cache_shards import Layout, Shard, ShardList, claimed, lay_out, read_layout
from kineograph.data.cache_writer import CacheWriter, StoredRow
from kineograph.run.cache_reuse import Mixture, take_over
from kineograph.run.encoders import Encoders
from kineograph.run.encoding_progress import EncodingProgress
from kineograph.stage.data import StageData
from kineograph.train.precision import autocast, resolve_precision
from kineograph.train.stop import StopRequest

BATCH = 256  # items encoded, written and flushed together, at most
TOGETHER = 256 * 2**20  # bytes of pixels, likewise
SHARD = 2 * 2**30  # bytes of pixels whose codes lie in one shard, about
MOST = 4096  # items a shard
STORED = {"fp16": "float16", "bf16": BF16, "fp32": "float32"}  # cache_precision → type on disk
_WAIT = 1.0  # seconds between looks at what other processes are writing


@torch.no_grad()
def fill(
    path: Path,
    facts: dict[str, Any],
    task: Task,
    data: StageData,
    device: torch.device,
    stop: StopRequest,
    note: Callable[[str], None],
    folder: RunFolder,
    codec: tuple[str, str] | None = None,
) -> int:
    """Encode everything that is neither there yet nor in an earlier cache, beside whoever else does; returns when all of it is there.
    → how many items came into the cache."""
    source, shape = data.source, data.stage.spec.data.shape
    buckets: Buckets | None = getattr(source, "buckets", None)
    listed = ShardList(
        key=path.name,
        count=len(source),
        each=max(1, min(MOST, SHARD // _pixel_bytes(Bucket(*_usual(shape)), shape.channels))),
        shapes=tuple(map(tuple, buckets.shapes)) if buckets is not None else (),
        usual=_usual(shape) if buckets is not None else None,
        buckets=buckets.config if buckets is not None else None,
    )
    train = data.stage.train
    encoders = Encoders(task, device, train.compile is not False, max(1, len(listed.shapes)), note)
    earlier = take_over(path, facts, data.stage, source, device) if not _is_whole(path) else None
    layout = lay_out(path, listed, buckets)
    filling = Filling(path, encoders, data, stop, layout, codec[1] if codec else "", earlier)
    was_training = task.training
    task.eval()
    try:
        filling.run()
    finally:
        task.train(was_training)
    told = distributed.all_gather_object([filling.made, filling.taken, filling.loader.skipped])
    made, taken = (sum(counts) for counts in list(zip(*told, strict=True))[:2])
    if made or taken:
        for _, _, skipped in told:
            filling.loader.skipped.update(skipped)
        data.write_skipped(folder.path / "skipped.jsonl", filling.loader)
        reused = f", {taken} taken from the cache before," if taken else ""
        note(f"{data.stage.name}: {made} items encoded{reused} into {path}")
    return made + taken


class Filling:
    """One process's work on a cache."""

    def __init__(
        self,
        path: Path,
        encoders: Encoders,
        data: StageData,
        stop: StopRequest,
        layout: Layout,
        codec: str,
        earlier: Earlier | None = None,
    ) -> None:
        self.path, self.encoders, self.data, self.stop, self.layout = path, encoders, data, stop, layout
        self.stage, self.codec = data.stage, codec
        with (
            distributed.single_process()
        ):  # items are divided by shards, not by batches: those need not divide into the processes
            self.loader = data.loader(data.source)
        self.precision = resolve_precision(self.stage.train.precision, encoders.device)
        self.made = 0  # items, by this process
        self.earlier, self.taken = earlier, 0  # where items were encoded before, and how many came from there
        self._seen = 0  # items of shards that are done
        self._progress = EncodingProgress(self.stage.name, layout.listed.count)
        self._room_was_checked = False

    def run(self) -> None:
        left = self.layout.shards
        while left:
            busy = [shard for shard in left if not self._attempt(shard)]
            if len(busy) == len(left):
                self._pause()
            left = busy

    def _attempt(self, shard: Shard) -> bool:
        """Whether the shard is complete now; not where another process holds it."""
        if not is_complete(self.path / shard.name):
            with claimed(self.path / shard.name) as mine:
                if not mine:
                    return False
                self._fill(shard)  # at once done, if someone else finished it just now
        self._seen += len(shard.items)
        if self.made or self.taken:  # what was there before this call is not encoded by it
            self._progress.show(self._seen)
        return True

    def _pause(self) -> None:
        """Others hold all that is left. Should one of them die, its shard is taken up here."""
        if self.stop:
            raise self._stopped()
        time.sleep(_WAIT)

    def _fill(self, shard: Shard) -> None:
        folder, source = self.path / shard.name, self.data.source
        header = read_header(folder)
        done = header.done if header is not None else 0
        clip = shard.shape or Bucket(*_usual(self.stage.spec.data.shape))
        together = max(1, min(BATCH, TOGETHER // _pixel_bytes(clip, self.stage.spec.data.channels)))
        mixture = Mixture(shard.items[done:], self.earlier)
        self.loader.vouch(mixture.count)
        writer = self._writer_like(folder, len(shard.items), mixture.any, clip)
        todo = mixture.todo
        try:
            for batch in self.loader.in_order(todo, together, shard.shape):
                with autocast(self.precision, self.encoders.device):
                    made = self.encoders.encode(batch, self._rows(shard.shape), self._left())
                kind = next(kind for kind in KINDS if kind in made)
                mask = _frame_mask(batch, clip.frames)
                self._check_room(made, len(batch), clip)
                writer = writer or self._open_writer(folder, len(shard.items), kind, made, mask)
                self._take(writer, mixture)
                items, todo = todo[: len(batch)].tolist(), todo[len(batch) :]
                among = mixture.through(len(batch))
                writer.append(
                    made[kind],
                    [source.identity(index) for index in items],
                    captions=batch.captions,
                    fps=batch.fps if batch.fps is not None else self.stage.spec.data.shape.fps,
                    text_embeds=made.get("text_embeds"),
                    text_mask=made.get("text_mask"),
                    frame_mask=mask,
                    text_embed=made.get("text_embed"),
                    first_frame=made.get("first_frame"),
                    stand_ins=[place for place, index in enumerate(items) if index in self.loader.replaced],
                    among=among,
                )
                self.made += len(batch)
                self.taken += len(among) - len(batch)
                heartbeat.beat()
                self._progress.show(self._seen + writer.done)
                if self.stop:
                    raise self._stopped()
            if writer is not None:
                self._take(writer, mixture)
        finally:
            if writer is not None:
                writer.close()

    def _take(self, writer: CacheWriter, mixture: Mixture) -> None:
        """What was encoded before, up to the next item that was not."""
        rows = mixture.leading()
        for start in range(0, len(rows), BATCH):
            writer.take(rows[start : start + BATCH])
            self.taken += len(rows[start : start + BATCH])
            heartbeat.beat()
            self._progress.show(self._seen + writer.done)
            if self.stop:
                raise self._stopped()

    def _stopped(self) -> Stopped:
        return Stopped(
            f"stopped by {self.stop.signal_name} while encoding the data of {self.stage.name} ({self.made + self.taken} items kept by this call); "
            "run the same command to go on"
        )

    def _left(self) -> int:
        """Items that this process has still to encode, about: the others of its group take their share."""
        left = self.layout.listed.count - self._seen if self.earlier is None else self.earlier.unknown - self.made
        return max(left, 0) // distributed.world()

    def _rows(self, shape: Bucket | None) -> int:
        """As many rows at a time as training takes: what fits there fits here."""
        train, rows = self.stage.train, self.stage.train.batch_size
        if shape is not None and self.loader.buckets is not None:
            rows = dict(zip(self.loader.buckets.shapes, self.loader.buckets.rows(rows), strict=True))[shape]
        return max(1, rows // (train.accumulate * distributed.data_world()))

    def _check_room(self, made: dict[str, Tensor], rows: int, clip: Bucket) -> None:
        """Refuse, once, what the disk has no room for: by the first batch, and what is still to come in proportion."""
        if self._room_was_checked:
            return
        self._room_was_checked = True
        wide = 4 if self.stage.spec.config.cache_precision == "fp32" else 2
        each = sum(value.numel() * (wide if value.is_floating_point() else 2) for value in made.values())
        tokens = BucketsConfig().tokens
        todo = sum(
            len(shard.items) * tokens(shard.shape or clip) / tokens(clip)
            for shard in self.layout.shards
            if read_header(self.path / shard.name) is None  # arrays of those begun are as long as they will be
        )
        needed, free = each / rows * todo, shutil.disk_usage(self.path).free
        if needed > free:
            raise InputError(
                f"stage {self.stage.name}: a cache of {self.layout.listed.count} items needs about {needed / 2**30:.3g} GiB, and "
                f"{self.path} has {free / 2**30:.3g} GiB free: make room, or set stages.{self.stage.name}.cache=false to encode while training"
            )

    def _writer_like(self, folder: Path, count: int, row: StoredRow | None, clip: Bucket) -> CacheWriter | None:
        """One that keeps items as they were kept before; None where none was."""
        if row is None:
            return None
        arrays = row.block.arrays.values()
        self._check_room({array.path.stem: torch.from_numpy(array.values[:1].copy()) for array in arrays}, 1, clip)
        return CacheWriter.like(folder, row.block, count, self.path.name, self.codec)

    def _open_writer(
        self, folder: Path, count: int, kind: str, made: dict[str, Tensor], mask: Tensor | None
    ) -> CacheWriter:
        text, text_embed, picture = made.get("text_embeds"), made.get("text_embed"), made.get("first_frame")
        stored = STORED[self.stage.spec.config.cache_precision]
        return CacheWriter(
            folder,
            kind,
            count,
            tuple(made[kind].shape[1:]),
            vocabulary=getattr(self.encoders.task.stages.get("codec"), "vocabulary", None),
            key=self.path.name,
            codec=self.codec,
            split="train",
            latents_dtype=stored,
            text_dtype=stored,
            text=(text.shape[1], text.shape[2]) if text is not None else None,
            frames=mask.shape[1] if mask is not None else None,
            text_embed=text_embed.shape[1] if text_embed is not None else None,
            first_frame=tuple(picture.shape[1:]) if picture is not None else None,
        )


def is_complete(folder: Path) -> bool:
    header = read_header(folder)
    return header is not None and header.complete


def _is_whole(path: Path) -> bool:
    layout = read_layout(path)
    return layout is not None and all(is_complete(path / shard.name) for shard in layout.shards)


def _usual(shape: Shape) -> tuple[int, int, int]:
    return shape.frames, shape.height, shape.width


def _pixel_bytes(clip: Bucket, channels: int) -> int:
    return clip.frames * clip.height * clip.width * channels


def _frame_mask(batch: Batch, frames: int) -> Tensor | None:
    """B T of a batch of clips, which may hold stills and short clips; pictures need none."""
    if frames == 1:
        return None
    return batch.frame_mask if batch.frame_mask is not None else torch.ones(len(batch), frames, dtype=torch.bool)
