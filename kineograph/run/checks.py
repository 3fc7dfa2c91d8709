"""Refuse a plan that cannot be trained, before anything is written."""

from __future__ import annotations

from pathlib import Path

import torch

from kineograph.core import distributed, weight_cache
from kineograph.core.capabilities import (
    ChecksPrecision,
    SupportsLatentSampling,
    SupportsReconstruction,
    SupportsSampling,
)
from kineograph.core.distributed import World
from kineograph.core.errors import ConfigError, InputError, KineoError
from kineograph.core.notes import discard
from kineograph.core.protocols import Stream
from kineograph.core.registry import find_metric
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task
from kineograph.evaluate.extractor.registry import DEFAULT_WEIGHTS
from kineograph.run.cache import check_cachable
from kineograph.run.launch import read_launcher_env
from kineograph.run.previews import read_prompt_rows
from kineograph.sample.prompt_file import check_pictures
from kineograph.stage.build import PlanBuilder, fake_tensors
from kineograph.stage.data import (
    StageData,
    check_buckets,
    check_codec,
    check_loss_masks,
    check_tokens,
    find_missing_weights,
)
from kineograph.stage.load import StageLoader, locate_stage
from kineograph.stage.spec import Plan, StagePlan
from kineograph.stage.warm_start import check_init_shapes
from kineograph.train import checkpoint
from kineograph.train.compile import uses_cuda_graphs
from kineograph.train.determinism import check_deterministic_device
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
    """Refuse stages that cannot be trained: a missing device, sizes that do not fit a codec, an `init` that does not fit.

    With `building`, every stage is built of fake tensors. `planned`: the processes of the planned run, instead of those
    running now; `elsewhere`: it will run on the GPU of another machine.
    """
    several = distributed.is_active() if planned is None else planned.processes > 1
    builder, cpu = PlanBuilder(plan, data, discard), torch.device("cpu")
    prompts = _PromptCheck(plan)
    for stage in plan.stages:
        if stage.name not in data:
            continue
        if elsewhere:
            precision: str = "bf16" if stage.train.precision == "auto" else stage.train.precision
        else:
            device = distributed.resolve_device(stage.train.device)
            precision = resolve_precision(stage.train.precision, device)
            uses_cuda_graphs(stage.train, device, several)
            _check_compile_ahead(stage, data[stage.name], several)
            if stage.train.deterministic:
                check_deterministic_device(device)
        stage.train.parallel.mesh_shape(*(planned or distributed.current_world()))
        if stage.train.parallel.offload and not several and read_launcher_env() is None:
            raise ConfigError(
                f"stages.{stage.name}.train.parallel.offload=true works in a process group only, which may be of one process: start with "
                "torchrun --nproc-per-node 1 -m kineograph -- train …, or set offload=false"
            )
        for metric in stage.train.metrics:
            _check_metric(metric, stage)
        check_cachable(stage, data[stage.name].source)
        _check_deterministic_order(stage, data[stage.name])
        if building and planned is None:
            missing = find_missing_weights(stage, data[stage.name], hub=True)
            if missing is not None:
                raise InputError(missing)
        if folder is not None:
            _check_init(plan, stage, folder)
            _check_references(plan, stage, folder, data[stage.name])
        data[stage.name].loader(planned=planned).check()  # batches must divide among the processes
        if building:
            try:
                with fake_tensors():
                    task = builder.build(stage.name, cpu)
                    if folder is not None:
                        check_init_shapes(task, stage, StageLoader(folder), lambda name: builder.build(name, cpu))
            except KineoError:
                raise
            except Exception:  # a Task that reads tensor values while it is built: training will check it
                continue
            if isinstance(task, ChecksPrecision):
                task.check_precision(precision)
            if several:
                check_layout(task, stage.train.parallel, stage.players)
            check_tokens(task, data[stage.name])
            check_buckets(task, data[stage.name])
            check_loss_masks(task, data[stage.name])
            _check_show(stage, task)
            prompts.add(stage, task)
    prompts.finish()


