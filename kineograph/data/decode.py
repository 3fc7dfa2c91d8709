"""Media files → frames: images and animations through Pillow, videos through PyAV."""

from __future__ import annotations

import io
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from kineograph.core.errors import Unreadable, explain_oversized_image
from kineograph.core.safe_media import (
    MediaLimits,
    Meter,
    check_bytes,
    is_animation,
    open_image,
    read_gif_delays,
    read_media,
)
from kineograph.data.buckets import MediaInfo
from kineograph.data.colour_profile import has_usable_profile
from kineograph.data.media_config import VIDEOS, DecodeOptions
from kineograph.data.picture import ORIENTATION, make_upright, to_channels
from kineograph.data.transforms import GIF_TOLERANCE, TOLERANCE, pick_frames

# Pillow warns about metadata that is not used here (odd EXIF, unknown chunks); undecodable pixels are an error anyway.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

_LIMITS = MediaLimits()


class Clip(NamedTuple):
    pixels: np.ndarray  # T H W C, uint8; T ≤ frames
    fps: float | None  # None: a still image
    geometry: Mapping[str, Any] = MappingProxyType({})  # the state of rng from which crop, rotation and flip were drawn
    start: float = 0.0  # of the first frame, in seconds after the file's first picture
    origin: float = 0.0  # the time of that picture in the file's clock


def decode_media(file: Path | bytes, suffix: str, name: str, options: DecodeOptions, rng: np.random.Generator) -> Clip:
    """Decode a file or its bytes. Raises Unreadable with a readable reason; `name` is what skipped.jsonl lists."""
    with raise_unreadable(name):
        if suffix.lower() in VIDEOS:
            from kineograph.data.video import decode_video  # imports PyAV only for videos

            return decode_video(file if isinstance(file, Path) else io.BytesIO(file), options, rng)
        return decode_image(_read(file, options.limits), options, rng)


@dataclass
class LoadedMedia:
    """All frames of a file, from which clips are drawn as `decode_media` draws them."""

    frames: list[Image.Image] | list[np.ndarray]
    """In the channels of the options; resized and cropped (H W C) if the crop never changes."""
    size: tuple[int, int]
    pick: Callable[[DecodeOptions, np.random.Generator], Sequence[int]]
    """→ the numbers of the frames of one clip."""
    fps: float | None = None
    turned: int = 0
    pixel_aspect: float = 1.0
    nbytes: int = 0

    @staticmethod
    def of(
        images: Iterable[Image.Image],
        limit: int,
        size: tuple[int, int],
        options: DecodeOptions,
        pick: Callable[[DecodeOptions, np.random.Generator], Sequence[int]],
        fps: float | None = None,
        turned: int = 0,
        pixel_aspect: float = 1.0,
    ) -> LoadedMedia:
        """Raises Unreadable as soon as the frames take more than `limit` bytes."""
        media = LoadedMedia([], size, pick, fps, turned, pixel_aspect)
        transform = None
        if options.resize_crop.is_fixed:
            transform = options.resize_crop.draw(*size, np.random.default_rng(0), turned, pixel_aspect)
        for image in images:
            # Copied, so that no view keeps a whole picture alive.
            frame: Any = image if transform is None else np.array(transform.resample(image))
            media.frames.append(frame)
            # Pillow takes four bytes a pixel for all modes but L.
            media.nbytes += frame.nbytes if transform else frame.width * frame.height * (1 if frame.mode == "L" else 4)
            if media.nbytes > limit:
                raise Unreadable("", f"its frames take more than {limit:,} bytes")
        return media

    def draw(self, options: DecodeOptions, rng: np.random.Generator) -> Clip:
        chosen, geometry = self.pick(options, rng), rng.bit_generator.state
        transform = options.resize_crop.draw(*self.size, rng, self.turned, self.pixel_aspect)
        frames: dict[int, np.ndarray] = {}
        for index in chosen:
            if index not in frames:
                frame = self.frames[index]
                frames[index] = transform.orient(frame) if isinstance(frame, np.ndarray) else transform.apply(frame)
        return Clip(np.stack([frames[index] for index in chosen]), self.fps, geometry)


