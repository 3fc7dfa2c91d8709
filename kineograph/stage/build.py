"""Build a stage's Task with fresh weights: to train it, to load its checkpoint into it, or of fake tensors to examine it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kineograph.core.config import StageConfig
from kineograph.core.notes import Note
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import BuildContext, Task, freeze
from kineograph.stage.data import StageData
from kineograph.stage.spec import Plan, StageSpec, read_stage
from kineograph.train import checkpoint


def build_task(
    spec: StageSpec,
    stage: Callable[[str], Task],
    note: Note,
    assets: dict[str, str] | None = None,
    captions: Callable[[], list[str]] = list,
    seed: int = 0,
    for_training: bool = True,
) -> Task:
    """Build a stage. `stage` gives the earlier stages that it refers to; `assets` (a learned vocabulary) replace `captions`."""
    context = BuildContext(
        shape=spec.data.shape,
        seed=seed,
        stage=stage,
        captions=captions,
        assets=assets or {},
        note=note,
        name=spec.name,
        for_training=for_training,
    )
    return spec.task.build(spec.config, context)


def fake_tensors() -> FakeTensorMode:
    """Inside, new tensors have a shape and no data, so that a model of any size is built at once and in no memory.

    `nn.Module.to` fails inside: torch cannot convert parameters that are fake.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


class PlanBuilder:
    """Builds the stages of a plan untrained. Earlier stages are untrained too, and frozen; a vocabulary is learned once."""

    def __init__(
        self,
        plan: Plan,
        data: Mapping[str, StageData],
        note: Note,
        assets: Mapping[str, dict[str, str]] | None = None,
    ) -> None:
        self.plan, self.data, self.note = plan, data, note
        self._assets = dict(assets or {})
        self._noted: set[str] = set()

    def build(self, name: str, device: torch.device, config: StageConfig | None = None) -> Task:
        """Build a stage of the plan, or a variant with `config`. The stages that it refers to go to `device`."""
        spec = self.plan.stage(name).spec
        task = build_task(
            replace(spec, config=config) if config is not None else spec,
            lambda reference: self._build_earlier(reference, device),
            self._note_once,
            self._assets.get(name),
            self.data[name].captions if name in self.data else list,
            self.plan.stage_seed(name),
        )
        self._assets[name] = task.assets()
        return task

    def _build_earlier(self, reference: str, device: torch.device) -> Task:
        if "/" in reference:
            path = Path(reference)
            run = RunFolder.existing(path.parent)
            task = build_task(
                read_stage(run.config(), path.name),
                lambda name: self._build_earlier(name if "/" in name else f"{path.parent}/{name}", device),
                self._note_once,
                checkpoint.select(run.checkpoints(path.name)).state().get("assets"),
            )
        else:
            task = self.build(reference, device)
        freeze(task if device.type == "cpu" else task.to(device))
        return task

    def _note_once(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self.note(line)
