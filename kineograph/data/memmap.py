"""`data.source=memmap`: an array of clips or pictures, as Moving MNIST has it (.npy, .npz or raw), with captions beside it or made from labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from einops import rearrange

from kineograph.core.batch import Sample
from kineograph.core.caption_format import CaptionFormat
from kineograph.core.config import Axis, LocalPath
from kineograph.core.errors import ConfigError, InputError, NoData, Unreadable
from kineograph.core.protocols import Source
from kineograph.data.arrays import Array, choose_member, find_array, list_npz, parse_dtype, read_captions_beside
from kineograph.data.buckets import MediaInfo
from kineograph.data.captions import several_texts, strip_captions
from kineograph.data.fit_summary import MeasuresItems, has_colour
from kineograph.data.open_source import DataConfig, Split, select_captioned_items
from kineograph.data.transforms import pad_frames, pick_window, resize_frames

_FPS = 8.0  # an array does not state its frame rate

Layout = Literal["TNHW", "NTHW", "NTCHW", "NTHWC", "NHW", "NHWC", "NCHW"]
NAMES = ("videos", "video", "clips", "images")
_CHANNELS = (1, 2, 3, 4)
_SAMPLE = 64  # items whose values tell the range of 16-bit integers


class MemmapConfig(DataConfig):
    caption_places: ClassVar[tuple[str, ...]] = ("text", "label")
    source: str = "memmap"
    folder: LocalPath
    """The array file (.npy, .npz, or raw with `array_shape` and `array_dtype`), or a folder that holds it as videos.npy or alone."""
    layout: Literal["auto"] | Layout = "auto"
    """Axes: T frames, N items, C channels. auto: inferred from the shape, the labels or the captions where that is unambiguous."""
    array_name: str | None = None
    """Of an array within a .npz file; null: videos, video, clips or images, or the only one."""
    array_shape: tuple[Axis, ...] | None = None
    """Of a raw file, in the order of `layout`."""
    array_dtype: str = "uint8"
    """Of a raw file; uint8, uint16 (0 … 65535), bool, or floats in [0, 1]."""
    labels: str | None = None
    """File of labels, N or N × K integers, beside the array; null: labels.npy where there is one."""
    labels_dtype: str = "uint8"
    """Of a raw labels file."""
    rotate: bool = False
    """Turn by a random multiple of 90° (training only)."""

    @property
    def label_template(self) -> str | None:
        """data.caption where it makes captions from labels: "the digit {label}", "the digits {label[0]} and {label[1]}"."""
        return self.caption if self.caption is not None and "{label" in self.caption else None

    def caption_format(self, split: Split) -> CaptionFormat:
        form = super().caption_format(split)
        return form if self.label_template is None else replace(form, template=None)


def infer_layout(shape: tuple[int, ...], counts: set[int]) -> Layout:
    """`counts`: how many labels or captions there are, where known. Refuses what may be read in two ways."""
    if len(shape) == 5:
        before, after = shape[2] in _CHANNELS, shape[4] in _CHANNELS
        if before and after:
            raise InputError(
                f"an array of shape {shape} may be N T C H W or N T H W C: set data.layout=NTCHW or data.layout=NTHWC"
            )
        if not (before or after):
            raise InputError(
                f"an array of shape {shape} has no axis of 1 to 4 channels as N T C H W or N T H W C: transpose it"
            )
        return "NTCHW" if before else "NTHWC"
    if len(shape) == 3 and shape[2] not in _CHANNELS:
        return "NHW"
    if len(shape) != 4:
        raise InputError(
            f"an array of shape {shape} is none of T N H W, N T H W, N T C H W, N T H W C (clips), N H W, N H W C and N C H W (pictures)"
        )
    first, second = shape[:2]
    if shape[3] in _CHANNELS:
        if second in _CHANNELS:
            raise InputError(
                f"an array of shape {shape} has two axes that may be channels: set data.layout=NHWC or data.layout=NCHW"
            )
        return "NHWC"
    if second == 3:
        raise InputError(
            f"an array of shape {shape} may be {first} pictures of {second} channels or {first} gray clips of {second} frames: "
            "set data.layout=NCHW or data.layout=NTHW"
        )
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


def describe_layout(shape: tuple[int, ...], layout: Layout) -> str:
    """As "1,000 clips of 16 frames, 64 × 64, 3 channels"."""
    sizes = dict(zip(layout, shape, strict=True))
    items = f"{sizes['N']:,} clips of {sizes['T']} frames" if "T" in sizes else f"{sizes['N']:,} pictures"
    channels = sizes.get("C", 1)
    return (
        f"{items}, {sizes['H']} × {sizes['W']}, {channels} channel{'s' if channels > 1 else ''} (data.layout={layout})"
    )


def check_values(array: Array, layout: Layout) -> None:
    """Refuse types that are no pixels, and 16-bit integers that do not use their range."""
    if array.dtype.kind not in "bf" and array.dtype not in (np.uint8, np.uint16):
        raise InputError(f"{array.path} holds {array.dtype}: use uint8, uint16, bool or floats in [0, 1]")
    if array.dtype != np.uint16:
        return
    count = array.shape[layout.index("N")]
    sample = sorted({int(index) for index in np.linspace(0, count - 1, min(count, _SAMPLE))})
    highest = max((int(np.take(array.values, index, layout.index("N")).max()) for index in sample), default=0)
    if highest < 2**14:
        factor = 65535 // max(highest, 1)
        raise InputError(
            f"{array.path} holds uint16 with values up to {highest} in {len(sample)} items, where 65535 is white: "
            f"save it as uint8, or multiply it by {factor}"
        )


class Memmap(Source, MeasuresItems):
    Config = MemmapConfig

    def __init__(
        self,
        config: MemmapConfig,
        array: Array,
        layout: Layout,
        captions: list[tuple[str, ...]] | None,
        indices: np.ndarray,
        note: str | None,
        rotate: bool,
    ) -> None:
        self.config, self.array, self.layout, self._captions = config, array, layout, captions
        self.indices, self.note, self._rotate = indices, note, rotate

    @classmethod
    def open(cls, config: MemmapConfig, split: Split, seed: int) -> Memmap:
        array = find_array(config.folder, NAMES, config.array_shape, config.array_dtype, config.array_name)
        labels = read_labels(config.labels, config.labels_dtype, array)
        captions = read_captions_beside(array.path)
        counts = {len(known) for known in (labels, captions) if known is not None}
        layout = infer_layout(array.shape, counts) if config.layout == "auto" else config.layout
        if len(layout) != len(array.shape):
            raise ConfigError(f"data.layout={layout} does not fit {array.path}, whose shape is {array.shape}")
        check_values(array, layout)
        count = array.shape[layout.index("N")]
        template = config.label_template
        if template is not None:
            if labels is None:
                raise InputError(
                    f"data.caption makes captions from labels, and there are none beside {array.path}: set data.labels"
                )
            # A raw file of several labels a clip comes flat.
            if len(labels) > count and len(labels) % count == 0:
                labels = labels.reshape(count, -1)
            own = captions or [()] * len(labels)
            captions = [
                strip_captions(format_label(template, label, text) for text in texts or ("",))
                for label, texts in zip(labels, own, strict=False)
            ]
        if captions is not None and len(captions) != count:
            raise InputError(
                f"{array.path} has {count} {'clips' if 'T' in layout else 'pictures'} in layout {layout}, and there are {len(captions)} labels or captions"
            )
        names = [f"{array.path.name}:{number}" for number in range(count)]
        indices, note = select_captioned_items(names, captions or (), split, config)
        if config.layout == "auto" and split == "train":
            note = "; ".join(filter(None, [f"{array.path}: {describe_layout(array.shape, layout)}", note]))
        return cls(config, array, layout, captions, indices, note, config.rotate and split == "train")

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        frames = self.array.shape[self.layout.index("T")] if "T" in self.layout else 1
        clip = self._to_uint8(self._read_frames(index, pick_window(frames, self.config.frames, rng)), index)
        if self._rotate:
            clip = np.rot90(clip, int(rng.integers(4)), axes=(1, 2))
        clip = resize_frames(clip, self.config.size, self.config.channels)
        pixels, mask = pad_frames(clip, self.config.frames)
        return Sample(
            pixels=pixels,
            frame_mask=mask,
            fps=self.config.fps or _FPS,
            caption=self.caption(index),
            texts=several_texts(self.captions(index)),
        )

    def _read_frames(self, index: int, window: slice) -> np.ndarray:
        """T H W C, as stored."""
        at: dict[str, int | slice] = {"N": int(self.indices[index]), "T": window}
        values = np.asarray(self.array.values[tuple(at.get(axis, slice(None)) for axis in self.layout)])
        axes = self.layout.replace("N", "")
        missing = [axis for axis in "TC" if axis not in axes]
        pattern = f"{' '.join(axes)} -> {' '.join('1' if axis in missing else axis for axis in 'THWC')}"
        return rearrange(values, pattern.lower())

    def measure(self, index: int) -> MediaInfo:
        sizes = dict(zip(self.layout, self.array.shape, strict=True))
        if "T" not in sizes:
            return MediaInfo(sizes["W"], sizes["H"])
        # Nothing is resampled: data.fps is the array's own rate.
        return MediaInfo(sizes["W"], sizes["H"], sizes["T"], sizes["T"] / (self.config.fps or _FPS))

    def is_coloured(self, index: int) -> bool:
        frame = self._read_frames(index, slice(0, 1))
        return frame.shape[-1] >= 3 and has_colour(self._to_uint8(frame[..., :3], index))

    def _to_uint8(self, clip: np.ndarray, index: int) -> np.ndarray:
        if clip.dtype == np.uint8:
            return clip
        if clip.dtype.kind == "f" and not (clip.min() >= 0 and clip.max() <= 1):  # also refuses nan
            raise Unreadable(
                self.identity(index), f"values from {clip.min():g} to {clip.max():g}: floats must lie in [0, 1]"
            )
        white = 65535 if clip.dtype == np.uint16 else 1
        return np.rint(clip.astype(np.float32) * (255 / white)).astype(np.uint8)

    def caption(self, index: int) -> str | None:
        return next(iter(self.captions(index)), None)

    def captions(self, index: int) -> Sequence[str]:
        return self._captions[self.indices[index]] if self._captions else ()

    def identity(self, index: int) -> str:
        return f"{self.array.path.name}:{self.indices[index]}"

    def list_missing_captions(self) -> list[str]:
        return [self.identity(index) for index in range(len(self)) if self.caption(index) is None]

    def item_states(self) -> list[str]:
        """The state of each clip: its name, the size and time of the array, and its caption."""
        stat = self.array.path.stat()
        array = f"{stat.st_size}\0{stat.st_mtime_ns}"
        return [
            "\0".join([self.identity(index), array, *(self.captions(index) or ["None"])]) for index in range(len(self))
        ]

    def items_digest(self) -> str:
        array = f"{self.array.path.stat().st_size}\0{len(self)}\0{self.identity(0) if len(self) else ''}"
        return hashlib.blake2b(array.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def fingerprint(self) -> str:
        """A digest of the array's size and time, the captions and the config."""
        stat = self.array.path.stat()
        digest = hashlib.blake2b(
            f"{self.config.model_dump_json()}{stat.st_size}{stat.st_mtime_ns}".encode(), digest_size=16
        )
        for texts in self._captions or ():
            digest.update(("\0".join(texts) + "\n").encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def read_labels(file: str | None, dtype: str, array: Array) -> np.ndarray | None:
    """The labels of an array's items: in `file`, or beside the array; None if there are none."""
    beside = array.path.parent
    if array.member is not None and not file and "labels" in list_npz(array.path):
        return Array.npz(array.path, "labels").values
    path = Path(file).expanduser() if file else beside / "labels.npy"
    if file and not path.is_absolute() and not path.exists():
        path = beside / path
    if not path.exists():
        if file:
            raise NoData(f"data.labels={file} does not exist, neither here nor beside {array.path}")
        return None
    if path.suffix == ".npy":
        return Array.npy(path).values
    if path.suffix == ".npz":
        return Array.npz(path, choose_member(path, ("labels",))).values
    return np.fromfile(path, dtype=parse_dtype(dtype, "data.labels_dtype"))


def format_label(template: str, label: np.ndarray, text: str) -> str:
    try:
        return template.format(label=label.tolist(), text=text)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"data.caption={template!r} does not fit a label like {label.tolist()}: {error}; use {{label}} or {{label[0]}}"
        ) from None


SOURCE = Memmap
