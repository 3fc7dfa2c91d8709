"""`data.source=cache`: tokens, latents or embeddings from disk in place of pixels, from our own cache or someone else's array."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from pydantic import Field

from kineograph.cache.pack import HEADER, Header, Pack, read_header
from kineograph.cache.store import SET, CacheSet, SetHeader, lock_cache
from kineograph.core.batch import Sample
from kineograph.core.caption_format import CaptionFormat
from kineograph.core.config import Axis, LocalPath
from kineograph.core.errors import InputError, Unreadable
from kineograph.data.arrays import Array, find_array, read_captions_beside
from kineograph.data.buckets import Bucket, BucketedSource, BucketFit, Buckets
from kineograph.data.captions import several_texts, strip_captions
from kineograph.data.memmap import format_label, read_labels
from kineograph.data.open_source import DataConfig, Split, SplitItems, select_captioned_items

_OPEN_PACKS = 64  # packs whose arrays stay mapped
EXTRA_FIELDS = ("image_embed", "text_embed", "first_frame", "low_res_tokens")  # fields that go into Sample.extra


class CacheConfig(DataConfig):
    caption_places: ClassVar[tuple[str, ...]] = ("text", "label")
    source: str = "cache"
    folder: LocalPath
    """A cache's folder; or someone else's array of codebook ids (.npy or raw) with `vocabulary` and `tokens_shape`."""
    vocabulary: int | None = Field(None, ge=1)
    """Number of codes in a foreign array."""
    tokens_shape: tuple[Axis, Axis, Axis] | None = None
    """t, h, w of one item in a foreign array; an item may be stored flat."""
    array_shape: tuple[Axis, ...] | None = None
    """Of a raw foreign file: items first."""
    array_dtype: str = "int64"
    """Of a raw foreign file."""
    labels: str | None = None
    """Foreign array: file of labels, N or N × K integers, from which `caption` makes captions; null: labels.npy beside it, if it exists."""
    labels_dtype: str = "uint8"
    """Of a raw labels file."""

    @property
    def label_template(self) -> str | None:
        return self.caption if self.caption is not None and "{label" in self.caption else None

    def caption_format(self, split: Split) -> CaptionFormat:
        form = super().caption_format(split)
        return form if self.label_template is None else replace(form, template=None)


class Cache(BucketedSource):
    Config = CacheConfig
    can_reshape = False  # an item keeps the shape in which it was encoded

    def __init__(
        self,
        config: CacheConfig,
        packs: list[Pack],
        rows: np.ndarray,
        captions: list[tuple[str, tuple[str, ...]]],
        part: SplitItems,
        header: SetHeader,
    ) -> None:
        """`rows` (N 2) is the pack and row of each item, `captions` its identity and captions; `part` chooses the items of the split."""
        self.config, self.packs, self._rows, self._captions = config, packs, rows, captions
        self._has_captions = any(texts for _, texts in captions)
        self.indices, self.note = self._skip_uncaptioned(part)
        self.fields = frozenset(packs[0].arrays)
        self._header = header
        self.buckets = _build_buckets(header, rows[self.indices, 0])
        self._lock: IO[bytes] | None = None
        self._open: OrderedDict[int, None] = OrderedDict()  # mapped packs, the one used last at the end

    @classmethod
    def open(cls, config: CacheConfig, split: Split, seed: int) -> Cache:
        folder = Path(config.folder).expanduser()
        by_split = folder / ("train" if split == "validation" and not _is_cache(folder / split) else split)
        if not _is_cache(folder) and _is_cache(by_split):
            folder = by_split
        if not _is_cache(folder):
            return cls._open_foreign(config, split)
        if config.label_template is not None:
            raise InputError(
                f"data.caption={config.caption!r} makes captions from labels, and the cache {folder} has none: use {{text}}"
            )
        cache_set = _open_set(folder)
        packs = cache_set.open_packs()
        lines = [pack.captions() for pack in packs]
        captions = [lines[pack][row] for pack, row in cache_set.rows.tolist()]
        header = cache_set.header
        if header.split is None:
            identities, texts = [identity for identity, _ in captions], [texts for _, texts in captions]
            part = select_captioned_items(identities, texts, split, config)
        elif header.split == split:
            part = SplitItems(np.arange(len(captions)))
        elif split == "validation" and header.split == "train":
            part = SplitItems(
                np.arange(len(captions)), f"validating on training data: {folder} caches no validation split"
            )
        else:
            raise InputError(f"the cache {folder} holds the {header.split} split, not {split}")
        source = cls(config, packs, cache_set.rows, captions, part, header)
        source._lock = lock_cache(folder)
        return source

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None}  # workers end before the process that they read for

    @classmethod
    def _open_foreign(cls, config: CacheConfig, split: Split) -> Cache:
        array = find_array(
            config.folder, ("tokens", "indices", "video_codebook_ids"), config.array_shape, config.array_dtype
        )
        if config.vocabulary is None or config.tokens_shape is None:
            raise InputError(
                f"{array.path} is not a cache of ours (no {SET} or {HEADER} beside it): "
                "set data.vocabulary and data.tokens_shape=[t, h, w] to read it as codebook ids"
            )
        if array.dtype.kind not in "iu":
            raise InputError(f"{array.path} holds {array.dtype}: codebook ids are integers")
        count, each, needed = array.shape[0], int(np.prod(array.shape[1:])), int(np.prod(config.tokens_shape))
        if each != needed:
            raise InputError(
                f"{array.path} has {each} ids an item (shape {array.shape}), and data.tokens_shape={list(config.tokens_shape)} needs {needed}"
            )
        for ends in (slice(0, 256), slice(max(count - 256, 0), count)):  # the others are checked when they are read
            low, high = int(array.values[ends].min()), int(array.values[ends].max())
            if low < 0 or high >= config.vocabulary:
                raise InputError(
                    f"{array.path} holds ids from {low} to {high}, and data.vocabulary={config.vocabulary} allows 0 to {config.vocabulary - 1}"
                )
        lines = read_captions_beside(array.path)
        if config.label_template is not None:
            lines = _caption_labels(config, array, count, lines)
        if lines is not None and len(lines) != count:
            raise InputError(f"{array.path} has {count} items and there are {len(lines)} captions beside it")
        header = Header(
            kind="tokens",
            count=count,
            done=count,
            shape=config.tokens_shape,
            vocabulary=config.vocabulary,
            arrays={"tokens": str(array.dtype)},
        )
        names = [f"{array.path.name}:{number}" for number in range(count)]
        captions = list(zip(names, lines or [()] * count, strict=True))
        pack = Pack(array.path.parent, header, {"tokens": array})
        part = select_captioned_items(names, lines or (), split, config)
        return cls(config, [pack], _rows_of(0, count), captions, part, SetHeader(packs=("",), split=None))

    def _skip_uncaptioned(self, part: SplitItems) -> SplitItems:
        if self.config.uncaptioned != "skip" or not self._has_captions:
            return part
        kept = np.array([index for index in part.indices.tolist() if self._captions[index][1]], np.int64)
        if len(kept) == len(part.indices):
            return part
        count = len(part.indices)
        line = f"data.uncaptioned=skip: {count - len(kept)} of {count} items have no caption and are left out"
        return SplitItems(kept, "; ".join(filter(None, [part.note, line])))

    def check_vocabulary(self, vocabulary: int) -> None:
        """Refuse ids of a codec with another number of codes."""
        for pack in self.packs:
            if pack.header.vocabulary != vocabulary:
                self._refuse(f"holds ids of {pack.header.vocabulary} codes, and the codec has {vocabulary};")

    def check_codec(self, path: str, digest: str) -> None:
        """Refuse tokens or latents of other weights than those of the codec at `path`."""
        for pack in self.packs:
            if pack.header.codec and pack.header.codec != digest:
                self._refuse(
                    f"was encoded by other weights ({pack.header.codec[:12]}) than the codec {path} has ({digest[:12]}), "
                    "for which its numbers mean something else: name the codec that made it, or"
                )

    def check_grid(self, shape_for: Callable[[int, int, int], tuple[int, int, int]]) -> None:
        """Refuse tokens or latents whose t h w is not what a codec makes of their clips: `shape_for` of frames, height, width."""
        for number, pack in enumerate(self.packs):
            clip = (self.config.frames, *self.config.size)
            if self.buckets is not None:
                clip = self.buckets.shapes[self._header.bucket_of[number]]
            axes = iter(pack.header.shape)
            # The grid's axes in order, wherever the channels are.
            if not all(side in axes for side in shape_for(*clip)):
                self._refuse(
                    f"holds items of shape {pack.header.shape}, and the codec makes t h w = {shape_for(*clip)} of {' × '.join(map(str, clip))};"
                )

    def _refuse(self, fault: str) -> None:
        raise InputError(f"the cache {self.config.folder} {fault} build it anew with kineo cache")

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        pack, row = self._rows[self.indices[index]].tolist()
        fields = self._map_pack(pack).read(row, self.identity(index))
        fps = float(fields.pop("fps")) if "fps" in fields else self.config.shape.fps
        # Where others have a caption, an empty one is the null text.
        caption = self.caption(index) or ("" if self._has_captions else None)
        sample = Sample(caption=caption, texts=several_texts(self.captions(index)), fps=fps)
        for name, value in fields.items():
            if name in EXTRA_FIELDS:
                sample.extra[name] = value
            else:
                setattr(sample, name, value)
        return sample

    def read_as(self, index: int, shape: Bucket, rng: np.random.Generator) -> Sample:
        if self.buckets is not None and self.buckets.shape(index) != shape:
            raise Unreadable(self.identity(index), f"encoded as {self.buckets.shape(index)}, not as {shape}")
        return self.read(index, rng)

    def _map_pack(self, number: int) -> Pack:
        """A pack, after closing the one used longest ago where too many are mapped."""
        self._open[number] = None
        self._open.move_to_end(number)
        if len(self._open) > _OPEN_PACKS:
            self.packs[self._open.popitem(last=False)[0]].close()
        return self.packs[number]

    def caption(self, index: int) -> str | None:
        return next(iter(self.captions(index)), None)

    def captions(self, index: int) -> Sequence[str]:
        return self._captions[self.indices[index]][1]

    def identity(self, index: int) -> str:
        return self._captions[self.indices[index]][0]

    def list_missing_captions(self) -> list[str]:
        if self.fields & {"text_embeds", "text_embed"}:
            return []
        return [self.identity(index) for index in range(len(self)) if self.caption(index) is None]


def _is_cache(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SET, HEADER))


def _open_set(folder: Path) -> CacheSet:
    """The set in a folder, or a single pack as a set."""
    cache_set = CacheSet.read(folder)
    if cache_set is not None:
        return cache_set
    header = read_header(folder)
    if header is None or header.done < header.count:
        done = f"{header.done} of {header.count} items" if header is not None else "not begun"
        raise InputError(f"the cache {folder} is unfinished ({done}): run the command that made it again")
    return CacheSet(folder, SetHeader(packs=(folder.name,), split=header.split), _rows_of(0, header.done))


def _rows_of(pack: int, count: int) -> np.ndarray:
    """All rows of one pack."""
    return np.stack([np.full(count, pack), np.arange(count)], axis=1)


def _build_buckets(header: SetHeader, packs: np.ndarray) -> Buckets | None:
    """The buckets of items, given the pack of each."""
    if header.usual is None or header.buckets is None:
        return None
    fits = [BucketFit(header.bucket_of[pack], 1.0, False, False) for pack in packs.tolist()]
    return Buckets([Bucket(*shape) for shape in header.shapes], fits, header.buckets, Bucket(*header.usual))


def _caption_labels(
    config: CacheConfig, array: Array, count: int, lines: list[tuple[str, ...]] | None
) -> list[tuple[str, ...]]:
    """Captions that data.caption makes from the labels of a foreign array."""
    labels = read_labels(config.labels, config.labels_dtype, array)
    if labels is None:
        raise InputError(
            f"data.caption makes captions from labels, and there are none beside {array.path}: set data.labels"
        )
    if len(labels) > count and len(labels) % count == 0:  # a raw file of several labels an item comes flat
        labels = labels.reshape(count, -1)
    if len(labels) != count:
        raise InputError(
            f"{array.path} has {count} items and there are {len(labels)} labels: set data.labels and data.labels_dtype"
        )
    assert config.label_template is not None
    own = lines or [()] * count
    return [
        strip_captions(format_label(config.label_template, label, text) for text in texts or ("",))
        for label, texts in zip(labels, own)
    ]


SOURCE = Cache
