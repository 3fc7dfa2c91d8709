"""`data.source=mix`: several sources in one run, each drawn as often as its weight or its repeats say."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from kineograph.core.batch import Sample
from kineograph.core.caption_format import Captioning
from kineograph.core.config import Config, parse
from kineograph.core.errors import ConfigError, InputError, NoData, Unreadable
from kineograph.core.protocols import MixShare, Source, Stream
from kineograph.data.buckets import Bucket, BucketedSource, Buckets, buckets_of
from kineograph.data.decoded_cache import DecodedSize, KeepsDecoded
from kineograph.data.media_config import MediaConfig
from kineograph.data.open_source import DataConfig, Split, find_source_class, open_source, parse_data_config

_SHAPE = ("size", "frames", "channels")  # of a batch, so of all its items


def _require_mapping(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(part, dict) for part in value.values()):
        raise ValueError("give each part a name: {photos: {folder: DIR, repeats: 10}, films: {folder: DIR}}")
    return value


class MixConfig(MediaConfig):
    source: str = "mix"
    mix: Annotated[dict[str, dict[str, Any]], BeforeValidator(_require_mapping)] = Field(min_length=1)
    """The sources by name, each with the keys of its own source and a `weight` or `repeats`. The other keys of data.* hold for all of them."""

    @model_validator(mode="after")
    def _check_parts(self) -> MixConfig:
        """Parse every part, and keep its own keys as they are understood: paths are absolute."""
        for name in self.mix:
            if not re.fullmatch(r"[\w-]+", name):
                raise ConfigError(f"data.mix.{name}: name parts with letters, digits, _ and -")
        parts = self.shares()
        kinds = {key for part in self.mix.values() for key in _SHARE_KEYS if part.get(key) is not None}
        if len(kinds) > 1:
            raise ConfigError("data.mix has parts with a weight and parts with repeats: use one of them for all parts")
        if kinds == {"weight"} and (
            missing := next((name for name, part in parts.items() if part.weight is None), None)
        ):
            raise ConfigError(f"data.mix.{missing} has no weight, and other parts have one: give it a weight above 0")
        for name, config in self.part_configs().items():
            self._check_shape(name, config)
            dumped = config.model_dump(mode="json")
            own = {key: dumped.get(key, value) for key, value in self.mix[name].items()}
            self.mix[name].update(own | {"source": config.source})
        return self

    def part_configs(self) -> dict[str, DataConfig]:
        """The config of each part: its own keys, and those of data.* that are not at their default."""
        defaults = {name: field.default for name, field in MediaConfig.model_fields.items()}
        dumped = self.model_dump(mode="json")
        shared = {
            key: dumped[key] for key, default in defaults.items() if key != "source" and getattr(self, key) != default
        }
        return {name: _parse_part(name, part, shared) for name, part in self.mix.items()}

    def shares(self) -> dict[str, _Share]:
        return {name: parse(_Share, _pick(part, _SHARE_KEYS), f"data.mix.{name}") for name, part in self.mix.items()}

    def _check_shape(self, name: str, config: DataConfig) -> None:
        for key in _SHAPE:
            value, own = getattr(self, key), getattr(config, key)
            if own != value:
                raise ConfigError(
                    f"data.mix.{name}.{key}={own} differs from data.{key}={value}: the items of a batch have one shape; "
                    f"set data.{key} for all parts and remove data.mix.{name}.{key}"
                )


class _Share(Config):
    """How often a part is drawn."""

    weight: float | None = Field(None, gt=0)
    """Share of the samples, relative to the other parts."""
    repeats: float | None = Field(None, gt=0)
    """How often every item comes in an epoch; null: once."""


_SHARE_KEYS = tuple(_Share.model_fields)


def _pick(tree: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: tree[key] for key in keys if key in tree}


def _parse_part(name: str, part: Mapping[str, Any], shared: Mapping[str, Any]) -> DataConfig:
    where = f"data.mix.{name}"
    if "shuffle" in part:
        raise ConfigError(f"{where}.shuffle: a mix has one order; set data.shuffle")
    tree = {key: value for key, value in part.items() if key not in _SHARE_KEYS}
    if "source" not in tree:
        source = "folder" if "folder" in tree else "webdataset" if "shards" in tree else None
        if source is None:
            raise ConfigError(f"{where} names no data: give folder, shards, or source with its keys")
        tree["source"] = source
    if tree["source"] in ("mix", "cache", "dataset"):
        remedy = {"mix": "list its parts here", "cache": "give its folder of media; cache: true caches the mix"}
        raise ConfigError(
            f"{where}.source={tree['source']} cannot be part of a mix: {remedy.get(tree['source'], 'give its dotted path')}"
        )
    fields = find_source_class(tree["source"]).Config.model_fields
    return parse_data_config({key: value for key, value in shared.items() if key in fields} | tree, where)


class Mix(BucketedSource, KeepsDecoded):
    Config = MixConfig

    def __init__(self, config: MixConfig, parts: dict[str, Source], split: Split) -> None:
        self.config, self.parts = config, parts
        self._names, self._sources = list(parts), list(parts.values())
        counts = [len(source) for source in self._sources]
        self._ends = np.cumsum(counts)
        starts = (self._ends - counts).tolist()
        self._starts = starts
        self.captioning = Captioning(tuple(source.captioning.at(0) for source in self._sources), tuple(starts))
        self.fields = self._sources[0].fields
        self.pad_to_frames = max(source.pad_to_frames for source in self._sources)
        self.is_user_dataset = any(source.is_user_dataset for source in self._sources)
        self.has_loss_masks = any(source.has_loss_masks for source in self._sources)
        self.skipped = {
            f"{name}/{path}": reason for name, source in parts.items() for path, reason in source.skipped.items()
        }
        self.buckets = _join_buckets(parts)
        notes = [f"{name}: {source.note}" for name, source in parts.items() if source.note]
        if split == "train":
            shares = config.shares()
            self.shares = count_draws(counts, [shares[name] for name in self._names])
            notes.insert(0, self._describe(counts))
        self.note = "; ".join(notes) or None

    @classmethod
    def open(cls, config: MixConfig, split: Split, seed: int) -> Mix:
        parts = _open_parts(config.part_configs(), split, seed)
        first = next(iter(parts))
        for name, source in parts.items():
            where = f"data.mix.{name}"
            if isinstance(source, Stream) or len(source) > 2**32:
                raise InputError(f"{where} is endless and cannot be mixed: download its shards, or set count")
            if source.resample:
                raise ConfigError(f"{where}.resample=true draws at random, and a mix by its shares: remove it")
            if "pixels" not in source.fields or source.fields != parts[first].fields:
                raise InputError(
                    f"{where} has {', '.join(sorted(source.fields))} and data.mix.{first} has {', '.join(sorted(parts[first].fields))}: "
                    "all parts of a mix have pixels and the same fields"
                )
        return cls(config, parts, split)

    def _describe(self, counts: list[int]) -> str:
        epoch = sum(share.draws for share in self.shares)
        parts = [
            f"{name} {count:,} items × {share.draws / count:.3g} = {share.draws / epoch:.0%}"
            for name, count, share in zip(self._names, counts, self.shares, strict=True)
        ]
        return f"data.mix: an epoch has {epoch:,} samples: {', '.join(parts)}"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, index: int) -> tuple[int, int]:
        """The part of an item, and its index there."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        return part, index - self._starts[part]

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        return self._read(index, lambda source, item: source.read(item, rng))

    def read_as(self, index: int, shape: Bucket, rng: np.random.Generator) -> Sample:
        def read(source: Source, item: int) -> Sample:
            assert isinstance(source, BucketedSource)
            return source.read_as(item, shape, rng)

        return self._read(index, read)

    def _read(self, index: int, read: Callable[[Source, int], Sample]) -> Sample:
        part, item = self._find(index)
        try:
            return read(self._sources[part], item)
        except Unreadable as error:
            raise Unreadable(f"{self._names[part]}/{error.path}", error.reason) from error.__cause__

    def estimate_decoded(self, limit: int) -> DecodedSize | None:
        total = DecodedSize(0, 0)
        for source in self._sources:
            size = source.estimate_decoded(limit) if isinstance(source, KeepsDecoded) else None
            if size is None:
                return None
            total = DecodedSize(total.bytes + size.bytes, total.frames + size.frames)
        return total

    def keep_decoded(self, limit: int) -> None:
        for source in self._sources:
            assert isinstance(source, KeepsDecoded)
            source.keep_decoded(limit)

    def caption(self, index: int) -> str | None:
        part, item = self._find(index)
        return self._sources[part].caption(item)

    def captions(self, index: int) -> Sequence[str]:
        part, item = self._find(index)
        return self._sources[part].captions(item)

    def identity(self, index: int) -> str:
        part, item = self._find(index)
        return f"{self._names[part]}/{self._sources[part].identity(item)}"

    def list_missing_captions(self) -> list[str]:
        return [f"{name}/{path}" for name, source in self.parts.items() for path in source.list_missing_captions()]

    def item_states(self) -> list[str]:
        states: list[str] = []
        for name, source in self.parts.items():
            own = source.item_states()
            if own is None:  # items are a function of their index, as moving digits are
                own = [f"{index}\0{source.identity(index)}" for index in range(len(source))]
            states += [f"{name}\0{state}" for state in own]
        return states

    def items_digest(self) -> str | None:
        return _join_digests({name: source.items_digest() for name, source in self.parts.items()})

    def fingerprint(self) -> str | None:
        return _join_digests({name: source.fingerprint() for name, source in self.parts.items()})


