"""Data sources: the config keys that all share, their splits, and how they are opened by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch.utils.data import Dataset

from kineograph.core.batch import Sample, Shape
from kineograph.core.caption_format import CaptionFormat, Captioning, check_template
from kineograph.core.config import Config, Size, parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.protocols import Source
from kineograph.core.registry import find_source

Split = Literal["train", "validation", "test"]
DEFAULT_FPS = 8.0


class DataConfig(Config):
    """Keys of every data source. A source's own `Config` extends this class."""

    caption_places: ClassVar[tuple[str, ...]] = ("text",)
    """Names in braces that `caption` may hold."""
    source: str = "moving_digits"
    """moving_digits, folder, memmap, webdataset, mix, cache, or the dotted path of your own Dataset or Source."""
    size: Size = (32, 32)
    """Height and width in pixels; one number means a square."""
    frames: int = Field(1, ge=1, le=65536)
    """Frames per clip; 1 means images."""
    fps: float | None = Field(None, gt=0)
    """Frame rate at which clips are sampled, by their timestamps; null keeps each clip's own rate."""
    sample_rate: int | None = Field(None, ge=4000, le=48000)
    """Samples a second of the sound track that is read with each clip (folder, moving_digits), a multiple of `fps`; null: no sound."""
    channels: Literal[1, 2, 3, 4] = 3
    """1 grayscale, 2 grayscale with alpha, 3 RGB, 4 RGBA; files are converted to it."""
    validation: float = Field(0.05, ge=0, lt=1)
    """Share of items held out for validation; 0 validates on training data (and logs it)."""
    test: float = Field(0.0, ge=0, lt=1)
    """Share of items held out for the test split."""
    split_seed: int = Field(0, ge=0)
    """Another number holds out other items for validation and test."""
    shuffle: bool = True
    """Train on the items in a new random order in every epoch; false: in their own order, every time."""
    uncaptioned: Literal["refuse", "skip", "empty"] = "refuse"
    """Items without a caption: refuse to train a stage that reads captions; skip them, if others have one; or empty: train them on the null text."""
    caption: str | None = None
    """Template of captions, such as "{text}, in the style of sks": {text} is the item's own caption. Without {text} all items get this caption."""
    shuffle_tags: bool = False
    """Put the parts of a caption between commas in a new random order each time (training only), before the template is filled."""
    max_unreadable: float = Field(0.2, ge=0, le=1)
    """Stop when more than this share of the items cannot be read."""

    @field_validator("uncaptioned", mode="before")
    @classmethod
    def _rename_keep(cls, value: Any) -> Any:
        return "empty" if value == "keep" else value  # its earlier name

    @field_validator("caption")
    @classmethod
    def _check_caption(cls, value: str | None) -> str | None:
        if value is not None:
            check_template(value, cls.caption_places)
        return value

    @model_validator(mode="after")
    def _check_splits(self) -> DataConfig:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation={self.validation} and test={self.test} leave nothing to train on: keep their sum below 1"
            )
        return self

    @model_validator(mode="after")
    def _check_sound(self) -> DataConfig:
        fps = self.fps or DEFAULT_FPS
        if self.sample_rate is not None and self.sample_rate % fps:
            near = max(1, round(self.sample_rate / fps)) * fps
            raise ValueError(
                f"sample_rate={self.sample_rate} gives {self.sample_rate / fps:g} samples for each frame at fps={fps:g}, and a frame takes "
                f"whole samples: use a multiple of fps, such as {near:g}"
            )
        return self

    def caption_format(self, split: Split) -> CaptionFormat:
        """How the items of a split get their captions; only training draws."""
        return CaptionFormat(self.caption, self.shuffle_tags, split == "train", self.uncaptioned == "empty")

    @property
    def shape(self) -> Shape:
        return Shape(self.frames, self.size[0], self.size[1], self.channels, self.fps or DEFAULT_FPS, self.sample_rate)


LOCATION_KEYS = (
    "folder",
    "validation_folder",
    "shards",
    "sketches",
    "img_embeddings_folder",
    "text_embeddings_folder",
    "text_encodings_folder",
    "image_embeddings",
    "text_embeddings",
    "metadata",
)
"""Keys of data.* that say where the items lie: a run's data may be moved."""


def is_location(key: str) -> bool:
    """Whether a key of data.* says where items lie: `folder`, or `mix.NAME.folder`."""
    parts = key.split(".")
    return parts[-1] in LOCATION_KEYS and (len(parts) == 1 or (len(parts) == 3 and parts[0] == "mix"))


_DEFAULT_SOURCE: str = DataConfig.model_fields["source"].default


def source_name(data: Mapping[str, Any], default: str = _DEFAULT_SOURCE) -> str:
    return str(data.get("source") or default).replace("-", "_")


def drop_other_source_keys(
    data: dict[str, Any], override: dict[str, Any], default: str = _DEFAULT_SOURCE
) -> dict[str, Any]:
    """Prepare `data` for a merge with `override`: if that changes the source, only the shared keys stay.

    `default` is the source of `data` when it names none.
    """
    if not override.get("source") or source_name(override) == source_name(data, default):
        return data
    kept = {key: value for key, value in data.items() if key in DataConfig.model_fields}
    if "{label" in str(kept.get("caption")):  # labels of an array
        del kept["caption"]
    return kept


