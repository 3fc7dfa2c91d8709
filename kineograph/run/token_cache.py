"""`kineo cache`: encode a stage's training data once, through its trained codec or CLIP and frozen text encoder, to disk.

A cache lies in RUN/<stage>/cache/<key>, where the key is a hash of the data's content, its preprocessing and the weights that
encode it: whatever changes makes another cache, and an old one is never taken for a new one.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kineograph.core import ranks
from kineograph.core.batch import Batch
from kineograph.core.errors import ConfigError, InputError, Stopped
from kineograph.core.run_folder import RunFolder
from kineograph.core.seams import Source
from kineograph.core.task import Task
from kineograph.data.cache import KINDS, Cache, CacheConfig, read_header
from kineograph.data.cache_writer import CacheWriter
from kineograph.run.building import build_task
from kineograph.run.plan import Plan, StagePlan, make_plan
from kineograph.run.resolve import resolve, say
from kineograph.run.stage_data import StageData, expect_tokens, gives, open_data
from kineograph.sample.stages import Stages
from kineograph.train.stepper import autocast, precision_for
from kineograph.train.stop import StopRequest

LARGEST = 50_000_000  # items; an endless source is beyond it
BATCH = 256  # items encoded, written and flushed together


def cache_folder(stage: StagePlan, folder: RunFolder, stages: Stages, source: Source) -> Path:
    """Where this stage's cache lies, whether it is there or not."""
    config = stage.spec.config
    encoders = {
        key: stages.digest(getattr(config, key)) for key in config.references if isinstance(getattr(config, key), str)
    }
    content = source.fingerprint() if hasattr(source, "fingerprint") else f"{len(source)} items"
    tree = config.model_dump(mode="json")
    facts = {
        "data": stage.spec.data.model_dump(mode="json"),
        "content": content,
        "encoders": encoders,
        "text": tree.get("text"),
    }
    facts |= {name: tree[name] for name in ("clip", "text_encodings") if name in tree}
    key = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    return folder.stage(stage.name) / "cache" / key


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
    wanted = stage.spec.config.cache
    if wanted is False or (wanted == "auto" and not (folder.stage(stage.name) / "cache").is_dir()):
        return None
    path = cache_folder(stage, folder, stages, data.source)
    if wanted is True:
        fill(path, task, data, device, stop, note, folder)
    header = read_header(path)
    if header is None or not header.complete:
        note(
            f"{stage.name}: the cache in {path.parent} does not fit this run (data, codec or preprocessing changed), so it is not used"
        )
        return None
    note(f"{stage.name}: trains from {header.count} cached items in {path}")
    config = CacheConfig.model_validate(
        {"folder": str(path), **{key: getattr(stage.spec.data, key) for key in ("size", "frames", "fps", "channels")}}
    )
    source = Cache.open(config, "train", data.seed)
    codec = task.stages.get("codec")
    source.expect(vocabulary=getattr(codec, "vocabulary", None), key=path.name)
    return source


