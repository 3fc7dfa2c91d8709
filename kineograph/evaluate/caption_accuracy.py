"""Caption accuracy: the share of clips in which every attribute of the prompt is read back right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations

import torch
from torch import Tensor

from kineograph.core import distributed
from kineograph.core.errors import InputError
from kineograph.data.digit_captions import Facts, Figure, parse_caption
from kineograph.data.moving_digits import MovingDigits
from kineograph.evaluate.digit_reader import Reader

ATTRIBUTES = ("digit", "colour", "direction", "place")


@dataclass(frozen=True)
class CaptionScore:
    accuracy: float
    """Share of the clips in which every attribute of the prompt is right, and nothing else is there."""
    rates: dict[str, float]
    """Share of the prompted digits of which this attribute is right; attributes that no prompt names are left out."""
    number: float
    """Share of the clips with as many digits as the prompt asked for."""
    count: int
    right: tuple[bool, ...]
    """Clip by clip: what `accuracy` is the mean of."""


def score(reader: Reader, pixels: Tensor, captions: Sequence[str], chunk: int = 256) -> CaptionScore:
    """B T C H W float in [0, 1], against the prompts they were made for. Attributes that a prompt leaves open count as right."""
    if len(pixels) != len(captions) or not len(captions):
        raise InputError(
            f"{len(pixels)} clips and {len(captions)} captions: caption accuracy needs one caption a clip, and at least one"
        )
    wanted = [facts_of(caption) for caption in captions]
    return compare(wanted, reader.read(pixels, chunk))


def facts_of(caption: str) -> Facts:
    """What a prompt asks for, or an InputError that names the prompt."""
    facts = parse_caption(caption)
    if facts is None:
        raise InputError(
            f"caption {caption!r} cannot be scored: caption accuracy knows moving digits only, in words such as "
            "'a red 3 moves left and a blue 7 moves up' or 'a red 3 at the top left'"
        )
    if len({figure.digit for figure in facts}) < len(facts):
        raise InputError(
            f"caption {caption!r} cannot be scored: it asks for the same digit twice, which the reader cannot tell apart"
        )
    return facts


@dataclass
class Tally:
    """What scores are made of: numbers that can be added up, over batches and processes."""

    count: int = 0
    right: int = 0  # clips in which everything is right
    same_number: int = 0
    asked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ATTRIBUTES, 0))  # prompted digits, by attribute
    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ATTRIBUTES, 0))

    def add(self, wanted: Sequence[Facts], found: Sequence[Facts]) -> list[bool]:
        """→ clip by clip, whether everything is right. Figures are matched so that most attributes agree, whatever their order."""
        right = []
        for facts, reading in zip(wanted, found, strict=True):
            matched = _match(facts, reading)
            everything = len(facts) == len(reading)
            self.same_number += everything
            for figure, seen in zip(facts, matched, strict=True):
                for name in ATTRIBUTES:
                    value = getattr(figure, name)
                    if value is not None:
                        agrees = seen is not None and getattr(seen, name) == value
                        self.asked[name] += 1
                        self.hits[name] += agrees
                        everything = everything and agrees
            right.append(everything)
        self.count += len(right)
        self.right += sum(right)
        return right

    def joined(self, device: torch.device | str) -> Tally:
        """Over all processes."""
        whole = Tally()
        for told in distributed.data_all_gather_object(asdict(self), device):
            other = Tally(**told)
            whole.count += other.count
            whole.right += other.right
            whole.same_number += other.same_number
            for name in ATTRIBUTES:
                whole.asked[name] += other.asked[name]
                whole.hits[name] += other.hits[name]
        return whole

    @property
    def accuracy(self) -> float:
        return self.right / self.count

    @property
    def number(self) -> float:
        return self.same_number / self.count

    @property
    def rates(self) -> dict[str, float]:
        return {name: self.hits[name] / self.asked[name] for name in ATTRIBUTES if self.asked[name]}


def compare(wanted: Sequence[Facts], found: Sequence[Facts]) -> CaptionScore:
    tally = Tally()
    right = tally.add(wanted, found)
    return CaptionScore(tally.accuracy, tally.rates, tally.number, tally.count, tuple(right))


def _match(facts: Facts, reading: Facts) -> tuple[Figure | None, ...]:
    """For each wanted figure the one read in its stead."""
    candidates: list[Figure | None] = [*reading, *[None] * max(0, len(facts) - len(reading))]
    return max(permutations(candidates, len(facts)), key=lambda order: sum(map(_agreement, facts, order)))


def _agreement(figure: Figure, seen: Figure | None) -> float:
    if seen is None:
        return 0.0
    weights = {"digit": 1.5, "colour": 1.0, "direction": 1.0, "place": 1.0}  # a tie goes to the right digit
    return sum(
        weight
        for name, weight in weights.items()
        if getattr(figure, name) is not None and getattr(figure, name) == getattr(seen, name)
    )


def ceiling(source: MovingDigits, reader: Reader, count: int, chunk: int = 256) -> CaptionScore:
    """The reader's own accuracy on the first `count` real items of a source: what a perfect generator would score."""
    wanted: list[Facts] = []
    found: list[Facts] = []
    for first in range(0, count, chunk):
        samples = [source.read(index) for index in range(first, min(first + chunk, count))]
        pixels = torch.stack([sample.pixels for sample in samples]).float() / 255  # type: ignore[misc]
        wanted += [facts_of(sample.caption or "") for sample in samples]
        found += reader.read(pixels, chunk)
    return compare(wanted, found)
