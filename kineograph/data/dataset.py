"""A user's own torch Dataset as a source: fields by name, or told apart by type.

Per item: str = caption · uint8, or float in [0, 1], of rank 4 = clip (T C H W; C T H W where only that fits `channels`) · of
rank 3 = image (C H W) · float of rank 2 = text embeddings (L D) · int64 of rank 2 or 3 = codebook ids (h w or t h w) · bool of
rank 1 = frame mask. Names in a dict, or `data.fields`, always win over the type. Items may hold codebook ids and no pixels at all:
`gives` says what there is, and `expect` what the ids must be like.
"""

from __future__ import annotations

import difflib
from functools import cached_property
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from kineograph.core.batch import Sample
from kineograph.core.errors import ConfigError, InputError, KineoError, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.registry import find_source
from kineograph.data.config import DataConfig, Split
from kineograph.data.decode import to_channels
from kineograph.data.precomputed_tokens import TokenGrid
from kineograph.data.split import select
from kineograph.data.timing import window
from kineograph.data.transforms import fit, pad

NAMES = {
    "pixels": ("pixels", "videos", "video", "images", "image", "clip"),
    "caption": ("caption", "captions", "text", "texts", "prompt", "prompts"),
    "tokens": ("tokens", "video_codebook_ids", "codebook_ids"),
    "frame_mask": ("frame_mask", "video_frame_mask"),
    "text_embeds": ("text_embeds",),
    "text_mask": ("text_mask",),
    "latents": ("latents",),
    "fps": ("fps",),
    "sketch": ("sketch", "sketches"),
    "image_embed": ("image_embed",),
    "text_embed": ("text_embed",),
}
_EMBEDS = ("image_embed", "text_embed")  # one vector each, for Sample.extra
_FIELD_OF = {name: field for field, names in NAMES.items() for name in names}
_EXPECTED = "str = caption, float or uint8 of rank 3 or 4 = pixels, int64 = codebook ids, bool = frame mask, float of rank 2 = text embeddings"