def load_media(file: Path, suffix: str, name: str, options: DecodeOptions, limit: int) -> LoadedMedia:
    """Decode all frames of a file. Raises Unreadable, also if they take more than `limit` bytes."""
    with raise_unreadable(name):
        if suffix.lower() in VIDEOS:
            from kineograph.data.video import load_video

            return load_video(file, options, limit)
        return _load_image(read_media(file, options.limits), options, limit)


def probe_media(
    file: Path | bytes, suffix: str, name: str, decode_all: bool = False, limits: MediaLimits = _LIMITS
) -> MediaInfo:
    """Size and length of a file, from its header or by decoding all frames. Raises Unreadable."""
    with raise_unreadable(name):
        if suffix.lower() in VIDEOS:
            from kineograph.data.video import probe_video

            return probe_video(file if isinstance(file, Path) else io.BytesIO(file), decode_all, limits)
        return _probe_image(_read(file, limits), decode_all, Meter(limits))


def has_damaged_profile(data: bytes, name: str) -> bool:
    """Whether a picture's colour profile cannot be used. Raises Unreadable."""
    with raise_unreadable(name), _open_image(data, True, Meter(_LIMITS)) as image:
        return not has_usable_profile(image)


def _read(file: Path | bytes, limits: MediaLimits) -> bytes:
    if isinstance(file, Path):
        return read_media(file, limits)
    check_bytes(len(file), limits)
    return file


@contextmanager
def raise_unreadable(name: str) -> Iterator[None]:
    """Turn any exception of a decoder into Unreadable: on broken input they raise almost anything."""
    try:
        yield
    except Unreadable as error:
        raise Unreadable(name, error.reason) from None
    except UnidentifiedImageError:
        raise Unreadable(name, "not a PNG, JPEG, WebP, AVIF, JPEG 2000, BMP, TIFF or GIF image") from None
    except FileNotFoundError:
        raise Unreadable(name, "the file no longer exists") from None
    except PermissionError:
        raise Unreadable(name, "no permission to read it") from None
    except Image.DecompressionBombError as error:
        raise Unreadable(name, explain_oversized_image(error)) from None
    except MemoryError:
        raise Unreadable(name, "out of memory while decoding") from None
    except (EOFError, IndexError):
        raise Unreadable(name, "truncated") from None
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise Unreadable(name, f"truncated: {text}" if isinstance(error, zlib.error) else text[:300]) from None


# Images and animations --------------------------------------------------------------------------------------------


def decode_image(data: bytes, options: DecodeOptions, rng: np.random.Generator) -> Clip:
    """A still image gives one frame; frames of an animation (GIF, WebP, APNG) are picked by their durations."""
    meter = Meter(options.limits)
    with _open_image(data, options.truncated, meter) as image:
        if is_animation(image):
            return _decode_animation(image, data, options, rng, meter)
        picture, geometry = _decode_picture(image, options), rng.bit_generator.state
        transform = options.resize_crop.draw(picture.width, picture.height, rng)
        return Clip(transform.apply(picture)[None], None, geometry)


def _decode_picture(image: Image.Image, options: DecodeOptions) -> Image.Image:
    """A still image, upright, in the channels of the options."""
    if image.format in ("JPEG", "MPO"):
        _shrink_while_decoding(image, options)
    image.load()
    return to_channels(make_upright(image), options.channels, options.background)


def _load_image(data: bytes, options: DecodeOptions, limit: int) -> LoadedMedia:
    meter = Meter(options.limits)
    with _open_image(data, options.truncated, meter) as image:
        if not is_animation(image):
            picture = _decode_picture(image, options)
            return LoadedMedia.of([picture.copy()], limit, picture.size, options, lambda *_: [0])
        delays = _frame_delays(image, data, meter, options.truncated)
        tolerance = GIF_TOLERANCE if image.format == "GIF" else TOLERANCE

        def decode() -> Iterator[Image.Image]:
            for index in range(len(delays)):
                _seek_frame(image, index, len(delays), meter)
                yield to_channels(image, options.channels, options.background).copy()

        def pick(options: DecodeOptions, rng: np.random.Generator) -> Sequence[int]:
            return _pick_animation_frames(delays, tolerance, options, rng).tolist()

        fps = options.fps or len(delays) / float(delays.sum())
        return LoadedMedia.of(decode(), limit, image.size, options, pick, fps)


@contextmanager
def _open_image(data: bytes, truncated: bool, meter: Meter) -> Iterator[Image.Image]:
    with open_image(data) as image, _allow_truncation(truncated):
        meter.check_size(*image.size)
        yield image


