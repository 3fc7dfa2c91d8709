"""Estimates the memory of a preset's stages for the page, as `kineo doctor --memory` does: one JSON object a line, one a stage. It
imports torch, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def describe_stages(arguments: list[str], out: Any) -> None:
    """Write a line for each stage of a preset as soon as it is estimated."""
    from dataclasses import asdict

    from kineograph.doctor.estimate import MAX_MEMORY_SHARE
    from kineograph.run.dry_run import estimate_plan

    # The memory of a GPU decides only what fits, which the page works out for every size.
    for estimate in estimate_plan(arguments, 2**40, lambda line: None):
        train, shape = estimate.stage.train, estimate.stage.spec.data.shape
        tree = {
            "name": estimate.stage.name,
            "task": estimate.task,
            "trained": sum(estimate.trained.values()),
            "frozen": estimate.frozen,
            "clip": [shape.frames, shape.height, shape.width],
            "precision": estimate.target.precision,
            "batch_size": train.batch_size,
            "accumulate": train.accumulate,
            "micro": estimate.micro,
            "sample_bytes": estimate.sample_bytes,
            "usable": MAX_MEMORY_SHARE,
            "memory": asdict(estimate.memory),
            "savings": [([setting], asdict(memory)) for setting, memory in estimate.savings.items()],
            "combinations": [(settings, asdict(memory)) for settings, memory in estimate.combinations],
        }
        out.write(json.dumps(tree) + "\n")
        out.flush()


def main() -> None:
    from kineograph.core.errors import KineoError

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the lines
    try:
        describe_stages(sys.argv[1:], out)
    except KineoError as error:
        out.write(json.dumps({"error": str(error)}) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