@torch.no_grad()
def fill(
    path: Path,
    task: Task,
    data: StageData,
    device: torch.device,
    stop: StopRequest,
    note: Callable[[str], None],
    folder: RunFolder,
) -> None:
    """Encode everything; goes on where an interrupted call stopped."""
    source, stage = data.source, data.stage
    header = read_header(path)
    if header is not None and header.complete:
        return
    was_training = task.training
    task.eval()
    precision = precision_for(stage.train.precision, device)
    writer: CacheWriter | None = None
    progress = _Progress(stage.name, len(source))
    loader = data.loader(source)
    try:
        start = header.done if header is not None else 0
        for batch in loader.in_order(start, len(source), BATCH):
            with autocast(precision, device):
                made = _encoded(task, batch, max(1, stage.train.batch_size // stage.train.accumulate), device)
            kind = next(kind for kind in KINDS if kind in made)
            mask = _frame_mask(batch, stage.spec.data.frames)
            writer = writer or _open_writer(path, task, len(source), kind, made, mask)
            first = writer.done
            writer.append(
                made[kind],
                [source.identity(index) for index in range(first, first + len(batch))],
                captions=batch.captions,
                fps=batch.fps if batch.fps is not None else stage.spec.data.shape.fps,
                text_embeds=made.get("text_embeds"),
                text_mask=made.get("text_mask"),
                frame_mask=mask,
                text_embed=made.get("text_embed"),
            )
            progress.show(writer.done)
            if stop:
                raise Stopped(
                    f"stopped by {stop.by} while encoding the data of {stage.name} ({writer.done} of {len(source)} kept); run the same command to go on"
                )
    finally:
        if writer is not None:
            writer.close()
        task.train(was_training)
    data.write_skipped(folder.path / "skipped.jsonl", loader)
    note(f"{stage.name}: {len(source)} items encoded into {path}")


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


def _open_writer(
    path: Path, task: Task, count: int, kind: str, made: dict[str, Tensor], mask: Tensor | None
) -> CacheWriter:
    text, text_embed = made.get("text_embeds"), made.get("text_embed")
    return CacheWriter(
        path,
        kind,
        count,
        tuple(made[kind].shape[1:]),
        vocabulary=getattr(task.stages.get("codec"), "vocabulary", None),
        key=path.name,
        split="train",
        text=(text.shape[1], text.shape[2]) if text is not None else None,
        frames=mask.shape[1] if mask is not None else None,
        text_embed=text_embed.shape[1] if text_embed is not None else None,
    )


def cache_run(arguments: Sequence[str], run: str | Path | None = None, note: Callable[[str], None] = say) -> list[Path]:
    """Cache every stage of a run whose codec is trained. `arguments` is a run folder, or a preset or file with its run."""
    first = RunFolder(arguments[0])
    if first.exists():
        if len(arguments) > 1:
            raise InputError(f"{first.path} is a run: its config stands, so {' '.join(arguments[1:])} cannot change it")
        folder, plan = first, make_plan(first.config())
    else:
        plan, folder = resolve(arguments, run, "auto")
    if not folder.exists():
        raise InputError(f"{folder.path} holds no run: train its codec first (kineo train {' '.join(arguments)})")
    made: list[Path] = []
    stop = StopRequest()
    with folder.lock(), stop.listening():
        for stage in plan.stages:
            if not stage.spec.config.skip and stage.spec.config.cache is not False and stage.spec.config.references:
                made += _cache_stage(plan, stage, folder, stop, note)
    if not made:
        raise InputError(f"{folder.path} has no stage whose data could be cached")
    return made


def _cache_stage(
    plan: Plan, stage: StagePlan, folder: RunFolder, stop: StopRequest, note: Callable[[str], None]
) -> list[Path]:
    device = ranks.device_of(stage.train.device)
    stages = Stages(folder, device, note)
    data = open_data(stage, plan.seed, None, note, folder.path)
    fault = _why_not(stage, data.source)
    if fault:
        note(f"{stage.name}: not cached: {fault}")
        return []
    task = build_task(plan, stage, stages, data, folder, note).to(device)
    path = cache_folder(stage, folder, stages, data.source)
    fill(path, task, data, device, stop, note, folder)
    return [path]


class _Progress:
    """A line that is written over on a terminal, one in ten per cent elsewhere."""

    def __init__(self, stage: str, count: int) -> None:
        self.stage, self.count, self.told = stage, count, -1

    def show(self, done: int) -> None:
        percent = 100 * done // self.count
        terminal = sys.stderr.isatty()
        if percent == self.told or (not terminal and percent // 10 == self.told // 10):
            return
        self.told = percent
        end = "\r" if terminal and done < self.count else "\n"
        print(f"{self.stage}  encoding {done}/{self.count} ({percent} %)", end=end, file=sys.stderr, flush=True)