def count_draws(counts: Sequence[int], shares: Sequence[_Share]) -> tuple[MixShare, ...]:
    """Samples of each part in an epoch: by its repeats; by weights, as many as show every item at least once."""
    if shares[0].weight is None:
        draws = [max(1, round(count * (share.repeats or 1))) for count, share in zip(counts, shares, strict=True)]
    else:
        weights = [share.weight or 0.0 for share in shares]
        unit = max(count / weight for count, weight in zip(counts, weights, strict=True))
        draws = [math.ceil(unit * weight - 1e-6) for weight in weights]
    return tuple(MixShare(count, number) for count, number in zip(counts, draws, strict=True))


def _open_parts(configs: dict[str, DataConfig], split: Split, seed: int) -> dict[str, Source]:
    """The parts of a split. Of held-out splits those that hold out nothing are left out, unless all do."""
    parts: dict[str, Source] = {}
    errors: list[InputError] = []
    for name, config in configs.items():
        try:
            parts[name] = open_source(config, split, seed)
        except InputError as error:
            if split != "test" or isinstance(error, NoData):  # a part that is gone is not one without test items
                raise type(error)(f"data.mix.{name}: {error}") from None
            errors.append(error)
    if not parts:
        raise errors[0]
    if split != "validation":
        return parts
    held_out = {name: part for name, part in parts.items() if not _is_training(configs[name], part, seed)}
    return held_out or parts