class DatasetConfig(DataConfig):
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What the Dataset class is called with."""
    fields: tuple[str, ...] | dict[str, str] | None = None
    """Names of a tuple's parts in order ([videos, texts, _]), or of a dict's keys ({clip: videos, label: _}); _ leaves one out."""


class DatasetSource:
    Config = DatasetConfig
    in_memory = True  # worker processes share it by forking, since it may be large or live in a notebook
    how_to_caption = (
        "give one as a str in each item, in a dict under the name texts; or train without text (text.kind=none)"
    )

    def __init__(self, dataset: Dataset, config: DataConfig, split: Split) -> None:
        """`config` may be any source's: `fields` is read where it is there."""
        if (
            isinstance(dataset, IterableDataset)
            or not hasattr(dataset, "__len__")
            or not hasattr(dataset, "__getitem__")
        ):
            raise InputError(
                f"{type(dataset).__name__} has no length or no items by index: give a map-style Dataset (__len__ and __getitem__)"
            )
        count = len(dataset)  # type: ignore[arg-type]
        if not count:
            raise InputError(f"{type(dataset).__name__} is empty")
        self.dataset, self.config = dataset, config
        part = select([f"item-{number}" for number in range(count)], split, config)
        self.indices, self.note = part.indices, part.note
        self._grid: TokenGrid | None = None
        self._probe()

    @classmethod
    def open(cls, config: DatasetConfig, split: Split, seed: int) -> DatasetSource:
        """`data.source` is a dotted path to a Dataset class."""
        if config.source == "dataset":
            raise InputError(
                "this config was made for a Dataset object given from Python: pass dataset=… again, or set data.source to its dotted path"
            )
        found = find_source(config.source)
        try:
            dataset = found(**config.arguments) if callable(found) else found
        except TypeError as error:
            raise ConfigError(
                f"data.source={config.source} cannot be built with data.arguments={config.arguments}: {error}"
            ) from None
        return cls(dataset, config, split)

    @classmethod
    def wrap(cls, dataset: Dataset, config: DataConfig, split: Split, seed: int) -> DatasetSource:
        """A Dataset object of the user's, whatever source the config names."""
        return cls(dataset, config, split)

    def _probe(self) -> None:
        """Read one item now, so that a wrong type is an error at the start and not a worker's."""
        try:
            self.read(0, numpy_rng(0, "probe"))
        except Unreadable as error:
            raise InputError(
                f"the first item of {type(self.dataset).__name__} cannot be read: {error.reason}"
            ) from error.__cause__

    @cached_property
    def gives(self) -> frozenset[str]:
        """Fields of the items, as the first one has them."""
        return frozenset(self._fields(0))

    def expect(self, grid: TokenGrid) -> None:
        """From now on codebook ids are held against this grid, and those of pictures and shorter clips padded to it."""
        self._grid = grid
        self._probe()

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        fields, name = self._fields(index), self.identity(index)
        sample = Sample(caption=fields.get("caption"), fps=fields.get("fps") or self.config.shape.fps)
        for field, value in fields.items():
            if field in _EMBEDS:
                sample.extra[field] = value
            elif isinstance(value, Tensor) and field != "sketch":
                setattr(sample, field, value)
        if "pixels" in fields:
            clip = _as_clip(fields["pixels"], self.config.channels, name)  # T H W C
            mask = sample.frame_mask
            if mask is not None and mask.shape != clip.shape[:1]:
                raise InputError(f"{name}: a frame mask of shape {tuple(mask.shape)} beside {clip.shape[0]} frames")
            real, frames = int(mask.sum()) if mask is not None else clip.shape[0], self.config.frames
            # Codebook ids tell of the first frames, whatever else the clip has.
            chosen = slice(0, min(real, frames)) if sample.tokens is not None else window(real, frames, rng)
            sample.pixels, sample.frame_mask = pad(fit(clip[chosen], self.config.size, self.config.channels), frames)
            if "sketch" in fields:
                sample.extra["sketch"] = self._sketch(fields["sketch"], clip, chosen, name)
        if sample.tokens is not None and self._grid is not None:
            sample.tokens, sample.frame_mask = self._grid.fit(sample.tokens, sample.frame_mask, name)
        return sample

    def _sketch(self, value: Any, clip: np.ndarray, chosen: slice | np.ndarray, name: str) -> Tensor:
        """T C H W, of the frames that are taken of the clip; channels as they are given."""
        sketch = _as_clip(
            value, value.shape[1] if isinstance(value, Tensor) and value.ndim == 4 else 1, name
        )  # T H W C
        if len(sketch) != len(clip):
            raise InputError(f"{name}: a sketch of {len(sketch)} frames beside a clip of {len(clip)}")
        return pad(fit(sketch[chosen], self.config.size, sketch.shape[3]), self.config.frames)[0]

    def caption(self, index: int) -> str | None:
        own = getattr(self.dataset, "caption", None)  # a Dataset may give captions without decoding
        if callable(own):
            return own(int(self.indices[index]))
        return self._fields(index).get("caption")

    def identity(self, index: int) -> str:
        return f"item-{self.indices[index]}"

    def missing_captions(self) -> list[str]:
        """Judged by the first item: reading all might take hours."""
        fields = self._fields(0)
        return (
            []
            if fields.keys() & {"caption", "text_embeds", "text_embed"}
            else [self.identity(index) for index in range(len(self))]
        )

    def _fields(self, index: int) -> dict[str, Any]:
        name = self.identity(index)
        try:
            item = self.dataset[int(self.indices[index])]
        except KineoError:
            raise
        except Exception as error:  # a user's code may raise anything
            raise Unreadable(name, f"{type(error).__name__}: {error}") from error
        fields: dict[str, Any] = {}
        for label, value in self._labelled(item, name):
            value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            field = _FIELD_OF[label] if label is not None else infer(value, name)
            if field in fields:
                raise InputError(
                    f"{name} has two values for {field}: name them with data.fields ({', '.join(NAMES[field][:2])} …, _ to leave one out)"
                )
            fields[field] = checked(field, value, name)
        if not fields:
            raise InputError(f"{name} holds nothing that is understood: {_EXPECTED}")
        if "text_mask" in fields and "text_embeds" in fields and len(fields["text_mask"]) != len(fields["text_embeds"]):
            raise InputError(
                f"{name}: a text mask of {len(fields['text_mask'])} beside {len(fields['text_embeds'])} text embeddings"
            )
        return fields

    def _labelled(self, item: Any, name: str) -> list[tuple[str | None, Any]]:
        """(field name, or None where the type must tell, value)."""
        given = getattr(self.config, "fields", None)
        if isinstance(item, dict):
            renames = given if isinstance(given, dict) else {}
            pairs = [(renames.get(key, key), value) for key, value in item.items()]
        else:
            values = list(item) if isinstance(item, (tuple, list)) else [item]
            if not isinstance(given, tuple):
                return [(None, value) for value in values]
            if len(given) != len(values):
                raise ConfigError(
                    f"data.fields names {len(given)} parts ({', '.join(given)}), and {name} has {len(values)}"
                )
            pairs = list(zip(given, values, strict=True))
        kept = [(label, value) for label, value in pairs if label != "_" and value is not None]
        unknown = [label for label, _ in kept if label not in _FIELD_OF]
        named = given.values() if isinstance(given, dict) else given or ()
        if unknown and unknown[0] in named:
            close = difflib.get_close_matches(str(unknown[0]), _FIELD_OF, 1)
            raise ConfigError(
                f"data.fields names {unknown[0]!r}, which is no field"
                + (f": did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(_FIELD_OF))}")
            )
        if unknown:
            raise InputError(
                f"{name} has the field {unknown[0]!r}, which nothing reads: rename it with data.fields={{{unknown[0]}: videos}}, or leave it out "
                f"with {{{unknown[0]}: _}}; known: {', '.join(sorted(_FIELD_OF))}"
            )
        return kept