def _decode_animation(image: Any, data: bytes, options: DecodeOptions, rng: np.random.Generator, meter: Meter) -> Clip:
    delays = _frame_delays(image, data, meter, options.truncated)
    tolerance = GIF_TOLERANCE if image.format == "GIF" else TOLERANCE
    chosen, geometry = _pick_animation_frames(delays, tolerance, options, rng), rng.bit_generator.state
    transform = options.resize_crop.draw(image.width, image.height, rng)
    decoded: dict[int, np.ndarray] = {}
    needed = set(chosen.tolist())
    for index in range(max(needed) + 1):  # frames build on earlier ones
        _seek_frame(image, index, len(delays), meter)
        if index in needed:
            decoded[index] = transform.apply(to_channels(image, options.channels, options.background))
    fps = options.fps or len(delays) / float(delays.sum())
    pixels = np.stack([decoded[index] for index in chosen.tolist()])
    return Clip(pixels, fps, geometry, start=float(delays[: chosen[0]].sum()))


def _seek_frame(image: Any, index: int, frames: int, meter: Meter) -> None:
    image.seek(index)
    meter.count_frame(*image.size)
    meter.check_animation(frames, *image.size)


def _pick_animation_frames(
    delays: np.ndarray, tolerance: float, options: DecodeOptions, rng: np.random.Generator
) -> np.ndarray:
    ends = np.cumsum(delays)
    starts, first, end = ends - delays, 0, float(ends[-1])
    options = options.apply_trim(end, len(delays) / end)
    if options.span is not None:
        first = int(np.searchsorted(ends, options.span[0] + tolerance, side="right"))
        end = min(end, options.span[1])
        starts = starts[first : int(np.searchsorted(starts, end - tolerance, side="left"))]
        if not len(starts):
            raise Unreadable("", f"its clip begins at {options.span[0]:g} s, but it lasts {ends[-1]:.3g} s")
    return first + pick_frames(starts, end, options.frames, options.fps, rng, tolerance)


def _frame_delays(image: Any, data: bytes, meter: Meter, truncated: bool = False) -> np.ndarray:
    """Seconds per frame. Like browsers, show frames of 10 ms or less for 100 ms."""
    if image.format == "GIF":
        delays = np.array(read_gif_delays(data, meter, truncated))
        meter.check_animation(len(delays), *image.size)
    else:
        meter.check_animation(image.n_frames, *image.size)
        delays = np.empty(image.n_frames)
        for index in range(len(delays)):
            image.seek(index)
            image.load()
            meter.check_time()
            delays[index] = image.info.get("duration", 0) / 1000
    return np.where(delays <= 0.01, 0.1, delays)


def _shrink_while_decoding(image: Image.Image, options: DecodeOptions) -> None:
    """JPEGs decode directly to 1/2, 1/4 or 1/8: keep at least twice the needed size."""
    width, height = image.size
    longer = max(options.resize_crop.size)
    scale = max(longer / width, longer / height) * options.resize_crop.max_zoom
    gray = options.channels == 1 and "icc_profile" not in image.info  # a profile is of the stored colours
    image.draft("L" if gray else "RGB", (int(width * scale * 2), int(height * scale * 2)))


_truncation_lock = threading.Lock()


@contextmanager
def _allow_truncation(allowed: bool) -> Iterator[None]:
    """Set Pillow's global switch for one decode; lock only if it must change."""
    if allowed == ImageFile.LOAD_TRUNCATED_IMAGES and not _truncation_lock.locked():
        yield
        return
    with _truncation_lock:
        before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, allowed
        try:
            yield
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = before


def _probe_image(data: bytes, decode_all: bool, meter: Meter) -> MediaInfo:
    with _open_image(data, truncated=False, meter=meter) as image:
        if not is_animation(image):
            if decode_all:
                image.load()
            width, height = image.size
            swapped = image.getexif().get(ORIENTATION, 1) >= 5
            return MediaInfo(height, width) if swapped else MediaInfo(width, height)
        delays = _frame_delays(image, data, meter, truncated=not decode_all)
        for index in range(len(delays) if decode_all else 0):
            _seek_frame(image, index, len(delays), meter)
            image.load()
        return MediaInfo(*image.size, len(delays), float(delays.sum()))
