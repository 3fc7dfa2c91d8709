"""CLIP score: the cosine between the embeddings of a caption and of the picture drawn for it; of a clip, the mean over its frames."""

from __future__ import annotations

from typing import ClassVar

import torch
from einops import rearrange, repeat
from torch import Tensor

from kineograph.core import distributed
from kineograph.evaluate.extractor.clip import Embeds, open_clip
from kineograph.evaluate.extractor.registry import quantize_to_8bit
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result

CHUNK = 64  # frames at once


class ClipScore:
    name: ClassVar[str] = "clip_score"
    needs: ClassVar[frozenset[Kind]] = frozenset({"captions", "generated", "real"})

    def __init__(self, clip: Embeds, label: str, subject: EvalContext) -> None:
        self.clip, self.label, self.frames = clip, label, subject.shape.frames
        # of made pictures and of real ones: Σ cosine, number
        self.sums = torch.zeros(2, 2, dtype=torch.float64, device=subject.device)

    @classmethod
    def open(cls, subject: EvalContext) -> ClipScore:
        return cls(*open_clip(subject), subject)

    def update(self, evidence: EvalBatch) -> list[str]:
        assert evidence.captions is not None
        assert evidence.generated is not None
        assert evidence.real is not None
        with torch.no_grad(), torch.autocast(evidence.generated.device.type, enabled=False):
            texts = self.clip.embed_texts(evidence.captions)[0].float()  # B D
            made = self._cosines(texts, evidence.generated)  # B T
            real = self._cosines(texts, evidence.real)
            keep = evidence.frame_mask if evidence.frame_mask is not None else torch.ones_like(real, dtype=torch.bool)
            for row, (values, mask) in enumerate(((made, torch.ones_like(made, dtype=torch.bool)), (real, keep))):
                self.sums[row, 0] += (values * mask).double().sum()
                self.sums[row, 1] += mask.sum()
        return [f"{value:.2f}" for value in made.mean(1).tolist()]

    def _cosines(self, texts: Tensor, clips: Tensor) -> Tensor:
        frames = quantize_to_8bit(
            rearrange(clips, "b t c h w -> (b t) c h w")
        )  # with the channels that they have: a stage knows its own
        images = torch.cat([self.clip.embed_images(part) for part in frames.split(CHUNK)]).float()
        together = (images * repeat(texts.to(images.device), "b d -> (b t) d", t=clips.shape[1])).sum(-1)
        return rearrange(together, "(b t) -> b t", t=clips.shape[1])

    def compute(self) -> Result:
        (made, count), (real, seen) = distributed.all_reduce_(self.sums.clone()).tolist()
        labels = {
            "extractor": self.label,
            "count": int(count),
            "real pictures": round(real / seen, 4),
            "unit": "cosine",
        }
        return Result({"clip_score": made / count}, labels | ({"of": "frames"} if self.frames > 1 else {}))


METRIC = ClipScore
