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
from kineograph.core.media_file import MediaLimits, Stopwatch
from kineograph.data.decode import decode_media, probe_media
from kineograph.data.folder import Folder, FolderConfig
from kineograph.data.media_config import DecodeOptions
from kineograph.data.startup_scan import scan
from kineograph.data.transforms import ResizeCrop
from kineograph.media.clips import read_frames
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
    monkeypatch.setattr("kineograph.core.media_file.time.monotonic", lambda: float(next(hours)))
    assert len(decode(save_gif(tmp_path / "a.gif")).pixels) == 2


def test_the_work_of_other_threads_is_no_fault_of_a_file():
    """`kineo data check` decodes in as many threads as there are cores."""
    stopwatch = Stopwatch()
    thread = threading.Thread(target=lambda: sum(number * number for number in range(2_000_000)))
    thread.start()
    thread.join()
    assert stopwatch.seconds() < 0.02


def test_an_animation_larger_than_its_first_frame_says(tmp_path):
    """13,000² × 500 frames: each frame passes Pillow's limit, all together would take hours."""
    path = save_gif(tmp_path / "a.gif", (200, 200), 40)
    with pytest.raises(Unreadable, match=r"40,000|200 × 200"):
        decode(path, pixels=39_999)


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
