"""Where moving digits go, and that they go where the caption says."""

import numpy as np
import pytest

from kineograph.core.errors import ConfigError
from kineograph.data.digit_captions import DIRECTIONS, PLACES
from tests.data.opened_digits import centres, clip, source

# motion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "frames", "directions"), [(32, 8, 8), (64, 16, 4), ([32, 56], 8, 8), (32, 17, 8), (32, 2, 8)]
)
def test_the_centre_of_mass_goes_where_the_caption_says(size, frames, directions):
    opened = source(size=size, frames=frames, directions=directions)
    seen = set()
    for index in range(60):
        (figure,) = opened.facts(index)
        way = centres(clip(opened, index))
        begin, whole = way[frames // 2] - way[0], way[-1] - way[0]
        for axis, step in enumerate(DIRECTIONS[figure.direction]):
            if step:
                assert min(begin[axis] * step, whole[axis] * step) > 0.9, (index, figure, way)
            else:
                assert abs(whole[axis]) < 1e-6
        seen.add(figure.direction)
    assert seen == set(list(DIRECTIONS)[:directions])


def test_digits_bounce_and_stay_whole_inside_the_canvas():
    opened = source(size=32, frames=8, channels=1)
    bounced = 0
    for index in range(60):
        pixels = clip(opened, index)
        ink = pixels.astype(int).sum((1, 2, 3))
        assert (ink == ink[0]).all()  # no part of a digit ever leaves
        way = np.diff(centres(pixels), axis=0)
        bounced += bool(((way.max(0) > 0.5) & (way.min(0) < -0.5)).any())
    assert bounced > 10


def test_speed_is_pixels_a_frame_and_must_suit_the_clip():
    opened = source(size=32, frames=8, speed=1, directions=4)
    for index in range(20):
        assert np.allclose(np.abs(np.diff(centres(clip(opened, index)), axis=0)).sum(1), 1)
    with pytest.raises(ConfigError, match=r"data\.speed=9.*use 0\.57 to 2\.86"):
        source(size=32, frames=8, speed=9)
    with pytest.raises(ConfigError, match="too slow"):
        source(size=32, frames=8, speed=0.1)


@pytest.mark.parametrize("frames", [1, 8])
def test_starts_lie_on_the_grid(frames):
    free, gridded = source(size=64, frames=frames), source(size=64, frames=frames, grid=4)

    def starts(opened):
        items = [opened.item(index) for index in range(60)]
        return np.array([opened.canvas.paths(item.facts, item.starts)[0, 0] for item in items])

    assert (starts(gridded) % 4 == 0).all()
    assert not (starts(free) % 4 == 0).all()


@pytest.mark.parametrize(("size", "frames"), [(32, 1), ([32, 56], 1), (32, 8), (64, 9)])
def test_a_grid_without_starts_is_told_which_ones_have_some(size, frames):
    with pytest.raises(ConfigError, match=r"data\.grid=40 leaves no start.*: use 1 to ") as told:
        source(size=size, frames=frames, grid=40)
    ranges = [part.split(" to ") for part in str(told.value).partition(": use ")[2].split(", or")[0].split(", ")]
    named = {grid for part in ranges for grid in range(int(part[0]), int(part[-1]) + 1)}
    assert 1 in named
    for grid in range(1, 40):
        if grid in named:
            opened = source(size=size, frames=frames, grid=grid)
            for item in (opened.item(index) for index in range(40)):
                path = opened.canvas.paths(item.facts, item.starts)
                assert (path[:, 0] % grid == 0).all() and (path >= 0).all() and (path <= opened.canvas.room).all()
        else:
            with pytest.raises(ConfigError, match=rf"data\.grid={grid} "):
                source(size=size, frames=frames, grid=grid)


@pytest.mark.parametrize(("size", "frames"), [(64, 9), ([64, 96], 9), (96, 17)])
def test_without_bouncing_everything_stays_on_the_tokens_grid(size, frames):
    opened = source(size=size, frames=frames, grid=8, speed=2, bounce=False, directions=8)
    seen = set()
    for index in range(80):
        item = opened.item(index)
        path = opened.canvas.paths(item.facts, item.starts)[0]  # T 2
        way = np.array(DIRECTIONS[item.facts[0].direction])
        assert (path == path[0] + 2 * np.arange(frames)[:, None] * way).all()  # straight on, to the last frame
        assert (path[::4] % 8 == 0).all()
        assert (path[::2] % 4 == 0).all()
        assert path.min() >= 0
        assert (path <= opened.canvas.room).all()
        seen.add(tuple(path[0]))
    assert len(seen) > 5


def test_with_bouncing_the_same_clips_do_turn_back():
    turned = 0
    for bounce in (True, False):
        opened = source(size=32, frames=8, speed=1.75, bounce=bounce)
        for index in range(60):
            item = opened.item(index)
            steps = np.diff(opened.canvas.paths(item.facts, item.starts)[0], axis=0)
            back = bool(((steps.max(0) > 0) & (steps.min(0) < 0)).any())
            assert bounce or not back
            turned += back
    assert turned > 10


def test_without_bouncing_the_canvas_must_have_room():
    with pytest.raises(ConfigError, match=r"data\.speed=3\.0 is so fast .*data\.bounce=false.*use 0\.50 to 1\.75"):
        source(size=32, frames=9, speed=3, bounce=False)
    source(size=32, frames=9, speed=1.75, bounce=False)  # the limit itself: from wall to wall
    with pytest.raises(ConfigError, match=r"data\.grid=8 .*lower data\.speed"):
        source(size=32, frames=9, speed=1.5, bounce=False, grid=8)
    for frames in (2, 5, 9, 17, 33):  # the usual speed always fits
        for digits in (1, 2):
            assert source(size=32, frames=frames, digits=digits, bounce=False).canvas.travel <= 20


def test_two_digits_mostly_keep_apart():
    opened = source(size=64, frames=8, digits=2)
    covered = []
    for index in range(100):
        item = opened.item(index)
        paths = opened.canvas.paths(item.facts, item.starts)
        assert paths.min() >= 0
        assert (paths <= opened.canvas.room).all()
        common = np.clip(opened.canvas.side - np.abs(paths[0] - paths[1]), 0, None).prod(-1) / opened.canvas.side**2
        covered.append(common)
        first, second = item.facts
        assert first.digit != second.digit
        assert first.colour != second.colour
    assert np.mean(np.array(covered) > 0.15) < 0.1


@pytest.mark.parametrize("size", [32, 64, [32, 60]])
def test_pictures_show_the_digit_at_its_place(size):
    opened = source(size=size)
    seen = set()
    for index in range(80):
        (figure,) = opened.facts(index)
        light = clip(opened, index)[0].max(0) > 60  # H W
        for axis, cell in enumerate(divmod(PLACES.index(figure.place), 3)):
            inked = np.flatnonzero(light.any(1 - axis))
            room = light.shape[axis] - opened.canvas.side
            at = (inked[0] + inked[-1] + 1 - opened.canvas.side) / 2 / room  # 0 at one wall, 1 at the other
            assert cell / 3 - 0.05 < at < (cell + 1) / 3 + 0.05, (index, figure, at)
        seen.add(figure.place)
    assert seen == set(PLACES)


def test_two_digits_of_a_picture_are_each_at_their_place():
    opened = source(size=64, digits=2)
    for index in range(60):
        item = opened.item(index)
        paths = opened.canvas.paths(item.facts, item.starts)[:, 0]  # figures × 2
        cells = np.floor(3 * (paths + 0.5) / (opened.canvas.room + 1)).astype(int)
        assert [PLACES[3 * row + column] for row, column in cells] == [figure.place for figure in item.facts]
        one, other = item.facts
        assert one.place != other.place


def test_small_canvas_is_refused_with_the_limit():
    with pytest.raises(ConfigError, match="at least 16 pixels"):
        source(size=12)
