"""Runs that are dead on purpose, each family at the smallest size that learns within 150 steps.

`python -m tests.run.dead_runs` trains them all and prints the table of docs/health.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.data import Dataset

from kineograph.core.config import merge
from kineograph.core.errors import KineoError
from kineograph.core.noise import numpy_rng
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
from kineograph.run.train import train
from kineograph.train.stepper import Stepper

STEPS = 150
BASE: dict[str, Any] = {
    "seed": 0,
    "data": {"source": "moving_digits", "size": 16, "channels": 1, "glyphs": 2, "directions": 4, "count": 400, "frames": 1},
    "train": {
        "steps": STEPS, "batch_size": 16, "lr": 2e-3, "warmup": 10, "schedule": "cosine", "log_every": 5, "save_every": STEPS,
        "validate_every": 50, "validation_samples": 32, "sample_every": 0, "workers": 0, "trackers": [], "device": "cpu",
        "ema": {"decay": 0.9},
    },
}  # fmt: skip
FSQ = {"kind": "fsq", "levels": [4, 4, 4]}
PLAIN = {"loss": "l2", "perceptual": {"weight": 0}}
TEXT = {"kind": "learned", "width": 32, "depth": 1, "heads": 2, "length": 24, "positions": "rotary"}
NETWORK = {"width": 32, "depth": 2, "heads": 2}
CLIP_TEXT = {"width": 32, "depth": 0, "positions": "none", "length": 24}

STAGES: dict[str, dict[str, Any]] = {
    "vqgan": {"task": "vqgan", "width": 16, "multipliers": [1, 2], "patch": 2, "quantizer": FSQ, **PLAIN},
    "cvivit": {
        "task": "cvivit", "width": 32, "heads": 2, "spatial_depth": 1, "temporal_depth": 1, "patch": 4, "temporal_patch": 2,
        "quantizer": FSQ, "data": {"frames": 5}, **PLAIN,
    },
    "causal_vae": {
        "task": "causal_vae", "widths": [8, 8, 8], "layers": 1, "latent_channels": 4, "groups": 4, "norm": "frame", "kl": 1e-3,
        "data": {"frames": 5}, "train": {"batch_size": 4, "lr": 4e-3}, **PLAIN,
    },
    "muse": {"task": "muse", "codec": "vqgan", "text": TEXT, **NETWORK},
    "phenaki": {"task": "phenaki", "codec": "cvivit", "text": TEXT, "data": {"frames": 5}, **NETWORK},
    "nuwa": {"task": "nuwa", "codec": "vqgan", "text": TEXT, "data": {"frames": 3}, "window": [3, 3, 3], **NETWORK},
    "cogvideox": {
        "task": "cogvideox", "codec": "causal_vae", "depth": 2, "heads": 2, "head_width": 16, "time_width": 32, "base_size": None,
        "base_frames": None, "diffusion": {"objective": "x0"}, "text": CLIP_TEXT | {"kind": "learned"}, "data": {"frames": 5},
    },
    "clip": {"task": "clip", "width": 32, "depth": 1, "heads": 2, "patch": 4, "embed_width": 32, "text": CLIP_TEXT},
    "prior": {"task": "dalle2.prior", "clip": "clip", "text_encodings": False, **NETWORK},
    "decoder": {
        "task": "dalle2", "image_embeds": "none", "patch": 2, "width": 16, "multipliers": [1, 1], "blocks": 1, "text": TEXT,
        "diffusion": {"objective": "x0"},
    },
}  # fmt: skip
REFERENCES = {"codec", "clip"}


class Digits(Dataset):
    """Moving digits; optionally black, or all with one caption."""

    def __init__(self, frames: int = 1, black: bool = False, caption: str | None = None) -> None:
        keys = {**BASE["data"], "frames": frames}
        self.source = MovingDigits(MovingDigitsConfig(**keys), "train")
        self.black, self.caption = black, caption

    def __len__(self) -> int:
        return BASE["data"]["count"]

    @cache  # noqa: B019  the few items of a test
    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.source.read(index, numpy_rng(0, index))
        assert sample.pixels is not None
        pixels = torch.zeros_like(sample.pixels) if self.black else sample.pixels
        return {"pixels": pixels, "caption": self.caption or sample.caption}


@dataclass(frozen=True)
class Ending:
    """How a run ended: its exit code, its findings, and the message of its end."""

    code: int
    findings: dict[str, str]  # stage: name → severity
    message: str
    seconds: float

    @property
    def is_silent(self) -> bool:
        return self.code == 0 and not self.findings


FAULTS = {
    "lr too high": {"train": {"lr": 3.0, "clip": None}},
    "lr 0": {"train": {"lr": 0.0}},
    "lr 1e-9": {"train": {"lr": 1e-9}},
    "black pictures": {"data": {"black": True}},
    "one caption": {"data": {"caption": "a digit"}},
    "half skipped": {"poison": "half"},
    "nan at the end": {"poison": "end"},
}
CASES = [
    *((family, "lr too high") for family in STAGES),
    *((family, fault) for family in ("vqgan", "causal_vae", "phenaki", "decoder") for fault in ("lr 0", "lr 1e-9")),
    *((family, "black pictures") for family in ("vqgan", "cvivit", "causal_vae", "clip", "decoder")),
    *((family, "one caption") for family in ("muse", "phenaki", "nuwa", "cogvideox", "clip", "decoder")),
    *((family, "half skipped") for family in ("vqgan", "muse", "cogvideox", "decoder")),
    *((family, "nan at the end") for family in ("cvivit", "nuwa", "prior", "decoder")),
    ("muse", "collapsed tokenizer"),
]


def make_config(family: str, folder: Path, fault: str | None) -> dict[str, Any]:
    """The run of one stage; earlier stages are those of healthy runs in `folder`."""
    stage = dict(STAGES[family])
    for key in REFERENCES & stage.keys():
        stage[key] = f"{folder}/{stage[key]}/{stage[key]}"
    if fault == "collapsed tokenizer":
        stage["codec"] = f"{folder}/collapsed/vqgan"
    changes = FAULTS.get(fault or "", {})
    tree = {**BASE, "stages": {family: stage}}
    if changes.get("train"):
        tree = merge(tree, {"stages": {family: {"train": changes["train"]}}})
    if changes.get("data"):
        frames = stage.get("data", {}).get("frames", 1)
        data = {"source": "tests.run.dead_runs.Digits", "size": 16, "channels": 1, "frames": frames, "validation": 0.1}
        tree["data"] = data | {"arguments": {"frames": frames, **changes["data"]}}
    return tree


@contextmanager
def poison_losses(kind: str | None) -> Iterator[None]:
    """Make the loss of every other step (half), or of the last five (end), not a number."""
    if kind is None:
        yield
        return
    backward, accumulate = Stepper._backward, Stepper.accumulate_gradients
    current = 0

    def note_step(self: Stepper, step: int, *arguments: Any) -> Any:
        nonlocal current
        current = step
        losses = accumulate(self, step, *arguments)
        for loss in losses.values():
            loss.sums["loss"] = loss.sums["loss"] * (torch.nan if is_bad() else 1)
        return losses

    def is_bad() -> bool:
        return current % 2 == 1 if kind == "half" else current >= STEPS - 5

    def poisoned(self: Stepper, loss: Any, retain_graph: bool = False) -> None:
        backward(self, loss, retain_graph)
        if is_bad():
            for parameters in self.parameters.values():
                for p in parameters.values():
                    if isinstance(p.grad, Tensor):
                        p.grad.fill_(torch.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "_backward", poisoned)
        patch.setattr(Stepper, "accumulate_gradients", note_step)
        yield


def run_case(folder: Path, family: str, fault: str | None, *overrides: str, name: str | None = None) -> Ending:
    """Train one stage, healthy without a fault, after the stages that it needs."""
    for key in REFERENCES & STAGES[family].keys():
        if not (folder / STAGES[family][key]).exists():
            run_case(folder, STAGES[family][key], None)
    if fault == "collapsed tokenizer" and not (folder / "collapsed").exists():
        run_case(folder, "vqgan", "lr too high", "train.health=off", name="collapsed")
    run = folder / (name or (family if fault is None else f"{family}-{fault}".replace(" ", "-")))
    config = folder / f"{run.name}.yaml"
    config.write_text(yaml.safe_dump(make_config(family, folder, fault), sort_keys=False))
    code, message, started = 0, "", time.monotonic()
    try:
        with poison_losses(FAULTS.get(fault or "", {}).get("poison")):
            train([str(config), *overrides], run=run, quiet=True)
    except KineoError as error:
        code, message = error.exit_code, str(error)
    return Ending(code, read_severities(run), message, time.monotonic() - started)


def read_severities(run: Path) -> dict[str, str]:
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {record["finding"]["name"]: record["finding"]["severity"] for record in records if "finding" in record}


def print_table(cases: list[tuple[str, str | None]]) -> None:
    print("| family | fault | exit code | findings |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for family, fault in cases:
            ending = run_case(Path(folder), family, fault)
            findings = ", ".join(f"`{name}` ({severity})" for name, severity in ending.findings.items())
            if ending.code and not findings:
                findings = ending.message.partition(":")[2].partition(";")[0].strip()
            print(f"| {family} | {fault or 'none'} | {ending.code} | {findings or '–'} |", flush=True)
            print(f"{ending.seconds:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    chosen = sys.argv[1:]
    everything = [*((family, None) for family in STAGES), *CASES]
    print_table([case for case in everything if not chosen or case[0] in chosen or case[1] in chosen])
