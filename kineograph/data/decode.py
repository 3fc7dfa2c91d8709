"""Files → frames: stills and animations through Pillow, videos through PyAV; any colour mode → 1 to 4 channels of 8 bits."""

from __future__ import annotations

import io
import math
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from pydantic import Field, model_validator

from kineograph.core.errors import Unreadable
from kineograph.core.oversize import too_large
from kineograph.data.buckets import Bucket, BucketsConfig
from kineograph.data.config import DataConfig, Split
from kineograph.data.timing import GIF_TOLERANCE, TOLERANCE, pick
from kineograph.data.transforms import Crop, Framing, Resize

# Pillow warns about metadata that nothing here reads (odd EXIF, unknown chunks); what cannot be decoded is an error, not a warning.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
VIDEOS = (".mp4", ".webm", ".mov", ".avi", ".mkv", ".m4v")
CLIPS = (".gif", *VIDEOS)
MODES: dict[int, Literal["L", "LA", "RGB", "RGBA"]] = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}

Kind = Literal["image", "clip"]


def kind_of(name: str) -> Kind | None:
    """By the file's ending."""
    suffix = Path(name).suffix.lower()
    return "image" if suffix in IMAGES else "clip" if suffix in CLIPS else None


@dataclass(frozen=True)
class Wanted:
    """What to take from a file."""

    framing: Framing
    frames: int = 1
    fps: float | None = None
    channels: int = 3
    background: Literal["white", "black"] = "white"
    truncated: bool = False
    span: tuple[float, float] | None = None  # seconds: only what is shown between them

    def shaped(self, shape: Bucket) -> Wanted:
        """The same for clips of another shape."""
        return replace(self, framing=replace(self.framing, size=(shape.height, shape.width)), frames=shape.frames)


class MediaConfig(DataConfig):
    """How sources of files read pictures and clips."""

    resize: Resize = "cover"
    """cover: scale until `size` is covered, then crop; stretch: squeeze the whole picture into it; contain: whole, with bars of `background`."""
    crop: Crop = "center"
    """Which part stays: center; random: anywhere; resized: a random part of random size (training; validation takes the centre)."""
    crop_area: tuple[float, float] = (0.75, 1.0)
    """With crop=resized: least and largest share of the picture's area that is taken."""
    crop_aspect: tuple[float, float] = (1.0, 1.0)
    """With crop=resized: least and largest aspect of what is taken, as a multiple of that of `size`; it is stretched by that much."""
    flip: float = Field(0.0, ge=0, le=1)
    """Probability of mirroring left and right (training only). Beware of captions that say left or right."""
    rotate: bool = False
    """Turn by a random multiple of 90° (training only)."""
    background: Literal["white", "black"] = "white"
    """What transparent pictures are laid over when `channels` has no alpha."""
    truncated: bool = False
    """Accept pictures that end too early; what is missing stays gray or black."""
    buckets: BucketsConfig | None = None
    """Train on clips of several shapes, each batch of one: `{}` for five aspects of `size`'s area; null: all are `frames` × `size`."""

    @model_validator(mode="after")
    def _ranges(self) -> MediaConfig:
        for name, (low, high), most in (
            ("crop_area", self.crop_area, 1.0),
            ("crop_aspect", self.crop_aspect, math.inf),
        ):
            if not 0 < low <= high <= most:
                raise ValueError(
                    f"{name}=[{low:g}, {high:g}]: least before largest, above 0" + (" and up to 1" if most == 1 else "")
                )
        if self.resize != "cover" and self.crop != "center":
            raise ValueError(
                f"crop={self.crop} takes a part, and resize={self.resize} shows the whole picture: use resize=cover, or leave crop out"
            )
        return self

    @property
    def usual(self) -> Bucket:
        return Bucket(self.frames, *self.size)

    @property
    def framing(self) -> Framing:
        bars = 255 if self.background == "white" else 0
        return Framing(
            self.size, self.crop, self.flip, self.rotate, self.resize, self.crop_area, self.crop_aspect, bars
        )

    def wanted(self, split: Split) -> Wanted:
        framing = self.framing
        return Wanted(
            framing if split == "train" else framing.still,
            self.frames,
            self.fps,
            self.channels,
            self.background,
            self.truncated,
        )


class Clip(NamedTuple):
    pixels: np.ndarray  # T H W C, uint8; T ≤ frames
    fps: float | None  # None: a still


