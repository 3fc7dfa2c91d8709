"""Run folders as training leaves them, written by hand: nothing is trained."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

PROMPTS = ["a 3 moves left", "a seven moves up"]


def write_run(
    path: Path,
    *,
    steps: int = 100,
    saved: int = 100,
    records: int = 20,
    changes: dict[str, Any] | None = None,
    prompts: list[str] | None = None,
) -> Path:
    """A run with a tokenizer, finished, and a generator that was saved at step `saved` of `steps`."""
    stages = {
        "tokenizer": {"task": "cvivit", "train": {"steps": 50}},
        "generator": {"task": "phenaki", "codec": "tokenizer", "train": {"steps": steps, "lr": 1e-3}},
    }
    tree = {"name": path.name, "preset": "phenaki-tiny", "resolved": True, "seed": 0, "stages": stages}
    stages["generator"]["train"] |= changes or {}
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    lines = [make_record("tokenizer", 50 * (n + 1) // records, 0.5 / (n + 1)) for n in range(records)]
    lines += [make_record("generator", saved * (n + 1) // records, 4 / (n + 1)) for n in range(records)]
    lines.append({"stage": "generator", "split": "validation", "step": saved, "loss": 0.4, "accuracy": 0.75})
    write_metrics(path, lines)
    for stage, step in (("tokenizer", 50), ("generator", saved)):
        write_checkpoint(path, stage, step)
    for step in (saved // 2, saved):
        write_samples(path, "generator", step, prompts or PROMPTS)
    write_gif(path / "tokenizer" / "validation" / "step-00000050.gif", 64, 32)
    (path / "logs").mkdir()
    (path / "logs" / "rank-0.log").write_text("2026-01-02 03:04:05  generator: Phenaki, 1.71 M parameters, on cpu\n")
    return path


def make_record(stage: str, step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    times = {"time/elapsed": 0.5 * step, "time/samples_per_second": 20.0, "time/step_ms": 500.0}
    return {"stage": stage, "split": "train", "step": step, "loss": loss, "lr": 1e-3, "skipped": 0.0, **times, **more}


def write_metrics(path: Path, records: list[dict[str, Any]]) -> None:
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_checkpoint(path: Path, stage: str, step: int) -> None:
    folder = path / stage / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"phase": "train"}')
    (folder.parent / "best.json").write_text(json.dumps({"step": step, "loss": 0.4}))


def write_samples(path: Path, stage: str, step: int, prompts: list[str]) -> None:
    folder = path / stage / "samples" / f"step-{step:08d}"
    names = [f"clip-{number:04d}.gif" for number in range(len(prompts))]
    for name in [*names, *(f"online/{name}" for name in names), "grid.gif", "online-beside-ema.gif"]:
        write_gif(folder / name)
    if not (folder.parent / "real").exists():  # a page may be reading it
        write_gif(folder.parent / "real" / names[0])
    listed = [{"file": name, "prompt": prompt} for name, prompt in zip(names, prompts, strict=True)]
    (folder / "prompts.json").write_text(json.dumps(listed))


def write_gif(path: Path, width: int = 32, height: int = 32, frames: int = 5, fps: int = 8) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [Image.new("RGB", (width, height), (40 * number + 10, 0, 0)) for number in range(frames)]
    images[0].save(path, save_all=True, append_images=images[1:], duration=1000 // fps, loop=0)
    return path


def write_evaluation(path: Path, **values: float) -> None:
    record = {
        "values": values,
        "labels": {"extractor": "reader abc"},
        "samples": 64,
        "date": "2026-01-02T03:04:05+00:00",
    }
    results = {"validation": {"generator/step-00000100": {"caption_accuracy": record}}}
    (path / "evaluation.json").write_text(json.dumps({"format": 1, "results": results}))


def write_dataset(path: Path) -> Path:
    """Two captioned pictures, a clip, a broken file, and a link to a secret outside."""
    path.mkdir(parents=True)
    for name, size, caption in (
        ("wide.png", (64, 32), "a red wide one"),
        ("square.png", (32, 32), "<b>bold</b> digit"),
    ):
        Image.new("RGB", size, (200, 20, 20)).save(path / name)
        (path / name).with_suffix(".txt").write_text(caption)
    write_gif(path / "clip.gif")
    (path / "clip.txt").write_text("it moves")
    (path / "torn.png").write_bytes((path / "wide.png").read_bytes()[:50])
    (path / "torn.txt").write_text("a torn one")
    Image.new("RGB", (8, 8)).save(path.parent / "secret.png")
    (path / "link.png").symlink_to(path.parent / "secret.png")
    return path


def write_packed(path: Path) -> Path:
    """Two tar shards, one compressed, of a red picture and a broken one; below, arrays of six frames whose second item is brighter."""
    path.mkdir(parents=True)
    buffer = io.BytesIO()
    Image.new("RGB", (16, 8), (200, 20, 20)).save(buffer, "PNG")
    members = {"a.png": buffer.getvalue(), "a.txt": b"a red one", "b.png": b"torn", "b.txt": b"a torn one"}
    for name, mode in (("0000.tar", "w"), ("0001.tar.gz", "w:gz")):
        with tarfile.open(path / name, mode) as shard:
            for member, data in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                shard.addfile(info, io.BytesIO(data))
    arrays = path / "arrays"
    arrays.mkdir()
    values = np.zeros((6, 2, 16, 24), np.uint8)  # T N H W
    values[:, 1] = 90
    np.save(arrays / "videos.npy", values)
    np.savez(arrays / "small.npz", images=values)
    np.savez_compressed(arrays / "packed.npz", images=values)
    (arrays / "captions.txt").write_text("the first\nthe second\n")
    return path
