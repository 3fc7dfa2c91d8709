"""`kineo cache`: encode a stage's training data once, through its trained codec or CLIP and frozen text encoder, to disk.

A cache lies in RUN/<stage>/cache/<key>, where the key is a hash of the data's content, its preprocessing and the weights that
encode it: whatever changes makes another cache, and an old one is never taken for a new one. Items that an old one has are copied from there
(cache_reuse.py), the others are encoded. It is filled shard by shard; processes that are started on one run divide the shards between them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kineograph.core import pulse, ranks
from kineograph.core.batch import Batch, Shape
from kineograph.core.config import dump_yaml
from kineograph.core.errors import ConfigError, InputError, Stopped
from kineograph.core.run_folder import RunFolder, write_atomic
from kineograph.core.seams import Source
from kineograph.core.task import Task
from kineograph.data.buckets import Bucket, Buckets, BucketsConfig
from kineograph.data.cache import BF16, KINDS, Cache, CacheConfig, read_header
from kineograph.data.cache_earlier import Earlier
from kineograph.data.cache_shards import Layout, Shard, ShardList, claimed, lay_out, read_layout
from kineograph.data.cache_writer import CacheWriter, StoredRow
from kineograph.data.reader import streams
from kineograph.run.building import build_task
from kineograph.run.cache_key import cache_facts, cache_folder
from kineograph.run.cache_reuse import Mixture, prune, take_over, tell_superseded
from kineograph.run.encoding_progress import EncodingProgress
from kineograph.run.plan import Plan, StagePlan, make_plan
from kineograph.run.resolve import resolve
from kineograph.run.stage_data import StageData, expect_codec, expect_tokens, gives, open_data
from kineograph.sample.stages import Stages
from kineograph.train.stepper import autocast, precision_for
from kineograph.train.stop import StopRequest

LARGEST = 50_000_000  # items; an endless source is beyond it
BATCH = 256  # items encoded, written and flushed together, at most
TOGETHER = 256 * 2**20  # bytes of pixels, likewise
SHARD = 2 * 2**30  # bytes of pixels whose codes lie in one shard, about
MOST = 4096  # items a shard
STORED = {"fp16": "float16", "bf16": BF16, "fp32": "float32"}  # cache_precision → type on disk
_WAIT = 1.0  # seconds between looks at what other processes are writing


def check_cachable(stage: StagePlan, source: Source) -> None:
    """Refuse `cache: true` where it cannot work, before anything is written."""
    if stage.spec.config.cache is True:
        fault = _why_not(stage, source)
        if fault:
            raise ConfigError(f"stages.{stage.name}.cache=true: {fault}")


def _why_not(stage: StagePlan, source: Source) -> str | None:
    config = stage.spec.config
    if not stage.spec.task.caches(config):
        return f"{config.task} has nothing here that could be kept instead of pixels; set it to false"
    if "pixels" not in gives(source):
        return f"the data hold {', '.join(sorted(gives(source)))} and no pixels, so nothing is left to encode; set it to false"
    if streams(source):
        return "data.shards is a stream: download the shards, or set it to false"
    if len(source) > LARGEST:
        return f"data.source={stage.spec.data.source} is endless; set data.count, such as data.count=100000"
    if getattr(source, "in_memory", False):
        return "nothing tells whether a Dataset of your own has changed since; set it to false"
    return None


def cached_source(
    stage: StagePlan,
    task: Task,
    stages: Stages,
    folder: RunFolder,
    data: StageData,
    device: torch.device,
    stop: StopRequest,
    note: Callable[[str], None],
) -> Source | None:
    """The cache that a stage trains from, made first where `cache: true` asks for it; None: train from the data as they are."""
    expect_tokens(task, data)
    codec = stages.codec_of(stage.spec.config)
    expect_codec(data, codec)
    wanted = stage.spec.config.cache
    if wanted is False or (wanted == "auto" and not (folder.stage(stage.name) / "cache").is_dir()):
        return None
    facts = cache_facts(stage, stages, data.source)
    path = cache_folder(stage, folder, facts)
    if wanted is True:
        if fill(path, facts, task, data, device, stop, note, folder, codec):
            tell_superseded(path, stage.name, folder, note)
        _release(task)
    layout = read_layout(path)
    if layout is None:
        note(
            f"{stage.name}: the cache in {path.parent} does not fit this run (data, codec or preprocessing changed), so it is not used: "
            "kineo cache encodes what changed"
        )
        return None
    unfinished = [shard.name for shard in layout.shards if not _is_complete(path / shard.name)]
    if unfinished:
        note(
            f"{stage.name}: {len(unfinished)} of {len(layout.shards)} shards of the cache {path} are unfinished, so it is not used: "
            "kineo cache goes on with it"
        )
        return None
    note(f"{stage.name}: trains from {layout.listed.count} cached items in {path}")
    config = CacheConfig.model_validate(
        {"folder": str(path), **{key: getattr(stage.spec.data, key) for key in ("size", "frames", "fps", "channels")}}
    )
    source = Cache.open(config, "train", data.seed)
    source.expect(vocabulary=getattr(task.stages.get("codec"), "vocabulary", None), key=path.name)
    return source


def _release(task: Task) -> None:
    """Frozen text encoders have done their work: they need not lie beside the model while it trains."""
    for module in task.modules():
        release: Any = getattr(module, "release", None)
        if release is not None:
            release()


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
    earlier = take_over(path, facts, data.stage, source) if not _is_whole(path) else None
    layout = lay_out(path, listed, buckets)
    filling = _Filling(path, task, data, device, stop, layout, codec[1] if codec else "", earlier)
    was_training = task.training
    task.eval()
    try:
        filling.run()
    finally:
        task.train(was_training)
    told = ranks.all_told([filling.made, filling.taken, filling.loader.skipped])
    made, taken = (sum(counts) for counts in list(zip(*told, strict=True))[:2])
    if made or taken:
        for _, _, skipped in told:
            filling.loader.skipped.update(skipped)
        data.write_skipped(folder.path / "skipped.jsonl", filling.loader)
        reused = f", {taken} taken from the cache before," if taken else ""
        note(f"{data.stage.name}: {made} items encoded{reused} into {path}")
    return made + taken


class _Filling:
    """One process's work on a cache."""

    def __init__(
        self,
        path: Path,
        task: Task,
        data: StageData,
        device: torch.device,
        stop: StopRequest,
        layout: Layout,
        codec: str,
        earlier: Earlier | None = None,
    ) -> None:
        self.path, self.task, self.data, self.device, self.stop, self.layout = path, task, data, device, stop, layout
        self.stage, self.codec = data.stage, codec
        with ranks.alone():  # items are divided by shards, not by batches: those need not divide into the processes
            self.loader = data.loader(data.source)
        self.precision = precision_for(self.stage.train.precision, device)
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
        if not _is_complete(self.path / shard.name):
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
                with autocast(self.precision, self.device):
                    made = _encoded(self.task, batch, self._rows(shard.shape), self.device)
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
                pulse.beat()
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
            pulse.beat()
            self._progress.show(self._seen + writer.done)
            if self.stop:
                raise self._stopped()

    def _stopped(self) -> Stopped:
        return Stopped(
            f"stopped by {self.stop.by} while encoding the data of {self.stage.name} ({self.made + self.taken} items kept by this call); "
            "run the same command to go on"
        )

    def _rows(self, shape: Bucket | None) -> int:
        """As many rows at a time as training takes: what fits there fits here."""
        train, rows = self.stage.train, self.stage.train.batch_size
        if shape is not None and self.loader.buckets is not None:
            rows = dict(zip(self.loader.buckets.shapes, self.loader.buckets.rows(rows), strict=True))[shape]
        return max(1, rows // (train.accumulate * ranks.data_world()))

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
            vocabulary=getattr(self.task.stages.get("codec"), "vocabulary", None),
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


def _is_complete(folder: Path) -> bool:
    header = read_header(folder)
    return header is not None and header.complete


def _is_whole(path: Path) -> bool:
    layout = read_layout(path)
    return layout is not None and all(_is_complete(path / shard.name) for shard in layout.shards)


def _usual(shape: Shape) -> tuple[int, int, int]:
    return shape.frames, shape.height, shape.width


def _pixel_bytes(clip: Bucket, channels: int) -> int:
    return clip.frames * clip.height * clip.width * channels


def _encoded(task: Task, batch: Batch, rows: int, device: torch.device) -> dict[str, Tensor]:
    """What `precompute` gives, for as many rows at a time as training takes: what fits there fits here."""
    places = range(len(batch))
    parts = [task.precompute(batch.rows(places[start : start + rows]).to(device)) for start in places[::rows]]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _frame_mask(batch: Batch, frames: int) -> Tensor | None:
    """B T of a batch of clips, which may hold stills and short clips; pictures need none."""
    if frames == 1:
        return None
    return batch.frame_mask if batch.frame_mask is not None else torch.ones(len(batch), frames, dtype=torch.bool)


def cache_run(
    arguments: Sequence[str],
    run: str | Path | None = None,
    note: Callable[[str], None] = ranks.say,
    remove: bool = False,
) -> list[Path]:
    """Cache every stage of a run whose codec is trained. `arguments` is a run folder, or a preset or file with its run. `remove`: then remove
    the run's caches that are not read any more."""
    note = ranks.once(note)
    first = RunFolder(arguments[0])
    if first.exists():
        if len(arguments) > 1:
            raise InputError(f"{first.path} is a run: its config stands, so {' '.join(arguments[1:])} cannot change it")
        folder, plan = first, make_plan(first.config())
    else:
        plan, folder = resolve(arguments, run, "auto")
    configs = [(stage, stage.spec.config) for stage in plan.stages]
    wanted = [stage for stage, config in configs if not config.skip and config.cache is not False and config.references]
    for stage, config in configs:
        if config.references and not config.skip and config.cache is False:
            note(f"{stage.name}: not cached, as stages.{stage.name}.cache=false says")
    ready: list[_Encoder] = []
    if not folder.exists():
        own = {stage.name for stage in plan.stages}
        referred = [getattr(stage.spec.config, key) for stage in wanted for key in stage.spec.config.references]
        if not wanted or any(name in own for name in referred):
            raise InputError(f"{folder.path} holds no run: train its codec first (kineo train {' '.join(arguments)})")
        # What encodes comes from elsewhere, as released weights do: the run begins with its cache, once everything was found in order.
        ready = [_Encoder(plan, stage, folder, note) for stage in wanted]
    made: list[Path] = []
    stop = StopRequest()
    with (
        folder.lock(shared=True),
        stop.listening(),
    ):  # others may encode beside this process, and nothing trains meanwhile
        if ready and not folder.exists():
            write_atomic(folder.config_file, dump_yaml(plan.tree()))
        for encoder in ready or (_Encoder(plan, stage, folder, note) for stage in wanted):
            made += encoder.run(stop, tell=not remove)
    if remove:
        ranks.barrier()  # the others have let go of the run too
        if ranks.is_first():
            prune(plan, folder, made, note)
    elif not made:
        raise InputError(f"{folder.path} has no stage whose data could be cached")
    return made


class _Encoder:
    """A stage's data and what encodes them."""

    def __init__(self, plan: Plan, stage: StagePlan, folder: RunFolder, note: Callable[[str], None]) -> None:
        self.stage, self.folder, self.note = stage, folder, note
        self.device = ranks.device_of(stage.train.device)
        self.stages = Stages(folder, self.device, note)
        self.data = open_data(stage, plan.seed, None, note, folder.path)
        self.fault = _why_not(stage, self.data.source)
        if self.fault is None:
            self.task = build_task(plan, stage, self.stages, self.data, folder, note)

    def run(self, stop: StopRequest, tell: bool) -> list[Path]:
        if self.fault is not None:
            self.note(f"{self.stage.name}: not cached: {self.fault}")
            return []
        facts = cache_facts(self.stage, self.stages, self.data.source)
        path, task = cache_folder(self.stage, self.folder, facts), self.task.to(self.device)
        codec = self.stages.codec_of(self.stage.spec.config)
        if not fill(path, facts, task, self.data, self.device, stop, self.note, self.folder, codec):
            self.note(f"{self.stage.name}: all {len(self.data.source)} items were encoded before")
        if tell:
            tell_superseded(path, self.stage.name, self.folder, self.note)
        return [path]
