"""A stage's data, opened and checked: training and validation sources, loaders, captions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kineograph.core import distributed
from kineograph.core.batch import Batch
from kineograph.core.distributed import World
from kineograph.core.errors import InputError
from kineograph.core.noise import key_of
from kineograph.core.protocols import Source
from kineograph.core.run_folder import write_json
from kineograph.data.buckets import Bucket, Buckets
from kineograph.data.config import Split
from kineograph.data.loader import Loader
from kineograph.data.scan import remember, write_skipped
from kineograph.stage.spec import StagePlan
from kineograph.train.config import TrainConfig

VOCABULARY_CAPTIONS = 20_000  # captions that a learned vocabulary is made from


@dataclass
class StageData:
    """What a stage trains and validates on."""

    stage: StagePlan
    seed: int
    source: Source
    validation: Source
    skipped: dict[Split, dict[str, str]]  # of splits that were scanned: item → why it cannot be read
    test: Source | None = None  # where grids show the test split
    heirs: list[StageData] = field(default_factory=list)  # of later stages whose `init` is this one

    def split(self, name: Split) -> Source:
        source = {"train": self.source, "validation": self.validation, "test": self.test}[name]
        assert source is not None
        return source

    def loader(self, source: Source | None = None, planned: World | None = None) -> Loader:
        """Batches of `source` (by default the training source) as training reads them; as the first process would in a `planned` world."""
        train, there = self.stage.train, planned or distributed.current_world()
        rank, world = train.parallel.data_place(0 if planned else distributed.rank(), there.processes)
        return Loader(
            source if source is not None else self.source,
            seed=self.seed,
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            workers=workers_for(train, there.local),
            rank=rank,
            world=world,
            pin=torch.cuda.is_available(),
            timeout=train.timeout,
            max_unreadable=self.stage.spec.data.max_unreadable,
        )

    def validation_loader(self) -> Loader:
        train = self.stage.train
        rank, world = train.parallel.data_place(distributed.rank(), distributed.world())
        return Loader(
            self.validation,
            seed=key_of(self.seed, "validation") >> 1,
            batch_size=train.batch_size,
            workers=0,
            rank=rank,
            world=world,
            timeout=train.timeout,
        )

    @cached_property
    def _validation(self) -> Loader:
        return self.validation_loader()

    def validation_batches(self) -> Iterator[Batch]:
        """The same items with the same crops every time."""
        train = self.stage.train
        count = min(train.validation_samples, len(self.validation))
        micro = max(1, train.batch_size // train.accumulate)
        return self._validation.fixed(count, min(micro, count))

    def pictures(self, count: int, split: Split = "validation") -> Batch:
        """A few items, always the same, to show; from the first again where there are fewer."""
        loader = self._validation if split == "validation" and distributed.world() == 1 else self._shown(split)
        there = min(count, len(loader.source))
        batch = next(iter(loader.fixed(there, there, alike=True)))
        return batch if len(batch) == count else batch.rows([place % len(batch) for place in range(count)])

    def _shown(self, split: Split) -> Loader:
        """Of a split that nothing else reads item by item."""
        if split not in self._loaders:
            # Validation's own items, which several processes have shared out among them.
            keys = ("validation",) if split == "validation" else ("shown", split)
            self._loaders[split] = Loader(self.split(split), seed=key_of(self.seed, *keys) >> 1, batch_size=1)
        return self._loaders[split]

    @cached_property
    def _loaders(self) -> dict[Split, Loader]:
        return {}

    def remember(self, folder: Path) -> None:
        """Put what opening the data found into the run folder: the scan's result, and the items that cannot be read."""
        for split, skipped in self.skipped.items():
            remember(scan_file(folder, self.stage, split), self.split(split), skipped.items())
        left_out = self._left_out()
        if left_out and distributed.is_first():
            write_skipped(folder / "skipped.jsonl", left_out)

    @property
    def buckets(self) -> Buckets | None:
        """What goes where, where the data are of several shapes."""
        return getattr(self.source, "buckets", None)

    def largest(self) -> tuple[Bucket | None, np.ndarray]:
        """The bucket whose clips have most tokens, and its items; without buckets, None and the first items."""
        if self.buckets is None:
            return None, np.arange(min(len(self.source), 1024))
        found = zip(self.buckets.shapes, self.buckets.members, strict=True)
        return max((pair for pair in found if len(pair[1])), key=lambda pair: self.buckets.config.tokens(pair[0]))  # type: ignore[union-attr]

    def write_buckets(self, path: Path) -> None:
        """The report of what goes where."""
        if self.buckets is not None and distributed.is_first():
            batch_size = self.stage.train.batch_size
            tree = {"budget": self.buckets.budget(batch_size), "buckets": self.buckets.table(batch_size)}
            write_json(path, tree)

    def _left_out(self) -> dict[str, str]:
        """What was known before training: by the sources themselves, or by their scans."""
        known = [getattr(source, "skipped", {}) for source in (self.source, self.validation, self.test)]
        return {path: reason for found in (*known, *self.skipped.values()) for path, reason in found.items()}

    def write_skipped(self, path: Path, loader: Loader) -> None:
        """List what could not be read, found at the start or met on the way."""
        validation: Loader | None = vars(self).get("_validation")  # where anything was validated
        skipped = self._left_out() | loader.skipped | (validation.skipped if validation is not None else {})
        if skipped and distributed.is_first():
            write_skipped(path, skipped)

    def captions(self) -> list[str]:
        """Training captions, for a vocabulary. Stages that will start from this one's weights read on with its words: theirs too."""
        return list(dict.fromkeys([*self._captions, *(caption for heir in self.heirs for caption in heir.captions())]))

    @cached_property
    def _captions(self) -> list[str]:
        with (
            unset_fake_temporarily()
        ):  # a stage may be built of tensors without numbers, and a Dataset's items have some
            found = (self.source.caption(index) for index in range(min(len(self.source), VOCABULARY_CAPTIONS)))
            return list(dict.fromkeys(caption for caption in found if caption))


def workers_for(train: TrainConfig, local_world: int | None = None) -> int:
    """Of one process; those of one machine (by default as many as there are) share its cores."""
    if train.workers != "auto":
        return train.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores // 2 // (local_world or distributed.local_world()))


def gives(source: Source) -> frozenset[str]:
    """What a source's items hold. Most make or read pixels; caches and a user's own Dataset say it."""
    return getattr(source, "gives", frozenset({"pixels"}))


def scan_file(folder: Path, stage: StagePlan, split: Split) -> Path:
    """Where the scan of a stage's files is remembered; stages that read the same data share it."""
    key = key_of(stage.spec.data.model_dump_json())
    return folder / ".scan" / (f"{key:016x}.json" if split == "train" else f"{key:016x}-{split}.json")


def missing(stage: StagePlan, data: StageData, hub: bool) -> str | None:
    """What the stage will read besides data and is not there, or does not fit, in words. `hub`: names on a hub are looked up too."""
    try:
        stage.spec.config.check_pretrained(gives(data.source), hub)
    except InputError as error:
        return f"stages.{stage.name}.{error}"
    return None
