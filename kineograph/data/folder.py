"""A folder of images and clips, with any captions found in it. Nothing has to be converted or listed beforehand."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple
from unicodedata import normalize

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from kineograph.core.batch import Sample
from kineograph.core.config import LocalPath
from kineograph.core.errors import InputError, Unreadable
from kineograph.data.buckets import Bucket, BucketedSource, Buckets, MediaInfo, assign_buckets
from kineograph.data.captions import Captions, Problem, Span, find_captions, read_captions, several_texts
from kineograph.data.decode import Clip, decode_media, probe_media, raise_unreadable
from kineograph.data.decoded_cache import DecodedCache, DecodedSize, KeepsDecoded
from kineograph.data.file_listing import list_folder, refuse_empty
from kineograph.data.fit_summary import MeasuresItems, has_colour, measure_sample
from kineograph.data.loss_masks import check_mask_size, describe_masks, mask_options
from kineograph.data.media_config import DecodeOptions, MediaConfig, media_kind
from kineograph.data.open_source import Split
from kineograph.data.probe import list_unreadable, probe_all
from kineograph.data.sound_track import read_sound
from kineograph.data.split_folders import exclude_validation_folder, select_files
from kineograph.data.transforms import pad_frames
from kineograph.data.trim import UNTRIMMED, CutConfig


class FolderConfig(MediaConfig):
    source: str = "folder"
    folder: LocalPath
    """Searched with all its subfolders; hidden files are ignored."""
    validation_folder: LocalPath | None = None
    """Folder whose items are the validation split, with captions as in `folder`; null: held out of `folder`."""
    split_folders: bool = True
    """Folders train, validation (val, valid, dev) and test at the top of `folder` are the splits; false: all items are split by share."""
    split_by: Literal["file", "folder"] = "file"
    """Hold out single files, or whole subfolders: for crops of one picture or scenes of one film, which must not be in both splits."""
    cut: CutConfig | None = None
    """Cut every clip into shorter ones, each an item, such as {seconds: 4, overlap: 1}; all those of a file are in one split. null: not."""
    masks: bool = False
    """Pictures named NAME-mask beside an item NAME say which part of it counts in the loss: white does, black does not. false: not used."""
    sketches: LocalPath | None = None
    """Folder of sketches, each named as its image or clip (the suffix may differ) and cropped the same way; null: none."""
    sketch_channels: Literal[1, 2, 3, 4] = 1
    """Channels of the sketches, as data.channels."""

    @model_validator(mode="after")
    def _check_frame_rate(self) -> FolderConfig:
        if self.sample_rate is not None and self.fps is None:
            raise ValueError(
                f"sample_rate={self.sample_rate} needs one frame rate for all clips: set data.fps, such as fps=8"
            )
        return self


class Item(NamedTuple):
    """A file, or the span of a clip that has its own caption."""

    name: str
    span: Span | None = None
    prefix: str = ""  # tells the items of data.validation_folder from those of data.folder

    @property
    def local_identity(self) -> str:
        """The name within its folder."""
        span = f"@{self.span.start:.10g}-{self.span.end:.10g}" if self.span is not None else ""
        return normalize("NFC", self.name) + span

    @property
    def identity(self) -> str:
        return self.prefix + self.local_identity


def build_items(names: Iterable[str], captions: Captions, prefix: str = "") -> list[Item]:
    """One item per file, or per captioned span where a file has these."""
    whole: Sequence[Span | None] = (None,)
    return [Item(name, span, prefix) for name in names for span in captions.spans.get(name, whole)]


def _read_item_captions(item: Item, captions: Captions, root: Path, config: FolderConfig) -> Sequence[str]:
    """Those of its span or file. A .txt file is read once."""
    if item.span is not None and item.span.texts is not None:
        return item.span.texts
    texts = captions.listed.get(item.name)
    if texts is None:
        texts = ()
        if item.name in captions.sidecars:
            # `kineo data check` gives the reason.
            with suppress(OSError, UnicodeDecodeError):
                texts = read_captions(root / captions.sidecars[item.name], config.caption_lines)
        captions.listed[item.name] = texts
    return texts


class Folder(BucketedSource, MeasuresItems, KeepsDecoded):
    Config = FolderConfig

    def __init__(
        self,
        config: FolderConfig,
        root: Path,
        items: list[Item],
        captions: Captions,
        split: Split,
        note: str | None,
        problems: list[Problem],
        buckets: Buckets | None = None,
        skipped: dict[str, str] | None = None,
        masks: dict[str, str] | None = None,
    ) -> None:
        self.config = config
        self.root = root
        self.items = items
        self.buckets = buckets
        self.skipped = skipped or {}
        self.note = note
        self.problems = problems
        """Not fatal: metadata rows without a file, text that is not UTF-8."""
        self._captions = captions
        extra = {"sketch": config.sketches is not None, "audio": config.sample_rate is not None}
        self.fields = frozenset({"pixels", *(name for name, has in extra.items() if has)})
        self._sketches = _find_sketches(config, [item.name for item in items]) if config.sketches is not None else {}
        self._masks, self._checked_masks = masks or {}, set[str]()
        self.has_loss_masks = bool(self._masks)
        self._options = config.decode_options(split)
        self._decoded: DecodedCache | None = None

    @classmethod
    def open(cls, config: FolderConfig, split: Split, seed: int) -> Folder:
        apart = split == "validation" and config.validation_folder is not None
        key, folder = ("validation_folder", config.validation_folder) if apart else ("folder", config.folder)
        root, key = Path(folder or "").expanduser(), f"data.{key}="
        listing = list_folder(root, key)
        media = listing.media if apart else exclude_validation_folder(listing.media, root, config)
        listing = listing._replace(media=media)
        refuse_empty(root, listing, key)
        captions = find_captions(root, media, listing.others)
        items = build_items(media, captions, f"{root.name}/" if apart else "")
        skipped: dict[str, str] = {}
        if config.uncaptioned == "skip" and (captions.listed or captions.sidecars or captions.spans):
            uncaptioned = [item for item in items if not _read_item_captions(item, captions, root, config)]
            if len(uncaptioned) == len(items):
                raise InputError(f"data.uncaptioned=skip leaves none of {len(items)} items: {cls.caption_help}")
            # Before the split, which would otherwise hold out items that nothing can use.
            skipped = {item.identity: "no caption" for item in uncaptioned}
            items = [item for item in items if item.identity not in skipped]
            captioned = {item.name for item in items}
            media = [name for name in media if name in captioned]
        names, note = (set(media), None) if apart else select_files(media, split, config)  # all spans of a file in one
        if split != "train" and not apart:
            skipped = {}  # reported with the training items
        if skipped:
            line = f"data.uncaptioned=skip: {len(skipped)} of {len(items) + len(skipped)} items have no caption and are left out, such as {min(skipped)}"
            note = "; ".join(filter(None, [note, line]))
        problems = listing.problems + captions.problems
        if config.cut is not None:
            items, line = cut_items(items, root, config, config.cut, f"{key}{root}")
            note = "; ".join(filter(None, [note, line])) if split == "train" else note
        buckets = None
        if config.buckets is not None:
            trim = f"\0{config.trim}" if config.trim else ""
            stamps = [_file_stamp(root, item) + trim for item in items]
            infos = probe_all(stamps, lambda index: _measure(root, items[index], config), str(root), f"{key}{root}")
            unreadable = list_unreadable([item.identity for item in items], infos, config.max_unreadable)
            skipped |= {
                item.identity: unreadable[item.identity]
                for item in items
                if item.name in names and item.identity in unreadable
            }
            items = [item for item, info in zip(items, infos, strict=True) if isinstance(info, MediaInfo)]
            readable = [info for info in infos if isinstance(info, MediaInfo)]
            buckets = assign_buckets(readable, config.buckets, config.base_shape, config.fps)  # of all splits
            buckets = buckets.subset([index for index, item in enumerate(items) if item.name in names])
        items = [item for item in items if item.name in names]
        if split == "train":
            mask_line = describe_masks(listing.masks, names, config.masks, f"{key}{root}")
            note = "; ".join(filter(None, [note, mask_line])) or None
        masks = listing.masks if config.masks else {}
        return cls(config, root, items, captions, split, note, problems, buckets, skipped, masks)

    def __len__(self) -> int:
        return len(self.items)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        return self.read_as(index, self.buckets.shape(index) if self.buckets else self.config.base_shape, rng)

    def read_as(self, index: int, shape: Bucket, rng: np.random.Generator) -> Sample:
        item, options = self.items[index], self._options.with_shape(shape)
        path = self.root / item.name
        if item.span is not None:
            options = replace(options, span=item.span[:2])
            if self.config.cut is not None:  # trimmed already
                options = replace(options, trim=UNTRIMMED)
        sketch_rng = deepcopy(rng)  # a sketch gets the same crop, rotation and start
        clip = self._decode(path, item.identity, options, rng)
        pixels, mask = pad_frames(clip.pixels, shape.frames)
        sample = Sample(
            pixels=pixels,
            frame_mask=mask,
            fps=clip.fps or self.config.shape.fps,
            caption=self.caption(index),
            texts=several_texts(self.captions(index)),
        )
        if item.name in self._masks:
            rng.bit_generator.state = clip.geometry
            sample.loss_mask = self._read_mask(index, options, rng)
        if self._sketches:
            path = self._sketches[item.name]
            options = replace(options, channels=self.config.sketch_channels)
            sketch = self._decode(path, path.name, options, sketch_rng).pixels
            if len(sketch) != len(clip.pixels):
                reason = f"its sketch {path} has {len(sketch)} frames, but it has {len(clip.pixels)}"
                raise Unreadable(item.name, reason)
            sample.extra["sketch"], _ = pad_frames(sketch, shape.frames)
        if self.config.sample_rate is not None:
            sample.extra["audio"] = self._read_sound(self.root / item.name, item.identity, clip, shape.frames)
        return sample

    def _read_mask(self, index: int, options: DecodeOptions, rng: np.random.Generator) -> Tensor:
        """H W, uint8, with the crop that `rng` gives. Raises Unreadable."""
        name = self.items[index].name
        path = self.root / self._masks[name]
        if name not in self._checked_masks:
            check_mask_size(path, _probe(self.root, self.items[index], self.config), self.identity(index))
            self._checked_masks.add(name)
        return torch.from_numpy(self._decode(path, path.name, mask_options(options), rng).pixels[0, :, :, 0].copy())

    def _read_sound(self, path: Path, name: str, clip: Clip, frames: int) -> Tensor:
        """T S, silent where the clip is padded."""
        rate, samples = self.config.shape.sample_rate or 0, self.config.shape.samples_per_frame
        with raise_unreadable(name):
            sound = torch.from_numpy(read_sound(path, clip, rate, samples, self.config.limits))
        return torch.nn.functional.pad(sound, (0, 0, 0, frames - len(sound)))

    def _decode(self, path: Path, name: str, options: DecodeOptions, rng: np.random.Generator) -> Clip:
        if self._decoded is not None:
            return self._decoded.decode(path, name, options, rng)
        return decode_media(path, path.suffix, name, options, rng)

    def keep_decoded(self, limit: int) -> None:
        self._decoded = DecodedCache(limit)

    def estimate_decoded(self, limit: int) -> DecodedSize | None:
        if self.config.sample_rate is not None:  # the sound is read from the file
            return None
        shapes = [self.buckets.shape(index) if self.buckets else self.config.base_shape for index in range(len(self))]
        channels = self.config.channels + (self.config.sketch_channels if self._sketches else 0) + bool(self._masks)
        # With one frame each, as small as they get.
        if sum(shape.height * shape.width * channels for shape in shapes) > limit:
            return None
        measured = measure_sample(self)
        if not measured:
            return None
        total = frames = 0
        for index, info in measured:
            area, width = info.width * info.height, 4 if channels > 1 else 1  # Pillow's bytes a pixel
            if self._options.with_shape(shapes[index]).resize_crop.is_fixed:
                area, width = shapes[index].height * shapes[index].width, channels
            total, frames = total + area * width * info.frames, frames + info.frames
        return DecodedSize(total * len(self) // len(measured), frames * len(self) // len(measured))

    def measure(self, index: int) -> MediaInfo:
        return _measure(self.root, self.items[index], self.config)

    def is_coloured(self, index: int) -> bool:
        path, options = self.root / self.items[index].name, replace(self._options, channels=3, frames=1)
        return has_colour(
            decode_media(path, path.suffix, self.identity(index), options, np.random.default_rng(0)).pixels
        )

    def caption(self, index: int) -> str | None:
        return next(iter(self.captions(index)), None)

    def captions(self, index: int) -> Sequence[str]:
        return _read_item_captions(self.items[index], self._captions, self.root, self.config)

    def has_several_captions(self) -> bool:
        may_list = self.config.caption_lines == "several" or any(
            len(texts) > 1
            for texts in (*self._captions.listed.values(), *(item.span.texts or () for item in self.items if item.span))
        )
        return may_list and super().has_several_captions()

    def identity(self, index: int) -> str:
        return self.items[index].identity

    def list_missing_captions(self) -> list[str]:
        return [item.identity for index, item in enumerate(self.items) if self.caption(index) is None]

    def item_states(self) -> list[str]:
        return [
            "\0".join([item.prefix + item.name, _file_stamp(self.root, item), *(self.captions(index) or ["None"])])
            for index, item in enumerate(self.items)
        ]

    def items_digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for item in self.items:
            digest.update(_file_stamp(self.root, item).rpartition("\0")[0].encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self.config.model_dump_json().encode(), digest_size=16)
        stamps = [_file_stamp(self.root, item) for item in self.items]
        stamps += [_file_stamp(self.root, Item(mask)) for mask in self._masks.values()]
        for text in (*stamps, *("\0".join(self.captions(index)) for index in range(len(self)))):
            digest.update(f"{text}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def _file_stamp(root: Path, item: Item) -> str:
    """The item and the state of its file."""
    try:
        stat = os.stat(os.path.join(root, item.name))
        return f"{item.local_identity}\0{stat.st_size}\0{stat.st_mtime_ns}"
    except OSError:
        return f"{item.local_identity}\0gone"


def _measure(root: Path, item: Item, config: FolderConfig) -> MediaInfo:
    """Size and length of what is read of an item. Raises Unreadable."""
    info = _probe(root, item, config)
    with raise_unreadable(item.identity):
        # Cut clips are trimmed already.
        return (config.trim if config.cut is None else UNTRIMMED).measure(info, item.span and item.span[:2])


def _probe(root: Path, item: Item, config: FolderConfig) -> MediaInfo:
    return probe_media(root / item.name, PurePosixPath(item.name).suffix, item.identity, limits=config.limits)


def cut_items(
    items: list[Item], root: Path, config: FolderConfig, cut: CutConfig, label: str
) -> tuple[list[Item], str]:
    """Cut the clips among the items, and a line for the log. What cannot be read stays whole, to be counted later."""
    names = list(dict.fromkeys(item.name for item in items if media_kind(item.name) == "clip"))
    files = [Item(name) for name in names]
    infos = probe_all(
        [_file_stamp(root, file) for file in files],
        lambda index: _probe(root, files[index], config),
        str(root / ".cut"),
        label,
    )
    known = dict(zip(names, infos, strict=True))
    parts: dict[Item, list[Item]] = {}
    unused = 0.0
    for item in items:
        info = known.get(item.name)
        if not isinstance(info, MediaInfo) or not info.seconds:  # unreadable, or a still picture
            continue
        with suppress(Unreadable):
            begin, end = config.trim.span(info.seconds, info.frames / info.seconds, item.span and item.span[:2])
            spans = cut.spans(begin, end)
            unused += end - spans[-1][1]
            texts = item.span.texts if item.span else None
            parts[item] = [item._replace(span=Span(*span, texts)) for span in spans]
    if not parts:
        return items, f"data.cut: none of {len(items)} items is a clip that can be read"
    count = sum(map(len, parts.values()))
    line = f"data.cut: {len(parts)} clips are cut into {count} of {cut.seconds:g} s"
    line += f", and {unused:.0f} s at their ends are left out" if unused >= 1 else ""
    return [part for item in items for part in parts.get(item, [item])], line


def _find_sketches(config: FolderConfig, names: list[str]) -> dict[str, Path]:
    """The sketch of each item, matched by name without suffix; all must exist."""
    root = Path(config.sketches or "").expanduser()
    stems = {name: str(PurePosixPath(name).with_suffix("")) for name in names}
    sketches = {
        str(PurePosixPath(name).with_suffix("")): root / name for name in list_folder(root, "data.sketches=").media
    }
    missing = [name for name in names if stems[name] not in sketches]
    if missing:
        raise InputError(
            f"data.sketches={config.sketches} has no sketch for {len(missing)} of {len(names)} items, for example {missing[0]}: "
            "name each sketch as its image or clip"
        )
    return {name: sketches[stem] for name, stem in stems.items()}


SOURCE = Folder
