"""Caption accuracy: the share of generated clips in which a reader finds everything that the prompt names, and nothing else.

The ceiling in its labels is the reader's accuracy on real clips of the same captions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import ClassVar

import torch

from kineograph.core import distributed
from kineograph.core.errors import InputError
from kineograph.data.digit_captions import Facts, Figure, parse_caption
from kineograph.data.moving_digits import MovingDigits
from kineograph.evaluate.digit_reader import WEIGHTS, Reader
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, MetricSkipped, Result

ATTRIBUTES = ("digit", "colour", "direction", "place")


class CaptionAccuracy:
    name: ClassVar[str] = "caption_accuracy"
    needs: ClassVar[frozenset[Kind]] = frozenset({"captions", "generated", "real"})

    def __init__(self, reader: Reader, device: torch.device | str = "cpu") -> None:
        self.reader, self.device = reader, device
        self.generated, self.real = Tally(), Tally()

    @classmethod
    def open(cls, context: EvalContext) -> CaptionAccuracy:
        _parse_prompts(context.captions or [])
        return cls(Reader.load(WEIGHTS, context.device), context.device)

    def update(self, batch: EvalBatch) -> list[str]:
        expected = _parse_prompts(batch.captions or [])
        found = self.reader.read(batch.clips("generated"))
        correct = self.generated.add(expected, found)
        self.real.add(expected, self.reader.read(batch.clips("real")))
        return ["✓" if ok else f"✗ {_abbreviate(facts)}" for ok, facts in zip(correct, found, strict=True)]

    def compute(self) -> Result:
        tally, ceiling = self.generated.all_reduce(self.device), self.real.all_reduce(self.device)
        digest = hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
        values = {"caption_accuracy": tally.accuracy, "number": tally.number, **tally.rates}
        labels = {"ceiling": ceiling.accuracy, "count": tally.count, "extractor": f"reader {digest[:12]}"}
        return Result(values, labels)


def _parse_prompts(captions: list[str]) -> list[Facts]:
    try:
        return [parse_prompt(caption) for caption in captions]
    except InputError as error:
        raise MetricSkipped(str(error)) from None


def parse_prompt(caption: str) -> Facts:
    """The figures that a prompt asks for."""
    facts = parse_caption(caption)
    if facts is None:
        raise InputError(
            f"caption {caption!r} cannot be scored: caption accuracy is for moving digits only, with captions such as "
            "'a red 3 moves left and a blue 7 moves up' or 'a red 3 at the top left'"
        )
    if len({figure.digit for figure in facts}) < len(facts):
        raise InputError(f"caption {caption!r} cannot be scored: the reader cannot tell the same digit twice apart")
    return facts


def _abbreviate(facts: Facts) -> str:
    """`red 3 left`"""
    return ", ".join(
        " ".join(str(part) for part in (f.colour, f.digit, f.direction or f.place) if part is not None) for f in facts
    )


@dataclass
class Tally:
    """Counts that can be summed over batches and processes. Attributes that a prompt leaves open count as correct."""

    count: int = 0
    correct: int = 0  # clips with everything right
    same_number: int = 0  # clips with as many digits as the prompt asks for
    asked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ATTRIBUTES, 0))  # prompted digits, by attribute
    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ATTRIBUTES, 0))

    def add(self, expected: Sequence[Facts], found: Sequence[Facts]) -> list[bool]:
        """→ for each clip, whether everything is right. The order of its figures does not matter."""
        correct = []
        for facts, reading in zip(expected, found, strict=True):
            everything = len(facts) == len(reading)
            self.same_number += everything
            for figure, match in zip(facts, _match_figures(facts, reading), strict=True):
                for name in ATTRIBUTES:
                    value = getattr(figure, name)
                    if value is not None:
                        agrees = match is not None and getattr(match, name) == value
                        self.asked[name] += 1
                        self.hits[name] += agrees
                        everything = everything and agrees
            correct.append(everything)
        self.count += len(correct)
        self.correct += sum(correct)
        return correct

    def all_reduce(self, device: torch.device | str) -> Tally:
        """The sum over all processes."""
        total = Tally()
        for counts in distributed.data_all_gather_object(asdict(self), device):
            other = Tally(**counts)
            total.count += other.count
            total.correct += other.correct
            total.same_number += other.same_number
            for name in ATTRIBUTES:
                total.asked[name] += other.asked[name]
                total.hits[name] += other.hits[name]
        return total

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    @property
    def number(self) -> float:
        return self.same_number / self.count

    @property
    def rates(self) -> dict[str, float]:
        """Attribute → share of the prompted digits with that attribute right; without attributes that no prompt names."""
        return {name: self.hits[name] / self.asked[name] for name in ATTRIBUTES if self.asked[name]}


def _match_figures(facts: Facts, reading: Facts) -> tuple[Figure | None, ...]:
    """For each expected figure the one read in its place, so that most attributes agree; None: no figure is left."""
    candidates: list[Figure | None] = [*reading, *[None] * max(0, len(facts) - len(reading))]
    return max(permutations(candidates, len(facts)), key=lambda order: sum(map(_count_agreements, facts, order)))


def _count_agreements(figure: Figure, match: Figure | None) -> float:
    if match is None:
        return 0.0
    weights = {"digit": 1.5, "colour": 1.0, "direction": 1.0, "place": 1.0}  # the right digit wins a tie
    return sum(
        weight
        for name, weight in weights.items()
        if getattr(figure, name) is not None and getattr(figure, name) == getattr(match, name)
    )


def measure_ceiling(source: MovingDigits, reader: Reader, count: int, chunk: int = 256) -> Tally:
    """The reader's accuracy on the first `count` real items of a source: a perfect generator's score."""
    tally = Tally()
    for first in range(0, count, chunk):
        samples = [source.read(index) for index in range(first, min(first + chunk, count))]
        pixels = torch.stack([sample.pixels for sample in samples]).float() / 255  # type: ignore[misc]
        tally.add([parse_prompt(sample.caption or "") for sample in samples], reader.read(pixels, chunk))
    return tally


METRIC = CaptionAccuracy
