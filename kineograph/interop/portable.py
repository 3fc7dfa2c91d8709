"""`kineo export RUN --to safetensors`: a run's weights as plain files, for any family.

DIR/config.yaml            the run's resolved config
DIR/<stage>.safetensors    weights by their names in the task: averaged ones, or those of the last step
DIR/<stage>.json           task, step, which weights, their checksum, and what else a rebuild needs (a learned vocabulary)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from kineograph.core.errors import InputError
from kineograph.core.run_folder import RunFolder, write_json
from kineograph.interop.placing import new_folder, refuse_occupied
from kineograph.train import checkpoint


def export_safetensors(
    run: RunFolder,
    target: Path,
    which: str = "last",
    online: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Every trained stage of a run. → the files."""
    refuse_occupied(target)
    tree = run.config()
    trained = [name for name in tree["stages"] if checkpoint.steps(run.checkpoints(name))]
    if not trained:
        raise InputError(f"{run.path} has no trained stage to export: train it first")
    chosen = {}
    for name in trained:  # a step is one of the last stage, and others may have no such
        own = which if which in ("last", "best") or name == trained[-1] else "last"
        chosen[name] = checkpoint.choose(run.checkpoints(name), own)
    for name in tree["stages"]:
        if name not in trained:
            note(f"{name} is left out: it has no checkpoint")
    with new_folder(target) as folder:
        shutil.copyfile(run.config_file, folder / "config.yaml")
        for name, found in chosen.items():
            averaged = not online and found.has("ema")
            file = folder / f"{name}.safetensors"
            if found.is_sharded:
                save_file(found.weights(ema=averaged), file)
            else:
                shutil.copyfile(found.path / f"{'ema' if averaged else 'model'}.safetensors", file)
            described = {
                "task": tree["stages"][name]["task"],
                "step": found.step,
                "weights": "ema" if averaged else "online",
                "sha256": checkpoint.fingerprint(file)["sha256"],
                "assets": found.state().get("assets", {}),
            }
            write_json(folder / f"{name}.json", described)
    return sorted(target.iterdir())
