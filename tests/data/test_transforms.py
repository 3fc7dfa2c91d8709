import numpy as np
import pytest
from PIL import Image

from kineograph.data.transforms import ResizeCrop, convert_channels, pad_frames, pick_frames, resize_frames


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(
        np.stack([x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), 0 * x], -1).astype(np.uint8)
    )


def placed(resize_crop: ResizeCrop, image: Image.Image, seed: int = 0, **options) -> np.ndarray:
    return resize_crop.draw(image.width, image.height, np.random.default_rng(seed), **options).apply(image).astype(int)


def test_exact_size_is_untouched():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 12, 3), dtype=np.uint8))
    assert (placed(ResizeCrop((8, 12)), image) == np.asarray(image)).all()


@pytest.mark.parametrize(("width", "height"), [(64, 32), (32, 64), (1, 1), (999, 3), (3, 999), (37, 53)])
def test_any_aspect_fits(width, height):
    assert placed(ResizeCrop((16, 24)), gradient(width, height)).shape == (16, 24, 3)


def test_centre_crop_takes_the_middle():
    pixels = placed(ResizeCrop((32, 32)), gradient(128, 32))
    assert abs(pixels[..., 0].mean() - 127) < 3
    assert pixels[..., 0].max() < 165  # neither end is in it
    assert pixels[..., 1].min() < 10  # full height is


def test_random_crop_moves_over_the_whole_picture():
    means = [placed(ResizeCrop((32, 32), crop="random"), gradient(128, 32), seed)[..., 0].mean() for seed in range(40)]
    assert min(means) < 50
    assert max(means) > 205


def test_flip_mirrors_with_its_probability():
    image = gradient(32, 32)
    results = [placed(ResizeCrop((32, 32), flip=0.5), image, seed) for seed in range(60)]
    mirrored = [bool(pixels[0, 0, 0] > pixels[0, -1, 0]) for pixels in results]
    assert 15 < sum(mirrored) < 45
    assert (results[mirrored.index(True)] == np.asarray(image)[:, ::-1]).all()


def test_rotation_reaches_all_four_and_keeps_size():
    image = gradient(48, 32)
    results = [placed(ResizeCrop((32, 48), rotate=True), image, seed) for seed in range(40)]
    assert {pixels.shape for pixels in results} == {(32, 48, 3)}
    corners = {tuple(pixels[0, 0, :2] > 127) for pixels in results}
    assert len(corners) == 4


def test_quarter_turn_is_anticlockwise():
    image = gradient(32, 32)
    assert (placed(ResizeCrop((32, 32)), image, turned=1) == np.rot90(np.asarray(image))).all()


def test_the_deterministic_crop_draws_nothing():
    resize_crop = ResizeCrop((8, 8), "random", 0.5, True).deterministic
    assert all(
        (placed(resize_crop, gradient(40, 9), seed) == placed(resize_crop, gradient(40, 9), 0)).all()
        for seed in range(10)
    )


def taken(resize_crop: ResizeCrop, width: int, height: int, seed: int) -> tuple[float, float]:
    """Share of the area, and aspect against that of the size, of the part that is taken."""
    left, top, right, bottom = resize_crop.draw(width, height, np.random.default_rng(seed)).box
    assert left >= 0 and top >= 0 and right <= width + 1e-9 and bottom <= height + 1e-9
    aspect = (right - left) / (bottom - top) / (resize_crop.size[1] / resize_crop.size[0])
    return (right - left) * (bottom - top) / (width * height), aspect


def test_a_resized_crop_takes_parts_of_the_asked_size_and_aspect():
    resize_crop = ResizeCrop((16, 24), crop="resized", area=(0.2, 0.5), aspect=(0.5, 2.0))
    found = np.array([taken(resize_crop, 90, 60, seed) for seed in range(300)])
    share, aspect = found.T
    assert 0.2 - 1e-6 < share.min() < 0.23 and 0.45 < share.max() <= 0.5 + 1e-6
    assert 0.5 - 1e-6 < aspect.min() < 0.56 and 1.8 < aspect.max() <= 2.0 + 1e-6
    assert 0.35 < (aspect < 1).mean() < 0.65
    plain = ResizeCrop((16, 24), crop="resized")
    assert all(aspect == pytest.approx(1) for _, aspect in (taken(plain, 77, 61, seed) for seed in range(20)))