def infer(value: Any, name: str) -> str:
    """Which field a value is, by its type."""
    if isinstance(value, str):
        return "caption"
    if isinstance(value, Image.Image):
        return "pixels"
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, str) for part in value):
        raise InputError(f"{name} holds a list of {len(value)} texts: an item has one caption")
    if isinstance(value, Tensor):
        kind, rank = value.dtype, value.ndim
        if rank in (3, 4) and (kind.is_floating_point or kind == torch.uint8):
            return "pixels"
        if rank == 2 and kind.is_floating_point:
            return "text_embeds"
        if rank in (2, 3) and kind in (torch.int64, torch.int32):
            return "tokens"
        if rank == 1 and kind == torch.bool:
            return "frame_mask"
        batched = rank == 5 or (rank == 4 and kind in (torch.int64, torch.int32))
        raise InputError(
            f"{name} holds a tensor of {kind} with shape {tuple(value.shape)}, and that could be anything: {_EXPECTED}; or name it with data.fields"
            + ("; a whole batch? an item is one clip" if batched else "")
        )
    hint = (
        "; a class label? give a caption instead, or leave it out with data.fields=[pixels, _]"
        if isinstance(value, int)
        else ""
    )
    raise InputError(
        f"{name} holds a {type(value).__name__} ({str(value)[:40]!r}), which is not understood: {_EXPECTED}{hint}"
    )


