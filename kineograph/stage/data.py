"""A stage's opened data: sources by split, loaders, captions; and whether its codec fits them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kineograph.cache.source import Cache
from kineograph.core import distributed
from kineograph.core.batch import Batch
from kineograph.core.capabilities import HasLatentShape, HasSampleSize, SupportsBuckets, SupportsLossMasks
from kineograph.core.distributed import World
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import key_of
from kineograph.core.protocols import Source, Stream
from kineograph.core.run_folder import write_json
from kineograph.core.task import Codec, Task, find_codec
from kineograph.data.buckets import Bucket, Buckets, buckets_of
from kineograph.data.dataset import DatasetSource
from kineograph.data.loader import Loader
from kineograph.data.open_source import Split
from kineograph.data.startup_scan import save_scan, write_skipped
from kineograph.data.token_check import TokenGrid
from kineograph.stage.data_record import describe_items
from kineograph.stage.spec import StagePlan
from kineograph.train.config import TrainConfig

VOCABULARY_CAPTIONS = 20_000  # captions that a learned vocabulary is made from


@dataclass
class StageData:
    """The sources that a stage trains and validates on."""

    stage: StagePlan
    seed: int
    source: Source
    validation: Source
    skipped: dict[Split, dict[str, str]]  # scanned split → item → why it cannot be read
    test: Source | None = None  # opened only if grids show it
    warm_started: list[StageData] = field(default_factory=list)  # data of later stages whose `init` is this stage
    _shown: dict[Split, Loader] = field(default_factory=dict)

    def split(self, name: Split) -> Source:
        source = {"train": self.source, "validation": self.validation, "test": self.test}[name]
        assert source is not None
        return source

    def loader(self, source: Source | None = None, planned: World | None = None) -> Loader:
        """Training batches of `source` (default: the training source), as the first process of a `planned` world reads them."""
        train, world = self.stage.train, planned or distributed.current_world()
        rank, ranks = train.parallel.data_rank_of(0 if planned else distributed.rank(), world.processes)
        return Loader(
            source if source is not None else self.source,
            seed=self.seed,
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            workers=count_workers(train, world.local),
            rank=rank,
            world=ranks,
            pin=torch.cuda.is_available(),
            timeout=train.timeout,
            max_unreadable=self.stage.spec.data.max_unreadable,
        )

    @cached_property
    def _validation_loader(self) -> Loader:
        train = self.stage.train
        rank, world = train.parallel.data_rank_of(distributed.rank(), distributed.world())
        return Loader(
            self.validation,
            seed=key_of(self.seed, "validation") >> 1,
            batch_size=train.batch_size,
            workers=0,
            rank=rank,
            world=world,
            timeout=train.timeout,
        )

    def validation_batches(self) -> Iterator[Batch]:
        """The same items with the same crops every time."""
        train = self.stage.train
        count = min(train.validation_samples, len(self.validation))
        return self._validation_loader.fixed_batches(count, min(train.micro_batch_size, count))

    def fixed_batch(self, count: int, split: Split = "validation") -> Batch:
        """The same `count` items every time, to show; repeated if the split has fewer."""
        loader = self._loader_for_showing(split)
        available = min(count, len(loader.source))
        batch = next(iter(loader.fixed_batches(available, available, one_shape=True)))
        return batch if len(batch) == count else batch.rows([row % len(batch) for row in range(count)])

    def _loader_for_showing(self, split: Split) -> Loader:
        if split == "validation" and distributed.world() == 1:
            return self._validation_loader
        if split not in self._shown:
            # The seed of validation, whose own loader gives each process a part of the items.
            keys = ("validation",) if split == "validation" else ("shown", split)
            self._shown[split] = Loader(self.split(split), seed=key_of(self.seed, *keys) >> 1, batch_size=1)
        return self._shown[split]

    @property
    def buckets(self) -> Buckets | None:
        """The buckets of data of several shapes."""
        return buckets_of(self.source)

    def largest_bucket(self) -> tuple[Bucket | None, np.ndarray]:
        """The bucket whose clips have most tokens, and its items; without buckets, None and the first items."""
        buckets = self.buckets
        if buckets is None:
            return None, np.arange(min(len(self.source), 1024))
        filled = [pair for pair in zip(buckets.shapes, buckets.members, strict=True) if len(pair[1])]
        return max(filled, key=lambda pair: buckets.config.tokens(pair[0]))

    def write_buckets(self, path: Path) -> None:
        """Report which items go into which bucket."""
        if self.buckets is not None and distributed.is_first():
            batch_size = self.stage.train.batch_size
            tree = {"budget": self.buckets.budget(batch_size), "buckets": self.buckets.table(batch_size)}
            write_json(path, tree)

    def describe_items(self) -> dict[str, Any]:
        """The stage's entry in RUN/data.json."""
        return describe_items(self.stage.spec.data, {"train": self.source, "validation": self.validation})

    def write_scan(self, folder: Path) -> None:
        """Write the scan's results, and the items that cannot be read, into the run folder."""
        for split, skipped in self.skipped.items():
            save_scan(scan_file(folder, self.stage, split), self.split(split), skipped.items())
        self._write_skipped(folder / "skipped.jsonl", self._known_unreadable())

    def write_skipped(self, path: Path, loader: Loader) -> None:
        """List the items that could not be read, at the start or during training."""
        validation: Loader | None = vars(self).get("_validation_loader")  # None: nothing was validated
        during = loader.skipped | (validation.skipped if validation is not None else {})
        self._write_skipped(path, self._known_unreadable() | during)

    @staticmethod
    def _write_skipped(path: Path, skipped: dict[str, str]) -> None:
        if skipped and distributed.is_first():
            write_skipped(path, skipped)

    def _known_unreadable(self) -> dict[str, str]:
        """Items that the sources, or their scans, knew to be unreadable before training."""
        known = [source.skipped for source in (self.source, self.validation, self.test) if source is not None]
        return {path: reason for items in (*known, *self.skipped.values()) for path, reason in items.items()}

    def captions(self) -> list[str]:
        """A training caption per item, to learn a vocabulary from; those of stages that will start from this one's weights too.

        A word of many items is frequent, even if all of them have the same caption.
        """
        return [*self._captions, *(caption for data in self.warm_started for caption in data.captions())]

    @cached_property
    def _captions(self) -> list[str]:
        # A stage may be built of fake tensors, but the items of a Dataset are real.
        count, limit = len(self.source), VOCABULARY_CAPTIONS
        # Evenly spaced: the first items of a folder may be of one class.
        step = 1 if isinstance(self.source, Stream) else max(1, -(-count // limit))
        with unset_fake_temporarily():
            items = range(0, min(count, step * limit), step)
            return [caption for index in items for caption in self.source.formatted_captions(index)]


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_workers(train: TrainConfig, local_world: int | None = None) -> int:
    """Data workers of one process; the processes of a machine share its cores."""
    if train.workers != "auto":
        return train.workers
    return min(8, count_cores() // 2 // (local_world or distributed.local_world()))


def scan_file(folder: Path, stage: StagePlan, split: Split) -> Path:
    """Where the scan of a stage's files is kept; stages that read the same data share it."""
    key = key_of(stage.spec.data.model_dump_json())
    return folder / ".scan" / (f"{key:016x}.json" if split == "train" else f"{key:016x}-{split}.json")


def find_missing_weights(stage: StagePlan, data: StageData, hub: bool) -> str | None:
    """Describe pretrained weights that the stage needs and that are missing or do not fit. `hub`: look names up on the hub too."""
    try:
        stage.spec.config.check_pretrained(data.source.fields, hub)
    except InputError as error:
        return f"stages.{stage.name}.{error}"
    return None


def check_tokens(task: Task, data: StageData) -> None:
    """Refuse tokens or latents in the data that the task's codec could not have made."""
    codec = _find_codec(task)
    if codec is None:
        return
    config = data.stage.spec.data
    sample_size = task.sample_size() if isinstance(task, HasSampleSize) else None
    for source in (data.source, data.validation):
        if isinstance(source, Cache) and source.fields & {"tokens", "latents"}:
            source.check_grid(lambda frames, *size: codec.shape_for(frames, *(sample_size or size)))
        if codec.vocabulary is None or "tokens" not in source.fields:
            continue
        if isinstance(source, DatasetSource):
            source.expect(TokenGrid.of(codec, config.frames, config.size))
        elif isinstance(source, Cache):
            source.check_vocabulary(codec.vocabulary)


def check_codec(data: StageData, codec: tuple[str, str] | None) -> None:
    """Refuse a cache whose tokens or latents other weights than `codec` (its path and digest) have made."""
    for source in (data.source, data.validation):
        if codec is not None and isinstance(source, Cache) and source.fields & {"tokens", "latents"}:
            source.check_codec(*codec)


def check_buckets(task: Task, data: StageData) -> None:
    """Refuse buckets that the task cannot train on, or whose clips its codec cannot encode."""
    buckets, stage = data.buckets, data.stage
    if buckets is None:
        return
    shapes = [shape for shape, members in zip(buckets.shapes, buckets.members, strict=True) if len(members)]
    can_bucket = isinstance(task, SupportsBuckets) and task.can_bucket()
    if not can_bucket and shapes != [buckets.base]:
        raise ConfigError(
            f"{stage.title} trains on clips of one shape, and data.buckets has {len(shapes)}, such as "
            f"{next(shape for shape in shapes if shape != buckets.base)}: set stages.{stage.name}.data.buckets=null"
        )
    network = task if isinstance(task, HasLatentShape) else _find_codec(task)
    if network is None:
        return
    for shape in shapes:
        try:
            network.shape_for(*shape)
        except ConfigError as error:
            raise ConfigError(f"data.buckets has clips of {shape}: {error}") from None


def check_loss_masks(task: Task, data: StageData) -> None:
    """Refuse masks for a stage whose loss has no positions in the picture, such as one that predicts tokens."""
    can_mask = isinstance(task, SupportsLossMasks) and task.can_mask_loss()
    if data.source.has_loss_masks and not can_mask:
        raise ConfigError(
            f"{data.stage.title} cannot use data.masks=true: its loss does not compare pixels or latents, position by position; "
            f"set stages.{data.stage.name}.data.masks=false"
        )


def _find_codec(task: Task) -> Codec | None:
    """The codec whose tokens a task reads: its own, or its generator's."""
    codec = find_codec(task)
    if codec is not None:
        return codec
    return next((codec for codec in map(_find_codec, task.stages.values()) if codec is not None), None)
