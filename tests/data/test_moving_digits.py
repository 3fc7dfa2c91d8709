import itertools

import numpy as np
import pytest

from kineograph.core.errors import ConfigError
from kineograph.core.registry import find_source
from kineograph.data import digit_glyphs
from kineograph.data.digit_captions import COLOURS, DIRECTIONS, PLACES, Figure, parse_caption
from kineograph.data.moving_digits import ENDLESS, MovingDigits, MovingDigitsConfig, is_kept_out
from tests.data.opened_digits import captions_for, clip, source

# the source ------------------------------------------------------------------------------------------------------


def test_is_found_by_name():
    assert find_source("moving-digits") is MovingDigits


def test_items_depend_on_index_split_and_config_alone():
    one, again, other_split = (
        source(frames=4),
        MovingDigits.open(MovingDigitsConfig(frames=4), "train", seed=7),
        source("validation", frames=4),
    )
    for index in (0, 5, 2**39):
        first, second = one.read(index, np.random.default_rng(1)), again.read(index, np.random.default_rng(2))
        assert (first.pixels == second.pixels).all()
        assert first.caption == second.caption == one.caption(index)
    assert any(one.caption(index) != other_split.caption(index) for index in range(5))
    assert len({one.caption(index) for index in range(50)}) > 40
    assert one.identity(3) != other_split.identity(3)


def test_size_does_not_change_what_is_told_or_shown():
    small, large = source(size=32, frames=8), source(size=[64, 96], frames=8)
    for index in range(20):
        assert small.item(index).glyphs == large.item(index).glyphs
        assert small.caption(index) == large.caption(index)


@pytest.mark.parametrize(
    "keys",
    [
        {"size": 32, "frames": 8},
        {"size": [48, 32], "frames": 16, "digits": 2},
        {"size": [20, 70], "frames": 3, "digits": 2, "channels": 4},
        {"size": 64, "frames": 1, "digits": 2},
        {"size": 16, "frames": 5, "channels": 1},
        {"size": [40, 33], "frames": 49, "channels": 2},
    ],
)
def test_any_size_length_and_channels(keys):
    opened = source(**keys)
    height, width = opened.config.size
    channels = opened.config.channels
    for index in range(10):
        pixels = clip(opened, index)
        assert pixels.shape == (keys["frames"], channels, height, width)
        assert pixels.dtype == np.uint8
        ink = pixels[:, : channels - (channels % 2 == 0)]
        assert (ink.max((1, 2, 3)) > 120).all()
        assert (ink.min((1, 2, 3)) == 0).all()
        if channels % 2 == 0:
            assert (pixels[:, -1] == 255).all()


def test_fps_travels_with_the_clip():
    assert source(frames=4, fps=12).read(0).fps == 12
    assert source(frames=4).read(0).fps == 8


def test_count_limits_the_splits():
    assert len(source()) == ENDLESS
    assert len(source(count=200)) == 200
    assert len(source("validation", count=200, validation=0.1)) == 20
    with pytest.raises(ConfigError, match=r"data\.test=0\.0"):
        len(source("test", count=200))


def test_without_a_validation_share_validation_is_training_data():
    train, validation = source(frames=4), source("validation", frames=4, validation=0)
    assert all(train.caption(index) == validation.caption(index) for index in range(10))


# colour ----------------------------------------------------------------------------------------------------------


def test_colour_is_painted_and_told():
    opened = source(size=32, frames=2)
    for index in range(30):
        (figure,) = opened.facts(index)
        pixels = clip(opened, index).reshape(2, 3, -1)
        brightest = pixels[0][:, pixels[0].astype(int).sum(0).argmax()]
        assert np.abs(brightest.astype(int) - COLOURS[figure.colour]).max() <= 25
        assert figure.colour in opened.caption(index)


def test_gray_has_no_colour_and_refuses_one():
    for opened in (source(channels=1, frames=4), source(coloured=False, frames=4)):
        pixels = clip(opened, 0)
        assert (pixels == pixels[:, :1]).all()
        assert not any(colour in opened.caption(index) for index in range(20) for colour in COLOURS)
    with pytest.raises(ConfigError, match=r"data\.coloured=true needs data\.channels=3"):
        source(channels=1, coloured=True)


# stills ----------------------------------------------------------------------------------------------------------


