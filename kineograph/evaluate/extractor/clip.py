"""The CLIP of the CLIP score: the chosen one (a stage of any run, a transformers folder), else the run's own."""

from __future__ import annotations

from pathlib import Path

from kineograph.core.capabilities import SupportsEmbedding
from kineograph.core.registry import find_task
from kineograph.core.safe_unpickle import sha256_of
from kineograph.evaluate.metric_api import EvalContext, MetricSkipped, WeightsMissing
from kineograph.stage.load import StageLoader
from kineograph.train import checkpoint


def open_clip(context: EvalContext) -> tuple[SupportsEmbedding, str]:
    """→ the CLIP and its label"""
    value, stages = context.extractors.chosen.get("clip_score"), context.stages
    if value is None:
        if stages is not None:
            for name, stage in stages.run.config()["stages"].items():
                trained = checkpoint.saved_steps(stages.run.checkpoints(name))
                if trained and issubclass(find_task(stage["task"]), SupportsEmbedding):
                    return _load_stage(stages, name)
        raise WeightsMissing(
            "the run has no trained clip stage: name one of another run (--extractor clip_score=runs/x/clip), or a folder of "
            "transformers with a CLIP (--extractor clip_score=FOLDER)"
        )
    folder = Path(value)
    if (folder / "config.json").is_file():
        return _load_transformers(folder, context)
    if stages is None or "/" not in value:
        raise MetricSkipped(f"--extractor clip_score={value} is neither a folder of transformers nor RUN/STAGE")
    return _load_stage(stages, value)


def _load_stage(stages: StageLoader, reference: str) -> tuple[SupportsEmbedding, str]:
    task = stages.load(reference)
    if not isinstance(task, SupportsEmbedding):
        raise MetricSkipped(f"stage {reference} gives no embeddings: name one whose task is clip")
    return task, f"clip stage {reference} {stages.digest(reference)[:12]}"


def _load_transformers(folder: Path, context: EvalContext) -> tuple[SupportsEmbedding, str]:
    from kineograph.text.clip_pretrained import PretrainedClip

    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise MetricSkipped(f"{folder} holds no safetensors")
    clip = PretrainedClip(str(folder), None, lambda line: None).to(context.device)
    return clip, f"{folder.name} {sha256_of(weights[0])[:12]}"
