"""`data.source=memmap`: an array of clips or pictures, as Moving MNIST has it (.npy, .npz or raw), with captions beside it or made from labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from kineograph.core.batch import Sample
from kineograph.core.caption_format import CaptionFormat
from kineograph.core.config import Axis, LocalPath
from kineograph.core.errors import ConfigError, InputError, NoData
from kineograph.core.protocols import Source
from kineograph.data.array_layout import FPS, Layout, check_values, describe_layout, infer_layout, read_frames, to_uint8
from kineograph.data.arrays import Array, choose_member, find_array, list_npz, parse_dtype, read_captions_beside
from kineograph.data.buckets import MediaInfo
from kineograph.data.captions import several_texts, strip_captions
from kineograph.data.fit_summary import MeasuresItems, has_colour
from kineograph.data.open_source import DataConfig, Split, select_captioned_items
from kineograph.data.transforms import pad_frames, pick_window, resize_frames

NAMES = ("videos", "video", "clips", "images")


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


class Memmap(Source, MeasuresItems):
    Config = MemmapConfig
    caption_help = (
        "put captions.txt beside the array, a line for each item, or make captions of labels with data.caption"
    )

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
        clip = self._read_pixels(index, pick_window(frames, self.config.frames, rng))
        if self._rotate:
            clip = np.rot90(clip, int(rng.integers(4)), axes=(1, 2))
        clip = resize_frames(clip, self.config.size, self.config.channels)
        pixels, mask = pad_frames(clip, self.config.frames)
        return Sample(
            pixels=pixels,
            frame_mask=mask,
            fps=self.config.fps or FPS,
            caption=self.caption(index),
            texts=several_texts(self.captions(index)),
        )

    def _read_pixels(self, index: int, window: slice) -> np.ndarray:
        """T H W C, uint8."""
        frames = read_frames(self.array.values, self.layout, int(self.indices[index]), window)
        return to_uint8(frames, self.identity(index))

    def measure(self, index: int) -> MediaInfo:
        sizes = dict(zip(self.layout, self.array.shape, strict=True))
        if "T" not in sizes:
            return MediaInfo(sizes["W"], sizes["H"])
        # Nothing is resampled: data.fps is the array's own rate.
        return MediaInfo(sizes["W"], sizes["H"], sizes["T"], sizes["T"] / (self.config.fps or FPS))

    def is_coloured(self, index: int) -> bool:
        frame = self._read_pixels(index, slice(0, 1))
        return frame.shape[-1] >= 3 and has_colour(frame[..., :3])

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
    if not path.is_file():
        raise InputError(f"data.labels={file} is not a regular file")
    return np.fromfile(path, dtype=parse_dtype(dtype, "data.labels_dtype"))


def format_label(template: str, label: np.ndarray, text: str) -> str:
    try:
        return template.format(label=label.tolist(), text=text)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"data.caption={template!r} does not fit a label like {label.tolist()}: {error}; use {{label}} or {{label[0]}}"
        ) from None


SOURCE = Memmap