def test_a_share_of_the_training_items_are_pictures():
    opened, clips = source(frames=5, stills=0.3), source(frames=5)
    pictures = 0
    for index in range(300):
        sample, facts = opened.read(index), opened.facts(index)
        still = sample.pixels.shape[0] == 1
        pictures += still
        assert sample.pixels.shape[0] in (1, 5)
        assert sample.caption == opened.caption(index)
        assert parse_caption(sample.caption) == facts
        assert all((figure.place is not None) == still == (figure.direction is None) for figure in facts)
        if not still:  # clips are those that there are without stills
            assert (sample.pixels == clips.read(index).pixels).all()
            assert sample.caption == clips.caption(index)
    assert 60 < pictures < 120


def test_stills_depend_on_the_index_alone():
    one, again = source(frames=5, stills=0.5), source(frames=5, stills=0.5)
    for index in (3, 7, 2**39, 3):
        first, second = one.read(index, np.random.default_rng(1)), again.read(index, np.random.default_rng(2))
        assert first.pixels.shape == second.pixels.shape
        assert (first.pixels == second.pixels).all()
    more = source(frames=5, stills=0.7)  # a larger share keeps what was a still
    for index in range(50):
        if len(one.read(index).pixels) == 1:
            assert (more.read(index).pixels == one.read(index).pixels).all()


@pytest.mark.parametrize("keys", [{}, {"digits": 2, "size": 48}])
def test_stills_keep_out_what_pictures_keep_out(keys):
    opened = source(frames=5, stills=0.5, **keys)
    stills = [index for index in range(500) if opened.facts(index)[0].place]
    assert len(stills) > 150
    assert not any(is_kept_out(opened.facts(index)) for index in range(500))
    for index in stills[:100]:
        assert opened.caption(index) in captions_for(opened.facts(index), "train")
    with_all = source(frames=5, stills=0.5, kept_out=0.0, **keys)
    assert any(is_kept_out(with_all.facts(index)) for index in range(500) if with_all.facts(index)[0].place)


def test_stills_show_the_digit_at_its_place():
    opened = source(frames=5, stills=0.9, size=32)
    for index in range(60):
        item = opened.item(index)
        if item.facts[0].place is None:
            continue
        row, column = item.scenes.canvas.paths(item.facts, item.starts)[0, 0]
        cells = np.floor(3 * (np.array([row, column]) + 0.5) / (item.scenes.canvas.room + 1)).astype(int)
        assert PLACES[3 * cells[0] + cells[1]] == item.facts[0].place
        light = clip(opened, index)[0].max(0)
        side = item.scenes.canvas.side
        assert light[row : row + side, column : column + side].sum() == light.sum() > 0


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_splits_stay_clips(split):
    opened = source(split, frames=5, stills=0.9, test=0.1)
    assert all(opened.read(index).pixels.shape[0] == 5 for index in range(40))
    assert all(opened.facts(index)[0].direction for index in range(40))


def test_validation_on_training_data_stays_clips_too():
    opened = source("validation", frames=5, stills=0.9, validation=0)
    assert all(opened.facts(index)[0].direction for index in range(40))
    assert not any(is_kept_out(opened.facts(index)) for index in range(200))


def test_stills_need_clips_to_stand_beside():
    with pytest.raises(ConfigError, match=r"data\.stills=0\.2 .*data\.frames=1"):
        source(frames=1, stills=0.2)
    with pytest.raises(ConfigError, match=r"data\.stills"):
        source(frames=5, stills=1.0)
    with pytest.raises(ConfigError, match=r"data\.grid=5 leaves no start for some motion or place"):
        source(frames=5, stills=0.2, grid=5, size=32)  # room for motions, not for nine places
    source(frames=5, grid=5, size=32)


# splits ----------------------------------------------------------------------------------------------------------


def test_glyph_images_are_disjoint_and_real():
    images, labels = digit_glyphs.load_glyphs()
    train, held = digit_glyphs.list_glyphs(False), digit_glyphs.list_glyphs(True)
    for digit in range(10):
        assert not set(train[digit]) & set(held[digit])
        assert set(labels[train[digit]]) == set(labels[held[digit]]) == {digit}
        assert len(held[digit]) >= 15
    assert sum(map(len, train)) + sum(map(len, held)) == len(images) == 1797
    used = {
        glyph for split in ("validation", "test") for index in range(200) for glyph in source(split).item(index).glyphs
    }
    assert not used & set(np.concatenate(train))


def test_few_glyphs_limit_training_alone():
    train = {glyph for index in range(300) for glyph in source(glyphs=3).item(index).glyphs}
    held = {glyph for index in range(300) for glyph in source("validation", glyphs=3).item(index).glyphs}
    assert len(train) == 30
    assert len(held) > 100
    assert held <= set(np.concatenate(digit_glyphs.list_glyphs(True)))


