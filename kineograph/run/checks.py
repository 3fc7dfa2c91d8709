"""What could not be trained is refused here, before anything is written."""

from __future__ import annotations

from pathlib import Path

import torch

from kineograph.core import distributed
from kineograph.core.capabilities import ChecksPrecision, SupportsLatentSampling, SupportsSampling
from kineograph.core.distributed import World
from kineograph.core.errors import ConfigError, InputError, KineoError
from kineograph.core.registry import find_metric
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.run.cache import check_cachable
from kineograph.stage.build import PlanBuilder, fake_tensors
from kineograph.stage.data import StageData, check_buckets, check_codec, check_tokens, find_missing_weights
from kineograph.stage.load import StageLoader, locate_stage
from kineograph.stage.spec import Plan, StagePlan
from kineograph.stage.warm_start import check_init_shapes
from kineograph.train import checkpoint
from kineograph.train.compile import uses_cuda_graphs
from kineograph.train.precision import resolve_precision
from kineograph.train.remote_checkpoint import check_reachable, is_remote
from kineograph.train.stepper import check_layout


def check_stages(
    plan: Plan,
    data: dict[str, StageData],
    folder: RunFolder | None = None,
    building: bool = True,
    planned: World | None = None,
    elsewhere: bool = False,
) -> None:
    """Refuse what could not be trained (a device that is not there, sizes that do not fit a codec) before anything is written.

    With `building`, every stage is built, of tensors without numbers, which takes no memory and little time. `planned`: processes of the run
    that is meant, in place of those that are there; `elsewhere`: on a GPU that is not this machine's.
    """
    several = distributed.is_active() if planned is None else planned.processes > 1
    builder = PlanBuilder(plan, data, lambda line: None)
    for stage in plan.stages:
        if stage.name not in data:
            continue
        if elsewhere:
            precision: str = "bf16" if stage.train.precision == "auto" else stage.train.precision
        else:
            device = distributed.resolve_device(stage.train.device)
            precision = resolve_precision(stage.train.precision, device)
            uses_cuda_graphs(stage.train, device, several)
        stage.train.parallel.mesh_shape(*(planned or distributed.current_world()))
        for metric in stage.train.metrics:
            find_metric(metric, "train.metrics")
        check_cachable(stage, data[stage.name].source)
        if building and planned is None:
            lacks = find_missing_weights(stage, data[stage.name], hub=True)
            if lacks is not None:
                raise InputError(lacks)
        if folder is not None:
            _check_warm_start(plan, stage, folder)
            _check_trained(plan, stage, folder)
            _check_codec(plan, stage, folder, data[stage.name])
        data[stage.name].loader(planned=planned).check()  # refuses batches that do not divide
        if building:
            try:
                with fake_tensors():
                    task = builder.build(stage.name, torch.device("cpu"))
                    if folder is not None:
                        check_init_shapes(
                            task, stage, StageLoader(folder), lambda name: builder.build(name, torch.device("cpu"))
                        )
            except KineoError:
                raise
            except Exception:  # a Task that looks at numbers while it is built: training will tell
                continue
            if isinstance(task, ChecksPrecision):
                task.check_precision(precision)
            if several:
                check_layout(task, stage.train.parallel, stage.players)
            check_tokens(task, data[stage.name])
            check_buckets(task, data[stage.name])
            _check_show(stage, task)


def _check_show(stage: StagePlan, task: Task) -> None:
    """Undecoded samples need a task that has such."""
    train = stage.train
    if (
        train.show == "latents"
        and train.sample_every
        and isinstance(task, SupportsSampling)
        and not isinstance(task, SupportsLatentSampling)
    ):
        raise ConfigError(
            f"stages.{stage.name}.train.show=latents: {stage.spec.config.task} draws pixels, and has nothing that is not decoded; use media"
        )
    if train.show == "latents" and train.grids:
        raise ConfigError(
            f"stages.{stage.name}.train.show=latents decodes nothing, so train.grids={list(train.grids)} cannot be drawn"
        )


def _check_warm_start(plan: Plan, stage: StagePlan, folder: RunFolder) -> None:
    """`init` must lead to weights: a file, an earlier stage of this run, or a trained stage of another.

    A stage that has begun stands on its own checkpoint, and what it began with may be gone.
    """
    init, where = stage.spec.config.init, f"stages.{stage.name}.init"
    if init is None or checkpoint.saved_steps(folder.checkpoints(stage.name)):
        return
    earlier = [other.name for other in plan.stages[: plan.stages.index(stage)]]
    if init in earlier:
        skipped = next(other for other in plan.stages if other.name == init).spec.config.skip
        if skipped and not checkpoint.saved_steps(folder.checkpoints(init)):
            raise InputError(f"{where}={init}: that stage is skipped and has no checkpoint; train it first")
        return
    if is_remote(init):
        check_reachable(init)
        return
    if init.endswith(".safetensors"):
        if not Path(init).is_file():
            raise InputError(f"{where}={init}: no such file")
        return
    if "/" not in init:
        raise InputError(
            f"{where}={init} is neither a file.safetensors nor a path runs/NAME/STAGE nor a URL nor wandb:ENTITY/PROJECT/NAME:VERSION "
            f"nor an earlier stage ({', '.join(earlier) or 'none'})"
        )
    run, name = locate_stage(init, folder)
    checkpoint.select(run.checkpoints(name))


def _check_trained(plan: Plan, stage: StagePlan, folder: RunFolder) -> None:
    """A stage that this one stands on and that will not be trained now must be trained already."""
    skipped = {other.name for other in plan.stages if other.spec.config.skip}
    for key in stage.spec.config.references:
        wanted = getattr(stage.spec.config, key)
        if isinstance(wanted, str) and ("/" in wanted or wanted in skipped):
            run, name = locate_stage(wanted, folder)
            if not checkpoint.saved_steps(run.checkpoints(name)):
                raise InputError(f"stages.{stage.name}.{key}={wanted}: that stage has no checkpoint; train it first")


def _check_codec(plan: Plan, stage: StagePlan, folder: RunFolder, data: StageData) -> None:
    """Codes that were made elsewhere, where the codec will not be trained now; else the stage finds out when its codec is trained."""
    codec = dict(stage.spec.config).get("codec")
    skipped = {other.name for other in plan.stages if other.spec.config.skip}
    if isinstance(codec, str) and ("/" in codec or codec in skipped):
        check_codec(data, StageLoader(folder).find_codec(stage.spec))
