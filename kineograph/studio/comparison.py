"""Runs side by side: settings in which they differ, their numbers, and their newest pictures of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kineograph.studio.run_details import compare_results, list_settings, read_config, read_evaluation, stage_names
from kineograph.studio.runs import Run
from kineograph.studio.wall import read_wall

COMPARED = 4  # runs at most
PICTURES = 24  # prompts of a comparison
UNSHARED = 4  # more of each run that shares none of them


def compare_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page of a comparison shows: differences of the configs, numbers, and the newest pictures of shared prompts."""
    trees = [read_config(run.path) for run in runs]
    settings = [setting for setting in list_settings(*trees) if setting.differs] if len(runs) > 1 else []
    results = compare_results([read_evaluation(run.path) for run in runs])
    drawn = match_pictures(runs, trees)
    shared = {prompt: files for prompt, files in drawn.items() if sum(map(bool, files)) > 1}
    pictures = dict(list((shared or drawn).items())[:PICTURES])
    for number in range(len(runs)):  # a run that shares no prompt shows its own
        if shared and not any(files[number] for files in shared.values()):
            own = {prompt: files for prompt, files in drawn.items() if files[number]}
            pictures |= dict(list(own.items())[:UNSHARED])
    return {
        "runs": runs,
        "settings": settings,
        "results": results,
        "pictures": list(pictures.items()),
        "shared_prompts": bool(shared),
        "seeds": [tree.get("seed") for tree in trees],
    }


def match_pictures(
    runs: Sequence[Run], trees: Sequence[dict[str, Any]]
) -> dict[str, list[tuple[str | None, int] | None]]:
    """Prompt → the newest picture of each run that drew it, of the last stage that draws, and its step."""
    drawn: dict[str, list[tuple[str | None, int] | None]] = {}
    for number, (run, tree) in enumerate(zip(runs, trees, strict=True)):
        walls = [read_wall(run.path, stage, most=1) for stage in stage_names(tree)]
        samples = [(wall, rows) for wall in walls if (rows := [row for row in wall.rows if not row.is_sheet])]
        for wall, rows in samples[-1:]:
            for row in rows:
                drawn.setdefault(row.title, [None] * len(runs))[number] = row.files[0], wall.steps[0]
    return drawn
