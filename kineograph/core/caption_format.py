"""How the caption of a training sample is made from the texts of its item: one of several, tags in random order, a template."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_PLACE = "{text}"


def check_template(template: str, known: Sequence[str] = ("text",)) -> None:
    """Refuse a caption template with anything else in braces than the known names; {label[0]} is one of several labels."""
    found = re.findall(r"{([^{}]*)}", template)
    # str.format would also take attributes, and widths of any size.
    unknown = [place for place in found if re.sub(r"^label(\[\d{1,9}\])+$", "label", place) not in known]
    if unknown:
        places = " or ".join(f"{{{name}}}" for name in known)
        raise ValueError(f"{template!r} has {{{unknown[0]}}}: write {places} where the item's own caption belongs")


@dataclass(frozen=True)
class CaptionFormat:
    """Texts of an item → its caption."""

    template: str | None = None  # {text} stands for the item's own text; without it all items get the same caption
    shuffle_tags: bool = False  # put the parts between commas in random order
    draws: bool = False  # in training: draw one of several texts, and the order of tags; else the first, as it is
    blank: bool = False  # an item without text gets the empty caption, which is the null text

    @property
    def needs_text(self) -> bool:
        """Whether an item without text has no caption."""
        return self.template is None or _PLACE in self.template

    def is_plain(self, texts: Sequence[str]) -> bool:
        """Whether the caption is just the item's only text."""
        return len(texts) == 1 and self.template is None and not (self.shuffle_tags and self.draws)

    def format(self, text: str | None) -> str | None:
        """The caption made from one text; None: there is none."""
        if self.template is not None and (text or not self.needs_text):
            return self.template.replace(_PLACE, text or "")
        return text or ("" if self.blank else None)

    def draw(self, texts: Sequence[str], make_rng: Callable[[], np.random.Generator]) -> str | None:
        """The caption of one sample. `make_rng` gives a generator of its own, so that no other draw depends on the captions."""
        text = texts[0] if texts else None
        if self.draws and text is not None and (len(texts) > 1 or self.shuffle_tags):
            rng = make_rng()
            text = texts[int(rng.integers(len(texts)))]
            if self.shuffle_tags:
                tags = [tag.strip() for tag in text.split(",") if tag.strip()]
                text = ", ".join(tags[place] for place in rng.permutation(len(tags)).tolist())
        return self.format(text)


@dataclass(frozen=True)
class Captioning:
    """The caption format of each item of a source; a mix has one per part."""

    formats: tuple[CaptionFormat, ...] = (CaptionFormat(),)
    starts: tuple[int, ...] = (0,)  # first item of each format

    def at(self, index: int) -> CaptionFormat:
        return self.formats[bisect_right(self.starts, index) - 1]

    @property
    def shuffles_tags(self) -> bool:
        return any(each.shuffle_tags and each.draws for each in self.formats)
