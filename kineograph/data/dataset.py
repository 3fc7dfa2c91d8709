"""A user's own torch Dataset as a source: fields by name, or inferred by type.

Per item: str, or a list of them = caption(s) · uint8, or float in [0, 1], of rank 4 = clip (T C H W; C T H W if only that fits `channels`) · of
rank 3 = image (C H W) · float of rank 2 = text embeddings (L D) · int64 of rank 2 or 3 = codebook ids (h w or t h w) · bool of
rank 1 = frame mask. Names in a dict, or `data.fields`, take precedence over the type. Items may hold codebook ids and no pixels.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
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
from kineograph.core.protocols import Source
from kineograph.core.registry import find_source
from kineograph.core.text_file import replace_surrogates
from kineograph.data.captions import several_texts
from kineograph.data.channels import to_channels
from kineograph.data.open_source import DataConfig, Split, select_split
from kineograph.data.token_check import TokenGrid
from kineograph.data.transforms import pad_frames, pick_window, resize_frames

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
_CAPTIONS_CHECKED = 20_000
_VECTORS = ("image_embed", "text_embed")  # stored in Sample.extra
_FIELD_OF = {name: field for field, names in NAMES.items() for name in names}
_EXPECTED = "str = caption, float or uint8 of rank 3 or 4 = pixels, int64 = codebook ids, bool = frame mask, float of rank 2 = text embeddings"


class DatasetConfig(DataConfig):
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the Dataset class."""
    fields: tuple[str, ...] | dict[str, str] | None = None
    """Names of a tuple's parts in order ([videos, texts, _]), or of a dict's keys ({clip: videos, label: _}); _ ignores one."""