@pytest.mark.parametrize(("width", "height"), [(200, 20), (20, 200), (1, 1), (31, 33)])
def test_a_resized_crop_of_any_picture_stays_inside(width, height):
    resize_crop = ResizeCrop((16, 16), crop="resized", area=(0.08, 1.0), aspect=(3 / 4, 4 / 3))
    for seed in range(30):
        taken(resize_crop, width, height, seed)
        assert placed(resize_crop, gradient(width, height), seed).shape == (16, 16, 3)


def test_a_resized_crop_reaches_all_corners():
    resize_crop = ResizeCrop((16, 16), crop="resized", area=(0.1, 0.2))
    centres = np.array([placed(resize_crop, gradient(64, 64), seed)[..., :2].mean((0, 1)) for seed in range(80)])
    assert (centres.min(0) < 70).all() and (centres.max(0) > 185).all()


def test_the_whole_picture_stretched_or_with_bars():
    image = gradient(64, 32)
    stretched = placed(ResizeCrop((32, 32), resize="stretch"), image)
    assert stretched[..., 0].min() < 8 and stretched[..., 0].max() > 247  # both ends are in it
    barred = placed(ResizeCrop((32, 32), resize="contain", bars=255), image)
    assert barred.shape == (32, 32, 3)
    assert (barred[:8] == 255).all() and (barred[-8:] == 255).all()
    assert np.abs(barred[8:24] - placed(ResizeCrop((16, 32), resize="stretch"), image)).max() == 0
    tall = placed(ResizeCrop((32, 32), resize="contain"), gradient(10, 40))
    assert (tall[:, :12] == 0).all() and (tall[:, 20:] == 0).all() and tall[:, 12:20].max() > 200
    assert (placed(ResizeCrop((8, 12), resize="contain"), gradient(12, 8)) == np.asarray(gradient(12, 8))).all()


def test_the_way_of_resizing_stays_without_chance():
    resize_crop = ResizeCrop((16, 16), "resized", 0.5, True, area=(0.1, 0.2)).deterministic
    assert (placed(resize_crop, gradient(40, 40), 1) == placed(ResizeCrop((16, 16)), gradient(40, 40), 2)).all()
    assert ResizeCrop((16, 16), resize="contain", flip=1.0).deterministic == ResizeCrop((16, 16), resize="contain")


def test_pad_repeats_and_masks():
    clip = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 3), np.uint8)
    pixels, mask = pad_frames(clip, 5)
    assert pixels.shape == (5, 3, 2, 2)
    assert pixels.is_contiguous()
    assert pixels[:, 0, 0, 0].tolist() == [0, 1, 2, 2, 2]
    assert mask.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("have", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_recolour_agrees_with_pillow(have, channels):
    values = np.random.default_rng(0).integers(0, 255, (1, 6, 6, have), dtype=np.uint8)
    if have in (2, 4):
        values[..., -1] = 255
    modes = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
    expected = np.asarray(
        Image.fromarray(values[0].squeeze(-1) if have == 1 else values[0]).convert(modes[channels])
    ).reshape(6, 6, channels)
    assert np.abs(convert_channels(values, channels)[0].astype(int) - expected).max() <= 1


def test_fit_resizes_arrays():
    assert resize_frames(np.full((2, 16, 16, 1), 9, np.uint8), (8, 8), 3).shape == (2, 8, 8, 3)
    assert resize_frames(np.full((2, 16, 16, 1), 9, np.uint8), (8, 8), 1).shape == (2, 8, 8, 1)


def test_pick_never_passes_the_end():
    starts = np.arange(30) / 30
    for seed in range(200):
        rng = np.random.default_rng(seed)
        frames, fps = int(rng.integers(1, 12)), float(rng.uniform(3, 60))
        chosen = pick_frames(starts, 1.0, frames, fps, rng)
        enough = (frames - 1) / fps < 0.99
        assert len(chosen) == frames if enough else 1 <= len(chosen) <= frames
        assert chosen.max() < 30
        assert (np.diff(chosen) >= 0).all()
        # each frame is on screen at the time it is taken for
        times = starts[chosen[0]] + np.arange(len(chosen)) / fps
        assert (starts[chosen] <= times + 0.003).all()
        assert (times < starts[chosen] + 1 / 30 + 0.003).all()
