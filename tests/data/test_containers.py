"""Every draw of every container holds the frames that were asked for, read back from pictures that carry their own number."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from kineograph.core.safe_media import MediaLimits
from kineograph.data import video
from kineograph.data.decode import Clip, decode_media, probe_media
from kineograph.data.decoded_cache import DecodedCache
from kineograph.data.media_config import DecodeOptions
from kineograph.data.transforms import ResizeCrop
from kineograph.data.trim import Trim
from kineograph.media.clips import read_frames

HEIGHT, WIDTH, BITS = 96, 128, 8  # the smallest size of H.263
COUNT, RATE = 36, 12

# suffix → codec of the pictures, codec of the sound, whether frames may last differently long
CONTAINERS = {
    "mp4": ("libx264", "aac", True),
    "mkv": ("libx264", "aac", True),
    "webm": ("libvpx", "libopus", True),
    "mov": ("mpeg4", "aac", True),
    "avi": ("mpeg4", "mp2", False),
    "ts": ("libx264", "mp2", True),
    "mpg": ("mpeg2video", "mp2", False),
    "flv": ("flv", "libmp3lame", True),
    "3gp": ("h263", "aac", True),
    "wmv": ("wmv2", "wmav2", True),
    "ogv": ("libvpx", "libopus", False),  # Ogg guesses the times of frames between its pages
}


def draw_number(number: int) -> np.ndarray:
    """H W 3: eight stripes, a bit each."""
    bits = (number >> np.arange(BITS)) & 1
    row = np.repeat(bits * 255, WIDTH // BITS).astype(np.uint8)
    return np.broadcast_to(row[None, :, None], (HEIGHT, WIDTH, 3)).copy()


def read_numbers(clip: Clip) -> list[int]:
    stripes = clip.pixels[..., 0].reshape(len(clip.pixels), clip.pixels.shape[1], BITS, -1).mean(axis=(1, 3))
    return [int(((stripe > 127) << np.arange(BITS)).sum()) for stripe in stripes]


def write_clip(
    path: Path,
    start: float = 0.0,
    variable: bool = False,
    sound: bool = True,
    size: tuple[int, int] = (HEIGHT, WIDTH),
    **options: str,
) -> list[float]:
    """Write a clip whose sound is longer than its pictures. → when each frame is shown, in seconds from the first"""
    codec, sound_codec, _ = CONTAINERS[path.suffix[1:]]
    steps = np.full(COUNT, 1.0)
    if variable:  # slow at first, fast at the end
        steps = np.where(np.arange(COUNT) < COUNT // 2, 4.0, 1.0)
    ticks = np.concatenate([[0.0], np.cumsum(steps)[:-1]])
    with av.open(str(path), "w", format="ogg" if path.suffix == ".ogv" else None, options=options) as container:
        stream = container.add_stream(codec, rate=RATE)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 1_000_000
        stream.codec_context.gop_size = 8
        if codec == "libx264":
            stream.options = {"preset": "ultrafast", "bf": "2"}
        elif codec == "libvpx":
            stream.options = {"deadline": "realtime", "cpu-used": "8"}
        clock = Fraction(1, RATE)
        stream.codec_context.time_base = clock
        audio = (
            container.add_stream(sound_codec, rate=44100 if path.suffix == ".flv" else 48000, layout="mono")
            if sound
            else None
        )
        if audio is not None:
            audio.bit_rate = 64_000
        for number, tick in enumerate(ticks):
            frame = av.VideoFrame.from_ndarray(draw_number(number), format="rgb24").reformat(
                size[1], size[0], "yuv420p"
            )
            frame.pts, frame.time_base = round(start * RATE + tick), clock
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if audio is not None:
            rate, samples = audio.rate, audio.codec_context.frame_size or 1152
            last = int((start + 2 * (ticks[-1] / RATE) + 5) * rate / samples)
            for index in (*range(4), *range(last - 4, last)):  # a few packets tell the track's length
                form = audio.format.name
                kind = {"fltp": np.float32, "flt": np.float32, "s16p": np.int16, "s16": np.int16, "s32p": np.int32}[
                    form
                ]
                silence = av.AudioFrame.from_ndarray(np.zeros((1, samples), kind), format=form, layout="mono")
                silence.sample_rate, silence.pts, silence.time_base = rate, index * samples, Fraction(1, rate)
                container.mux(audio.encode(silence))
            container.mux(audio.encode())
    return (ticks / RATE).tolist()


def draw(path: Path, seed: int, **options) -> list[int]:
    wanted = DecodeOptions(ResizeCrop((HEIGHT, WIDTH)), channels=1, **options)
    return read_numbers(decode_media(path, path.suffix, path.name, wanted, np.random.default_rng(seed)))


def decode_all(path: Path) -> list[float]:
    """When each frame is shown, in seconds from the first; by decoding one after the other."""
    with av.open(str(path)) as container:
        times = [frame.time for frame in container.decode(video=0)]
    return [time - times[0] for time in times]


def expected_at(times: list[float], first: int, frames: int, fps: float) -> list[int]:
    return [int(np.searchsorted(times, times[first] + k / fps + 2e-3, side="right")) - 1 for k in range(frames)]


@pytest.mark.parametrize("suffix", CONTAINERS)
def test_every_draw_holds_the_frames_that_were_asked_for(tmp_path, suffix):
    """Though the sound lasts longer, the pictures begin late, and frames last differently long."""
    for start in (0.0,) if suffix == "mpg" else (0.0, 7.0):  # FFmpeg finds no pictures that begin late in an mpg
        for variable in (False, True) if CONTAINERS[suffix][2] else (False,):
            path = tmp_path / f"{start:g}-{variable}.{suffix}"
            write_clip(path, start, variable)
            times, case = decode_all(path), f"start={start:g} variable={variable}"
            assert len(times) == COUNT
            firsts = set()
            for seed in range(8):
                found = draw(path, seed, frames=9)
                assert found == list(range(found[0], found[0] + 9)), case
                firsts.add(found[0])
                found = draw(path, seed, frames=9, fps=6.0)
                assert found == expected_at(times, found[0], 9, 6.0), case
                firsts.add(found[0])
            assert min(firsts) < COUNT / 3 < max(firsts), case
            assert len(firsts) > 3, case
            info = video.probe_video(path, decode_all=False, limits=MediaLimits())
            assert info.frames == COUNT, case
            assert info.seconds == pytest.approx(times[-1], abs=0.34), case  # and the last frame's duration


def test_parts_of_a_clip_hold_their_frames(tmp_path):
    """Consecutive frames between two seconds, of a clip whose frames last differently long."""
    path = tmp_path / "a.mkv"
    write_clip(path, 7.0, variable=True)
    times = decode_all(path)
    inside = [number for number, time in enumerate(times) if 1.999 <= time < 6.499]
    for seed in range(8):
        found = draw(path, seed, frames=9, span=(2.0, 6.5))
        assert found == list(range(found[0], found[0] + 9))
        assert found[0] >= inside[0] and found[-1] <= inside[-1]


def test_a_video_is_measured_once(tmp_path, monkeypatch):
    path = tmp_path / "a.mkv"
    write_clip(path)
    measured = []
    measure = video._measure_timing
    monkeypatch.setattr(video, "_measure_timing", lambda *arguments: measured.append(1) or measure(*arguments))
    for seed in range(3):
        draw(path, seed, frames=9)
    assert len(measured) == 1
    write_clip(path, variable=True)
    draw(path, 0, frames=9)
    assert len(measured) == 2  # the file has changed


def test_theora_repeats_a_picture_with_an_empty_packet() -> None:
    """A second of red, one of blue, and a green picture at 12 frames a second: three pictures, and 22 empty packets."""
    path = Path(__file__).parents[1] / "fixtures" / "repeated-pictures.ogv"
    options = DecodeOptions(ResizeCrop((8, 8)), frames=8, fps=4.0)
    info = probe_media(path, ".ogv", path.name, decode_all=True)
    assert info.seconds == pytest.approx(25 / 12)
    pixels = decode_media(path, ".ogv", path.name, options, np.random.default_rng(0)).pixels.mean(axis=(1, 2))
    assert [("red", "blue")[int(blue > red)] for red, _, blue in pixels] == ["red"] * 4 + ["blue"] * 4
    assert len(list(read_frames(path))) == info.frames


def test_fragments_without_a_stated_duration(tmp_path):
    path = tmp_path / "a.mp4"
    write_clip(path, sound=False, movflags="frag_keyframe+empty_moov")
    for seed in range(8):
        found = draw(path, seed, frames=9)
        assert found == list(range(found[0], found[0] + 9))


@pytest.mark.parametrize(("turned", "shown"), [(0, (2, 1)), (90, (1, 2))])
def test_wide_pixels_are_shown_wide(tmp_path, turned, shown):
    """A circle stored in a square of pixels twice as wide as high is an ellipse on the screen."""
    path = tmp_path / "a.mp4"
    rows, columns = np.mgrid[:64, :64] - 31.5
    circle = np.repeat(((rows**2 + columns**2 < 20**2) * 255).astype(np.uint8)[..., None], 3, axis=2)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(2, 1)
        if turned:
            stream.set_display_rotation(turned)
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(circle, format="rgb24")))
        container.mux(stream.encode())
    info = video.probe_video(path, decode_all=False, limits=MediaLimits())
    assert (info.width, info.height) == (64 * shown[0], 64 * shown[1])
    options = DecodeOptions(ResizeCrop((64 * shown[1], 64 * shown[0])), channels=1)
    light = decode_media(path, ".mp4", "a", options, np.random.default_rng(0)).pixels[0, ..., 0] > 127
    width, height = np.ptp(np.nonzero(light.any(0))) + 1, np.ptp(np.nonzero(light.any(1))) + 1
    assert width / height == pytest.approx(shown[0] / shown[1], rel=0.1)


@pytest.mark.parametrize("suffix", CONTAINERS)
def test_frames_kept_in_memory_are_the_same(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    write_clip(path, variable=CONTAINERS[suffix][2])
    sizes = {"crop": "random"}, {"resize": "contain", "flip": 0.5}
    for crop in sizes:
        for options in (
            {"frames": 9},
            {"frames": 9, "fps": 6.0},
            {"frames": 4, "span": (1.0, 2.5)},
            {"frames": 9, "trim": Trim(0.5)},
        ):
            wanted = DecodeOptions(ResizeCrop((24, 48), **crop), channels=1, **options)
            cache = DecodedCache(2**30)
            for seed in range(3):
                found = cache.decode(path, "a", wanted, np.random.default_rng(seed))
                direct = decode_media(path, path.suffix, "a", wanted, np.random.default_rng(seed))
                assert np.array_equal(found.pixels, direct.pixels), (crop, options)
                assert found.fps == direct.fps
            assert cache.used > 0