def read_media(path: Path, name: str, wanted: Wanted, rng: np.random.Generator) -> Clip:
    """Decode one file, or raise Unreadable with a reason for a person. `name` is what skipped.jsonl lists."""
    with reasons(name):
        if path.suffix.lower() in VIDEOS:
            from kineograph.data.video import read_video  # PyAV is imported where videos are

            return read_video(path, wanted, rng)
        return read_picture(path.read_bytes(), wanted, rng)


def read_encoded(data: bytes, ending: str, name: str, wanted: Wanted, rng: np.random.Generator) -> Clip:
    """The same from a file's bytes; `ending` is its suffix, as in `.jpg`."""
    with reasons(name):
        if ending in VIDEOS:
            from kineograph.data.video import read_video

            return read_video(io.BytesIO(data), wanted, rng)
        return read_picture(data, wanted, rng)


@contextmanager
def reasons(name: str) -> Iterator[None]:
    """Whatever a decoder raises becomes Unreadable: on broken input they raise almost anything."""
    try:
        yield
    except Unreadable as error:
        raise Unreadable(name, error.reason) from None
    except UnidentifiedImageError:
        raise Unreadable(name, "not a picture in any format that Pillow knows") from None
    except FileNotFoundError:
        raise Unreadable(name, "the file is gone") from None
    except PermissionError:
        raise Unreadable(name, "no permission to read it") from None
    except Image.DecompressionBombError as error:
        raise Unreadable(name, too_large(error)) from None
    except MemoryError:
        raise Unreadable(name, "out of memory while decoding") from None
    except (EOFError, IndexError):
        raise Unreadable(name, "truncated") from None
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise Unreadable(name, f"truncated: {text}" if isinstance(error, zlib.error) else text[:300]) from None


# Stills and animations --------------------------------------------------------------------------------------------


def read_picture(data: bytes, wanted: Wanted, rng: np.random.Generator) -> Clip:
    """A still is one frame; of an animation (GIF, WebP, APNG) the wanted ones are taken by their durations."""
    if not data:
        raise Unreadable("", "empty file (0 bytes)")
    with Image.open(io.BytesIO(data)) as image, _truncation(wanted.truncated):
        if is_animation(image):
            return _read_animation(image, data, wanted, rng)
        if image.format in ("JPEG", "MPO"):
            _shrink_while_decoding(image, wanted)
        image.load()
        upright = ImageOps.exif_transpose(image) if _has_orientation(image) else image
        place = wanted.framing.place(upright.width, upright.height, rng)
        return Clip(place.apply(to_channels(upright, wanted.channels, wanted.background))[None], None)


def is_animation(image: Any) -> bool:
    """Not the pages of a TIFF, nor the second view that phones keep inside a JPEG (MPO)."""
    return image.format in ("GIF", "WEBP", "PNG") and getattr(image, "is_animated", False)


def _read_animation(image: Any, data: bytes, wanted: Wanted, rng: np.random.Generator) -> Clip:
    delays = frame_delays(image, data, wanted.truncated)
    ends = np.cumsum(delays)
    clock = GIF_TOLERANCE if image.format == "GIF" else TOLERANCE
    starts, first, end = ends - delays, 0, float(ends[-1])
    if wanted.span is not None:
        first = int(np.searchsorted(ends, wanted.span[0] + clock, side="right"))
        end = min(end, wanted.span[1])
        starts = starts[first : int(np.searchsorted(starts, end - clock, side="left"))]
        if not len(starts):
            raise Unreadable("", f"its clip begins at {wanted.span[0]:g} s, and it has {ends[-1]:.3g} s")
    chosen = first + pick(starts, end, wanted.frames, wanted.fps, rng, clock)
    place = wanted.framing.place(image.width, image.height, rng)
    decoded: dict[int, np.ndarray] = {}
    needed = set(chosen.tolist())
    for index in range(max(needed) + 1):  # frames build on earlier ones
        image.seek(index)
        if index in needed:
            decoded[index] = place.apply(to_channels(image, wanted.channels, wanted.background))
    return Clip(np.stack([decoded[index] for index in chosen.tolist()]), wanted.fps or len(delays) / float(ends[-1]))


def frame_delays(image: Any, data: bytes, truncated: bool = False) -> np.ndarray:
    """Seconds that each frame stays. Viewers show what asks for 10 ms or less for 100 ms, and so do we."""
    if image.format == "GIF":
        delays = np.array(gif_delays(data, truncated))
    else:
        delays = np.empty(image.n_frames)
        for index in range(len(delays)):
            image.seek(index)
            image.load()
            delays[index] = image.info.get("duration", 0) / 1000
    return np.where(delays <= 0.01, 0.1, delays)