def test_kept_out_combinations_are_a_tenth_and_cover_no_pair():
    figures = [Figure(*facts) for facts in itertools.product(range(10), COLOURS, DIRECTIONS)]
    figures += [
        Figure(digit, colour, None, place) for digit, colour, place in itertools.product(range(10), COLOURS, PLACES)
    ]
    shown = [figure for figure in figures if not is_kept_out((figure,))]
    assert 0.07 < 1 - len(shown) / len(figures) < 0.13

    def pairs(some):
        names = ("digit", "colour", "direction", "place")
        return {
            (a, getattr(f, a), b, getattr(f, b))
            for f in some
            for a, b in itertools.combinations(names, 2)
            if getattr(f, a) is not None and getattr(f, b) is not None
        }

    assert pairs(shown) == pairs(figures)


@pytest.mark.parametrize("directions", [4, 8])
def test_without_colour_every_digit_and_every_motion_is_still_shown(directions):
    figures = [Figure(digit, None, motion) for digit in range(10) for motion in list(DIRECTIONS)[:directions]]
    shown = [figure for figure in figures if not is_kept_out((figure,))]
    assert len(shown) < len(figures)
    assert {figure.digit for figure in shown} == set(range(10))
    assert len({figure.direction for figure in shown}) == directions


@pytest.mark.parametrize(
    "keys", [{"frames": 8}, {"frames": 1}, {"frames": 8, "digits": 2}, {"frames": 8, "channels": 1, "directions": 4}]
)
def test_training_never_shows_what_is_kept_out_and_half_of_validation_does(keys):
    train, validation = source(**keys), source("validation", **keys)
    assert not any(is_kept_out(train.facts(index)) for index in range(600))
    share = np.mean([is_kept_out(validation.facts(index)) for index in range(600)])
    assert 0.4 < share < 0.6


def test_kept_out_share_can_be_changed():
    everything = source(frames=8, kept_out=0.0)
    assert any(is_kept_out(everything.facts(index)) for index in range(200))


def test_keeping_out_too_much_is_refused():
    with pytest.raises(ConfigError, match=r"data\.kept_out=0\.5"):
        source(frames=8, channels=1, directions=4, kept_out=0.5)


# sketches --------------------------------------------------------------------------------------------------------


def test_a_sketch_lies_under_the_digits_and_knows_no_colours():
    plain, sketched = source(frames=4), source(frames=4, sketch=True)
    for index in range(8):
        sample = sketched.read(index)
        sketch = sample.extra["sketch"].numpy()
        assert sketch.shape == (4, 1, 32, 32) and set(np.unique(sketch)) == {0, 255}
        assert (sample.pixels.numpy() == clip(plain, index)).all()
        bright = sample.pixels.numpy().max(1, keepdims=True)
        assert bright[sketch == 255].min() > bright[sketch == 0].max() * 0.9
    assert plain.read(0).extra == {}
    assert sketched.fields == {"pixels", "sketch"} and plain.fields == {"pixels"}


def test_two_digits_are_told_apart_in_the_order_of_the_caption():
    opened = source(frames=3, size=64, digits=2, sketch=True)
    for index in range(6):
        item, sketch = opened.item(index), opened.read(index).extra["sketch"].numpy()[:, 0]
        assert set(np.unique(sketch)) == {0, 128, 255}
        paths = item.scenes.canvas.paths(item.facts, item.starts)
        middle = item.scenes.canvas.side / 2
        for ink, path in zip((255, 128), paths, strict=True):
            rows, columns = np.nonzero(sketch[0] == ink)
            assert abs(rows.mean() - path[0, 0] - middle) < middle / 2
            assert abs(columns.mean() - path[0, 1] - middle) < middle / 2


def test_what_shows_sketches_shows_those_of_the_clips():
    clips, sketches = source(frames=4, sketch=True), source(frames=4, shows="sketch")
    gray = source(frames=4, shows="sketch", channels=1)
    for index in range(4):
        wanted = clips.read(index).extra["sketch"]
        assert (sketches.read(index).pixels == wanted).all()  # in three equal channels
        assert sketches.caption(index) == clips.caption(index)
    assert gray.read(0).pixels.shape == (4, 1, 32, 32)
    assert sketches.read(0).extra == {}


def test_sketches_of_stills_are_padded_with_them():
    from kineograph.data.loader import Loader

    opened = source(frames=4, stills=0.5, sketch=True)
    for batch in Loader(opened, seed=0, batch_size=2, workers=0).ordered_batches(range(12), 2):
        assert batch.extra["sketch"].shape == (2, 4, 1, 32, 32)
        assert batch.pixels.shape[:2] == (2, 4)
