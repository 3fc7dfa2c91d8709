"""Inception Score of generated pictures: high when each is clearly of some class and all classes come. Real ones play no part."""

from __future__ import annotations

from typing import Any, ClassVar

from kineograph.evaluate.extractor.registry import Extractor
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result, WeightsMissing
from kineograph.evaluate.statistics import FeatureRows, inception_score

WITH_LOGITS = "pt_inception-2015-12-05-6726825d.pth"


class InceptionScore:
    name: ClassVar[str] = "is"
    needs: ClassVar[frozenset[Kind]] = frozenset({"generated"})

    def __init__(self, extractor: Extractor, subject: EvalContext) -> None:
        self.extractor, self.frames = extractor, subject.shape.frames
        self.logits = FeatureRows(subject.device)
        self.classes = getattr(extractor.network, "classes", None) or extractor.width(subject.shape)

    @classmethod
    def open(cls, subject: EvalContext) -> InceptionScore:
        return cls(_extractor(subject), subject)

    def update(self, evidence: EvalBatch) -> None:
        self.logits.add(self.extractor.logits(evidence.features("generated", self.extractor)))

    def compute(self) -> Result:
        logits = self.logits.joined(self.classes)
        values, told = inception_score(logits)
        labels: dict[str, Any] = {"extractor": self.extractor.label, "count": len(logits), **told}
        if self.frames > 1:
            labels["of"] = "frames"
        if not self.extractor.label.startswith("inception-v3 "):
            labels["caution"] = "not Inception's classes: compare with scores of the same extractor only"
        return Result(values, labels)


def _extractor(subject: EvalContext) -> Extractor:
    """Inception where its classes are known, else EfficientNet-Lite0; what the user names before either."""
    for name in ("inception-v3", "efficientnet-lite0"):
        try:
            found = subject.extractors.open("is", name, "pictures")
        except WeightsMissing:
            continue
        if found.has_logits:
            return found
    raise WeightsMissing(
        "there are no classes to score by: run kineo weights get efficientnet-lite0 (not comparable with published scores), or "
        f"kineo weights get inception-v3 --from {WITH_LOGITS}"
    )


METRIC = InceptionScore
