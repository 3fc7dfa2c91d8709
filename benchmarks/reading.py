"""CPU time to start on a large folder, and to read clips: `python -m benchmarks.reading [--pictures 100000] [--clips 64] [--out DIR]`

*Start*: `kineo train` on a folder of small JPEGs with captions, as a dry run and up to its first step. *Clips*: 480p videos of 5 seconds
at 30 frames per second, of which 16 frames at 8 per second are read at 128 × 128. CPU seconds of all threads and processes, so that other
work on the machine hardly matters; one core gives 1 / seconds clips a second.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

CODECS = {"h264": ("libx264", "mp4"), "hevc": ("libx265", "mp4"), "vp9": ("libvpx-vp9", "webm")}


# Start ---------------------------------------------------------------------------------------------------------------


def write_pictures(root: Path, count: int) -> None:
    """Small JPEGs, 1,000 a folder, each with a caption of its own."""
    from PIL import Image

    random = np.random.default_rng(0)
    files = []
    for _ in range(64):
        buffer = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((96, 72)).save(buffer, "JPEG")
        files.append(buffer.getvalue())
    root.mkdir(exist_ok=True)
    for number in range(count):
        folder = root / f"{number // 1000:04}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:06}.jpg").write_bytes(files[number % len(files)])
        (folder / f"{number:06}.txt").write_text(f"picture {number} of coloured fields", encoding="utf-8")


def time_command(*words: str) -> dict[str, float]:
    """CPU seconds and seconds of a `kineo` command and its processes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "kineograph", *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"cpu_seconds": round(cpu, 2), "seconds": round(time.perf_counter() - began, 2)}


def measure_start(folder: Path, runs: Path) -> dict[str, dict[str, float]]:
    """A tokenizer, which reads no captions, and a generator, which reads all of them."""
    data = ["data.source=folder", f"data.folder={folder}", "train.workers=0"]
    one = ["train.steps=1", "train.sample_every=0", "train.validation_samples=32"]
    config = runs / "decoder.yaml"
    config.write_text(
        "name: start\nstages:\n  decoder:\n    task: dalle2\n    image_embeds: none\n    text: {kind: learned, width: 32, depth: 0, positions: none}\n"
        "    width: 16\n    multipliers: [1, 1]\n    patch: 4\n"
    )
    return {
        "help": time_command("--help"),
        "dry run, vqgan-tiny": time_command("train", "vqgan-tiny", *data, "--dry-run"),
        "first step, vqgan-tiny": time_command("train", "vqgan-tiny", *data, *one, "--run", str(runs / "tokenizer")),
        "first step, a decoder with text": time_command(
            "train", str(config), *data, *one, "--run", str(runs / "decoder")
        ),
    }


# Clips ---------------------------------------------------------------------------------------------------------------


def write_clips(root: Path, name: str, count: int, size: tuple[int, int], frames: int) -> None:
    """Videos of moving fields with grain, keyframes every 2 seconds."""
    import av

    (codec, suffix), (height, width) = CODECS[name], size
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = random.integers(0, 256, (height // 24, width // 16, 3), dtype=np.uint8)
        field = np.kron(coarse, np.ones((24, 16, 1), np.uint8))  # height × about width
        field = np.tile(field, (1, 2 + 4 * frames // width, 1))
        with av.open(str(root / f"{number:03}.{suffix}"), "w") as container:
            stream: Any = container.add_stream(codec, rate=30)  # of a video, which its type does not say
            stream.height, stream.width, stream.pix_fmt, stream.bit_rate = height, width, "yuv420p", 1_500_000
            stream.codec_context.gop_size = 60
            if codec == "libvpx-vp9":
                stream.codec_context.options = {"deadline": "realtime", "cpu-used": "8"}
            elif codec == "libx265":
                stream.codec_context.options = {"preset": "ultrafast", "x265-params": "log-level=error"}
            for index in range(frames):
                moved = field[:, 4 * index : 4 * index + width]
                grain = random.integers(0, 12, (height, width, 1), dtype=np.uint8)
                pixels = np.clip(moved.astype(np.int16) + grain, 0, 255).astype(np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())


def measure_clips(root: Path, count: int, pixels: int = 128, frames: int = 16) -> dict[str, float]:
    """CPU seconds a clip of `frames` at 8 per second; every file is read `count` / files times, from random starts."""
    from kineograph.data.folder import Folder, FolderConfig

    source = Folder.open(
        FolderConfig(folder=str(root), size=(pixels, pixels), frames=frames, fps=8, validation=0), "train", seed=0
    )
    for index in range(len(source)):  # lengths are measured once
        source.read(index, np.random.default_rng(index))
    began = time.process_time()
    for number in range(count):
        source.read(number % len(source), np.random.default_rng(1000 + number))
    seconds = (time.process_time() - began) / count
    return {"cpu_seconds_per_clip": round(seconds, 4), "clips_per_second_per_core": round(1 / seconds, 2)}


def main(words: list[str]) -> None:
    options = _build_parser().parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: dict[str, dict[str, dict[str, float]]] = {}
    if options.pictures:
        with tempfile.TemporaryDirectory() as name:
            folder, runs = options.folder or Path(name) / "pictures", Path(name) / "runs"
            runs.mkdir()
            if options.folder is None:
                write_pictures(folder, options.pictures)
            results["start"] = measure_start(folder, runs)
    for codec in CODECS if options.clips else ():
        with tempfile.TemporaryDirectory() as name:
            write_clips(Path(name), codec, options.files, tuple(options.size), options.frames)
            results.setdefault("clips", {})[codec] = measure_clips(Path(name), options.clips)
    for part, rows in results.items():
        for row, figures in rows.items():
            print(f"{part:>6}  {row:<32} " + "  ".join(f"{value:g} {key}" for key, value in figures.items()))
    import torch

    from benchmarks.report import write_results

    print(f"written: {write_results(options.out, 'reading', words, torch.device('cpu'), reading=results)}")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument(
        "--pictures", type=int, default=100_000, help="how many to start on; 0: do not measure the start"
    )
    parser.add_argument("--folder", type=Path, help="a folder of pictures to start on, instead of a new one")
    parser.add_argument("--clips", type=int, default=64, help="clips to read of each codec; 0: none")
    parser.add_argument("--files", type=int, default=4, help="videos to write of each codec")
    parser.add_argument("--size", type=int, nargs=2, default=(480, 854), help="height and width of the videos")
    parser.add_argument("--frames", type=int, default=150, help="frames of a video, 30 per second")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
