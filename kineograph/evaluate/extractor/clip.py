"""Which CLIP judges: the one that is named (a stage of some run, a transformers folder), else the run's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from kineograph.core.registry import find_task
from kineograph.core.safe_unpickle import sha256_of
from kineograph.evaluate.metric_api import EvalContext, MetricSkipped, WeightsMissing
from kineograph.stage.load import StageLoader
from kineograph.train import checkpoint


class Embeds(Protocol):
    """Pictures and captions in one space, each of length 1."""

    def embed_images(self, pixels: Tensor) -> Tensor:
        """N C H W in [0, 1] → N D"""

    def embed_texts(self, captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """→ N D, and what else there is"""


def open_clip(subject: EvalContext) -> tuple[Embeds, str]:
    """The CLIP and its label."""
    value = subject.extractors.chosen.get("clip_score")
    if value is None:
        return _own(subject.stages)
    folder = Path(value)
    if (folder / "config.json").is_file():
        return _of_transformers(folder, subject)
    if subject.stages is None or "/" not in value:
        raise MetricSkipped(f"--extractor clip_score={value} is neither a folder of transformers nor RUN/STAGE")
    return _stage(subject.stages, value)


def _own(stages: StageLoader | None) -> tuple[Embeds, str]:
    for name, stage in (stages.run.config()["stages"] if stages is not None else {}).items():
        if hasattr(find_task(stage["task"]), "embed_images") and checkpoint.saved_steps(stages.run.checkpoints(name)):  # type: ignore[union-attr]
            return _stage(cast("StageLoader", stages), name)
    raise WeightsMissing(
        "the run has no trained clip stage: name one of another run (--extractor clip_score=runs/x/clip), or a CLIP in a folder of "
        "transformers (--extractor clip_score=FOLDER)"
    )


def _stage(stages: StageLoader, reference: str) -> tuple[Embeds, str]:
    task: Any = stages.load(reference)
    if not hasattr(task, "embed_images"):
        raise MetricSkipped(f"stage {reference} gives no embeddings: name one whose task is clip")
    return task, f"clip stage {reference} {stages.digest(reference)[:12]}"


def _of_transformers(folder: Path, subject: EvalContext) -> tuple[Embeds, str]:
    from kineograph.text.clip_pretrained import PretrainedClip

    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise MetricSkipped(f"{folder} holds no safetensors")
    clip = PretrainedClip(str(folder), None, lambda line: None).to(subject.device)
    return clip, f"{folder.name} {sha256_of(weights[0])[:12]}"
