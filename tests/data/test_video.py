import errno

import av
import numpy as np
import pytest
import torch

from kineograph.core.errors import Unreadable
from kineograph.core.safe_media import MediaLimits
from kineograph.data import video
from kineograph.data.decode import decode_media, probe_media
from kineograph.data.media_config import DecodeOptions
from kineograph.data.transforms import ResizeCrop


def wanted(size=(32, 48), **options) -> DecodeOptions:
    return DecodeOptions(ResizeCrop(size), **options)


def decode(path, name, options, rng):
    return decode_media(path, path.suffix, name, options, rng)


def take(path, numbers, seed=0, **options):
    clip = decode(path, path.name, wanted(**options), np.random.default_rng(seed))
    return numbers(torch.from_numpy(clip.pixels)), clip.fps


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.mov", "a.mkv"])
def test_thirty_to_eight_by_timestamps(tmp_path, make_video, counting, numbers, name):
    """An integer stride of 30 // 8 = 3 would give 10 frames a second: 0, 3, 6, 9 …"""
    path = make_video(tmp_path / name, counting(27), fps=30)  # room for one start alone
    found, fps = take(path, numbers, frames=8, fps=8.0)
    assert found == [0, 3, 7, 11, 15, 18, 22, 26]
    assert fps == 8


@pytest.mark.parametrize("name", ["a.mp4", "a.webm"])
def test_own_rate_keeps_every_frame(tmp_path, make_video, counting, numbers, name):
    path = make_video(tmp_path / name, counting(30), fps=30)
    assert take(path, numbers, frames=30, fps=30.0)[0] == list(range(30))
    found, fps = take(path, numbers, frames=30)
    assert found == list(range(30))
    assert fps == pytest.approx(30)


def test_slower_video_repeats_frames(tmp_path, make_video, counting, numbers):
    path = make_video(tmp_path / "a.mp4", counting(8), fps=4)
    assert take(path, numbers, frames=16, fps=8.0)[0] == [i // 2 for i in range(16)]


def test_short_video_gives_what_it_has(tmp_path, make_video, counting, numbers):
    path = make_video(tmp_path / "a.mp4", counting(15), fps=30)
    assert take(path, numbers, frames=8, fps=8.0)[0] == [0, 3, 7, 11]


def test_random_start_is_exact_and_spreads(tmp_path, make_video, counting, numbers):
    """Starting behind a keyframe must not shift what is taken."""
    path = make_video(tmp_path / "a.mp4", counting(60), fps=30)
    firsts = set()
    for seed in range(25):
        found = take(path, numbers, seed, frames=4, fps=10.0)[0]
        assert found == [found[0] + 3 * index for index in range(4)]
        firsts.add(found[0])
    assert len(firsts) > 12
    assert min(firsts) < 12
    assert 38 < max(firsts) <= 50


def test_seeking_decodes_little(tmp_path, make_video, counting, numbers, monkeypatch):
    path = make_video(tmp_path / "a.mp4", counting(60), fps=30)
    converted = []
    frames_from = video._iterate_frames

    def counted(*arguments):
        for at, frame in frames_from(*arguments):
            converted.append(at)
            yield at, frame

    monkeypatch.setattr(video, "_iterate_frames", counted)
    for seed in range(5):
        converted.clear()
        take(path, numbers, seed, frames=2, fps=10.0)
        assert len(converted) <= 10 + 5  # a group of pictures, and what is taken


def test_seeking_where_the_decoder_needs_the_first_picture(tmp_path, make_video, counting, numbers, monkeypatch):
    """As in 4:4:4 of old versions of x264: frames behind a seek are garbage unless the first picture was decoded."""
    path = make_video(tmp_path / "a.mp4", counting(60), fps=30)
    decode_packets, told = video.decode_packets, set()

    class Garbage:
        is_corrupt, width, height = True, 48, 32

        def __init__(self, pts):
            self.pts = pts

    def decode_as_old_x264(container, stream):
        for frame in decode_packets(container, stream):
            if frame.time == 0:
                told.add(container)
            yield frame if container in told else Garbage(frame.pts)

    monkeypatch.setattr(video, "decode_packets", decode_as_old_x264)
    firsts = set()
    for seed in range(5):
        found = take(path, numbers, seed, frames=4, fps=10.0)[0]
        assert found == [found[0] + 3 * index for index in range(4)]
        firsts.add(found[0])
    assert max(firsts) > 20


def test_one_frame_of_a_video(tmp_path, make_video, counting, numbers):
    path = make_video(tmp_path / "a.mp4", counting(30), fps=30)
    found = {take(path, numbers, seed, frames=1, fps=8.0)[0][0] for seed in range(40)}
    assert len(found) > 15
    assert found <= set(range(30))


@pytest.mark.parametrize("rotation", [90, -90, 180])
def test_portrait_clips_are_set_upright(tmp_path, make_video, rotation):
    """A clip stored lying down with a note comes out as a viewer shows it: turned anticlockwise by the noted degrees."""
    frames = np.zeros((6, 32, 64, 3), np.uint8)
    frames[:, :16, :32] = 255  # a white quarter, top left, as stored
    path = make_video(tmp_path / "a.mp4", frames, rotation=rotation)
    noted = next(av.open(str(path)).decode(video=0)).rotation
    assert abs(noted) == abs(rotation)
    upright = np.rot90(frames[0], noted // 90)
    size = upright.shape[:2]
    clip = decode(path, "a.mp4", wanted(size, frames=2), np.random.default_rng(0))
    assert np.abs(clip.pixels[0].astype(int) - upright).mean() < 6
    assert video.probe_video(path, decode_all=True, limits=MediaLimits())[:2] == (size[1], size[0])


def test_colours_and_channels(tmp_path, make_video):
    frames = np.zeros((4, 32, 32, 3), np.uint8)
    frames[:] = (200, 30, 60)
    path = make_video(tmp_path / "a.mp4", frames)
    rgb = decode(path, "a", wanted((16, 16)), np.random.default_rng(0)).pixels[0]
    gray = decode(path, "a", wanted((16, 16), channels=1), np.random.default_rng(0)).pixels[0]
    rgba = decode(path, "a", wanted((16, 16), channels=4), np.random.default_rng(0)).pixels[0]
    assert np.abs(rgb.astype(int) - (200, 30, 60)).max() < 8  # RGB, not BGR
    assert gray.shape == (16, 16, 1)
    assert abs(int(gray[0, 0, 0]) - 84) < 6
    assert rgba[0, 0, 3] == 255


def test_hd_colours_use_their_own_matrix(tmp_path):
    """Frames marked Rec. 709 and decoded as Rec. 601 turn greens by more than 15 levels."""
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"colormatrix": "bt709"})
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        stream.codec_context.colorspace = 1
        pixels = np.zeros((64, 64, 3), np.uint8)
        pixels[:] = (30, 200, 60)
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
            format="yuv420p", src_colorspace="ITU709", dst_colorspace="ITU709"
        )
        for _ in range(3):
            frame.pts = None
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert next(av.open(str(path)).decode(video=0)).colorspace == 1
    found = decode(path, "a", wanted((16, 16)), np.random.default_rng(0)).pixels[0]
    assert np.abs(found.astype(int) - (30, 200, 60)).max() < 8


