"""Inception Score of generated images: high when each clearly belongs to a class and all classes occur. Ignores real images."""

from __future__ import annotations

from typing import ClassVar

from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result, WeightsMissing
from kineograph.evaluate.statistics import FeatureRows, inception_score


class InceptionScore:
    name: ClassVar[str] = "is"
    needs: ClassVar[frozenset[Kind]] = frozenset({"generated"})

    def __init__(self, extractor: Extractor, context: EvalContext) -> None:
        self.extractor, self.label, self.frames = extractor, extractor.label, context.shape.frames
        self.splits = context.options.is_splits
        self.logits = FeatureRows(extractor.network.classes or extractor.width(context.shape), context.device)

    @classmethod
    def open(cls, context: EvalContext) -> InceptionScore:
        """With Inception where its classes are known, else EfficientNet-Lite0; a user's choice before either."""
        for name in ("inception-v3", "efficientnet-lite0"):
            try:
                extractor = context.extractors.open("is", name, "images")
            except WeightsMissing:
                continue
            if extractor.network.classes != 0:
                return cls(extractor, context)
        raise WeightsMissing(
            "no extractor with classes is installed: run kineo weights get efficientnet-lite0 (not comparable with published "
            "scores), or kineo weights get inception-v3 --from pt_inception-2015-12-05-6726825d.pth"
        )

    def update(self, batch: EvalBatch) -> None:
        self.logits.add(self.extractor.logits(batch.features("generated", self.extractor)))

    def compute(self) -> Result:
        logits = self.logits.gather()
        values, labels = inception_score(logits, self.splits)
        labels = {**self.extractor.protocol, "count": len(logits), **labels}
        if self.frames > 1:
            labels["of"] = "frames"
        if not self.label.startswith("inception-v3 "):
            labels["caution"] = "not Inception's classes: compare with scores of the same extractor only"
        return Result(values, labels)


METRIC = InceptionScore
