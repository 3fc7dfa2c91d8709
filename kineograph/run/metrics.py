"""Metrics during training: those of `kineo evaluate`, on the present weights."""

from __future__ import annotations

from typing import Any

import torch

from kineograph.core.errors import InputError
from kineograph.core.registry import find_metric
from kineograph.core.task import Task
from kineograph.evaluate.extractor.registry import Extractors
from kineograph.evaluate.metric_api import MetricSkipped, WeightsMissing
from kineograph.evaluate.stage_evaluator import StageEvaluator
from kineograph.stage.data import StageData
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import Plan, StagePlan


class TrainingMetrics:
    """Evaluates when the Trainer calls it with (step, task). Items, noise and seed are those of `kineo evaluate`, at every step."""

    def __init__(self, plan: Plan, stage: StagePlan, data: StageData, stages: StageLoader) -> None:
        self.plan, self.stage, self.data, self.stages = plan, stage, data, stages
        self.metrics = {metric.name: metric for metric in map(find_metric, stage.train.metrics)}
        self.extractors = Extractors(stages.device, stage.train.metric_options)

    def check(self, task: Task) -> None:
        """Refuse to start without the pretrained weights of a metric."""
        reasons: dict[str, list[MetricSkipped]] = {name: [] for name in self.metrics}
        self._make_evaluator(task).open(self.metrics, reasons)
        for name, skipped in reasons.items():
            for reason in skipped:
                if isinstance(reason, WeightsMissing):
                    raise InputError(f"train.metrics names {name}: {reason}; or remove it")

    def __call__(self, step: int, task: Task) -> tuple[dict[str, float], dict[str, Any]]:
        """→ values by name (`fid`, `reconstruction/psnr`), and each metric's labels: extractor, number of samples"""
        reasons: dict[str, list[MetricSkipped]] = {name: [] for name in self.metrics}
        evaluator = self._make_evaluator(task)
        # In float32, as `kineo evaluate`: training's autocast is on here. Drawing turns it on again.
        with torch.autocast(self.stages.device.type, enabled=False):
            results, _ = evaluator.run(self.metrics, reasons)
        for name in [name for name in self.metrics if name not in results]:
            reason = "; ".join(dict.fromkeys(map(str, reasons[name]))) or (
                f"{self.stage.spec.config.task} does not offer {', '.join(sorted(self.metrics[name].needs))}"
            )
            self.stages.note(f"{self.stage.name}: {name} is skipped from here on: {reason}")
            del self.metrics[name]
        values = {
            metric if name == metric else f"{metric}/{name}": value
            for metric, result in results.items()
            for name, value in result.values.items()
        }
        return values, {name: {"samples": evaluator.count, **result.labels} for name, result in results.items()}

    def _make_evaluator(self, task: Task) -> StageEvaluator:
        return StageEvaluator(
            self.stage.spec,
            task,
            self.data.validation,
            self.stages.device,
            self.stage.train.evaluation_samples,
            self.plan.seed,
            self.extractors,
            self.stages,
            batch=self.plan.evaluate.rows,
            note=self.stages.note,
            validation_batch=self.stage.train.micro_batch_size,
        )