def _is_training(config: DataConfig, validation: Source, seed: int) -> bool:
    """Whether the validation items of a part are its training items, as it holds out none."""
    train = open_source(config, "train", seed)
    return len(train) == len(validation) and train.identity(0) == validation.identity(0)


def _join_buckets(parts: dict[str, Source]) -> Buckets | None:
    found = {name: buckets_of(source) for name, source in parts.items()}
    if not any(found.values()):
        return None
    without = [name for name, buckets in found.items() if buckets is None]
    if without:
        raise ConfigError(
            f"data.mix.{without[0]} has no buckets, and other parts have: set data.buckets for all of them"
        )
    buckets = [each for each in found.values() if each is not None]
    if any(each.config != buckets[0].config for each in buckets):
        raise ConfigError("the parts of data.mix have different buckets: set data.buckets for all of them instead")
    shapes = sorted({shape for each in buckets for shape in each.shapes})
    fits = [fit._replace(bucket=shapes.index(each.shapes[fit.bucket])) for each in buckets for fit in each.fits]
    return Buckets(shapes, fits, buckets[0].config, buckets[0].base)


def _join_digests(digests: Mapping[str, str | None]) -> str | None:
    if None in digests.values():
        return None
    text = "\n".join(f"{name}\0{digest}" for name, digest in digests.items())
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


SOURCE = Mix
