"""Video files → frames: seek to the keyframe before a random start, decode from there, convert only what is taken."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from kineograph.core.errors import Unreadable
from kineograph.data.decode import MODES, Clip, Wanted, to_channels
from kineograph.data.timing import TOLERANCE
from kineograph.data.transforms import Placement

if TYPE_CHECKING:
    import av


def read_video(file: Path | io.BytesIO, wanted: Wanted, rng: np.random.Generator) -> Clip:
    """Frames on screen at s, s + 1/fps …, by timestamps; consecutive frames where no fps is asked for."""
    with _opened(file) as container:
        stream = _video_stream(container)
        rate = native_rate(stream)
        step = 1 / (wanted.fps or rate)
        begin, end = wanted.span or (0.0, math.inf)
        duration = min(_stated_duration(container, stream) or _measured_duration(container, stream), end)
        latest = duration - (wanted.frames - 1) * step - TOLERANCE
        start = begin + float(rng.random()) * max(latest - begin, 0.0)
        spot = rng.bit_generator.state  # a second try must crop alike
        taken = _take(container, stream, start, wanted, rng)
        if not taken and start > begin:  # the stated duration was wrong, or the tail is missing
            rng.bit_generator.state = spot
            latest = min(_measured_duration(container, stream), end) - (wanted.frames - 1) * step - TOLERANCE
            taken = _take(container, stream, max(min(start, latest), begin), wanted, rng) or _take(
                container, stream, begin, wanted, rng
            )
        if not taken and begin > 0:
            raise Unreadable(
                "", f"its clip begins at {begin:g} s, and it has {_measured_duration(container, stream):.3g} s"
            )
        if not taken:
            raise Unreadable("", "a video without frames")
        return Clip(np.stack(taken), wanted.fps or rate)


def _take(container: Any, stream: Any, start: float, wanted: Wanted, rng: np.random.Generator) -> list[np.ndarray]:
    """The wanted frames from the one on screen at `start`; fewer where the file ends."""
    begin, end = wanted.span or (0.0, math.inf)
    frames = _until(end, _frames_from(container, stream, start, wanted.truncated))
    shown: av.VideoFrame | None = None
    shown_at = 0.0
    for at, frame in frames:  # find the frame on screen at `start`
        if shown is not None and at > start + TOLERANCE:
            break
        shown, shown_at = frame, at
    else:
        at, frame = float("inf"), None
    if shown is None or (begin and shown_at + _time_on_screen(shown, stream) <= begin + TOLERANCE):
        return []  # nothing at all, or only what comes before the clip
    place = wanted.framing.place(shown.width, shown.height, rng, turned=quarter_turns(shown))
    convert = Converter(wanted, place)
    taken = [convert(shown)]
    if wanted.fps is None:
        while frame is not None and len(taken) < wanted.frames:
            taken.append(convert(frame))
            frame = next(frames, (0.0, None))[1]
        return taken
    first = shown_at
    pixels = taken[0]
    while len(taken) < wanted.frames:
        due = first + len(taken) / wanted.fps
        while frame is not None and at <= due + TOLERANCE:
            shown, shown_at, pixels = frame, at, None  # type: ignore[assignment]
            at, frame = next(frames, (float("inf"), None))
        if frame is None and due >= min(shown_at + _time_on_screen(shown, stream), end) - TOLERANCE:
            break
        pixels = convert(shown) if pixels is None else pixels
        taken.append(pixels)
    return taken


def _until(end: float, frames: Iterator[tuple[float, av.VideoFrame]]) -> Iterator[tuple[float, av.VideoFrame]]:
    for at, frame in frames:
        if at >= end - TOLERANCE:
            return
        yield at, frame


def _frames_from(container: Any, stream: Any, start: float, truncated: bool) -> Iterator[tuple[float, av.VideoFrame]]:
    """(seconds, frame) from the keyframe at or before `start`, in the order shown."""
    import av

    origin, clock = stream.start_time or 0, float(stream.time_base)
    container.seek(origin + int(start / clock), stream=stream, backward=True)
    first = True
    last = -1 / native_rate(stream)
    try:
        for frame in container.decode(stream):
            at = (frame.pts - origin) * clock if frame.pts is not None else last + 1 / native_rate(stream)
            if (
                first and start > 0 and at > start + TOLERANCE
            ):  # a container whose index is off: from the beginning then
                yield from _frames_from(container, stream, 0.0, truncated)
                return
            first, last = False, at
            yield at, frame
    except av.FFmpegError:
        if not truncated or first:
            where = "no frame can be decoded" if first else f"nothing can be decoded after {last:.3g} s"
            raise Unreadable("", f"damaged or cut off: {where}") from None


class Converter:
    """Decoded frames of one clip → H W C, uint8, all alike."""

    def __init__(self, wanted: Wanted, place: Placement) -> None:
        import av
        from av.video.reformatter import VideoReformatter

        self.wanted, self.place = wanted, place
        self._reformatter = VideoReformatter()  # kept, since setting one up costs ten times a conversion
        self._options = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}

    def __call__(self, frame: Any) -> np.ndarray:
        channels = self.wanted.channels
        has_alpha = any(part.is_alpha for part in frame.format.components)
        layout = "rgba" if has_alpha else "gray" if channels == 1 else "rgb24"
        # FFmpeg follows the frame's own colour matrix and range
        image = Image.fromarray(self._reformatter.reformat(frame, format=layout, **self._options).to_ndarray())
        return self.place.apply(
            image if image.mode == MODES[channels] else to_channels(image, channels, self.wanted.background)
        )


def quarter_turns(frame: Any) -> int:
    """Anticlockwise turns that set a frame upright: phones store portrait clips lying down, with a note."""
    return round(getattr(frame, "rotation", 0) / 90) % 4


def native_rate(stream: Any) -> float:
    return float(stream.average_rate or stream.guessed_rate or 25)


def _time_on_screen(frame: Any, stream: Any) -> float:
    return float(frame.duration * stream.time_base) if frame.duration else 1 / native_rate(stream)


def _stated_duration(container: Any, stream: Any) -> float | None:
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return container.duration / 1e6 if container.duration else None


def _measured_duration(container: Any, stream: Any) -> float:
    """From the packets, without decoding: for files that were never closed properly, such as recordings of a stream."""
    origin, clock = stream.start_time or 0, float(stream.time_base)
    container.seek(origin, stream=stream, backward=True)
    ends = [
        (packet.pts + (packet.duration or 0) - origin) * clock
        for packet in container.demux(stream)
        if packet.pts is not None
    ]
    if not ends:
        raise Unreadable("", "a video without frames")
    return max(ends)


def _opened(file: Path | io.BytesIO) -> Any:
    import av

    if not (file.stat().st_size if isinstance(file, Path) else file.getbuffer().nbytes):
        raise Unreadable("", "empty file (0 bytes)")
    try:
        return av.open(str(file) if isinstance(file, Path) else file)
    except av.InvalidDataError:
        raise Unreadable(
            "", "not a video in any format that FFmpeg knows, or cut off before its index was written"
        ) from None


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise Unreadable("", "no video in it (sound only?)")
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # worker processes are the parallelism
    return stream


def extent(file: Path | io.BytesIO) -> tuple[int, int, int, float]:
    """Width, height (upright), frames, seconds: as the container states them, with one frame decoded."""
    with _opened(file) as container:
        stream = _video_stream(container)
        seconds = _stated_duration(container, stream) or _measured_duration(container, stream)
        _, first = next(_frames_from(container, stream, 0.0, truncated=False), (0.0, None))
        if first is None:
            raise Unreadable("", "a video without frames")
        upright = quarter_turns(first) % 2 == 0
        size = (first.width, first.height) if upright else (first.height, first.width)
        return *size, stream.frames or max(1, round(seconds * native_rate(stream))), seconds


def measure(file: Path | io.BytesIO) -> tuple[int, int, int, float]:
    """Width, height (upright), frames, seconds: by decoding everything."""
    with _opened(file) as container:
        stream = _video_stream(container)
        count, end, size = 0, 0.0, (0, 0)
        for at, frame in _frames_from(container, stream, 0.0, truncated=False):
            if not count:
                size = (frame.width, frame.height) if quarter_turns(frame) % 2 == 0 else (frame.height, frame.width)
            count, end = count + 1, at + _time_on_screen(frame, stream)
        if not count:
            raise Unreadable("", "a video without frames")
        return *size, count, end