def test_cut_video(tmp_path, make_video, counting, numbers):
    """With its index in front a cut file still opens: what is left is taken, wherever the start fell."""
    path = make_video(
        tmp_path / "a.mp4",
        np.random.default_rng(0).integers(0, 255, (60, 64, 64, 3), dtype=np.uint8),
        movflags="faststart",
    )
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    for seed in range(8):
        clip = decode(path, "a.mp4", wanted(frames=2, fps=10.0, truncated=True), np.random.default_rng(seed))
        assert 1 <= len(clip.pixels) <= 2
    with pytest.raises(Unreadable, match=r"damaged or cut off: nothing can be decoded after [\d.]+ s$"):
        video.probe_video(path, decode_all=True, limits=MediaLimits())


@pytest.mark.parametrize("suffix", [".mkv", ".webm"])
def test_cut_off_before_the_first_frame(tmp_path, make_video, counting, suffix):
    path = make_video(tmp_path / f"a{suffix}", counting(20))
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\x1f\x43\xb6\x75") + 20])  # inside the first cluster
    with pytest.raises(Unreadable, match="damaged or cut off: no frame can be found"):
        probe_media(path, suffix, path.name, decode_all=True)
    with pytest.raises(Unreadable, match="damaged or cut off: no frame can be found"):
        decode(path, path.name, wanted(truncated=True), np.random.default_rng(0))


def test_no_permission(tmp_path, make_video, counting, monkeypatch):
    path = make_video(tmp_path / "a.mkv", counting(4))

    def refuse(*_, **__):
        raise av.PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(av, "open", refuse)
    with pytest.raises(Unreadable, match="no permission to read it"):
        decode(path, path.name, wanted(), np.random.default_rng(0))


def test_sound_only(tmp_path):
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(Unreadable, match="no video"):
        decode(path, "a.mkv", wanted(), np.random.default_rng(0))


def test_measure(tmp_path, make_video, counting):
    assert video.probe_video(
        make_video(tmp_path / "a.mp4", counting(15), fps=30), decode_all=True, limits=MediaLimits()
    ) == (
        48,
        32,
        15,
        pytest.approx(0.5),
    )