def drop_digit_channels(data: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Remove `channels` if the source changes from moving_digits to files: gray digits say nothing about these."""
    if source_name(data) != _DEFAULT_SOURCE or source_name(override) not in ("folder", "webdataset", "mix"):
        return data
    return {key: value for key, value in data.items() if key != "channels"}


# Opening ----------------------------------------------------------------------------------------------------------


def parse_data_config(tree: Mapping[str, Any], where: str = "data") -> DataConfig:
    """Parse `tree` with the Config of the source that it names."""
    if "caption_dropout" in tree:
        raise ConfigError(
            f"unknown key {where}.caption_dropout: every stage that reads captions drops them itself, for guidance; "
            "set stages.NAME.caption_dropout, or text_dropout for task: dalle2"
        )
    return parse(find_source_class(tree.get("source", _DEFAULT_SOURCE)).Config, tree, where)


def open_source(config: DataConfig, split: Split, seed: int, dataset: Dataset | None = None) -> Source:
    """Open one split. A `dataset` object replaces the source that the config names."""
    if dataset is not None:
        from kineograph.data.dataset import DatasetSource

        source: Source = DatasetSource(dataset, config, split)
    else:
        source = find_source_class(config.source).open(config, split, seed)
    if config.sample_rate is not None and "audio" not in source.fields:
        raise ConfigError(
            f"data.sample_rate={config.sample_rate}: data.source={config.source} reads no sound tracks; use folder or moving_digits, "
            "or set data.sample_rate=null"
        )
    if not source.parts:  # those of a mix have their own
        source.captioning = Captioning((config.caption_format(split),))
    source.shuffle = config.shuffle
    return source


def find_source_class(name: str) -> Any:
    from kineograph.data.dataset import DatasetSource

    source = find_source(name)
    return source if isinstance(source, type) and issubclass(source, Source) else DatasetSource


class BlankSource(Source):
    """Black clips with a caption, where only the shape of the data matters."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.fields = frozenset({"pixels"} if shape.sample_rate is None else {"pixels", "audio"})

    def __len__(self) -> int:
        return 1024

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        shape = self.shape
        pixels = torch.zeros(shape.frames, shape.channels, shape.height, shape.width, dtype=torch.uint8)
        sample = Sample(pixels=pixels, fps=shape.fps, caption=self.caption(index))
        if shape.sample_rate is not None:
            sample.extra["audio"] = torch.zeros(shape.frames, shape.samples_per_frame)
        return sample

    def caption(self, index: int) -> str:
        return "a clip"

    def identity(self, index: int) -> str:
        return f"blank-{index}"


# Splits -----------------------------------------------------------------------------------------------------------


class SplitItems(NamedTuple):
    """The items of one split, in the order of the whole set."""

    indices: np.ndarray
    note: str | None = None  # a line for the log, when validation falls back to training data


def hash_to_unit(identity: str, seed: int = 0) -> float:
    """Hash an identity to [0, 1), so that splits are stable when items are added, removed or reordered."""
    text = f"{seed}\0{identity}" if seed else identity
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def assign_splits(identities: Sequence[str], validation: float, test: float, seed: int = 0) -> dict[Split, np.ndarray]:
    """Indices of each split. A share above 0 gets at least one item while there are enough items."""
    hashes = np.array([hash_to_unit(identity, seed) for identity in identities])
    masks: dict[Split, np.ndarray] = {
        "validation": hashes < validation,
        "test": (hashes >= validation) & (hashes < validation + test),
        "train": hashes >= validation + test,
    }
    shares: dict[Split, float] = {"train": 1.0, "validation": validation, "test": test}
    nonempty = [name for name, share in shares.items() if share > 0]
    for name in nonempty[: len(hashes)]:
        if masks[name].any():
            continue
        # Move the item with the nearest hash from the largest split: the lowest for validation, the highest for training.
        largest = max(nonempty, key=lambda other: int(masks[other].sum()))
        candidates = sorted(np.flatnonzero(masks[largest]).tolist(), key=lambda item: (hashes[item], identities[item]))
        moved = candidates[-1] if name == "train" else candidates[0]
        masks[largest][moved], masks[name][moved] = False, True
    return {name: np.flatnonzero(mask) for name, mask in masks.items()}


def select_captioned_items(
    identities: Sequence[str], captions: Sequence[Any], split: Split, config: DataConfig
) -> SplitItems:
    """As `select_split`; with data.uncaptioned=skip, of the items that have a caption, unless none has."""
    kept = [index for index, texts in enumerate(captions) if texts]
    if config.uncaptioned != "skip" or not kept or len(kept) == len(identities):
        return select_split(identities, split, config)
    part = select_split([identities[index] for index in kept], split, config)
    missing = len(identities) - len(kept)
    line = f"data.uncaptioned=skip: {missing} of {len(identities)} items have no caption and are left out"
    notes = [part.note, line if split == "train" else None]
    return SplitItems(np.array(kept, np.int64)[part.indices], "; ".join(filter(None, notes)) or None)


def select_split(identities: Sequence[str], split: Split, config: DataConfig) -> SplitItems:
    """The items of `split`. Without held-out items, validation falls back to the training data, with a note."""
    splits = assign_splits(identities, config.validation, config.test, config.split_seed)
    if len(splits[split]):
        return SplitItems(splits[split])
    if split == "validation":
        why = "data.validation=0" if config.validation == 0 else f"{len(identities)} item is too few to hold one out"
        return SplitItems(splits["train"], f"validating on training data: {why}")
    if config.test == 0:
        raise InputError("there is no test split: data.test is 0; set data.test=0.1, for example")
    raise InputError(
        f"no item is left for the {split} split: {len(identities)} items, data.validation={config.validation}, data.test={config.test}"
    )
