"""`python -m benchmarks.decoding [--rounds N] [--clips N] [--out DIR]`: clips a second of one core, from 480p videos, beside other decoders.

Each clip is 16 frames at 8 frames a second from a random start of a video of 10 seconds, scaled to 128 pixels. Ours is what training reads
(`decode_video`); decord and torchcodec decode the same frames, and torch scales them. Rounds alternate between decoders, and the median
counts, since other work on a machine disturbs single ones. A package that is not installed, or does not load, is left out with its reason.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from kineograph.core.noise import numpy_rng
from kineograph.data.media_config import MediaConfig
from kineograph.data.video import decode_video

SECONDS, RATE, HEIGHT, WIDTH = 10, 30, 480, 854
FRAMES, FPS, SIZE = 16, 8, 128
# name → container, encoder, and options that make encoding quick
CODECS: dict[str, tuple[str, str, dict[str, str]]] = {
    "h264": ("mp4", "libx264", {"preset": "veryfast"}),
    "hevc": ("mp4", "libx265", {"preset": "ultrafast", "x265-params": "log-level=error"}),
    "vp9": ("webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
}
Decoder = Callable[[Path, float], Any]  # file, start in seconds → frames


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clips", type=int, default=8, help="clips in a round")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # Before decord is imported: its own FFmpeg disturbs PyAV's encoders.
        videos = {
            name: write_video(Path(folder) / f"{name}.{kind}", encoder, given)
            for name, (kind, encoder, given) in CODECS.items()
        }
        decoders, missing = find_decoders()
        for name, path in videos.items():
            results[name] = measure(path, decoders, options.rounds, options.clips)
            rates = (f"{side} {rate:.1f} clips/s" for side, rate in results[name].items())
            print(f"{name:5}", *rates, sep="  ", flush=True)
    for line in missing:
        print(line)
    record = {
        "clips_per_second": results,
        "rounds": options.rounds,
        "clips": options.clips,
        "left_out": missing,
        "machine": asdict(machine.describe(torch.device("cpu"), 0.0)),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{date.today()}-decoding-cpu.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    return 0


def write_video(path: Path, encoder: str, options: dict[str, str]) -> Path:
    """A bright block that moves over noise, so that there is motion and texture to code."""
    import av

    noise = np.random.default_rng(0).integers(0, 60, (HEIGHT, WIDTH, 3), np.uint8)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(encoder, rate=RATE, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(SECONDS * RATE):
            frame = np.roll(noise, number, axis=1)
            left = 5 * number % (WIDTH - 100)
            frame[100:300, left : left + 100] = (220, 40 + number % 200, 90)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def find_decoders() -> tuple[dict[str, Decoder], list[str]]:
    """→ decoders by name, and a line for each that does not load"""
    found: dict[str, Decoder] = {"ours": _decode_ours}
    missing: list[str] = []
    for name, make in (("decord", _make_decord), ("torchcodec", _make_torchcodec)):
        try:
            found[name] = make()
        except (ImportError, OSError, RuntimeError) as error:
            reason = re.sub(r"/\S*/", "", str(error).splitlines()[0])  # without folders of this machine
            missing.append(f"{name} is left out: {reason[:160]}")
    return found, missing


def _decode_ours(path: Path, start: float) -> Any:
    options = MediaConfig(size=(SIZE, SIZE), frames=FRAMES, fps=FPS).decode_options("train")
    return decode_video(path, options, numpy_rng(0, round(start * 1000)))


def _scale(frames: torch.Tensor) -> torch.Tensor:
    """T C H W uint8 → T C 128 128, covering as ours does"""
    height, width = SIZE, round(WIDTH * SIZE / HEIGHT)
    scaled = torch.nn.functional.interpolate(frames.float(), (height, width), mode="bilinear", antialias=True)
    left = (width - SIZE) // 2
    return scaled[..., left : left + SIZE].round().to(torch.uint8)


def _make_decord() -> Decoder:
    import decord

    def decode(path: Path, start: float) -> Any:
        reader = decord.VideoReader(str(path), num_threads=1)
        indices = [min(round((start + number / FPS) * RATE), len(reader) - 1) for number in range(FRAMES)]
        return _scale(torch.from_numpy(reader.get_batch(indices).asnumpy()).permute(0, 3, 1, 2))

    return decode


def _make_torchcodec() -> Decoder:
    from torchcodec.decoders import VideoDecoder

    def decode(path: Path, start: float) -> Any:
        decoder = VideoDecoder(str(path), num_ffmpeg_threads=1, seek_mode="approximate")
        seconds = [min(start + number / FPS, SECONDS - 1 / RATE) for number in range(FRAMES)]
        return _scale(decoder.get_frames_played_at(seconds).data)

    return decode


def measure(path: Path, decoders: dict[str, Decoder], rounds: int, clips: int) -> dict[str, float]:
    """Clips a second of each decoder: the median of rounds that alternate."""
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    starts = np.random.default_rng(1).uniform(0, SECONDS - FRAMES / FPS, (rounds, clips))
    for row in starts:
        for name, decode in decoders.items():
            began = time.process_time()  # a busy machine takes none of it
            for start in row:
                decode(path, float(start))
            rates[name].append(clips / (time.process_time() - began))
    return {name: statistics.median(values) for name, values in rates.items()}


if __name__ == "__main__":
    raise SystemExit(main())
