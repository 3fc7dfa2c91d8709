"""`kineo cache`: encode a stage's training data once, through its trained codec or CLIP and frozen text encoder, to disk.

A cache lies in RUN/<stage>/cache/<key>, where the key is a hash of the data's content, its preprocessing and the weights that
encode it: whatever changes makes another cache, and an old one is never taken for a new one. Items that an old one has are copied from there
(cache_reuse.py), the others are encoded. It is filled shard by shard; processes that are started on one run divide the shards between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kineograph.core import distributed
from kineograph.core.config import dump_yaml
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.protocols import Source
from kineograph.core.run_folder import RunFolder, write_atomic
from kineograph.core.task import Task
from kineograph.data.cache import Cache, CacheConfig
from kineograph.data.cache_shards import read_layout
from kineograph.data.reader import streams
from kineograph.run.cache_filling import fill, is_complete
from kineograph.run.cache_key import cache_facts, cache_folder
from kineograph.run.cache_reuse import prune, tell_superseded
from kineograph.run.plan import make_plan
from kineograph.run.resolve import resolve
from kineograph.run.stage_data import open_data
from kineograph.stage.data import StageData, check_codec, check_tokens, gives
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import Plan, StagePlan
from kineograph.stage.warm_start import build_untrained
from kineograph.train.stop import StopRequest

LARGEST = 50_000_000  # items; an endless source is beyond it


def check_cachable(stage: StagePlan, source: Source) -> None:
    """Refuse `cache: true` where it cannot work, before anything is written."""
    if stage.spec.config.cache is True:
        fault = _why_not(stage, source)
        if fault:
            raise ConfigError(f"stages.{stage.name}.cache=true: {fault}")


def _why_not(stage: StagePlan, source: Source) -> str | None:
    config = stage.spec.config
    if not stage.spec.task.can_cache(config):
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
    stages: StageLoader,
    folder: RunFolder,
    data: StageData,
    device: torch.device,
    stop: StopRequest,
    note: Callable[[str], None],
) -> Source | None:
    """The cache that a stage trains from, made first where `cache: true` asks for it; None: train from the data as they are."""
    check_tokens(task, data)
    codec = stages.find_codec(stage.spec)
    check_codec(data, codec)
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
    unfinished = [shard.name for shard in layout.shards if not is_complete(path / shard.name)]
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


def cache_run(
    arguments: Sequence[str],
    run: str | Path | None = None,
    note: Callable[[str], None] = distributed.print_note,
    remove: bool = False,
) -> list[Path]:
    """Cache every stage of a run whose codec is trained. `arguments` is a run folder, or a preset or file with its run. `remove`: then remove
    the run's caches that are not read any more."""
    note = distributed.on_first_rank(note)
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
        stop.handle_signals(),
    ):  # others may encode beside this process, and nothing trains meanwhile
        if ready and not folder.exists():
            write_atomic(folder.config_file, dump_yaml(plan.tree()))
        for encoder in ready or (_Encoder(plan, stage, folder, note) for stage in wanted):
            made += encoder.run(stop, tell=not remove)
    if remove:
        distributed.barrier()  # the others have let go of the run too
        if distributed.is_first():
            prune(plan, folder, made, note)
    elif not made:
        raise InputError(f"{folder.path} has no stage whose data could be cached")
    return made


class _Encoder:
    """A stage's data and what encodes them."""

    def __init__(self, plan: Plan, stage: StagePlan, folder: RunFolder, note: Callable[[str], None]) -> None:
        self.stage, self.folder, self.note = stage, folder, note
        self.device = distributed.resolve_device(stage.train.device)
        self.stages = StageLoader(folder, self.device, note)
        self.data = open_data(stage, plan.seed, None, note, folder.path)
        self.fault = _why_not(stage, self.data.source)
        if self.fault is None:
            self.task = build_untrained(plan, stage, self.stages, self.data, note)

    def run(self, stop: StopRequest, tell: bool) -> list[Path]:
        if self.fault is not None:
            self.note(f"{self.stage.name}: not cached: {self.fault}")
            return []
        facts = cache_facts(self.stage, self.stages, self.data.source)
        path, task = cache_folder(self.stage, self.folder, facts), self.task.to(self.device)
        codec = self.stages.find_codec(self.stage.spec)
        if not fill(path, facts, task, self.data, self.device, stop, self.note, self.folder, codec):
            self.note(f"{self.stage.name}: all {len(self.data.source)} items were encoded before")
        if tell:
            tell_superseded(path, self.stage.name, self.folder, self.note)
        return [path]