class DatasetSource(Source):
    Config = DatasetConfig
    is_user_dataset = True
    caption_help = (
        "give one as a str in each item, in a dict under the name texts; or train without text (text.kind=none)"
    )

    def __init__(self, dataset: Dataset, config: DataConfig, split: Split) -> None:
        """`config` may be any source's: only a DatasetConfig names fields."""
        has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not has_items:
            raise InputError(
                f"{type(dataset).__name__} has no length or no items by index: give a map-style Dataset (__len__ and __getitem__)"
            )
        count = len(dataset)  # type: ignore[arg-type]
        if not count:
            raise InputError(f"{type(dataset).__name__} is empty")
        self.dataset, self.config = dataset, config
        self._names = config.fields if isinstance(config, DatasetConfig) else None
        self.indices, self.note = select_split([f"item-{number}" for number in range(count)], split, config)
        self._grid: TokenGrid | None = None
        self._check_first_item()
        self.fields = frozenset(self._read_fields(0))

    @classmethod
    def open(cls, config: DatasetConfig, split: Split, seed: int) -> DatasetSource:
        """Open the Dataset class at the dotted path `data.source`."""
        if config.source == "dataset":
            raise InputError(
                "this config is for a Dataset object passed from Python: pass dataset=… again, or set data.source to its dotted path"
            )
        dataset = find_source(config.source)
        try:
            dataset = dataset(**config.arguments) if callable(dataset) else dataset
        except TypeError as error:
            raise ConfigError(
                f"data.source={config.source} cannot be built with data.arguments={config.arguments}: {error}"
            ) from None
        return cls(dataset, config, split)

    def _check_first_item(self) -> None:
        """Read one item now, so that a wrong type fails at the start and not in a worker."""
        try:
            self.read(0, numpy_rng(0, "probe"))
        except Unreadable as error:
            raise InputError(
                f"the first item of {type(self.dataset).__name__} cannot be read: {error.reason}"
            ) from error.__cause__

    def expect(self, grid: TokenGrid) -> None:
        """Check codebook ids against this grid from now on, and pad those of images and shorter clips to it."""
        self._grid = grid
        self._check_first_item()

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        fields, name = self._read_fields(index), self.identity(index)
        texts = fields.get("caption", ())
        if not texts and self.config.uncaptioned == "skip" and "caption" in self.fields:
            raise Unreadable(name, "no caption")
        sample = Sample(
            caption=next(iter(texts), "" if "caption" in fields else None),
            texts=several_texts(texts),
            fps=fields.get("fps") or self.config.shape.fps,
        )
        for field, value in fields.items():
            if field in _VECTORS:
                sample.extra[field] = value
            elif isinstance(value, Tensor) and field != "sketch":
                setattr(sample, field, value)
        if "pixels" in fields:
            clip = _to_clip(fields["pixels"], self.config.channels, name)  # T H W C
            mask = sample.frame_mask
            if mask is not None and mask.shape != clip.shape[:1]:
                raise InputError(f"{name}: a frame mask of shape {tuple(mask.shape)} beside {clip.shape[0]} frames")
            real, frames = int(mask.sum()) if mask is not None else clip.shape[0], self.config.frames
            # Codebook ids describe the first frames of a clip.
            window = slice(0, min(real, frames)) if sample.tokens is not None else pick_window(real, frames, rng)
            pixels = resize_frames(clip[window], self.config.size, self.config.channels)
            sample.pixels, sample.frame_mask = pad_frames(pixels, frames)
            if "sketch" in fields:
                sample.extra["sketch"] = self._read_sketch(fields["sketch"], len(clip), window, name)
        if sample.tokens is not None and self._grid is not None:
            sample.tokens, sample.frame_mask = self._grid.fit(sample.tokens, sample.frame_mask, name)
        return sample

    def _read_sketch(self, value: Any, frames: int, window: slice, name: str) -> Tensor:
        """T C H W, of the clip's frames; channels stay as they are."""
        channels = value.shape[1] if isinstance(value, Tensor) and value.ndim == 4 else 1
        sketch = _to_clip(value, channels, name)  # T H W C
        if len(sketch) != frames:
            raise InputError(f"{name}: a sketch of {len(sketch)} frames beside a clip of {frames}")
        return pad_frames(resize_frames(sketch[window], self.config.size, sketch.shape[3]), self.config.frames)[0]

    def caption(self, index: int) -> str | None:
        return next(iter(self.captions(index)), None)

    def captions(self, index: int) -> Sequence[str]:
        read_caption = getattr(self.dataset, "caption", None)  # a Dataset may give captions without decoding
        if callable(read_caption):
            text = read_caption(int(self.indices[index]))
            return () if text is None else check_value("caption", text, self.identity(index))
        return self._read_fields(index).get("caption", ())

    def identity(self, index: int) -> str:
        return f"item-{self.indices[index]}"

    def list_missing_captions(self) -> list[str]:
        """Judged by the first item, as reading all might take hours; or by the method `caption`, for up to 20,000 items."""
        if self.fields & {"text_embeds", "text_embed"}:
            return []
        if "caption" in self.fields:
            known = min(len(self), _CAPTIONS_CHECKED) if callable(getattr(self.dataset, "caption", None)) else 0
            skips = self.config.uncaptioned == "skip"
            return [] if skips else [self.identity(index) for index in range(known) if not self.captions(index)]
        return [self.identity(index) for index in range(len(self))]

    def _read_fields(self, index: int) -> dict[str, Any]:
        name = self.identity(index)
        try:
            item = self.dataset[int(self.indices[index])]
        except KineoError:
            raise
        except Exception as error:  # a user's code may raise anything
            raise Unreadable(name, f"{type(error).__name__}: {error}") from error
        fields: dict[str, Any] = {}
        for label, value in self._label_values(item, name):
            value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            field = _FIELD_OF[label] if label is not None else infer_field(value, name)
            if field in fields:
                raise InputError(
                    f"{name} has two values for {field}: name them with data.fields ({', '.join(NAMES[field][:2])} …, _ to ignore one)"
                )
            fields[field] = check_value(field, value, name)
        if not fields:
            raise InputError(f"{name} has no known field: {_EXPECTED}")
        if "text_mask" in fields and "text_embeds" in fields and len(fields["text_mask"]) != len(fields["text_embeds"]):
            raise InputError(
                f"{name}: a text mask of {len(fields['text_mask'])} beside {len(fields['text_embeds'])} text embeddings"
            )
        return fields

    def _label_values(self, item: Any, name: str) -> list[tuple[str | None, Any]]:
        """(field name, or None where the type decides, value)."""
        names = self._names
        if isinstance(item, dict):
            renames = names if isinstance(names, dict) else {}
            pairs = [(renames.get(key, key), value) for key, value in item.items()]
        else:
            values = list(item) if isinstance(item, (tuple, list)) else [item]
            if not isinstance(names, tuple):
                return [(None, value) for value in values]
            if len(names) != len(values):
                raise ConfigError(
                    f"data.fields names {len(names)} parts ({', '.join(names)}), but {name} has {len(values)}"
                )
            pairs = list(zip(names, values, strict=True))
        pairs = [(label, value) for label, value in pairs if label != "_" and value is not None]
        unknown = next((label for label, _ in pairs if label not in _FIELD_OF), None)
        if unknown is not None:
            known = ", ".join(sorted(_FIELD_OF))
            if unknown in (names.values() if isinstance(names, dict) else names or ()):
                close = difflib.get_close_matches(str(unknown), _FIELD_OF, 1)
                hint = f": did you mean {close[0]}?" if close else f"; known: {known}"
                raise ConfigError(f"data.fields names {unknown!r}, which is no field{hint}")
            raise InputError(
                f"{name} has the unknown field {unknown!r}: rename it with data.fields={{{unknown}: videos}}, or ignore it "
                f"with {{{unknown}: _}}; known: {known}"
            )
        return pairs


