"""Metrics while a stage trains: the judgement of `kineo evaluate`, of the weights as they are now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kineograph.core.lookup import find_metric
from kineograph.core.task import Task
from kineograph.evaluate.runner import Judge
from kineograph.run.plan import Plan, StagePlan
from kineograph.run.stage_data import StageData


class Evaluate:
    """Called by the Trainer with (step, the task as it is judged). The same items, noise and seed at every step, and as `kineo evaluate` takes them."""

    def __init__(
        self, plan: Plan, stage: StagePlan, data: StageData, device: torch.device, note: Callable[[str], None]
    ) -> None:
        self.plan, self.stage, self.data, self.device, self.note = plan, stage, data, device, note
        self.chosen = {metric.name: metric for metric in map(find_metric, stage.train.metrics)}

    def __call__(self, step: int, task: Task) -> tuple[dict[str, float], dict[str, Any]]:
        """Numbers by name (`fid`, `reconstruction/psnr`), and what each metric's rest on: extractor, count."""
        reasons: dict[str, list[str]] = {name: [] for name in self.chosen}
        judge = Judge(
            self.stage.spec,
            task,
            self.data.validation,
            self.device,
            self.stage.train.evaluation_samples,
            self.plan.seed,
        )
        results, _ = judge.run(self.chosen, reasons)
        for name in [name for name in self.chosen if name not in results]:
            why = "; ".join(dict.fromkeys(reasons[name])) or (
                f"{self.stage.spec.config.task} does not offer {', '.join(sorted(self.chosen[name].needs))}"
            )
            self.note(f"{self.stage.name}: {name} rests: {why}")
            del self.chosen[name]  # said once
        values = {
            metric if name == metric else f"{metric}/{name}": value
            for metric, result in results.items()
            for name, value in result.values.items()
        }
        return values, {name: {"samples": judge.count, **result.labels} for name, result in results.items()}
