"""The stages of a plan, built with fresh weights to be examined before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kineograph.core.batch import Shape
from kineograph.core.config import StageConfig
from kineograph.core.noise import key_of
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import BuildContext, Task, freeze
from kineograph.stage.data import StageData
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import Plan, StagePlan, read_stage
from kineograph.train import checkpoint
from kineograph.train.remote_checkpoint import is_remote


@contextmanager
def pretending() -> Iterator[None]:
    """Tensors that are made inside have a shape and no numbers, so that a model of any size can be built.

    Modules can be converted (`.to(torch.bfloat16)`) too: torch would swap the contents of parameters, which pretended ones do not bear.
    """
    convert = nn.Module._apply
    nn.Module._apply = _replaced  # type: ignore[method-assign,assignment]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


def _replaced(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """nn.Module._apply by new parameters in place of old ones; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules() if recurse else [module]:
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                with torch.no_grad():
                    changed = change(parameter)
                same = changed is parameter
                made[id(parameter)] = parameter if same else nn.Parameter(changed, parameter.requires_grad)
            part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = change(buffer) if buffer is not None else None
    return module


class Builder:
    """Builds the stages of a plan with fresh weights; an earlier stage that one refers to stands in untrained and frozen."""

    def __init__(
        self,
        plan: Plan,
        data: dict[str, StageData],
        note: Callable[[str], None],
        assets: dict[str, dict[str, str]] | None = None,
    ) -> None:
        self.plan, self.data, self.note = plan, data, note
        self._assets: dict[str, dict[str, str]] = dict(assets or {})  # a vocabulary is learned once a stage
        self._said: set[str] = set()

    def build(self, name: str, device: torch.device, config: StageConfig | None = None) -> Task:
        """A stage of the plan, to be trained; `device` is where the stages that it refers to go. `config` in place of its own."""
        stage = next(stage for stage in self.plan.stages if stage.name == name)
        context = BuildContext(
            shape=stage.spec.data.shape,
            seed=key_of(self.plan.seed, name) >> 1,
            stage=lambda reference: self._earlier(reference, device),
            captions=self._captions(stage),
            assets=self._assets.get(name, {}),
            note=self._say,
            name=name,
        )
        task = stage.spec.task.build(config or stage.spec.config, context)
        self._assets[name] = task.assets()
        return task

    def _earlier(self, reference: str, device: torch.device) -> Task:
        if "/" not in reference:
            return _frozen(self.build(reference, device), device)
        path = Path(reference)
        run = RunFolder.existing(path.parent)
        assets = checkpoint.select(run.checkpoints(path.name)).state().get("assets", {})
        spec = read_stage(run.config(), path.name)
        context = BuildContext(
            shape=spec.data.shape,
            stage=lambda name: self._earlier(name if "/" in name else f"{path.parent}/{name}", device),
            assets=assets,
            note=self._say,
            name=path.name,
        )
        return _frozen(spec.task.build(spec.config, context), device)

    def _captions(self, stage: StagePlan) -> Callable[[], list[str]]:
        return self.data[stage.name].captions if stage.name in self.data else list

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.note(line)


def _frozen(task: Task, device: torch.device) -> Task:
    return freeze(task if device.type == "cpu" else task.to(device))  # type: ignore[return-value]


def stage_seed(plan: Plan, stage: StagePlan) -> int:
    """Stages of one run draw different numbers."""
    return key_of(plan.seed, stage.name) >> 1


def build_task(
    plan: Plan,
    stage: StagePlan,
    stages: StageLoader,
    data: StageData,
    folder: RunFolder,
    note: Callable[[str], None],
    brought: Path | None = None,
) -> Task:
    """A stage's Task with fresh weights. What it once learned from the data (a vocabulary) comes from its checkpoint.

    Before it has one, a stage that starts from another's weights takes over what that one learned: its embeddings are of those words.
    `brought` is what was fetched for an `init` that lies elsewhere.
    """
    seed = stage_seed(plan, stage)
    torch.manual_seed(key_of(seed, "init") >> 1)
    found = checkpoint.latest(folder.checkpoints(stage.name)) or _saved(brought) or _ancestor(stage, stages)
    context = BuildContext(
        shape=stage.spec.data.shape,
        seed=seed,
        stage=stages.load,
        captions=data.captions,
        assets=found.state().get("assets", {}) if found else {},
        note=note,
        name=stage.name,
    )
    task = stage.spec.task.build(stage.spec.config, context)
    _tell_of_longer_clips(task, stage, note)
    return task


def _tell_of_longer_clips(task: Task, stage: StagePlan, note: Callable[[str], None]) -> None:
    """A codec of clips takes any length, but knows those that it was trained on: beyond, its latents drift and its frames smear."""
    trained: Shape | None = getattr(task.stages.get("codec"), "shape", None)
    frames = stage.spec.data.shape.frames
    if trained is not None and 1 < trained.frames < frames:
        note(
            f"warning: {stage.name}: its codec was trained on clips of {trained.frames} frames, and these have {frames}: "
            "what it makes of the later ones may be far off; train it on clips as long"
        )


def _ancestor(stage: StagePlan, stages: StageLoader) -> checkpoint.Checkpoint | None:
    """The checkpoint that `init` names; None for a file, which has weights only. It may be yet to come: `kineo cache` builds early."""
    init = stage.spec.config.init
    if init is None or init.endswith(".safetensors") or is_remote(init):
        return None
    run, name = stages.locate(init)
    return checkpoint.latest(run.checkpoints(name))


def _saved(brought: Path | None) -> checkpoint.Checkpoint | None:
    """What was fetched, where it is a checkpoint and not weights alone."""
    return checkpoint.Checkpoint(brought, 0) if brought is not None and brought.is_dir() else None