def infer_field(value: Any, name: str) -> str:
    """The field of a value, by its type."""
    if isinstance(value, str):
        return "caption"
    if isinstance(value, Image.Image):
        return "pixels"
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, str) for part in value):
        return "caption"
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
        is_batch = rank == 5 or (rank == 4 and kind in (torch.int64, torch.int32))
        raise InputError(
            f"{name} holds a tensor of {kind} with shape {tuple(value.shape)}, which is ambiguous: {_EXPECTED}; or name it with data.fields"
            + ("; a whole batch? an item is one clip" if is_batch else "")
        )
    hint = "; a class label? give a caption instead, or ignore it with data.fields=[pixels, _]"
    raise InputError(
        f"{name} holds a {type(value).__name__} ({str(value)[:40]!r}), which is not supported: {_EXPECTED}"
        + (hint if isinstance(value, int) else "")
    )


def check_value(field: str, value: Any, name: str) -> Any:
    """Check a value's type, and convert pixels to uint8, codebook ids to int64 of rank 3, and captions to a tuple of them."""
    if field == "caption":
        texts = list(value) if isinstance(value, (list, tuple)) else [value]
        for text in texts:
            if not isinstance(text, str):
                raise InputError(f"{name}: the caption is of type {type(text).__name__}, not str")
        return tuple(dict.fromkeys(filter(None, map(replace_surrogates, texts))))
    if field == "fps":
        return _check_fps(value, name)
    if field in ("pixels", "sketch") and isinstance(value, Image.Image):
        return value
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: {field} is a {type(value).__name__}, not a tensor or array")
    if field in ("pixels", "sketch"):
        return _check_pixels(value, name)
    is_float = value.dtype.is_floating_point
    expected, fits = {
        "tokens": (
            "int64 of rank 2 or 3 (h w or t h w)",
            not is_float and value.dtype != torch.bool and value.ndim in (2, 3),
        ),
        "text_embeds": ("float of rank 2 (L D)", is_float and value.ndim == 2),
        "latents": ("float", is_float),
        **dict.fromkeys(_VECTORS, ("float of rank 1 (D)", is_float and value.ndim == 1)),
    }.get(field, ("bool of rank 1", value.dtype == torch.bool and value.ndim == 1))
    if not fits:
        raise InputError(f"{name}: {field} must be {expected}, not {value.dtype} of shape {tuple(value.shape)}")
    if 0 in value.shape:
        raise InputError(f"{name}: {field} of shape {tuple(value.shape)} is empty")
    if field == "tokens":
        return rearrange(value, "... h w -> (...) h w").to(torch.int64)
    if field == "frame_mask" and not (value[0] and torch.equal(value, torch.arange(len(value)) < value.sum())):
        raise InputError(f"{name}: a frame mask must have at least one real frame, and padding only at the end")
    return value


def _check_fps(value: Any, name: str) -> float:
    try:
        rate = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name}: fps is a {type(value).__name__}, not a number") from None
    if not 0 < rate < float("inf"):
        raise InputError(f"{name}: fps={rate:g} is not a frame rate: give frames per second, above 0")
    return rate


def _check_pixels(value: Tensor, name: str) -> Tensor:
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
        remedy = "scale them"
        if low >= 0 and high <= 255:
            remedy = "give uint8, or divide by 255"
        elif low >= -1 and high <= 1:
            remedy = "add 1 and halve"
        raise InputError(f"{name}: float pixels must be in [0, 1], these go from {low:g} to {high:g}: {remedy}")
    return value.mul(255).round_().to(torch.uint8)


def _to_clip(value: Tensor | Image.Image, channels: int, name: str) -> np.ndarray:
    """→ T H W C, uint8. T C H W unless only C T H W has a possible number of channels (`channels` decides between two)."""
    if isinstance(value, Image.Image):
        pixels = np.asarray(to_channels(value, channels))
        return pixels.reshape(1, *pixels.shape[:2], channels)
    shape = tuple(value.shape)
    if shape[-1] in (1, 3, 4) and shape[-2] > 4:
        raise InputError(f"{name}: pixels of shape {shape} are channels-last: give T C H W, C T H W or C H W")
    clip = value if value.ndim == 4 else value[None]
    first, second = clip.shape[:2]
    if value.ndim == 4 and second != channels and (first == channels or second > 4):
        clip = rearrange(clip, "c t h w -> t c h w")
    if clip.shape[1] not in (1, 2, 3, 4) or 0 in clip.shape:
        raise InputError(
            f"{name}: pixels of shape {shape} have no axis of 1 to 4 channels as T C H W, C T H W or C H W"
        )
    return rearrange(clip, "t c h w -> t h w c").numpy()


SOURCE = DatasetSource