def gif_delays(data: bytes, truncated: bool = False) -> list[float]:
    """Each frame's delay, read from the control blocks without decoding a pixel."""
    delays: list[float] = []
    delay = 0.0
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)  # header, global palette
    try:
        while at < len(data) and data[at] in (0x21, 0x2C):
            if data[at] == 0x21:  # an extension; F9 is the graphic control
                if data[at + 1] == 0xF9:
                    delay = int.from_bytes(data[at + 4 : at + 6], "little") / 100
                at = _after_blocks(data, at + 2)
            else:  # an image: descriptor, local palette, LZW code size, blocks
                flags = data[at + 9]
                at = _after_blocks(data, at + 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0))
                delays.append(delay)
                delay = 0.0
    except IndexError:
        if not truncated or not delays:
            raise Unreadable("", f"truncated GIF: it ends inside frame {len(delays) + 1}") from None
    if not delays:
        raise Unreadable("", "a GIF without frames")
    return delays


def _after_blocks(data: bytes, at: int) -> int:
    while data[at]:
        at += data[at] + 1
    return at + 1


def _has_orientation(image: Image.Image) -> bool:
    if image.format == "JPEG" and not image.info.keys() & {
        "exif",
        "xmp",
    }:  # asking costs as much as all else around a decode
        return False
    return image.getexif().get(0x0112, 1) != 1


def _shrink_while_decoding(image: Image.Image, wanted: Wanted) -> None:
    """JPEGs decode straight to 1/2, 1/4 or 1/8: take what is still at least twice the size that is needed."""
    width, height = image.size
    high, wide = wanted.framing.size
    scale = max(max(wide, high) / width, max(wide, high) / height) * wanted.framing.finest
    image.draft("L" if wanted.channels == 1 else "RGB", (int(width * scale * 2), int(height * scale * 2)))


_truncation_lock = threading.Lock()


@contextmanager
def _truncation(allowed: bool) -> Iterator[None]:
    """Pillow's switch is a global: hold it for the time of one decode, and only where it stands the other way."""
    if allowed == ImageFile.LOAD_TRUNCATED_IMAGES and not _truncation_lock.locked():
        yield
        return
    with _truncation_lock:
        before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, allowed
        try:
            yield
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = before


def extent_of_picture(data: bytes) -> tuple[int, int, int, float]:
    """The same from the header alone."""
    if not data:
        raise Unreadable("", "empty file (0 bytes)")
    with Image.open(io.BytesIO(data)) as image:
        if is_animation(image):
            delays = frame_delays(image, data, truncated=True)
            return *image.size, len(delays), float(delays.sum())
        width, height = image.size
        return (height, width, 1, 0.0) if image.getexif().get(0x0112, 1) >= 5 else (width, height, 1, 0.0)


def measure_picture(data: bytes) -> tuple[int, int, int, float]:
    """Width, height (upright), frames, seconds (0 for a still): by decoding everything."""
    if not data:
        raise Unreadable("", "empty file (0 bytes)")
    with Image.open(io.BytesIO(data)) as image, _truncation(False):
        if not is_animation(image):
            image.load()
            width, height = image.size
            return (height, width, 1, 0.0) if image.getexif().get(0x0112, 1) >= 5 else (width, height, 1, 0.0)
        delays = frame_delays(image, data)
        for index in range(len(delays)):
            image.seek(index)
            image.load()
        return *image.size, len(delays), float(delays.sum())


# Colour -----------------------------------------------------------------------------------------------------------


def to_channels(image: Image.Image, channels: int, background: str = "white") -> Image.Image:
    """Any mode → L, LA, RGB or RGBA. Where alpha has no place, the picture is laid over `background`."""
    mode = MODES[channels]
    if image.mode == mode and "transparency" not in image.info:
        return image
    if image.mode.startswith(("I", "F")):
        image = _eight_bits(image)
    elif image.mode in ("CMYK", "YCbCr", "HSV"):
        image = image.convert("RGB")
    if not image.has_transparency_data:
        return image.convert(mode)
    layered = image.convert("RGBA")
    if channels in (2, 4):
        return layered.convert(mode)
    return Image.alpha_composite(Image.new("RGBA", image.size, background), layered).convert(mode)


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit gray (Pillow's I;16 and I): 0 … 65535 → 0 … 255. Float gray (F): 0 … 1 → 0 … 255."""
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    top = 1.0 if image.mode == "F" else 65535.0
    if not 0 <= low <= high <= top:  # also refuses nan
        raise Unreadable(
            "",
            f"values from {low:g} to {high:g} in a {'float' if top == 1 else '16-bit'} picture: 0 to {top:g} is understood",
        )
    return Image.fromarray(np.rint(values * (255 / top)).astype(np.uint8))
