"""Sound tracks of clips: decoded with PyAV to mono samples of one rate, aligned to the frames that were drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kineograph.core.errors import Unreadable
from kineograph.core.safe_media import MediaLimits, Meter, open_sound
from kineograph.data.decode import Clip
from kineograph.data.media_config import VIDEOS

_PREROLL = 0.25  # seconds decoded before the first sample: codecs build on earlier packets
_REMEDY = "add a sound track or a .wav of the same name, remove the clip, or set data.sample_rate=null"


def read_sound(path: Path, clip: Clip, rate: int, samples: int, limits: MediaLimits) -> np.ndarray:
    """The sound of a drawn clip, T S in [−1, 1], from NAME.wav beside it or its own track; silent after the track's end. Raises Unreadable."""
    beside = path.with_suffix(".wav")
    frames = len(clip.pixels)
    if beside.is_file():
        sound = _decode(beside, clip.start, frames * samples, rate, limits)
    elif path.suffix.lower() in VIDEOS:
        sound = _decode(path, clip.origin + clip.start, frames * samples, rate, limits)
    else:
        raise Unreadable("", f"no sound: {path.suffix[1:]} files hold none; {_REMEDY}")
    return sound.reshape(frames, samples)


def _decode(path: Path, begin: float, count: int, rate: int, limits: MediaLimits) -> np.ndarray:
    """`count` samples from second `begin` of the file's clock on."""
    import av

    result = np.zeros(count, dtype=np.float32)
    with open_sound(path) as container:
        if not container.streams.audio:
            raise Unreadable("", f"no sound track; {_REMEDY}")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise Unreadable("", f"its sound track is of a codec that cannot be decoded; {_REMEDY}")
        try:
            _fill(result, container, stream, begin, rate, Meter(limits))
        except av.FFmpegError as error:
            raise Unreadable("", f"its sound track is damaged: {error.strerror}; {_REMEDY}") from None
    if np.isnan(result).any():
        raise Unreadable("", f"its sound track holds values that are not numbers; {_REMEDY}")
    return result.clip(-1, 1)


def _fill(result: np.ndarray, container: Any, stream: Any, begin: float, rate: int, meter: Meter) -> None:
    import av

    container.seek(int((begin - _PREROLL) / float(stream.time_base)), stream=stream, backward=True)
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    at: int | None = None  # where the next sample goes
    for frame in _then_none(container.decode(stream)):
        meter.check_time()
        if at is None:
            if frame is None:
                return
            at = round(((frame.time or 0.0) - begin) * rate)
        for part in resampler.resample(frame):
            values = part.to_ndarray()[0]
            skipped = max(0, -at)
            target = result[max(0, at) :]
            values = values[skipped : skipped + len(target)]
            target[: len(values)] = values
            at += part.samples
        if at >= len(result):
            return


def _then_none(frames: Any) -> Any:
    """None flushes the resampler."""
    yield from frames
    yield None
