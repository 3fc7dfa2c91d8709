"""Reads a stage's folder of checkpoints without its tensors: steps, phase, the best one. Imports no torch: listings stay fast."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from kineograph.core.config import merge
from kineograph.core.run_folder import read_json
from kineograph.core.text_file import parse_json, read_regular

Phase = Literal["train", "save", "validate", "evaluate", "sample", "publish", "check"]
ORDER: tuple[Phase, ...] = get_args(Phase)
STEP_NAME = re.compile(r"step-(\d{8,})")
_PHASE_KEYS = ("phase", "samples", "best", "best_step", "elapsed")
_STATE_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("assets", "config", "references", "data", "stepper", "clock"), (dict,)),
    "samples": (int,),
    "best": (int, float, NoneType),
    "best_step": (int, NoneType),
    "elapsed": (int, float),
}


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending; complete or not."""
    if not folder.is_dir():
        return []
    steps = [int(match[1]) for path in folder.iterdir() if (match := STEP_NAME.fullmatch(path.name))]
    return sorted({step for step in steps if step_folder(folder, step).is_dir()})


def read_state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint besides its tensors, as its finished phases left it."""
    return parse_json(read_regular(path / "state.json")) | _read_phase(path)


def _read_phase(path: Path) -> dict[str, Any]:
    """Read the keys of the state that finished phases changed. If they are damaged, the phases of this step run again."""
    saved = read_json(path / "phase.json")
    state = {key: saved[key] for key in _PHASE_KEYS if key in saved}
    if find_odd_value(state) is not None:
        return {}
    # Older checkpoints have no checksum here.
    return state if "sha256" not in saved or saved["sha256"] == phase_digest(path, state) else {}


def phase_digest(path: Path, state: Mapping[str, Any]) -> str:
    """Of these keys and of the manifest, so that phase.json belongs to this checkpoint."""
    text = json.dumps({key: state[key] for key in sorted(state)})
    return hashlib.sha256(text.encode() + read_regular(path / "manifest.json").encode()).hexdigest()


def find_odd_value(state: Mapping[str, Any]) -> str | None:
    """The first key whose value is none that Kineograph writes."""
    if "phase" in state and state["phase"] not in ORDER:
        return "phase"
    return next(
        (key for key, kinds in _STATE_TYPES.items() if key in state and not isinstance(state[key], kinds)), None
    )


def read_best(folder: Path) -> dict[str, Any]:
    """Step and validation loss of the best checkpoint; empty if there is none."""
    best = read_json(folder / "best.json")
    return best if isinstance(best.get("step"), int) and isinstance(best.get("loss"), int | float) else {}


def planned_steps(tree: Mapping[str, Any], stage: str, checkpoints: Path) -> int:
    """The steps that a stage is configured to train for. With train.minutes: as many as its time allows, at the speed so far."""
    train = merge(tree.get("train") or {}, tree["stages"][stage].get("train") or {})
    saved = max(saved_steps(checkpoints), default=0)
    if train.get("minutes") is not None and saved:
        return expect_steps(saved, _read_clock_share(step_folder(checkpoints, saved)))
    if "steps" not in train:
        from kineograph.train.config import TrainConfig  # with torch; a run's own config.yaml has every key

        return int(TrainConfig.model_fields["steps"].default)
    return int(train["steps"])


def expect_steps(step: int, share: float) -> int:
    """All steps of a stage that made `step` in this share of its time."""
    if share >= 1:
        return step
    return max(step + 1, round(step / share)) if share > 0 else step + 1


def _read_clock_share(path: Path) -> float:
    try:
        share = read_state(path)["clock"]["now"]
    except (OSError, ValueError, KeyError, TypeError):  # damaged, or saved before the stage had a time
        return 0.0
    return float(share) if isinstance(share, int | float) and 0 <= share <= 1 else 0.0
