"""What `kineo data check` finds in a folder: counts, measurements and problems, and the lines that it prints."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kineograph.data.buckets import MediaInfo
from kineograph.data.captions import Problem, Span

_LISTED = 5  # problems of one kind


class MemberPlace(NamedTuple):
    """Where the image or clip of a sample lies in a tar."""

    file: str  # below the folder
    member: str
    offset: int | None  # None: the tar is compressed
    size: int


class ArrayPlace(NamedTuple):
    """An item of an array."""

    file: str  # below the folder
    array: str | None  # its name within a .npz
    layout: str
    item: int


class CheckedItem(NamedTuple):
    """An image, a clip, a captioned span of one, a sample of a tar, or an item of an array."""

    name: str  # of its file, below the folder
    info: MediaInfo | None  # None: it cannot be read
    captions: tuple[str, ...]
    span: Span | None = None  # the part of a clip
    place: MemberPlace | ArrayPlace | None = None  # inside its file


@dataclass
class Report:
    """Counts, measurements and problems. `kineo data check` exits with 1 if there are problems."""

    path: Path
    """The folder that paths in it are relative to."""
    title: str
    """What was checked: the folder, or a file in it."""
    kinds: Counter[str] = field(default_factory=Counter)
    media: list[MediaInfo] = field(default_factory=list)
    items: list[CheckedItem] = field(default_factory=list)
    """Images and clips; captioned spans stand instead of their clip."""
    packed: list[CheckedItem] = field(default_factory=list)
    """Samples of tars and items of arrays."""
    captions: list[str] = field(default_factory=list)
    sided: int = 0
    """Captions, also of shards, that say left or right."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.kinds.values())

    def lines(self, everything: bool = False) -> list[str]:
        """What was found, for a person. More than a few problems of one kind are shortened, unless `everything` is asked for."""
        lines = [f"{self.title}: {_count_kinds(self.kinds) or 'nothing to train on'}", *self.notes]
        if self.media:
            lines += [
                _format_range("width", [media.width for media in self.media]),
                _format_range("height", [media.height for media in self.media]),
                _format_range("aspect", [media.width / media.height for media in self.media], ".2f"),
            ]
        clips = [media for media in self.media if media.seconds]
        if clips:
            lines += [
                _format_range("clip frames", [clip.frames for clip in clips]),
                _format_range("clip seconds", [clip.seconds for clip in clips], ".2f"),
                _format_range("clip fps", [clip.frames / clip.seconds for clip in clips], ".2f"),
            ]
        if any(kind.startswith(("images", "clips")) for kind in self.kinds):  # notes describe arrays and shards
            lines.append(self._captions_line())
        if self.sided:
            lines.append(
                f"sides: {self.sided} captions say left or right; leave data.flip at 0, which would mirror the pictures only"
            )
        lines.append(f"{len(self.problems)} problems" if len(self.problems) != 1 else "1 problem")
        return lines + _list_problems(self.problems, everything)

    def _captions_line(self) -> str:
        texts = self.captions
        if not texts:
            return "captions: none (fine for a tokenizer; a stage that reads text needs them)"
        words = [len(text.split()) for text in texts]
        repeated = len(texts) - len(set(texts))
        return (
            f"captions: {len(texts)} of {len(self.items)} ({len(self.items) - len(texts)} missing), {repeated} repeated, "
            f"words {min(words)} to {max(words)} (median {statistics.median(words):g})"
        )


def _count_kinds(kinds: Counter[str]) -> str:
    """`12 images (png), 3 clips (2 mp4, 1 gif)` of kinds such as `images (png)`."""
    endings: dict[str, list[tuple[str, int]]] = {}
    for kind, count in kinds.most_common():
        noun, _, ending = kind.removesuffix(")").partition(" (")
        endings.setdefault(noun, []).append((ending, count))
    texts = []
    for noun, counted in endings.items():
        total = sum(count for _, count in counted)
        listed = ", ".join(f"{count} {ending}" for ending, count in counted) if len(counted) > 1 else counted[0][0]
        texts.append(f"{total} {noun if total != 1 else noun.removesuffix('s')} ({listed})")
    return ", ".join(texts)


def _list_problems(problems: Sequence[Problem], everything: bool) -> list[str]:
    """A line per problem; those with the same reason together, and only the first few of them."""
    reasons: dict[str, list[str]] = {}
    for path, reason in problems:
        reasons.setdefault(reason, []).append(path)
    lines = []
    for reason, paths in reasons.items():
        shown = paths if everything or len(paths) <= _LISTED else paths[: _LISTED - 1]
        lines += [f"  {path}: {reason}" for path in shown]
        if len(shown) < len(paths):
            lines.append(f"  … and {len(paths) - len(shown)} more: {reason} (--all lists them)")
    return lines


def _format_range(name: str, values: list[float] | list[int], form: str = "g") -> str:
    return f"{name}: {min(values):{form}} to {max(values):{form}}, median {statistics.median(values):{form}}"
