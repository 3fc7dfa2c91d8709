"""What was typed → a checked plan and its run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kineograph.core.config import Tree
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.run_folder import RunFolder
from kineograph.run import layers
from kineograph.run.plan import make_plan, refuse_changes
from kineograph.stage.spec import Plan
from kineograph.train import checkpoint

Resume = Literal["auto", "never", "must"]


def resolve(
    arguments: Sequence[str], run: str | Path | None = None, resume: Resume = "auto", extra: Tree | None = None
) -> tuple[Plan, RunFolder]:
    """What was typed → a checked plan and its run folder. A run that exists is the base of its own continuation."""
    if not arguments and run is None:
        raise ConfigError("name a preset or a YAML or JSON file (kineo presets lists the presets)")
    fresh = layers.read(arguments, extra) if any(not layers.is_override(a) for a in arguments) else {}
    folder = RunFolder(run if run is not None else Path("runs") / str(fresh.get("name") or "run"))
    if not folder.exists():
        if resume == "must":
            raise InputError(f"--resume must: {folder.path} holds no run to go on with")
        if folder.path.is_file():
            raise InputError(f"{folder.path} is a file: give --run a folder")
        return make_plan(fresh), folder
    if resume == "never":
        raise InputError(f"--resume never: {folder.path} holds a run already; give --run another folder")
    saved = folder.config()
    # The preset that the run was made from is in the saved config already, as it was then.
    others = [a for a in arguments if not (a == saved.get("preset") and not Path(a).is_file())]
    if fresh and not any(checkpoint.saved_steps(folder.checkpoints(name)) for name in saved.get("stages", {})):
        return make_plan(fresh), folder  # it never came to a checkpoint: there is nothing to be true to
    plan = make_plan(layers.read(others, extra, base=saved))
    refuse_changes(comparable(make_plan(saved).tree()), comparable(plan.tree()))
    return plan, folder


def comparable(tree: Tree) -> Tree:
    """Without what may differ between two copies of one run."""
    return {key: value for key, value in tree.items() if key not in ("name", "preset")}
