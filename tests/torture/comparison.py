"""Compare a run that was killed and resumed with an undisturbed one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from kineograph.train import checkpoint

Curve = dict[tuple[str, str, int], dict[str, Any]]


def read_curve(run: Path) -> tuple[Curve, list[str]]:
    """Lines of metrics.jsonl by stage, split and step, without timings; and errors in the file."""
    found: Curve = {}
    wrong = []
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines[:-1]):  # what follows the last newline is torn
        try:
            record = json.loads(line)
        except ValueError:
            wrong.append(f"metrics.jsonl line {number + 1} is not JSON")
            continue
        key = (record["stage"], record["split"], record["step"])
        if key in found:
            wrong.append(f"{key} is there twice")
        found[key] = {name: value for name, value in record.items() if not name.startswith("time/")}
    return found, wrong


def find_differences(found: Curve, reference: Curve, tolerance: float = 0.0) -> list[str]:
    """Lines that are not those of the undisturbed run."""
    wrong = []
    for key, record in found.items():
        if key not in reference:
            wrong.append(f"{key} is not in the undisturbed run")
        elif record.keys() != reference[key].keys():
            wrong.append(f"{key} has other names: {sorted(record.keys() ^ reference[key].keys())}")
        else:
            for name, value in record.items():
                if not _equal(value, reference[key][name], tolerance):
                    wrong.append(f"{key} {name}: {value!r} instead of {reference[key][name]!r}")
    return wrong


def find_missing(found: Curve, reference: Curve) -> list[str]:
    """Lines of the undisturbed run that a finished one lacks."""
    return [f"{key} is missing" for key in reference.keys() - found.keys()]


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    if tolerance and isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    return a == b


def compare_weights(run: Path, reference: Path, stages: list[str], tolerance: float = 0.0) -> list[str]:
    """Every tensor of the last checkpoints: weights, averages, moments."""
    wrong = []
    for stage in stages:
        mine, other = (checkpoint.latest(path / stage / "checkpoints") for path in (run, reference))
        if mine is None or other is None or mine.step != other.step:
            wrong.append(f"{stage}: step {mine and mine.step} instead of {other and other.step}")
            continue
        for kind in ("model", "ema", "optimizer"):
            here, there = mine.tensors(kind), other.tensors(kind)
            for name in here.keys() | there.keys():
                same = name in here and name in there and here[name].shape == there[name].shape
                if same and not (
                    torch.allclose(here[name].double(), there[name].double(), tolerance, tolerance)
                    if tolerance
                    else torch.equal(here[name], there[name])
                ):
                    same = False
                if not same:
                    wrong.append(f"{stage}: {kind} {name} differs")
    return wrong


def saved_steps(run: Path, stages: list[str]) -> dict[str, int]:
    """The newest complete checkpoint of each stage."""
    found = {}
    for stage in stages:
        newest = checkpoint.latest(run / stage / "checkpoints")
        if newest is not None:
            found[stage] = newest.step
    return found


def find_lost_steps(before: dict[str, int], text: str, after: dict[str, int]) -> list[str]:
    """Steps of a complete checkpoint that were trained again, or are gone."""
    wrong = []
    for stage, step in before.items():
        told = re.search(rf"^{stage}: \w+, .* parameters.*$", text, re.MULTILINE)
        begun = re.search(r", from step (\d+)", told[0]) if told else None
        if told and (int(begun[1]) if begun else 0) < step:
            wrong.append(f"{stage} began at step {begun[1] if begun else 0}, and step {step} was saved")
        if after.get(stage, 0) < step:
            wrong.append(f"{stage}: step {step} was saved, and now {after.get(stage)} is the newest")
    return wrong
