"""`data.source=memmap`: an array of clips, as Moving MNIST has it (.npy or raw), with captions beside it or made from labels."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
from einops import rearrange

from kineograph.core.batch import Sample
from kineograph.core.config import Axis, LocalPath
from kineograph.core.errors import ConfigError, InputError, NoData, Unreadable
from kineograph.core.protocols import Source
from kineograph.data.arrays import Array, find_array, parse_dtype, read_captions_beside
from kineograph.data.buckets import MediaInfo
from kineograph.data.fit_summary import MeasuresItems, has_colour
from kineograph.data.open_source import DataConfig, Split, select_split
from kineograph.data.transforms import pad_frames, pick_window, resize_frames

_FPS = 8.0  # an array does not state its frame rate

Layout = Literal["TNHW", "NTHW", "NTCHW"]


class MemmapConfig(DataConfig):
    source: str = "memmap"
    folder: LocalPath
    """The array file (.npy, or raw with `array_shape` and `array_dtype`), or a folder that holds it as videos.npy or alone."""
    layout: Literal["auto"] | Layout = "auto"
    """Axes: T frames, N clips, C channels. auto: inferred from the shape, the labels or the captions where that is unambiguous."""
    array_shape: tuple[Axis, ...] | None = None
    """Of a raw file, in the order of `layout`."""
    array_dtype: str = "uint8"
    """Of a raw file; uint8, bool, or floats in [0, 1]."""
    labels: str | None = None
    """File of labels, N or N × K integers, beside the array; null: labels.npy where there is one."""
    labels_dtype: str = "uint8"
    """Of a raw labels file."""
    caption: str | None = None
    """Captions from labels: "the digit {label}", "the digits {label[0]} and {label[1]}". null: captions.txt or captions.jsonl beside, if any."""
    rotate: bool = False
    """Turn by a random multiple of 90° (training only)."""


def infer_layout(shape: tuple[int, ...], counts: set[int]) -> Layout:
    """`counts`: how many labels or captions there are, where known."""
    if len(shape) == 5:
        if shape[2] not in (1, 2, 3, 4):
            hint = ": channels come before height and width (N T C H W)" if shape[-1] in (1, 2, 3, 4) else ""
            raise InputError(f"an array of shape {shape} has {shape[2]} channels where 1 to 4 are possible{hint}")
        return "NTCHW"
    if len(shape) != 4:
        raise InputError(f"an array of shape {shape} is none of T N H W, N T H W and N T C H W")
    first, second = shape[:2]
    if first != second:
        if first in counts:
            return "NTHW"
        if second in counts:
            return "TNHW"
        if max(first, second) >= 8 * min(first, second):  # thousands of clips of tens of frames
            return "NTHW" if first > second else "TNHW"
    raise InputError(
        f"an array of shape {shape} may be {first} clips of {second} frames or {second} of {first}: set data.layout=NTHW or data.layout=TNHW"
    )


class Memmap(Source, MeasuresItems):
    Config = MemmapConfig

    def __init__(
        self,
        config: MemmapConfig,
        array: Array,
        layout: Layout,
        captions: list[str] | None,
        indices: np.ndarray,
        note: str | None,
        rotate: bool,
    ) -> None:
        self.config, self.array, self.layout, self.captions = config, array, layout, captions
        self.indices, self.note, self._rotate = indices, note, rotate

    @classmethod
    def open(cls, config: MemmapConfig, split: Split, seed: int) -> Memmap:
        array = find_array(config.folder, ("videos", "video", "clips"), config.array_shape, config.array_dtype)
        if array.dtype.kind not in "bf" and array.dtype != np.uint8:
            raise InputError(f"{array.path} holds {array.dtype}: use uint8, bool or floats in [0, 1]")
        labels = _read_labels(config, array.path)
        captions = read_captions_beside(array.path)
        counts = {len(known) for known in (labels, captions) if known is not None}
        layout = infer_layout(array.shape, counts) if config.layout == "auto" else config.layout
        if len(layout) != len(array.shape):
            raise ConfigError(f"data.layout={layout} does not fit {array.path}, whose shape is {array.shape}")
        count = array.shape[layout.index("N")]
        if config.caption is not None:
            if labels is None:
                raise InputError(
                    f"data.caption makes captions from labels, and there are none beside {array.path}: set data.labels"
                )
            # A raw file of several labels a clip comes flat.
            if len(labels) > count and len(labels) % count == 0:
                labels = labels.reshape(count, -1)
            captions = [_format_caption(config.caption, label) for label in labels]
        if captions is not None and len(captions) != count:
            raise InputError(
                f"{array.path} has {count} clips in layout {layout}, and there are {len(captions)} labels or captions"
            )
        part = select_split([f"{array.path.name}:{number}" for number in range(count)], split, config)
        return cls(config, array, layout, captions, part.indices, part.note, config.rotate and split == "train")

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        number = int(self.indices[index])
        values = self.array.values
        clip = values[:, number] if self.layout == "TNHW" else values[number]  # T H W or T C H W
        clip = np.asarray(clip[pick_window(len(clip), self.config.frames, rng)])
        clip = rearrange(clip, "t c h w -> t h w c") if self.layout == "NTCHW" else clip[..., None]
        if self._rotate:
            clip = np.rot90(clip, int(rng.integers(4)), axes=(1, 2))
        clip = resize_frames(self._to_uint8(clip, index), self.config.size, self.config.channels)
        pixels, mask = pad_frames(clip, self.config.frames)
        return Sample(pixels=pixels, frame_mask=mask, fps=self.config.fps or _FPS, caption=self.caption(index))

    def measure(self, index: int) -> MediaInfo:
        frames, (height, width) = self.array.shape[self.layout.index("T")], self.array.shape[-2:]
        # Nothing is resampled: data.fps is the array's own rate.
        return MediaInfo(width, height, frames, frames / (self.config.fps or _FPS))

    def is_coloured(self, index: int) -> bool:
        if self.layout != "NTCHW" or self.array.shape[2] < 3:
            return False
        frame = np.asarray(self.array.values[int(self.indices[index]), :1, :3])
        return has_colour(self._to_uint8(rearrange(frame, "t c h w -> t h w c"), index))

    def _to_uint8(self, clip: np.ndarray, index: int) -> np.ndarray:
        if clip.dtype == np.uint8:
            return clip
        if clip.dtype.kind == "f" and not (clip.min() >= 0 and clip.max() <= 1):  # also refuses nan
            raise Unreadable(
                self.identity(index), f"values from {clip.min():g} to {clip.max():g}: floats must lie in [0, 1]"
            )
        return np.rint(clip.astype(np.float32) * 255).astype(np.uint8)

    def caption(self, index: int) -> str | None:
        return self.captions[self.indices[index]] or None if self.captions else None

    def identity(self, index: int) -> str:
        return f"{self.array.path.name}:{self.indices[index]}"

    def list_missing_captions(self) -> list[str]:
        return [self.identity(index) for index in range(len(self)) if self.caption(index) is None]

    def item_states(self) -> list[str]:
        """The state of each clip: its name, the size and time of the array, and its caption."""
        stat = self.array.path.stat()
        array = f"{stat.st_size}\0{stat.st_mtime_ns}"
        return [f"{self.identity(index)}\0{array}\0{self.caption(index)}" for index in range(len(self))]

    def items_digest(self) -> str:
        array = f"{self.array.path.stat().st_size}\0{len(self)}\0{self.identity(0) if len(self) else ''}"
        return hashlib.blake2b(array.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def fingerprint(self) -> str:
        """A digest of the array's size and time, the captions and the config."""
        stat = self.array.path.stat()
        digest = hashlib.blake2b(
            f"{self.config.model_dump_json()}{stat.st_size}{stat.st_mtime_ns}".encode(), digest_size=16
        )
        for caption in self.captions or ():
            digest.update(f"{caption}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def _read_labels(config: MemmapConfig, array: Path) -> np.ndarray | None:
    path = Path(config.labels).expanduser() if config.labels else array.parent / "labels.npy"
    if config.labels and not path.is_absolute() and not path.exists():
        path = array.parent / path
    if not path.exists():
        if config.labels:
            raise NoData(f"data.labels={config.labels} does not exist, neither here nor beside {array}")
        return None
    if path.suffix == ".npy":
        return Array.npy(path).values
    return np.fromfile(path, dtype=parse_dtype(config.labels_dtype, "data.labels_dtype"))


def _format_caption(template: str, label: np.ndarray) -> str:
    try:
        return template.format(label=label.tolist())
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"data.caption={template!r} does not fit a label like {label.tolist()}: {error}; use {{label}} or {{label[0]}}"
        ) from None


SOURCE = Memmap
