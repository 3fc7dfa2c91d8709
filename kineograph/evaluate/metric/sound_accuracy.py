"""Sound accuracy of moving digits: whether the pitch is that of the prompted digit, and whether clicks and bounces go together.

`pitch_accuracy`: the share of generated clips whose tone is that of the digit. `click_accuracy`: the share in which every click lies
within one frame of a bounce that is seen, and every bounce within one frame of a click. The ceilings in the labels are the same
numbers of real clips.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import ClassVar

import torch
from torch import Tensor

from kineograph.core import distributed
from kineograph.data.digit_captions import parse_caption
from kineograph.data.digit_sound import PITCHES
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, MetricSkipped, Result
from kineograph.evaluate.sound_reader import find_bounces, find_clicks, read_pitch

TOLERANCE = 0.03  # of a pitch: half of the smallest step between two digits
NEAR = 1.0  # frames between a click and its bounce


class SoundAccuracy:
    name: ClassVar[str] = "sound_accuracy"
    needs: ClassVar[frozenset[Kind]] = frozenset({"captions", "generated", "clips", "sound"})

    def __init__(self, rate: int, fps: float, device: torch.device | str = "cpu") -> None:
        self.rate, self.fps, self.device = rate, fps, device
        self.counts: Counter[str] = Counter()

    @classmethod
    def open(cls, context: EvalContext) -> SoundAccuracy:
        for caption in context.captions or []:
            parse_digit(caption)
        assert context.shape.sample_rate is not None
        return cls(context.shape.sample_rate, context.shape.fps, context.device)

    def update(self, batch: EvalBatch) -> list[str]:
        digits = [parse_digit(caption) for caption in batch.captions or []]
        assert batch.sound is not None
        remarks = []
        for digit, pixels, sound in zip(digits, batch.clips("generated"), batch.sound, strict=True):
            pitch, bounced = self._judge("drawn", digit, pixels, sound)
            remarks.append(f"{'♪' if pitch else 'wrong pitch'} {'✓' if bounced else 'wrong clicks'}")
        if batch.real is not None and batch.real_sound is not None:
            lengths = batch.mask("real").sum(1).tolist()
            for digit, pixels, sound, length in zip(digits, batch.real, batch.real_sound, lengths, strict=True):
                self._judge("real", digit, pixels[:length], sound[:length])
        return remarks

    def _judge(self, kind: str, digit: int, pixels: Tensor, sound: Tensor) -> tuple[bool, bool]:
        """Count a clip, T C H W with T S. → whether its pitch is right, and whether its clicks are"""
        sound, bounces = sound.cpu(), find_bounces(pixels)
        right_pitch = find_digit(read_pitch(sound, self.rate)) == digit
        clicks = [click * self.fps for click in find_clicks(sound, self.rate)]
        right_clicks = match_times(clicks, bounces)
        found = {"clips": 1, "pitch": right_pitch, "clicks": right_clicks, "bounced": bool(bounces)}
        found["clicks where bounced"] = right_clicks and bool(bounces)
        for name, value in found.items():
            self.counts[f"{kind} {name}"] += value
        return right_pitch, right_clicks

    def compute(self) -> Result:
        total: Counter[str] = Counter()
        for counts in distributed.data_all_gather_object(self.counts, self.device):
            total.update(counts)
        values = {
            "pitch_accuracy": total["drawn pitch"] / total["drawn clips"],
            "click_accuracy": total["drawn clicks"] / total["drawn clips"],
            "bounced": total["drawn bounced"] / total["drawn clips"],
        }
        if total["drawn bounced"]:
            values["click_accuracy_where_bounced"] = total["drawn clicks where bounced"] / total["drawn bounced"]
        labels: dict[str, float] = {"count": total["drawn clips"]}
        if total["real clips"]:
            labels |= {
                f"ceiling of {name}": total[f"real {name}"] / total["real clips"] for name in ("pitch", "clicks")
            }
        return Result(values, labels)


def parse_digit(caption: str) -> int:
    """The digit that a prompt asks for."""
    facts = parse_caption(caption)
    if facts is None or len(facts) != 1:
        raise MetricSkipped(
            f"caption {caption!r} cannot be scored: sound accuracy is for one moving digit, with captions such as 'a red 3 moves left'"
        )
    return facts[0].digit


def find_digit(pitch: float | None) -> int | None:
    """The digit whose pitch is near; None: of none."""
    if pitch is None:
        return None
    distances = [abs(math.log(pitch / hertz)) for hertz in PITCHES]
    nearest = min(distances)
    return distances.index(nearest) if nearest < TOLERANCE else None


def match_times(clicks: list[float], bounces: list[float]) -> bool:
    """Whether each click is within a frame of a bounce, and each bounce of a click; both in frames."""
    pairs = ((clicks, bounces), (bounces, clicks))
    return all(any(abs(a - b) <= NEAR for b in theirs) for mine, theirs in pairs for a in mine)


METRIC = SoundAccuracy
