"""A stage's Task with its starting weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from kineograph.core.errors import InputError
from kineograph.core.noise import key_of
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import BuildContext, Task, load_weights, weights_of
from kineograph.run.plan import Plan, StagePlan
from kineograph.run.stage_data import StageData
from kineograph.sample.stages import Stages
from kineograph.train import checkpoint


def stage_seed(plan: Plan, stage: StagePlan) -> int:
    """Stages of one run draw different numbers."""
    return key_of(plan.seed, stage.name) >> 1


def build_task(
    plan: Plan, stage: StagePlan, stages: Stages, data: StageData, folder: RunFolder, note: Callable[[str], None]
) -> Task:
    """A stage's Task with its starting weights. What it once learned from the data (a vocabulary) comes from its checkpoint."""
    seed = stage_seed(plan, stage)
    torch.manual_seed(key_of(seed, "init") >> 1)
    found = checkpoint.latest(folder.checkpoints(stage.name))
    context = BuildContext(
        shape=stage.spec.data.shape,
        seed=seed,
        stage=stages.load,
        captions=data.captions,
        assets=found.state().get("assets", {}) if found else {},
        note=note,
    )
    return stage.spec.task.build(stage.spec.config, context)


def warm_start(task: Task, stage: StagePlan, stages: Stages, note: Callable[[str], None]) -> None:
    """Copy what fits from `init`; the run's own checkpoint, if there is one, overrides it afterwards."""
    init = stage.spec.config.init
    if init is None:
        return
    if init.endswith(".safetensors"):
        given = checkpoint.read_file(Path(init))
    else:
        run, name = stages.locate(init)
        given = checkpoint.choose(run.checkpoints(name)).weights()
    own = weights_of(task)
    fitting = {name: value for name, value in given.items() if name in own and own[name].shape == value.shape}
    if not fitting:
        raise InputError(
            f"stages.{stage.name}.init={init}: none of its {len(given)} tensors fits a name and shape of this stage"
        )
    load_weights(task, own | fitting)
    note(f"{stage.name}: {len(fitting)} of {len(own)} tensors taken from {init}")
