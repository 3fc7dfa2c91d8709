"""Open a stage's data and check it against what the stage reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kineograph.core.errors import InputError
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Source
from kineograph.data.captions import require_captions
from kineograph.data.dataset import DatasetSource
from kineograph.data.scan import check_unreadable_share, scan
from kineograph.data.source import Split, open_source
from kineograph.stage.data import StageData, scan_file
from kineograph.stage.spec import StagePlan
from kineograph.text import TextConfig
from kineograph.train.config import TrainConfig


def open_data(
    stage: StagePlan,
    seed: int,
    dataset: Any = None,
    note: Callable[[str], None] = print,
    folder: Path | None = None,
    opened: dict[str, StageData] | None = None,
) -> StageData:
    """Open and check a stage's data before anything is written.

    `folder` is the run's, where an earlier scan of the files may be remembered; `opened` holds the data of earlier stages: the same config is read once.
    """
    config = stage.spec.data
    # The last one knows all that those before it have found.
    same = next((other for other in reversed((opened or {}).values()) if other.stage.spec.data == config), None)
    if same is not None:
        found = StageData(stage, seed, same.source, same.validation, dict(same.skipped), same.test)
    else:
        source = open_source(config, "train", seed, dataset)
        if len(source) == 0:
            raise InputError(
                f"data.source={config.source} has no training items: lower data.validation and data.test, or add data"
            )
        skipped = dict(scan(source, config.max_unreadable, note, _memory(folder, stage, "train")))
        if source.note:
            note(source.note)
        if config.validation == 0:
            note("data.validation=0: validation runs on training data")
        found = StageData(stage, seed, source, open_source(config, "validation", seed, dataset), {"train": skipped})
    if "test" in stage.train.grids and found.test is None:
        found.test = open_source(config, "test", seed, dataset)
        if len(found.test) == 0:  # most sources refuse that themselves, some only when they are asked
            raise InputError("train.grids names test, and that split is empty: set data.test=0.1, for one")
    held_out = [split for split in _looked_at(stage.train) if not _same_items(found.split(split), found.source)]
    for split in held_out:
        if split not in found.skipped:
            _scan_held_out(found, split, note, _memory(folder, stage, split))
    if found.buckets is not None:
        for line in found.buckets.lines(stage.train.batch_size):
            note(line)
    reads = stage.spec.config.reads()
    if "pixels" in reads:
        _require_pixels(found)
    if "sketch" in reads:
        _require_sketch(found)
    _require_text(found)
    if "captions" in reads:
        reader = f"stage {stage.name} ({stage.spec.config.task})"
        require_captions(found.source, reader)
        for split in held_out:
            require_captions(found.split(split), reader, f"{split} items")
        if stage.spec.config.init in (opened or {}):
            opened[stage.spec.config.init].warm_started.append(found)  # type: ignore[index]
    return found


def _looked_at(train: TrainConfig) -> list[Split]:
    """Splits that training looks at beside its own."""
    validates = train.validate_every or train.sample_every or (train.metrics and train.evaluate_every)
    splits: list[Split] = ["validation"] if validates else []
    return [*splits, "test"] if train.sample_every and "test" in train.grids else splits


def _same_items(one: Source, other: Source) -> bool:
    """Splits have either all items in common (validation on training data) or none."""
    return one is other or (len(one) == len(other) and one.identity(0) == other.identity(0))


def _scan_held_out(data: StageData, split: Split, note: Callable[[str], None], memory: Path | None) -> None:
    """As the training items were. data.max_unreadable is a share of both together: a split may be a few items, of which one is many."""
    source, config = data.split(split), data.stage.spec.data
    found = scan(source, 1.0, note, memory, kind=f"{split} items")
    if len(found) == len(source):
        lost = {**source.skipped, **dict(found)}
        told = "".join(f", {path}: {reason}" for path, reason in list(lost.items())[:1])
        raise InputError(
            f"data.source={config.source} has no {split} item that can be read{told}. Repair or remove what is broken, "
            f"or raise data.{split}={getattr(config, split):g}, so that more items are held out"
        )
    data.skipped[split] = dict(found)
    check_unreadable_share(
        [*data.skipped["train"].items(), *found], len(data.source) + len(source), config.max_unreadable
    )


def _require_pixels(data: StageData) -> None:
    """Codebook ids (or latents, or image embeddings) stand in for pixels only where a stage has a codec (or CLIP) that could have made them."""
    there, stage = data.source.fields, data.stage
    if "pixels" in there or (stage.spec.config.references and there & {"tokens", "latents", "image_embed"}):
        return
    who = f"stage {stage.name} ({stage.spec.config.task})"
    remedy = (
        "train it on pixels in a run of its own, which the stages that use it name as runs/NAME/STAGE, or set "
        f"stages.{stage.name}.skip=true once it is trained"
        if "tokens" in there
        else "give videos (or images), or video_codebook_ids"
    )
    raise InputError(
        f"{who} reads pixels, and the items of data.source={stage.spec.data.source} hold {', '.join(sorted(there))} only: {remedy}"
    )


def _require_text(data: StageData) -> None:
    """Text embeddings of the right width in the data, where they are all the text that there is."""
    stage, source = data.stage, data.source
    text = dict(stage.spec.config).get("text")
    if not isinstance(text, TextConfig) or text.kind != "given":
        return
    who = f"stage {stage.name} ({stage.spec.config.task}) with text.kind=given"
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
            f"stage {stage.name} ({stage.spec.config.task}) draws after sketches, and the items of data.source={stage.spec.data.source} have none: "
            "set data.sketch=true (moving_digits) or data.sketches=FOLDER (folder), give them as `sketch` in your own Dataset, "
            f"or leave stages.{stage.name}.sketch out"
        )


def _memory(folder: Path | None, stage: StagePlan, split: Split) -> Path | None:
    return scan_file(folder, stage, split) if folder is not None and folder.is_dir() else None
