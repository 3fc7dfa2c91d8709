"""Caches of a run: `kineo cache`, and the cache that a stage trains from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kineograph.cache.fill import CacheContent, CacheFiller
from kineograph.cache.keys import recipe_key
from kineograph.cache.source import Cache, CacheConfig
from kineograph.cache.store import SET, format_disk_use, is_complete, list_stale, prune
from kineograph.core import distributed
from kineograph.core.capabilities import SupportsCaching
from kineograph.core.errors import ConfigError, InputError, RunInUse
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.core.notes import Note
from kineograph.core.protocols import Source, Stream, TextEncoder
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task, find_codec
from kineograph.run.open_data import open_data
from kineograph.run.plan import make_plan, resolve_run
from kineograph.stage.data import StageData, check_codec, check_tokens
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import Plan, StagePlan
from kineograph.stage.warm_start import build_untrained
from kineograph.text import TextConfig
from kineograph.train.precision import resolve_precision
from kineograph.train.stop import StopRequest

MAX_ITEMS = 50_000_000  # an endless source has more


def check_cachable(stage: StagePlan, source: Source) -> None:
    """Refuse `cache: true` where it cannot work, before anything is written."""
    fault = _cache_fault(stage, source) if stage.spec.config.cache is True else None
    if fault:
        raise ConfigError(f"stages.{stage.name}.cache=true: {fault}; or set it to false")


def _cache_fault(stage: StagePlan, source: Source) -> str | None:
    """Why a stage's data cannot be cached; None where they can."""
    config = stage.spec.config
    if not (issubclass(stage.spec.task, SupportsCaching) and stage.spec.task.can_cache(config)):
        return f"{config.task} has nothing to keep in place of pixels under this config"
    if "pixels" not in source.fields:
        return f"the data hold {', '.join(sorted(source.fields))} and no pixels to encode"
    if isinstance(source, Stream):
        return "data.shards is a stream: download the shards"
    if len(source) > MAX_ITEMS:
        return f"data.source={stage.spec.data.source} is endless; set data.count, such as data.count=100000"
    if source.has_loss_masks:
        return "a cache holds no loss masks (data.masks=true)"
    if source.is_user_dataset:
        return "a change of your own Dataset cannot be detected"
    if _keeps_text(stage) and (source.captioning.shuffles_tags or source.has_several_captions()):
        what = "data.shuffle_tags=true" if source.captioning.shuffles_tags else "drawing one of several captions"
        return f"{what} changes an item's caption in every epoch, and a cache holds the embedding of one"
    return None


def _keeps_text(stage: StagePlan) -> bool:
    """Whether a stage's cache holds text embeddings: of every frozen encoder."""
    text = dict(stage.spec.config).get("text")
    trained = isinstance(text, TextConfig) and text.kind in ("learned", "none")
    return "captions" in stage.spec.config.reads() and not trained


@dataclass
class StageCache:
    """The cache of a stage: its data, and the task whose encoders fill it."""

    stage: StagePlan
    task: Task
    stages: StageLoader
    folder: RunFolder
    data: StageData
    device: torch.device
    note: Note

    @cached_property
    def content(self) -> CacheContent:
        """The rows that it should hold now."""
        spec, config = self.stage.spec, self.stage.spec.config
        tree = config.model_dump(mode="json")
        references = [key for key in config.references if isinstance(getattr(config, key), str)]
        encoders = {key: self.stages.digest(getattr(config, key)) for key in references}
        if "low_res" in references and (codec_of_it := self.stages.find_codec_of(tree["low_res"])) is not None:
            encoders["low_res"] = codec_of_it  # a generator encodes nothing: its codec does
        facts: dict[str, Any] = {
            "encoders": encoders,
            **{name: tree[name] for name in ("text", "clip", "text_encodings") if name in tree},
            "own": spec.task.cache_facts(config) if issubclass(spec.task, SupportsCaching) else {},
            "precision": config.cache_precision,
            "train_precision": resolve_precision(self.stage.train.precision, self.device),
            "seed": self.data.seed,  # of crops and starts
        }
        codec, codec_task = self.stages.find_codec(spec), find_codec(self.task)
        # Processes divide the items, not the batches, which need not divide into them.
        with distributed.single_process():
            loader = self.data.loader(self.data.source)
        return CacheContent(
            stage=spec.name,
            folder=self.folder.stage(spec.name) / "cache",
            loader=loader,
            shape=spec.data.shape,
            recipe=recipe_key(spec.data.model_dump(mode="json"), facts),
            precision=config.cache_precision,
            vocabulary=codec_task.vocabulary if codec_task is not None else None,
            codec=codec[1] if codec is not None else "",
        )

    def fill(self, stop: StopRequest) -> int:
        """Encode what is missing. → how many items were encoded."""
        content, count = self.content, len(self.data.source)
        encoded = CacheFiller(content, self.task, self.stage.train, self.device, stop, self.note).fill()
        if encoded:
            self.data.write_skipped(self.folder.path / "skipped.jsonl", content.loader)
            reused = f", {count - encoded} were in the cache already" if encoded < count else ""
            self.note(f"{self.stage.name}: {encoded} items encoded into {content.path}{reused}")
        return encoded

    def open(self, stop: StopRequest) -> Source | None:
        """The source that training reads, filled first where `cache: true` says so; None: train from the data as they are."""
        check_tokens(self.task, self.data)
        check_codec(self.data, self.stages.find_codec(self.stage.spec))
        name, choice = self.stage.name, self.stage.spec.config.cache
        if choice is False or (choice == "auto" and not (self.folder.stage(name) / "cache").is_dir()):
            return None
        fallback = choice == "if_possible" or self.data.source.has_loss_masks
        if fallback and (fault := _cache_fault(self.stage, self.data.source)):
            self.note(f"{name}: trains without a cache, which takes longer (stages.{name}.cache={choice}): {fault}")
            return None
        content = self.content
        if choice in (True, "if_possible"):
            if self.fill(stop):
                self.note_stale()
            _release_encoders(self.task)
        elif not is_complete(content.path):
            self.note(
                f"{name}: the cache in {content.folder} lacks items (it is unfinished, or data, codec or preprocessing changed), "
                "so it is not used: kineo cache encodes them"
            )
            return None
        self.note(f"{name}: trains from {len(content.keys)} cached items in {content.path}")
        keys = {key: getattr(self.stage.spec.data, key) for key in ("size", "frames", "fps", "channels")}
        cache = Cache.open(CacheConfig.model_validate({"folder": str(content.path), **keys}), "train", self.data.seed)
        source = self.data.source
        cache.captioning, cache.shuffle, cache.shares = source.captioning, source.shuffle, source.shares
        return cache

    def note_stale(self) -> None:
        stale = list_stale(self.content.folder, [self.content.path])
        stale = [path for path in stale if not (path / SET).is_file()]  # sets take hardly any space
        if stale:
            self.note(
                f"{self.stage.name}: {format_disk_use(stale)} in {self.content.folder} are no longer read: "
                f"kineo cache {self.folder.path} --prune removes them"
            )


