"""Metrics while a stage trains: the judgement of `kineo evaluate`, of the weights as they are now."""

from __future__ import annotations

from typing import Any

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
    """Called by the Trainer with (step, the task as it is judged). The same items, noise and seed at every step, and as `kineo evaluate` takes them."""

    def __init__(self, plan: Plan, stage: StagePlan, data: StageData, stages: StageLoader) -> None:
        self.plan, self.stage, self.data, self.stages = plan, stage, data, stages
        self.chosen = {metric.name: metric for metric in map(find_metric, stage.train.metrics)}
        self.extractors = Extractors(stages.device)

    def check(self, task: Task) -> None:
        """Refuse to start without the weights that a metric looks through: training would go on, and nobody would have judged it."""
        reasons: dict[str, list[MetricSkipped]] = {name: [] for name in self.chosen}
        self._judge(task).open(self.chosen, reasons)
        for name, found in reasons.items():
            for reason in found:
                if isinstance(reason, WeightsMissing):
                    raise InputError(f"train.metrics names {name}: {reason}; or leave it out")

    def __call__(self, step: int, task: Task) -> tuple[dict[str, float], dict[str, Any]]:
        """Numbers by name (`fid`, `reconstruction/psnr`), and what each metric's rest on: extractor, count."""
        reasons: dict[str, list[MetricSkipped]] = {name: [] for name in self.chosen}
        judge = self._judge(task)
        results, _ = judge.run(self.chosen, reasons)
        for name in [name for name in self.chosen if name not in results]:
            why = "; ".join(dict.fromkeys(map(str, reasons[name]))) or (
                f"{self.stage.spec.config.task} does not offer {', '.join(sorted(self.chosen[name].needs))}"
            )
            self.stages.note(f"{self.stage.name}: {name} rests: {why}")
            del self.chosen[name]  # said once
        values = {
            metric if name == metric else f"{metric}/{name}": value
            for metric, result in results.items()
            for name, value in result.values.items()
        }
        return values, {name: {"samples": judge.count, **result.labels} for name, result in results.items()}

    def _judge(self, task: Task) -> StageEvaluator:
        return StageEvaluator(
            self.stage.spec,
            task,
            self.data.validation,
            self.stages.device,
            self.stage.train.evaluation_samples,
            self.plan.seed,
            self.extractors,
            self.stages,
        )
