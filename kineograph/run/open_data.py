"""Open a stage's data and check it against what the stage reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from kineograph.core.distributed import World
from kineograph.core.errors import ConfigError, InputError, NoData
from kineograph.core.noise import numpy_rng
from kineograph.core.notes import Note
from kineograph.core.protocols import Source, Stream
from kineograph.core.run_folder import RunFolder
from kineograph.data.captions import require_captions, warn_of_flip
from kineograph.data.dataset import DatasetSource
from kineograph.data.fit_summary import summarise_fit
from kineograph.data.media_config import MediaConfig
from kineograph.data.open_source import BlankSource, Split, open_source
from kineograph.data.startup_scan import check_unreadable_share, scan
from kineograph.stage.data import StageData, scan_file
from kineograph.stage.data_record import check_items, explain_moved_data
from kineograph.stage.spec import Plan, StagePlan
from kineograph.text import TextConfig
from kineograph.train.config import TrainConfig

ENDLESS_FROM = 2**32  # items
MIN_VALIDATE_EVERY = 50  # steps: a set of a few items is validated no more often


def open_data(
    stage: StagePlan,
    seed: int,
    dataset: Any = None,
    note: Note = print,
    folder: Path | None = None,
    opened: dict[str, StageData] | None = None,
) -> StageData:
    """Open and check a stage's data before anything is written.

    `folder` is the run folder, which may hold an earlier scan; `opened` holds the data of earlier stages, to share equal sources.
    """
    try:
        return _open_data(stage, seed, dataset, note, folder, opened)
    except NoData as error:
        if folder is None or not RunFolder(folder).data_file.is_file():
            raise
        raise explain_moved_data(error, f"kineo train --run {folder}") from None


def _open_data(
    stage: StagePlan, seed: int, dataset: Any, note: Note, folder: Path | None, opened: dict[str, StageData] | None
) -> StageData:
    opened, config = opened if opened is not None else {}, stage.spec.data
    # The last one has the scans of all before it.
    shared = next((other for other in reversed(opened.values()) if other.stage.spec.data == config), None)
    if shared is not None:
        data = StageData(stage, seed, shared.source, shared.validation, dict(shared.skipped), shared.test)
    else:
        source = open_source(config, "train", seed, dataset)
        if len(source) == 0:
            raise InputError(
                f"data.source={config.source} has no training items: lower data.validation and data.test, or add data"
            )
        skipped = dict(scan(source, config.max_unreadable, note, _find_scan(folder, stage, "train")))
        if source.note:
            note(source.note)
        validation = open_source(config, "validation", seed, dataset)
        if config.validation == 0 and _have_same_items(source, validation):
            note("data.validation=0: validation runs on training data")
        data = StageData(stage, seed, source, validation, {"train": skipped})
        for line in summarise_fit(source, config):
            note(line)
    if folder is not None and dataset is None:
        for split in get_args(Split)[:2]:
            check_items(RunFolder(folder), stage.name, config, split, data.split(split), note)
    if "test" in stage.train.grids and data.test is None:
        data.test = open_source(config, "test", seed, dataset)
        if len(data.test) == 0:  # most sources refuse an empty split themselves
            raise InputError("train.grids names test, and that split is empty: set data.test, such as data.test=0.1")
    held_out = [
        split for split in _held_out_splits(stage.train) if not _have_same_items(data.split(split), data.source)
    ]
    for split in held_out:
        if split not in data.skipped:
            _scan_held_out(data, split, note, _find_scan(folder, stage, split))
    if data.buckets is not None:
        for line in data.buckets.lines(stage.train.batch_size):
            note(line)
    reads = stage.spec.config.reads()
    if "pixels" in reads:
        _require_pixels(data)
    if "sketch" in reads:
        _require_sketch(data)
    if "audio" in reads and "audio" not in data.source.fields:
        raise InputError(
            f"{stage.title} reads sound, and the items of data.source={stage.spec.data.source} come without: set data.sample_rate, "
            "such as data.sample_rate=8000 (folder, moving_digits)"
        )
    _require_text(data)
    if "captions" in reads:
        kinds: dict[Split, str] = {"train": "items", **{split: f"{split} items" for split in held_out}}
        for split, kind in kinds.items():
            blank = require_captions(data.split(split), stage.title, kind)
            if blank is not None:
                note(f"{stage.name}: {blank}")
        warning = (
            warn_of_flip(config.flip, data.captions()) if isinstance(config, MediaConfig) and config.flip else None
        )
        if warning is not None:
            note(f"warning: {stage.name}: {warning}")
        if stage.spec.config.init in opened:
            opened[stage.spec.config.init].warm_started.append(data)
    return data


def resolve_epochs(plan: Plan, data: dict[str, StageData], note: Note, planned: World | None = None) -> Plan:
    """Turn train.epochs and train.validate_epochs into steps, now that the number of items is known.

    → the plan with them; `data` gets its stages. `planned`: for these processes instead of those that run.
    """
    stages = tuple(_resolve_epochs(stage, data.get(stage.name), note, planned) for stage in plan.stages)
    stages = tuple(_resolve_validation(stage, data.get(stage.name), note, planned) for stage in stages)
    for stage in stages:
        if stage.name in data:
            data[stage.name].stage = stage
    return replace(plan, stages=stages)


def _resolve_epochs(stage: StagePlan, data: StageData | None, note: Note, planned: World | None) -> StagePlan:
    epochs = stage.train.epochs
    if epochs is None or data is None:
        return stage
    where = f"stages.{stage.name}.train.epochs={epochs:g}"
    if isinstance(data.source, BlankSource):
        note(f"{where}: estimated for train.steps={stage.train.steps}, as the number of items is unknown")
        return stage
    if isinstance(data.source, Stream) or len(data.source) > ENDLESS_FROM:
        remedy = "download the shards" if isinstance(data.source, Stream) else "set data.count"
        raise ConfigError(
            f"{where} needs data of known length, and data.source={stage.spec.data.source} here has no end: set train.steps, or {remedy}"
        )
    loader = data.loader(planned=planned)
    steps, items = loader.count_steps(epochs), loader.count_epoch()
    note(f"{stage.name}: {epochs:g} epochs of {items:,} samples are {steps:,} steps")
    return replace(stage, train=stage.train.model_copy(update={"steps": steps, "epochs": None}))


def _resolve_validation(stage: StagePlan, data: StageData | None, note: Note, planned: World | None) -> StagePlan:
    """Validate a small set before it is memorised: after train.validate_epochs, where that is sooner than train.validate_every."""
    train = stage.train
    if train.validate_epochs is None or not train.validate_every or train.epoch_samples is not None or data is None:
        return stage
    if train.minutes is not None:  # how many passes the clock allows is not known
        return stage
    has_no_end = isinstance(data.source, (BlankSource, Stream)) or len(data.source) > ENDLESS_FROM
    if has_no_end or _have_same_items(data.source, data.validation):
        return stage
    loader = data.loader(planned=planned)
    every = max(loader.count_steps(train.validate_epochs), MIN_VALIDATE_EVERY)
    if every >= min(train.validate_every, train.steps):
        return stage
    note(
        f"{stage.name}: a small data set: validation every {every} steps ({train.validate_epochs:g} epochs of {loader.count_epoch():,} "
        f"samples) shows when it is memorised; train.validate_epochs=null: every {train.validate_every}"
    )
    return replace(stage, train=train.model_copy(update={"validate_every": every}))


def _held_out_splits(train: TrainConfig) -> list[Split]:
    """Splits that training reads besides its own."""
    validates = train.validate_every or train.sample_every or (train.metrics and train.evaluate_every)
    splits: list[Split] = ["validation"] if validates else []
    return [*splits, "test"] if train.sample_every and "test" in train.grids else splits


def _have_same_items(one: Source, other: Source) -> bool:
    """Two splits share either all items (validation on training data) or none."""
    return one is other or (len(one) == len(other) and one.identity(0) == other.identity(0))


def _scan_held_out(data: StageData, split: Split, note: Note, scan_path: Path | None) -> None:
    """Scan a held-out split. data.max_unreadable is a share of it and the training items together, since it may have few items."""
    source, config = data.split(split), data.stage.spec.data
    unreadable = scan(source, 1.0, note, scan_path, kind=f"{split} items")
    if len(unreadable) == len(source):
        skipped = {**source.skipped, **dict(unreadable)}
        example = "".join(f", {path}: {reason}" for path, reason in list(skipped.items())[:1])
        raise InputError(
            f"data.source={config.source} has no {split} item that can be read{example}. Repair or remove the broken files, "
            f"or raise data.{split}={getattr(config, split):g} to hold out more items"
        )
    data.skipped[split] = dict(unreadable)
    check_unreadable_share(
        [*data.skipped["train"].items(), *unreadable], len(data.source) + len(source), config.max_unreadable
    )


def _require_pixels(data: StageData) -> None:
    """Refuse data without pixels, unless the stage has a codec (or CLIP) that made their tokens, latents or embeddings."""
    fields, stage = data.source.fields, data.stage
    if "pixels" in fields or (stage.spec.config.references and fields & {"tokens", "latents", "image_embed"}):
        return
    remedy = (
        "train it on pixels in a run of its own and refer to it as runs/NAME/STAGE, or set "
        f"stages.{stage.name}.skip=true once it is trained"
        if "tokens" in fields
        else "give videos (or images), or video_codebook_ids"
    )
    raise InputError(
        f"{stage.title} reads pixels, and the items of data.source={stage.spec.data.source} have only "
        f"{', '.join(sorted(fields))}: {remedy}"
    )


def _require_text(data: StageData) -> None:
    """Refuse text.kind=given without text embeddings of the right width in the data."""
    stage, source = data.stage, data.source
    text = dict(stage.spec.config).get("text")
    if not isinstance(text, TextConfig) or text.kind != "given":
        return
    who = f"{stage.title} with text.kind=given"
    if "text_embeds" not in source.fields:
        raise InputError(
            f"{who} reads text embeddings, and the items of data.source={stage.spec.data.source} have none: give them as text_embeds in "
            f"your own Dataset or with data.text_encoding (webdataset), or set stages.{stage.name}.text.kind to learned, t5 or clip"
        )
    if isinstance(source, DatasetSource):
        embeds = source.read(0, numpy_rng(0, "probe")).text_embeds
        if embeds is not None and embeds.shape[-1] != text.width:
            raise InputError(
                f"{who} has text.width={text.width}, and the text embeddings of {source.identity(0)} have {embeds.shape[-1]} channels: "
                f"set stages.{stage.name}.text.width={embeds.shape[-1]}"
            )


def _require_sketch(data: StageData) -> None:
    stage = data.stage
    if "sketch" not in data.source.fields:
        raise InputError(
            f"{stage.title} draws from sketches, and the items of data.source={stage.spec.data.source} have none: "
            "set data.sketch=true (moving_digits) or data.sketches=FOLDER (folder), give them as `sketch` in your own Dataset, "
            f"or leave stages.{stage.name}.sketch out"
        )


def _find_scan(folder: Path | None, stage: StagePlan, split: Split) -> Path | None:
    return scan_file(folder, stage, split) if folder is not None and folder.is_dir() else None
