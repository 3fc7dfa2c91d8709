"""Files that fight back are unreadable, with the reason, within the limits, and do nothing else."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kineograph.core.errors import InputError, Unreadable
from kineograph.core.safe_media import MediaLimits, Stopwatch
from kineograph.data.decode import decode_media, probe_media
from kineograph.data.folder import Folder, FolderConfig
from kineograph.data.media_config import DecodeOptions
from kineograph.data.startup_scan import scan
from kineograph.data.transforms import ResizeCrop
from kineograph.media.clips import read_frames
from kineograph.sample import prime
from tests.data.conftest import write_video

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 10 10
%%EndComments
showpage
"""


def decode(path, **limits):
    options = DecodeOptions(ResizeCrop((8, 8)), frames=2, limits=MediaLimits(**limits))
    return decode_media(path, path.suffix, path.name, options, np.random.default_rng(0))


def save_gif(path, size=(16, 16), frames=5):
    images = [Image.new("L", size, i * 20) for i in range(frames)]
    images[0].save(path, save_all=True, append_images=images[1:], duration=100)
    return path


def test_postscript_in_a_png_starts_no_program(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: started.append(args) or sys.exit("started"))
    (tmp_path / "a.png").write_bytes(EPS)
    with pytest.raises(Unreadable, match="not a PNG, JPEG"):
        decode(tmp_path / "a.png")
    with pytest.raises(InputError, match="cannot be read"):
        list(read_frames(tmp_path / "a.png"))
    assert not started


def test_a_codec_that_nothing_decodes_is_named(tmp_path):
    path = write_video(tmp_path / "a.mp4", np.zeros((4, 16, 16, 3), np.uint8))
    content = path.read_bytes()
    assert content.count(b"avc1") > 0
    path.write_bytes(content.replace(b"avc1", b"zzz1"))
    with pytest.raises(Unreadable, match="a codec that cannot be decoded: convert it"):
        decode(path)
    with pytest.raises(Unreadable, match="a codec that cannot be decoded"):
        probe_media(path, ".mp4", "a.mp4")
    with pytest.raises(InputError, match="a codec that cannot be decoded"):
        list(read_frames(path))


def test_a_colon_in_a_file_name_is_part_of_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.move(write_video(tmp_path / "a.mp4", np.zeros((4, 16, 16, 3), np.uint8)), "10:30 lecture.mp4")
    assert len(decode(Path("10:30 lecture.mp4")).pixels) == 2
    assert len(list(read_frames("10:30 lecture.mp4"))) == 4


