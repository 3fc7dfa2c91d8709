"""Sheets: every cell is on the page, at its place, large enough to see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kineograph.media.grids import (
    MAX_SIDE,
    MIN_SIDE,
    make_animated_comparison,
    make_animated_grid,
    make_film_strip,
    make_grid,
    make_titled_strips,
    select_evenly,
    wrap_text,
)


def flat(red: int, frames: int = 1, size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    pixels = torch.zeros(frames, 3, *size, dtype=torch.uint8)
    pixels[:, 0] = red
    return pixels


def area(image, red: int) -> int:
    array = np.asarray(image).astype(int)
    return int(((array[..., 0] == red) & (array[..., 1] == 0)).sum())


def test_grid_shows_every_picture_enlarged():
    cells = [flat(10 + index) for index in range(7)]
    sheet = make_grid(cells)
    assert [area(sheet, 10 + index) for index in range(7)] == [MIN_SIDE * MIN_SIDE] * 7
    assert sheet.width < 3 * (MIN_SIDE + 10)
    assert sheet.height < 3 * (MIN_SIDE + 10)


def test_grid_order_is_reading_order():
    array = np.asarray(make_grid([flat(10 + index) for index in range(4)])).astype(int)[..., 0]
    y, x = zip(*[[axis.mean() for axis in np.nonzero(array == 10 + index)] for index in range(4)])
    assert y[0] == y[1] < y[2] == y[3]
    assert x[0] == x[2] < x[1] == x[3]


def test_enlarging_keeps_pixels_square_and_sharp():
    picture = torch.rand(1, 3, 5, 7)
    array = np.asarray(make_grid([picture]))
    assert len(np.unique(array.reshape(-1, 3), axis=0)) == 5 * 7 + 1  # nothing blended; and the page


def test_large_pictures_are_reduced():
    assert max(make_grid([flat(9, size=(1000, 500))]).size) <= MAX_SIDE + 20


def test_captions_take_room_below_and_leave_ink():
    cells = [flat(0), flat(0)]
    plain, with_text = (
        make_grid(cells),
        make_grid(cells, ["a red 3 moves left and then on and on", "sept « à gauche », 猫"]),
    )
    assert with_text.height > plain.height
    ink = np.asarray(with_text)[plain.height - 5 :]
    assert (ink[:, : MIN_SIDE // 2] < 200).any()
    assert (ink[:, MIN_SIDE + 10 :] < 200).any()
    assert make_grid(cells, ["", None]).size == plain.size


def test_wrap_fits_and_ends_in_an_ellipsis():
    assert wrap_text("", 100) == []
    assert wrap_text("short", 100) == ["short"]
    lines = wrap_text("the quick brown fox jumps over the lazy dog " * 5, 100, 3)
    assert len(lines) == 3
    assert lines[-1].endswith("…")
    assert " ".join(lines).startswith("the quick brown")
    assert all(len(line) < 30 for line in lines)
    assert "".join(wrap_text("a" * 40, 60, 30)) == "a" * 40  # a word that does not fit is broken, not lost
    assert wrap_text("ab", 1, 1) == ["a…"]  # too narrow for anything: ends all the same


def test_a_clip_in_a_still_grid_shows_its_motion():
    clip = torch.cat([flat(10 + t) for t in range(9)])
    sheet = make_grid([clip])
    assert area(sheet, 10) == area(sheet, 18) == MIN_SIDE * MIN_SIDE
    assert sum(area(sheet, 10 + t) > 0 for t in range(9)) == 4


def test_animated_grid_plays_and_holds_the_last_frame():
    long, short = torch.cat([flat(10 + t) for t in range(4)]), torch.cat([flat(20 + t) for t in range(2)])
    page = make_animated_grid([long, short])
    assert page.shape[:2] == (4, 3)
    frames = page.permute(0, 2, 3, 1).numpy()
    assert area(frames[3], 13) == area(frames[3], 21) == MIN_SIDE * MIN_SIDE


def test_film_strip_holds_all_frames_and_thins_long_clips():
    clip = torch.cat([flat(10 + t) for t in range(20)])
    assert all(area(make_film_strip(clip), 10 + t) == MIN_SIDE * MIN_SIDE for t in range(20))
    long = torch.cat([flat(t) for t in range(100)])
    strip = make_film_strip(long)
    shown = [t for t in range(100) if area(strip, t)]
    assert len(shown) == 32
    assert (shown[0], shown[-1]) == (0, 99)


def test_animated_comparison_stacks_its_rows():
    inputs, online, average = [flat(10), flat(11)], [flat(20), flat(21)], [flat(30)]
    page = make_animated_comparison(
        [("input", inputs), ("reconstruction, online", online), ("reconstruction, EMA", average)]
    )
    assert page.shape[:2] == (1, 3)
    array = page[0].permute(1, 2, 0).numpy()
    places = {
        red: [axis.mean() for axis in np.nonzero((array[..., 0] == red) & (array[..., 1] == 0))]
        for red in (10, 11, 20, 21, 30)
    }
    assert places[10][1] == places[20][1] == places[30][1] < places[11][1] == places[21][1]
    assert places[10][0] < places[20][0] < places[30][0]
    assert (array[: int(places[10][0] - MIN_SIDE / 2)] < 128).any()  # a title above the first row


def test_animated_comparison_plays_clips():
    clips = [torch.cat([flat(10 + t) for t in range(3)])]
    page = make_animated_comparison([("input", clips), ("output", clips)])
    assert page.shape[0] == 3
    assert area(page[2].permute(1, 2, 0).numpy(), 12) == 2 * MIN_SIDE * MIN_SIDE


def test_channels_may_differ_from_three():
    grey, alpha = torch.full((1, 1, 8, 8), 77, dtype=torch.uint8), torch.zeros(1, 4, 8, 8)
    array = np.asarray(make_grid([grey, alpha]))
    assert (array == 77).all(axis=-1).sum() >= MIN_SIDE * MIN_SIDE
    assert (array == 0).all(axis=-1).sum() >= MIN_SIDE * MIN_SIDE


def test_nothing_to_show_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        make_grid([])


def test_strips_stand_under_their_titles_from_the_left():
    long, short = torch.cat([flat(10 + t) for t in range(12)]), torch.cat([flat(40 + t) for t in range(3)])
    titles = ["scene 1 of 2: " + "a red 3 moves left and on " * 20, "scene 2 of 2"]
    array = np.asarray(make_titled_strips(list(zip(titles, (long, short))))).astype(int)
    places = {red: np.nonzero((array[..., 0] == red) & (array[..., 1] == 0)) for red in (10, 21, 40, 41, 42)}
    assert all(len(y) == MIN_SIDE * MIN_SIDE for y, _ in places.values())
    assert places[10][1].min() == places[40][1].min() < places[41][1].min() < places[42][1].min()
    assert places[10][0].max() < places[40][0].min()
    assert sum(area(array, 10 + t) > 0 for t in range(12)) == 8
    between = array[places[10][0].max() + 1 : places[40][0].min()]
    assert (between < 128).any()  # the second title
    assert (array[: places[10][0].min()] < 128).any(axis=(1, 2)).sum() > 20  # three lines of the first


def test_select_evenly_keeps_both_ends():
    assert select_evenly(5, 8) == [0, 1, 2, 3, 4]
    assert select_evenly(9, 3) == [0, 4, 8]
    assert select_evenly(1, 3) == [0]
