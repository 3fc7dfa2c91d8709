"""Captions of moving digits: a small grammar from facts to words, and its exact inverse.

A caption is one wording applied to the facts. Some wordings are held out from training: a tenth of those with the figure first (new
combinations of known words), and all with the figure last. With two figures only a tenth of the latter: a model that never saw this order
must read "to the left goes a 3 and to the right a 5" as a 3 that goes right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from kineograph.core.noise import key_of
from kineograph.data.open_source import Split

COLOURS = {  # names → RGB; far apart, all bright on black
    "red": (255, 56, 56),
    "yellow": (255, 222, 48),
    "green": (56, 218, 78),
    "cyan": (64, 222, 232),
    "blue": (80, 112, 255),
    "magenta": (242, 76, 232),
}
DIRECTIONS = {  # names → (rows, columns) a step; the first four are those of directions=4
    "left": (0, -1),
    "right": (0, 1),
    "up": (-1, 0),
    "down": (1, 0),
    "up left": (-1, -1),
    "up right": (-1, 1),
    "down left": (1, -1),
    "down right": (1, 1),
}
# 3 × 3, by rows
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")


@dataclass(frozen=True)
class Figure:
    """One digit of a clip or image. None: not named (colour) or not applicable (direction, place)."""

    digit: int
    colour: str | None = None
    direction: str | None = None
    place: str | None = None


Facts = tuple[Figure, ...]

# Words -----------------------------------------------------------------------------------------------------------

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_MOVING = ("moves", "is moving", "drifts", "goes", "slides")
_RESTING = ("is", "sits", "stands", "lies", "")
_MOVING_JOINS = (" and ", " while ", ", and ")
_RESTING_JOINS = (" and ", ", and ", "; ")
_DIRECTION_PHRASES = {
    "left": ("left", "to the left", "leftwards"),
    "right": ("right", "to the right", "rightwards"),
    "up": ("up", "to the top", "upwards"),
    "down": ("down", "to the bottom", "downwards"),
    "up left": ("up and left", "to the top left", "upwards and leftwards"),
    "up right": ("up and right", "to the top right", "upwards and rightwards"),
    "down left": ("down and left", "to the bottom left", "downwards and leftwards"),
    "down right": ("down and right", "to the bottom right", "downwards and rightwards"),
}
_PLACE_PHRASES = {
    "top left": ("at the top left", "in the top left corner", "in the upper left"),
    "top": ("at the top", "in the top middle", "at the upper edge"),
    "top right": ("at the top right", "in the top right corner", "in the upper right"),
    "left": ("at the left", "in the left middle", "at the left edge"),
    "centre": ("at the centre", "in the middle", "in the centre"),
    "right": ("at the right", "in the right middle", "at the right edge"),
    "bottom left": ("at the bottom left", "in the bottom left corner", "in the lower left"),
    "bottom": ("at the bottom", "in the bottom middle", "at the lower edge"),
    "bottom right": ("at the bottom right", "in the bottom right corner", "in the lower right"),
}


# Wordings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wording:
    """Indices into the word lists above, and the order of the parts."""

    noun: int  # 0 "a red 3", 1 "the red digit 3", 2 "a 3 in red", 3 "a handwritten red 3"
    spelled: bool  # "three" for "3"
    verb: int
    phrase: int
    order: str  # "first": figure, verb, phrase; "that": with a relative clause; "last": phrase, verb, figure


PLAIN = Wording(noun=0, spelled=False, verb=0, phrase=0, order="first")


@cache
def wordings(split: Split, moving: bool, figures: int = 1) -> tuple[Wording, ...]:
    """The wordings of training, or for the other splits those that training never uses."""
    candidates = [
        Wording(noun, spelled, verb, phrase, order)
        for order, noun, spelled, verb, phrase in product(
            ("first", "that", "last"), range(4), (False, True), range(5), range(3)
        )
        if _is_english(order, phrase, moving or bool(_RESTING[verb]))
    ]
    return tuple(wording for wording in candidates if _is_held_out(wording, figures) != (split == "train"))


def _is_english(order: str, phrase: int, has_verb: bool) -> bool:
    """Refuses "a 3 that at the top" and "left moves a 3", accepts "to the left moves a 3"."""
    return {"first": True, "that": has_verb, "last": phrase == 1}[order]


def _is_held_out(wording: Wording, figures: int) -> bool:
    if wording.order == "last" and figures == 1:
        return True
    if wording == PLAIN:
        return False
    return key_of("wording", wording.noun, wording.spelled, wording.verb, wording.phrase, wording.order) % 10 == 0


def joins(facts: Facts) -> tuple[str, ...]:
    """Conjunctions between two figures; empty for one."""
    if len(facts) == 1:
        return ("",)
    return _MOVING_JOINS if facts[0].direction else _RESTING_JOINS


def write_caption(facts: Facts, wording: Wording = PLAIN, join: str = " and ") -> str:
    """Write a caption for these facts in this wording."""
    return join.join(_clause(figure, wording) for figure in facts)


def _clause(figure: Figure, wording: Wording) -> str:
    noun = _noun(figure, wording)
    if figure.direction:
        verb, phrase = _MOVING[wording.verb], _DIRECTION_PHRASES[figure.direction][wording.phrase]
    elif figure.place:
        verb, phrase = _RESTING[wording.verb], _PLACE_PHRASES[figure.place][wording.phrase]
    else:
        return noun
    order = {"first": (noun, verb, phrase), "that": (noun, "that", verb, phrase), "last": (phrase, verb, noun)}[
        wording.order
    ]
    return " ".join(word for word in order if word)


def _noun(figure: Figure, wording: Wording) -> str:
    number = _NUMBERS[figure.digit] if wording.spelled else str(figure.digit)
    article = "an" if figure.digit == 8 else "a"
    colour = f"{figure.colour} " if figure.colour else ""
    if wording.noun == 0:
        return f"a {colour}{number}" if colour else f"{article} {number}"
    if wording.noun == 1:
        return f"the {colour}digit {number}"
    if wording.noun == 2:
        return f"{article} {number} in {figure.colour}" if colour else f"the number {number}"
    return f"a handwritten {colour}{number}"


# Reading captions ------------------------------------------------------------------------------------------------


def parse_caption(text: str) -> Facts | None:
    """The facts of a caption: the inverse of every wording, slightly more lenient. None: outside this grammar."""
    text = " ".join(text.lower().replace("center", "centre").split()).rstrip(" .")
    grammar = _grammar()
    for count in (1, 2):
        match = grammar[count].fullmatch(text)
        if match:
            figures = [_parse_figure(match.groupdict(), part) for part in range(count)]
            return None if None in figures else tuple(figures)  # type: ignore[arg-type]
    return None


@cache
def _phrases() -> dict[str, tuple[str, str]]:
    """phrase → ("direction" or "place", its name)"""
    directions = {phrase: ("direction", name) for name, phrases in _DIRECTION_PHRASES.items() for phrase in phrases}
    places = {phrase: ("place", name) for name, phrases in _PLACE_PHRASES.items() for phrase in phrases}
    return directions | places


@cache
def _grammar() -> dict[int, re.Pattern[str]]:
    """A pattern for captions of one figure and one for two; the groups of figure i end in _i."""
    join = r"(?: and |, and |, | while |; )"
    return {1: re.compile(_clause_pattern(0)), 2: re.compile(_clause_pattern(0) + join + _clause_pattern(1))}


def _clause_pattern(part: int) -> str:
    colour = "|".join(COLOURS)
    number = "|".join([*_NUMBERS, *"0123456789"])
    phrase = "|".join(sorted(_phrases(), key=len, reverse=True))
    verb = r"(?:is )?(?:moves|moving|drifts|drifting|goes|going|slides|sliding|sits|sitting|stands|standing|lies|lying)"

    def noun(name: str) -> str:
        return (
            rf"(?:an?|the|one) (?:handwritten )?(?:(?P<{name}_colour_{part}>{colour}) )?(?:digit |number )?"
            rf"(?P<{name}_digit_{part}>{number})(?: in (?P<{name}_in_{part}>{colour}))?"
        )

    first = rf"{noun('f')}(?: (?:that )?(?:{verb}|is))?(?: (?P<f_phrase_{part}>{phrase}))?"
    last = rf"(?P<l_phrase_{part}>{phrase}) (?:(?:{verb}|is) )?{noun('l')}"
    return f"(?:{first}|{last})"


def _parse_figure(groups: dict[str, str | None], part: int) -> Figure | None:
    words = {
        name: groups[f"f_{name}_{part}"] or groups[f"l_{name}_{part}"] for name in ("digit", "colour", "in", "phrase")
    }
    if words["colour"] and words["in"]:
        return None  # "a red 3 in blue"
    number = words["digit"]
    assert number is not None  # both orders name a digit
    digit = int(number) if number.isdigit() else _NUMBERS.index(number)
    kind, name = _phrases().get(words["phrase"] or "", ("", ""))
    return Figure(
        digit,
        words["colour"] or words["in"],
        name if kind == "direction" else None,
        name if kind == "place" else None,
    )


def list_motions(moving: bool, directions: int) -> Sequence[str]:
    """Directions of clips, or places of images."""
    return list(DIRECTIONS)[:directions] if moving else PLACES