def _release_encoders(task: Task) -> None:
    """Free the frozen text encoders: training reads their embeddings from the cache."""
    for module in task.modules():
        if isinstance(module, TextEncoder):
            module.release()


# The command -------------------------------------------------------------------------------------------------------


def cache_run(
    arguments: Sequence[str],
    run: str | Path | None = None,
    note: Note = distributed.print_note,
    remove: bool = False,
) -> list[Path]:
    """Cache the data of every stage whose encoders are trained. → the folders of the sets.

    `arguments` is a run folder, or a preset or file with its run. `remove`: then remove what no stage reads any more.
    """
    note = distributed.on_first_rank(note)
    first = RunFolder(arguments[0])
    if first.exists():
        if len(arguments) > 1:
            raise InputError(f"{first.path} is a run: its config is fixed, so leave out {' '.join(arguments[1:])}")
        folder, plan = first, make_plan(first.config())
    else:
        plan, folder = resolve_run(arguments, run, "auto")
    stages = [stage for stage in plan.stages if stage.spec.config.references and not stage.spec.config.skip]
    for stage in stages:
        if stage.spec.config.cache is False:
            note(f"{stage.name}: not cached, as stages.{stage.name}.cache=false says")
    stages = [stage for stage in stages if stage.spec.config.cache is not False]
    caches: list[StageCache | None] = []
    if not folder.exists():
        own = {stage.name for stage in plan.stages}
        references = [getattr(stage.spec.config, key) for stage in stages for key in stage.spec.config.references]
        if not stages or any(name in own for name in references):
            raise InputError(f"{folder.path} holds no run: train its codec first (kineo train {' '.join(arguments)})")
        # The encoders come from elsewhere, as released weights do: check everything before the run folder is written.
        caches = [_prepare(plan, stage, folder, note) for stage in stages]
    paths: list[Path] = []
    stop = StopRequest()
    # Others may encode at the same time, but nothing trains.
    with folder.lock(shared=True), stop.handle_signals():
        if caches and not folder.exists():
            folder.write_config(plan.tree())
        for cache in caches or (_prepare(plan, stage, folder, note) for stage in stages):
            if cache is None:
                continue
            cache.task.to(cache.device)
            if not cache.fill(stop):
                note(f"{cache.stage.name}: all {len(cache.data.source)} items were encoded before")
            if not remove:
                cache.note_stale()
            paths.append(cache.content.path)
    if remove:
        distributed.barrier()  # until all processes have released the run
        if distributed.is_first():
            _prune_run(plan, folder, paths, note)
    elif not paths:
        raise InputError(f"{folder.path} has no stage whose data could be cached")
    return paths


def _prepare(plan: Plan, stage: StagePlan, folder: RunFolder, note: Note) -> StageCache | None:
    """Open a stage's data and build its task; None where the data cannot be cached."""
    device = distributed.resolve_device(stage.train.device)
    enable_flash_attention_3(device)
    stages = StageLoader(folder, device, note)
    data = open_data(stage, plan.seed, None, note, folder.path)
    fault = _cache_fault(stage, data.source)
    if fault is not None:
        note(f"{stage.name}: not cached: {fault}")
        return None
    return StageCache(stage, build_untrained(plan, stage, stages, data, note), stages, folder, data, device, note)


def _prune_run(plan: Plan, folder: RunFolder, current: Collection[Path], note: Note) -> None:
    """Remove what no stage reads: neither a `current` set nor one that a stage names as its data. Nothing may train or encode meanwhile."""
    named = [
        Path(stage.spec.data.folder).expanduser() for stage in plan.stages if isinstance(stage.spec.data, CacheConfig)
    ]
    cached = {path.parent for path in current}
    removed = 0
    try:
        with folder.lock():
            for stage in plan.stages:
                packs, config = folder.stage(stage.name) / "cache", stage.spec.config
                # Of a skipped stage, or one that could not be cached now, nothing says which set it will read.
                if config.skip or (config.cache is not False and packs not in cached):
                    continue
                count = prune(packs, [*current, *named], note)
                if count:
                    note(f"{stage.name}: {format_disk_use([packs])} kept in {packs}")
                removed += count
    except RunInUse as error:
        raise RunInUse(f"nothing was removed: {error}") from None
    if not removed:
        note(f"{folder.path}: there is no cache to remove")
