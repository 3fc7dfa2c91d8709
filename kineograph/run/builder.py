"""The stages of a plan, built with fresh weights to be examined before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from kineograph.core.config import StageConfig
from kineograph.core.noise import key_of
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import BuildContext, Task, freeze
from kineograph.run.plan import Plan, StagePlan
from kineograph.run.stage_data import StageData
from kineograph.sample.stages import read_stage
from kineograph.train import checkpoint


class Builder:
    """Builds the stages of a plan with fresh weights; an earlier stage that one refers to stands in untrained and frozen."""

    def __init__(self, plan: Plan, data: dict[str, StageData], note: Callable[[str], None]) -> None:
        self.plan, self.data, self.note = plan, data, note
        self._assets: dict[str, dict[str, str]] = {}  # a vocabulary is learned once a stage
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
        )
        task = stage.spec.task.build(config or stage.spec.config, context)
        self._assets[name] = task.assets()
        return task

    def _earlier(self, reference: str, device: torch.device) -> Task:
        if "/" not in reference:
            return _frozen(self.build(reference, device), device)
        path = Path(reference)
        run = RunFolder.existing(path.parent)
        assets = checkpoint.choose(run.checkpoints(path.name)).state().get("assets", {})
        spec = read_stage(run.config(), path.name)
        context = BuildContext(
            shape=spec.data.shape,
            stage=lambda name: self._earlier(name if "/" in name else f"{path.parent}/{name}", device),
            assets=assets,
            note=self._say,
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
