"""Captions of moving digits, and reading them back."""

import itertools

import numpy as np
import pytest

from kineograph.data import digit_captions as words
from kineograph.data.digit_captions import COLOURS, DIRECTIONS, PLACES, Figure, parse_caption, wordings
from tests.data.opened_digits import captions_for, source

# captions --------------------------------------------------------------------------------------------------------

SINGLES = [
    *[(Figure(*facts),) for facts in itertools.product(range(10), [None, *COLOURS], DIRECTIONS)],
    *[
        (Figure(digit, colour, None, place),)
        for digit, colour, place in itertools.product(range(10), [None, *COLOURS], PLACES)
    ],
]


def test_every_wording_of_every_single_figure_is_parsed_back():
    for facts in SINGLES[::7]:
        for split in ("train", "validation"):
            for caption in captions_for(facts, split):
                assert parse_caption(caption) == facts, caption
    for facts in SINGLES:
        assert parse_caption(words.write_caption(facts)) == facts


def test_every_wording_of_two_figures_is_parsed_back():
    rng = np.random.default_rng(0)
    for _ in range(12):
        kind = int(rng.integers(2))
        pool = [single for single in SINGLES if bool(single[0].direction) == bool(kind)]
        facts = tuple(pool[int(rng.integers(len(pool)))][0] for _ in range(2))
        for split in ("train", "validation"):
            for caption in captions_for(facts, split):
                assert parse_caption(caption) == facts, caption


def test_wordings_say_different_things_differently():
    captions = [
        caption
        for facts in SINGLES[::11]
        for split in ("train", "validation")
        for caption in captions_for(facts, split)
    ]
    assert len(set(captions)) == len(captions)


def test_parser_is_lenient_with_people_and_strict_with_nonsense():
    assert parse_caption("  A red 3 moves LEFT. ") == (Figure(3, "red", "left"),)
    assert parse_caption("a blue seven moving up") == (Figure(7, "blue", "up"),)
    assert parse_caption("an 8 in the center") == (Figure(8, None, None, "centre"),)
    assert parse_caption("a red 3") == (Figure(3, "red"),)
    for nonsense in (
        "",
        "a cat moves left",
        "a red 3 in blue moves left",
        "a 3 moves sideways",
        "12 moves left",
        "a 3 moves left a 4 moves up",
    ):
        assert parse_caption(nonsense) is None


@pytest.mark.parametrize("moving", [True, False])
def test_held_out_wordings_are_new_but_their_words_are_not(moving):
    train, held = wordings("train", moving), wordings("validation", moving)
    assert not set(train) & set(held)
    assert len(held) > 20
    assert "last" in {w.order for w in held} - {w.order for w in train}  # one figure: a new order of words too
    for part in ("noun", "spelled", "verb", "phrase"):
        assert {getattr(w, part) for w in held} <= {getattr(w, part) for w in train}
    facts = (Figure(8, "red", "up left") if moving else Figure(8, "red", None, "top"),)
    taught = {word for caption in captions_for(facts, "train") for word in caption.split()}
    assert {word for caption in captions_for(facts, "validation") for word in caption.split()} <= taught


@pytest.mark.parametrize("moving", [True, False])
def test_with_two_figures_every_order_is_taught_and_every_order_is_asked(moving):
    train, held = wordings("train", moving, 2), wordings("validation", moving, 2)
    assert not set(train) & set(held)
    assert {w.order for w in train} == {w.order for w in held} == {"first", "that", "last"}


@pytest.mark.parametrize("keys", [{"frames": 8}, {"frames": 1, "digits": 2}])
def test_training_never_uses_a_held_out_wording_and_half_of_validation_does(keys):
    train, validation = source(**keys), source("validation", **keys)
    for index in range(150):
        assert train.caption(index) in captions_for(train.facts(index), "train")
    new = [validation.caption(index) in captions_for(validation.facts(index), "validation") for index in range(150)]
    assert 0.35 < np.mean(new) < 0.65


def test_plain_wordings_are_one():
    for split in ("train", "validation"):
        opened = source(split, frames=8, wordings="plain")
        for index in range(20):
            (figure,) = opened.facts(index)
            phrase = figure.direction.replace(" ", " and ")
            assert opened.caption(index) == f"a {figure.colour} {figure.digit} moves {phrase}"
