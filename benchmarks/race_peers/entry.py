"""Trains, judges and samples one peer with one seed, in a process of its own: `python -m benchmarks.race_peers.entry RACE PEER SEED RATE PRECISION FILE`."""

from __future__ import annotations

import random
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.race_peers.contestant import Contestant, Trained, count_trained, load_contestants
from benchmarks.race_peers.judge import check_drawn, find_metrics, judge
from benchmarks.race_peers.track import Bf16Failed, Track
from kineograph.core.run_folder import read_json, write_json
from kineograph.media.clips import choose_format, write_clip

UNGUIDED = "unguided"
BF16_FAILED = 4  # exit code


def run_entry(race: Path, contestant: Contestant, seed: int, rate: float, precision: str, file: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        precision = "fp32"  # bf16 is slow there
    torch.manual_seed(seed)
    random.seed(seed)
    track = Track(race, contestant.family, seed, device, precision, rate)
    trained = contestant.train(track)
    write_json(file, _judge(track, contestant, trained, _read_memory(device), file))


def _read_memory(device: torch.device) -> float:
    """GiB, the most so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _judge(track: Track, contestant: Contestant, trained: Trained, memory: float, file: Path) -> dict[str, Any]:
    record = read_json(track.race / "race.json")
    request, names = record["request"]["judge"], find_metrics(record)
    result = judge(track, trained, request, names, trained.draw)
    sizes = {
        "M parameters": count_trained(trained.modules) / 1e6,
        "GiB": memory,
        "steps": sum(stage.steps for stage in track.stages),
        "minutes": sum(stage.seconds for stage in track.stages) / 60,
    }
    result["figures"] |= sizes
    prompts = (track.race / "prompts.txt").read_text(encoding="utf-8").splitlines()
    write_samples(file.with_suffix(""), track, prompts, trained)
    stages = {
        stage.title: {
            "steps": stage.steps,
            "minutes": stage.seconds / 60,
            "batch": stage.batch,
            "precision": stage.trained_in,
        }
        for stage in track.stages
    }
    if trained.unguided is not None:
        other = judge(track, trained, request, names, trained.unguided)
        result[UNGUIDED] = {**other, "figures": other["figures"] | sizes}
    return {
        "peer": contestant.title,
        "family": contestant.family,
        "seed": track.seed,
        "rate": track.rate,
        **result,
        "stages": stages,
        "precision": ", ".join(sorted({stage.trained_in for stage in track.stages})),
        "notes": track.notes,
    }


@torch.no_grad()
def write_samples(folder: Path, track: Track, prompts: list[str], trained: Trained) -> None:
    """The sheet's prompts, in the form in which `kineo sample` writes them."""
    shape = track.shape
    expected = torch.Size((len(prompts), shape.frames, shape.channels, shape.height, shape.width))
    clips = check_drawn(trained.draw(prompts), expected).cpu()
    folder.mkdir(parents=True, exist_ok=True)
    for number, (prompt, clip) in enumerate(zip(prompts, clips, strict=True)):
        path = write_clip(folder / f"{number}.{choose_format(clip)}", clip, shape.fps)
        write_json(path.with_suffix(".json"), {"prompt": prompt, "file": path.name})


def main(words: list[str]) -> int:
    race, family, seed, rate, precision, file = words
    try:
        run_entry(Path(race), load_contestants()[family], int(seed), float(rate), precision, Path(file))
    except Bf16Failed as error:
        print(error)
        return BF16_FAILED
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
