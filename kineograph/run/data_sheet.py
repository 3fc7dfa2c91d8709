"""`kineo data show DIR`: a contact sheet of items as the model will see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from kineograph.core.batch import Sample
from kineograph.core.config import parse_override
from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.notes import Note
from kineograph.core.protocols import Source
from kineograph.data.file_listing import list_folder
from kineograph.data.fit_summary import summarise_fit
from kineograph.data.open_source import DataConfig, Split, open_source, parse_data_config
from kineograph.evaluate.sheets import enlarge_for_caption
from kineograph.media.grids import make_grid, select_evenly
from kineograph.run.layers import is_override, read_config
from kineograph.run.plan import RunConfig, make_plan

_FORMATS = (".png", ".jpg", ".jpeg", ".webp")
_MOST_FAILED = 1000  # items that cannot be read, after which no more are tried
_LISTED = 16  # of these


def show_data(
    path: Path,
    arguments: Sequence[str],
    out: Path,
    count: int = 16,
    split: Split = "train",
    stage: str | None = None,
    note: Note = print,
) -> Path:
    """Write a sheet of `count` evenly spaced items, read with the data keys of a preset, files and overrides."""
    if out.suffix.lower() not in _FORMATS:
        raise InputError(f"--out {out}: the sheet is a picture; end its name with {', '.join(_FORMATS)}")
    config = read_data_config(path, arguments, stage)
    source = open_source(config, split, 0)
    if "pixels" not in source.fields:
        raise InputError(
            f"data.source={config.source} reads no pixels ({', '.join(sorted(source.fields))}): nothing to show"
        )
    if source.note:
        note(source.note)
    for line in summarise_fit(source, config):
        note(line)
    samples = _read_evenly(source, count, note)
    if not samples:
        raise InputError(f"{path}: none of the items can be read; kineo data check {path} lists them all")
    cells = [enlarge_for_caption(_show_pixels(sample)) for sample in samples]
    out.parent.mkdir(parents=True, exist_ok=True)
    make_grid(cells, captions=[_describe(sample) for sample in samples]).save(out)
    note(
        f"{len(samples)} of {len(source)} {split} items, {config.frames} × {config.size[0]} × {config.size[1]} "
        f"with {config.channels} channel{'s' if config.channels > 1 else ''} (frames × height × width)"
    )
    return out


def _read_evenly(source: Source, count: int, note: Note) -> list[Sample]:
    """Evenly spaced items; one that cannot be read is replaced by the next that is not shown yet."""
    total = len(source)
    indices = select_evenly(total, count)
    samples: dict[int, Sample] = {}
    lines: list[str] = []
    for index in indices:  # grows with each that cannot be read
        try:
            samples[index] = _read(source, index)
        except Unreadable as error:
            lines.append(f"cannot be read: {error.path}: {error.reason}")
            if len(lines) < _MOST_FAILED:
                following = (place % total for place in range(index + 1, index + total))
                indices += islice((place for place in following if place not in indices), 1)
    for line in lines[:_LISTED]:
        note(line)
    if len(lines) > _LISTED:
        note(f"… and {len(lines) - _LISTED} more; kineo data check lists them all")
    return [samples[index] for index in sorted(samples)]


def _read(source: Source, index: int) -> Sample:
    """An item with the caption that the model will see, and how many it is drawn from."""
    sample = source.read(index, numpy_rng(0, index, "show"))
    texts = sample.texts or ((sample.caption,) if sample.caption else ())
    caption = source.captioning.at(index).draw(texts, lambda: numpy_rng(0, index, "caption"))
    if caption and len(texts) > 1:
        caption = f"[1 of {len(texts)} captions] {caption}"
    return replace(sample, caption=caption)


def _show_pixels(sample: Sample) -> Tensor:
    """T C H W, uint8. Pixels that do not count in the loss are faded to gray."""
    assert sample.pixels is not None
    if sample.loss_mask is None:
        return sample.pixels
    share = sample.loss_mask.float() / 255 * 0.85 + 0.15
    return torch.lerp(torch.full_like(share, 128.0), sample.pixels.float(), share).round().to(torch.uint8)


def read_data_config(path: Path, arguments: Sequence[str], stage: str | None = None) -> DataConfig:
    """The data keys of a stage (default: the last) with the items at `path`; keys without a section belong to data.*."""
    settings = [_add_section(argument) for argument in arguments if is_override(argument)]
    files = [argument for argument in arguments if not is_override(argument)]
    chosen = dict(map(parse_override, settings)).get("data.source")
    is_config = path.suffix.lower() in (".yaml", ".yml") and path.is_file()  # it says where the items lie
    files, place = ([*files, str(path)], []) if is_config else (files, _locate(path, chosen))
    tree = read_config([*files, *place, *settings])
    if not tree.get("stages"):
        if stage is not None:
            raise ConfigError(f"--stage {stage}: only a preset or file has stages; name one")
        return parse_data_config(tree.get("data") or {})
    plan = make_plan(tree)
    if stage is not None and stage not in [known.name for known in plan.stages]:
        raise ConfigError(f"--stage {stage}: the stages are {', '.join(known.name for known in plan.stages)}")
    return (plan.stage(stage) if stage is not None else plan.stages[-1]).spec.data


def _add_section(argument: str) -> str:
    key = argument.partition("=")[0]
    return argument if "." in key or key in RunConfig.model_fields else f"data.{argument}"


def _locate(path: Path, source: str | None) -> list[str]:
    """Overrides that read `path`: a folder of media, shards or arrays, by what it holds."""
    if source is None:
        listing = list_folder(path, "") if path.is_dir() else None
        names = [*listing.others] if listing is not None else [path.name]
        endings = {Path(name).suffix.lower() for name in names}
        if listing is not None and listing.media:
            source = "folder"
        elif ".tar" in endings:
            source = "webdataset"
        else:
            source = "memmap" if ".npy" in endings else "folder"
    return [f"data.source={source}", f"data.{'shards' if source == 'webdataset' else 'folder'}={path}"]


def _describe(sample: Sample) -> str:
    """The caption, and how many frames are padding."""
    words = sample.caption or "(no caption)"
    if sample.frame_mask is None or bool(sample.frame_mask.all()):
        return words
    return f"[{int(sample.frame_mask.sum())} of {len(sample.frame_mask)} frames, the rest is padding] {words}"