def checked(field: str, value: Any, name: str) -> Any:
    """A value of the type that its field needs."""
    if field == "caption":
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, str):
            raise InputError(f"{name}: the caption is of type {type(value).__name__}, not str")
        return value
    if field == "fps":
        return _checked_fps(value, name)
    if field in ("pixels", "sketch") and isinstance(value, Image.Image):
        return value
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: {field} is a {type(value).__name__}, not a tensor or array")
    if field in ("pixels", "sketch"):
        return _checked_pixels(value, name)
    floats = value.dtype.is_floating_point
    wanted = {
        "tokens": "int64 of rank 2 or 3 (h w or t h w)",
        "text_embeds": "float of rank 2 (L D)",
        "latents": "float",
        **dict.fromkeys(_EMBEDS, "float of rank 1 (D)"),
    }.get(field, "bool of rank 1")
    fits = {
        "tokens": not floats and value.dtype != torch.bool and value.ndim in (2, 3),
        "text_embeds": floats and value.ndim == 2,
        "latents": floats,
        **dict.fromkeys(_EMBEDS, floats and value.ndim == 1),
    }.get(field, value.dtype == torch.bool and value.ndim == 1)
    if not fits:
        raise InputError(f"{name}: {field} must be {wanted}, not {value.dtype} of shape {tuple(value.shape)}")
    if 0 in value.shape:
        raise InputError(f"{name}: {field} of shape {tuple(value.shape)} is empty")
    if field == "tokens":
        return rearrange(value, "... h w -> (...) h w").to(torch.int64)
    if field == "frame_mask" and not (value[0] and torch.equal(value, torch.arange(len(value)) < value.sum())):
        raise InputError(f"{name}: in a frame mask the real frames come first, at least one, and padding after them")
    return value


def _checked_fps(value: Any, name: str) -> float:
    try:
        rate = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name}: fps is a {type(value).__name__}, not a number") from None
    if not 0 < rate < float("inf"):
        raise InputError(f"{name}: fps={rate:g} is not a speed: give frames a second, above 0")
    return rate


def _checked_pixels(value: Tensor, name: str) -> Tensor:
    if value.ndim not in (3, 4):
        raise InputError(
            f"{name}: pixels must be T C H W (a clip) or C H W (an image), not of shape {tuple(value.shape)}"
        )
    if value.dtype == torch.uint8:
        return value
    if not value.dtype.is_floating_point:
        raise InputError(f"{name}: pixels must be uint8 or float in [0, 1], not {value.dtype}")
    low, high = value.aminmax() if value.numel() else (torch.tensor(0.0), torch.tensor(0.0))
    if not (low >= 0 and high <= 1):  # also refuses nan
        remedy = (
            "give uint8, or divide by 255"
            if low >= 0 and high <= 255
            else "add 1 and halve"
            if low >= -1 and high <= 1
            else "scale them"
        )
        raise InputError(f"{name}: float pixels must lie in [0, 1], these go from {low:g} to {high:g}: {remedy}")
    return value.mul(255).round_().to(torch.uint8)


def _as_clip(value: Tensor | Image.Image, channels: int, name: str) -> np.ndarray:
    """→ T H W C, uint8. T C H W unless only C T H W has a possible number of channels (`channels` decides between two)."""
    if isinstance(value, Image.Image):
        pixels = np.asarray(to_channels(value, channels))
        return pixels.reshape(1, *pixels.shape[:2], channels)
    if value.shape[-1] in (1, 3, 4) and value.shape[-2] > 4:
        raise InputError(
            f"{name}: pixels of shape {tuple(value.shape)} have their channels last: T C H W, C T H W or C H W is needed"
        )
    clip = value if value.ndim == 4 else value[None]
    first, second = clip.shape[:2]
    if value.ndim == 4 and second != channels and (first == channels or second > 4):
        clip = rearrange(clip, "c t h w -> t c h w")
    if clip.shape[1] not in (1, 2, 3, 4) or 0 in clip.shape:
        raise InputError(
            f"{name}: pixels of shape {tuple(value.shape)} have no axis of 1 to 4 channels where T C H W, C T H W or C H W has it"
        )
    return rearrange(clip, "t c h w -> t h w c").numpy()


SOURCE = DatasetSource
