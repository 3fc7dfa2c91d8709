"""CLIP score: cosine between a caption's embedding and that of its sample, mean over frames."""

from __future__ import annotations

from typing import ClassVar

import torch
from einops import rearrange, repeat
from torch import Tensor

from kineograph.core import distributed
from kineograph.core.capabilities import SupportsEmbedding
from kineograph.evaluate.extractor.clip import open_clip
from kineograph.evaluate.extractor.registry import quantize_to_8bit
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, Result

CHUNK = 64  # frames at once


class ClipScore:
    name: ClassVar[str] = "clip_score"
    needs: ClassVar[frozenset[Kind]] = frozenset({"captions", "generated"})

    def __init__(self, clip: SupportsEmbedding, label: str, context: EvalContext) -> None:
        self.clip, self.label, self.frames = clip, label, context.shape.frames
        # (generated, real) × (Σ cosine, frames)
        self.sums = torch.zeros(2, 2, dtype=torch.float64, device=context.device)

    @classmethod
    def open(cls, context: EvalContext) -> ClipScore:
        return cls(*open_clip(context), context)

    def update(self, batch: EvalBatch) -> list[str]:
        assert batch.captions is not None
        with torch.no_grad(), torch.autocast(self.sums.device.type, enabled=False):
            texts = self.clip.embed_texts(batch.captions)[0].float()  # B D
            generated = self._cosines(texts, batch.clips("generated"))  # B T
            found = [(generated, batch.mask("generated"))]
            if batch.real is not None:  # prompts of a file have no real pictures
                found.append((self._cosines(texts, batch.real), batch.mask("real")))
            for row, (cosines, mask) in enumerate(found):
                self.sums[row, 0] += (cosines * mask).double().sum()
                self.sums[row, 1] += mask.sum()
        return [f"{value:.2f}" for value in generated.mean(1).tolist()]

    def _cosines(self, texts: Tensor, clips: Tensor) -> Tensor:
        # All channels: a clip stage may have other than three.
        frames = quantize_to_8bit(rearrange(clips, "b t c h w -> (b t) c h w"))
        images = torch.cat([self.clip.embed_images(chunk) for chunk in frames.split(CHUNK)]).float()
        cosines = (images * repeat(texts.to(images.device), "b d -> (b t) d", t=clips.shape[1])).sum(-1)
        return rearrange(cosines, "(b t) -> b t", t=clips.shape[1])

    def compute(self) -> Result:
        (generated, count), (real, seen) = distributed.all_reduce_(self.sums.clone()).tolist()
        labels = {
            "extractor": self.label,
            "count": int(count),
            **({"real pictures": round(real / seen, 4)} if seen else {}),
            "unit": "cosine",
        }
        return Result({"clip_score": generated / count}, labels | ({"of": "frames"} if self.frames > 1 else {}))


METRIC = ClipScore