@pytest.mark.parametrize("name", ["tcp:127.0.0.1:{port}.mp4", "http:127.0.0.1:{port}.mp4"])
def test_a_file_name_is_never_a_url(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        path = Path(name.format(port=server.getsockname()[1]))
        path.write_bytes(b"x" * 100)
        with pytest.raises(Unreadable):
            decode(path)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    "script", ["ffconcat version 1.0\nfile other.mp4\n", "#EXTM3U\n#EXTINF:1,\nother.mp4\n#EXT-X-ENDLIST\n"]
)
def test_a_playlist_opens_no_other_file(tmp_path, script):
    write_video(tmp_path / "other.mp4", np.zeros((4, 16, 16, 3), np.uint8))
    (tmp_path / "list.mp4").write_text(script)
    with pytest.raises(Unreadable, match="not a video"):
        decode(tmp_path / "list.mp4")


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_limits_on_frames_pixels_and_seconds(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".gif":
        save_gif(path, frames=30)
    else:
        write_video(path, np.zeros((30, 16, 16, 3), np.uint8))
    assert len(decode(path).pixels) == 2
    with pytest.raises(Unreadable, match=r"more than 3 frames \(data.limits.frames\)"):
        probe_media(path, suffix, "a", decode_all=True, limits=MediaLimits(frames=3))
    with pytest.raises(Unreadable, match=r"16 × 16 pixels.*data.limits.pixels"):
        decode(path, pixels=255)
    with pytest.raises(Unreadable, match=r"data.limits.seconds"):
        decode(path, seconds=1e-9)


def test_waiting_for_a_core_is_no_fault_of_a_file(tmp_path, monkeypatch):
    """On a busy machine an hour may pass between two frames."""
    hours = iter(range(0, 10**9, 3600))
    monkeypatch.setattr("kineograph.core.safe_media.time.monotonic", lambda: float(next(hours)))
    assert len(decode(save_gif(tmp_path / "a.gif")).pixels) == 2


def test_the_work_of_other_threads_is_no_fault_of_a_file():
    """`kineo data check` decodes in as many threads as there are cores."""
    stopwatch = Stopwatch()
    thread = threading.Thread(target=lambda: sum(number * number for number in range(2_000_000)))
    thread.start()
    thread.join()
    assert stopwatch.seconds() < 0.02


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp"])
def test_an_animation_that_is_too_large_in_all_is_not_decoded(tmp_path, monkeypatch, suffix):
    """13,000² × 500 frames: each frame is within data.limits.pixels, all together take many minutes."""
    path = save_gif(tmp_path / f"a{suffix}", (20, 20), 9)
    assert len(decode(path, animation_pixels=3_600).pixels) == 2
    monkeypatch.setattr(Image.Image, "load", None)
    reason = r"9 frames of 20 × 20 pixels, and no more than 3,599 pixels in all .*data.limits.animation_pixels"
    with pytest.raises(Unreadable, match=reason):
        decode(path, animation_pixels=3_599)
    with pytest.raises(Unreadable, match=reason):
        probe_media(path, suffix, "a", limits=MediaLimits(animation_pixels=3_599))
    monkeypatch.setattr("kineograph.media.clips._LIMITS", MediaLimits(animation_pixels=3_599))
    with pytest.raises(InputError, match=reason):  # --prime, --mask, --sketch, pictures of prompts
        next(read_frames(path))


def test_a_gif_whose_canvas_grows(tmp_path):
    """Its header says 16 × 16, its last frame is larger."""
    data = bytearray(save_gif(tmp_path / "a.gif", frames=5).read_bytes())
    at = data.rindex(b"\x2c" + bytes(4) + b"\x10\0\x10\0")
    data[at + 5 : at + 9] = b"\x00\x20\x00\x20"  # 8192 × 8192
    (tmp_path / "b.gif").write_bytes(data)
    with pytest.raises(Unreadable, match=r"5 frames of 8192 × 8192 pixels.*animation_pixels"):
        probe_media(tmp_path / "b.gif", ".gif", "b", decode_all=True, limits=MediaLimits(animation_pixels=2**24))


def test_a_clip_to_continue_that_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(prime, "_MAX_KEPT", 16 * 16 * 3)
    path = save_gif(tmp_path / "a.gif")
    assert len(prime._read_last_images(path, None, 3)[0]) == 3
    with pytest.raises(InputError, match=r"4 frames of 16 × 16 pixels.*scale it down"):
        prime._read_last_images(path, None, 5)
    monkeypatch.setattr("kineograph.media.clips._LIMITS", MediaLimits(animation_pixels=1_000))
    with pytest.raises(InputError, match=r"5 frames of 16 × 16.*1,000 pixels in all"):
        prime._read_last_images(path, None, 3)


def test_an_apng_that_states_two_billion_frames(tmp_path):
    import struct
    import zlib

    frames = [Image.new("L", (4, 4), i) for i in (0, 99)]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:])
    data = bytearray((tmp_path / "a.png").read_bytes())
    at = data.index(b"acTL")
    data[at + 4 : at + 8] = struct.pack(">I", 2**31 - 1)
    data[at + 12 : at + 16] = struct.pack(">I", zlib.crc32(bytes(data[at : at + 12])))
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(Unreadable, match="frames"):
        decode(tmp_path / "a.png")


def test_a_file_too_large_for_memory_is_not_read(tmp_path):
    with open(tmp_path / "a.png", "wb") as file:
        file.truncate(2**40)  # sparse: takes no disk
    with pytest.raises(Unreadable, match=r"1,099,511,627,776 bytes.*data.limits.bytes"):
        decode(tmp_path / "a.png")


@pytest.mark.timeout(20)
def test_pipes_and_devices_are_unreadable_and_do_not_block(tmp_path):
    for number in range(12):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("a dot")
    os.mkfifo(tmp_path / "pipe.png")
    os.mkfifo(tmp_path / "pipe.mp4")
    os.mkfifo(tmp_path / "metadata.jsonl")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    config = FolderConfig(folder=str(tmp_path), size=8, validation=0, max_unreadable=0.5)
    source = Folder.open(config, "train", 0)
    assert {(path, reason) for path, reason in scan(source, 0.5)} == {
        (name, "not a regular file") for name in ("pipe.png", "pipe.mp4", "zero.jpg")
    }
    for name in ("pipe.png", "pipe.mp4"):
        with pytest.raises(InputError):
            read_frames(tmp_path / name)


@pytest.mark.timeout(20)
def test_limits_hold_in_threads(tmp_path):
    """The scan decodes in threads: a limit of one item does not end another."""
    good, long = save_gif(tmp_path / "good.gif"), save_gif(tmp_path / "long.gif", frames=40)
    results = []
    threads = [threading.Thread(target=lambda: results.append(len(decode(good, frames=10).pixels))) for _ in range(4)]
    for thread in threads:
        thread.start()
    with pytest.raises(Unreadable):
        probe_media(long, ".gif", "long", decode_all=True, limits=MediaLimits(frames=10))
    for thread in threads:
        thread.join()
    assert results == [2] * 4
