"""Caption accuracy: the share of generated clips in which a reader finds everything that the prompt names, and nothing else.

The ceiling in its labels is the reader's accuracy on real clips of the same captions, where there are any; chance is
its accuracy on real clips of other captions, which is what a model that does not read its prompt can reach.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import ClassVar

import torch

from kineograph.core import distributed
from kineograph.core.errors import InputError
from kineograph.data.digit_captions import Facts, Figure, parse_caption
from kineograph.evaluate.digit_reader import WEIGHTS, Reader
from kineograph.evaluate.metric_api import EvalBatch, EvalContext, Kind, MetricSkipped, Result

ATTRIBUTES = ("digit", "colour", "direction", "place")


class CaptionAccuracy:
    name: ClassVar[str] = "caption_accuracy"
    needs: ClassVar[frozenset[Kind]] = frozenset({"captions", "generated"})

    def __init__(self, reader: Reader, device: torch.device | str = "cpu") -> None:
        self.reader, self.device = reader, device
        self.generated, self.real, self.other = Tally(), Tally(), Tally()
        self._last: list[Facts] = []  # what the last caption asked for

    @classmethod
    def open(cls, context: EvalContext) -> CaptionAccuracy:
        parse_prompts(context.captions or [])
        return cls(Reader.load(WEIGHTS, context.device), context.device)

    def update(self, batch: EvalBatch) -> list[str]:
        expected = parse_prompts(batch.captions or [])
        found = self.reader.read(batch.clips("generated"))
        correct = self.generated.add(expected, found)
        if batch.real is not None:  # prompts of a file have no real clips
            read = self.reader.read(batch.real)
            self.real.add(expected, read)
            shifted = [*self._last, *expected[:-1]]  # each clip with the caption before its own
            self.other.add(shifted, read[len(read) - len(shifted) :])
            self._last = expected[-1:]
        return ["✓" if ok else f"✗ {_abbreviate(facts)}" for ok, facts in zip(correct, found, strict=True)]

    def compute(self) -> Result:
        tally, ceiling = self.generated.all_reduce(self.device), self.real.all_reduce(self.device)
        digest = hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
        values = {"caption_accuracy": tally.accuracy, "number": tally.number, **tally.rates}
        labels = {"count": tally.count, "extractor": f"reader {digest[:12]}"}
        bounds = {"ceiling": ceiling.accuracy} if ceiling.count else {}
        other = self.other.all_reduce(self.device)
        return Result(values, bounds | ({"chance": other.accuracy} if other.count else {}) | labels)


def parse_prompts(captions: list[str]) -> list[Facts]:
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


class Tally:
    """Counts that can be summed over batches and processes. Attributes that a prompt leaves open count as correct."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, expected: Sequence[Facts], found: Sequence[Facts]) -> list[bool]:
        """→ for each clip, whether everything is right. The order of its figures does not matter."""
        correct = []
        for facts, reading in zip(expected, found, strict=True):
            everything = len(facts) == len(reading)
            self.counts["same number"] += everything
            for figure, match in zip(facts, _match_figures(facts, reading), strict=True):
                for name in ATTRIBUTES:
                    value = getattr(figure, name)
                    if value is not None:
                        agrees = match is not None and getattr(match, name) == value
                        self.counts[f"{name} asked"] += 1
                        self.counts[f"{name} right"] += agrees
                        everything = everything and agrees
            correct.append(everything)
        self.counts["clips"] += len(correct)
        self.counts["everything right"] += sum(correct)
        return correct

    def all_reduce(self, device: torch.device | str) -> Tally:
        """The sum over all processes."""
        total = Tally()
        for counts in distributed.data_all_gather_object(self.counts, device):
            total.counts.update(counts)
        return total

    @property
    def count(self) -> int:
        return self.counts["clips"]

    @property
    def accuracy(self) -> float:
        return self.counts["everything right"] / self.count

    @property
    def number(self) -> float:
        return self.counts["same number"] / self.count

    @property
    def rates(self) -> dict[str, float]:
        """Attribute → share of the prompted digits with that attribute right; without attributes that no prompt names."""
        counts = self.counts
        return {name: counts[f"{name} right"] / n for name in ATTRIBUTES if (n := counts[f"{name} asked"])}


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


METRIC = CaptionAccuracy