class _PromptCheck:
    """Refuses `prompts` with inputs that no stage can draw from: a picture that is gone, frames that do not fit."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.drawn, self.errors = False, list[InputError]()
        if isinstance(plan.prompts, list):
            check_pictures(plan.prompts)

    def add(self, stage: StagePlan, task: Task) -> None:
        if not isinstance(self.plan.prompts, list) or not stage.train.sample_every:
            return
        if not isinstance(task, SupportsSampling) or "captions" not in stage.spec.config.reads():
            return
        try:
            read_prompt_rows(self.plan, stage, task, discard)
            self.drawn = True
        except InputError as error:
            self.errors.append(error)

    def finish(self) -> None:
        if self.errors and not self.drawn:
            raise self.errors[-1]


def _check_compile_ahead(stage: StagePlan, data: StageData, several: bool) -> None:
    if not stage.train.compile_ahead:
        return
    fault = (
        "works in one process" if several else "reads the data in a second process, which cannot get your own Dataset"
    )
    if several or data.source.is_user_dataset:
        raise ConfigError(f"stages.{stage.name}.train.compile_ahead=true {fault}: set it to false")


def _check_deterministic_order(stage: StagePlan, data: StageData) -> None:
    """Refuse a stream whose order would depend on the machine's cores."""
    if stage.train.deterministic and stage.train.workers == "auto" and isinstance(data.source, Stream):
        raise ConfigError(
            "train.deterministic=true: the order of a stream (data.shards that are pipes, URLs or compressed) depends on the number of data "
            "workers, and train.workers=auto takes it from the machine: set train.workers=4, for example"
        )


def _check_show(stage: StagePlan, task: Task) -> None:
    """Refuse train.show=latents for a task that has no latents."""
    train = stage.train
    if train.show != "latents":
        return
    if train.sample_every and isinstance(task, SupportsSampling) and not isinstance(task, SupportsLatentSampling):
        raise ConfigError(
            f"stages.{stage.name}.train.show=latents: {stage.spec.config.task} draws pixels and has no latents; use media"
        )
    if train.grids:
        raise ConfigError(
            f"stages.{stage.name}.train.show=latents decodes nothing, so train.grids={list(train.grids)} cannot be drawn"
        )


def _check_metric(name: str, stage: StagePlan) -> None:
    """Refuse a metric whose weights are missing now, and not after the stages before this one."""
    needs = find_metric(name, "train.metrics").needs
    task, frames = stage.spec.task, stage.spec.data.frames
    if ("generated" in needs and not issubclass(task, SupportsSampling)) or ("clips" in needs and frames == 1):
        return  # it does not apply, which is noted in training
    if "reconstruction" in needs and not issubclass(task, SupportsReconstruction):
        return
    own = stage.train.metric_options.extractors.get(name.replace("-", "_"))
    if own is not None and ("/" in own or "." in own):  # a file, or RUN/STAGE
        if not Path(own).expanduser().exists():
            raise InputError(f"train.metric_options.extractors names {own} for {name}, which does not exist")
        return
    missing = []
    for weights in (own,) if own is not None else DEFAULT_WEIGHTS.get(name.replace("-", "_"), ()):
        try:
            weight_cache.find(weights)
            return
        except InputError as error:
            missing.append(str(error))
    if missing:
        raise InputError(f"train.metrics names {name}: {missing[-1]}; or remove it")


def _check_init(plan: Plan, stage: StagePlan, folder: RunFolder) -> None:
    """Refuse an `init` without weights. A stage with a checkpoint no longer needs its `init`, which may be gone."""
    init, where = stage.spec.config.init, f"stages.{stage.name}.init"
    if init is None or checkpoint.saved_steps(folder.checkpoints(stage.name)):
        return
    earlier = [other.name for other in plan.stages[: plan.stages.index(stage)]]
    if init in earlier:
        if plan.stage(init).spec.config.skip and not checkpoint.saved_steps(folder.checkpoints(init)):
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
            f"{where}={init} is not an earlier stage ({', '.join(earlier) or 'there is none'}): use one of those, a path "
            "runs/NAME/STAGE, a file.safetensors, a URL or wandb:ENTITY/PROJECT/NAME:VERSION"
        )
    run, name = locate_stage(init, folder)
    checkpoint.select(run.checkpoints(name))


def _check_references(plan: Plan, stage: StagePlan, folder: RunFolder, data: StageData) -> None:
    """Refuse references to stages that are untrained and not trained now, and a cache that another codec has made."""
    skipped = {other.name for other in plan.stages if other.spec.config.skip}
    for key, reference in stage.spec.referenced_stages().items():
        if "/" not in reference and reference not in skipped:
            continue
        run, name = locate_stage(reference, folder)
        if not checkpoint.saved_steps(run.checkpoints(name)):
            raise InputError(f"stages.{stage.name}.{key}={reference}: that stage has no checkpoint; train it first")
        if key == "codec":
            check_codec(data, StageLoader(folder).find_codec(stage.spec))
