"""What is written comes back: frames, colours, timing."""

from __future__ import annotations

import ctypes
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from kineograph.core.errors import InputError
from kineograph.media.clips import open_clip_writer, read_frames, write_clip
from kineograph.media.frames import to_images, to_pixels, to_uint8
from kineograph.media.gif import Palette, frame_durations
from tests.media.reading import rate, read_clip

_M_PERTURB = -6  # malloc.h


def moving_square(frames: int = 8, channels: int = 3, height: int = 20, width: int = 24) -> torch.Tensor:
    pixels = torch.zeros(frames, channels, height, width, dtype=torch.uint8)
    for t in range(frames):
        for c in range(channels):
            pixels[t, c, 4:12, 2 + t : 10 + t] = 255 - 60 * c
    if channels in (2, 4):
        pixels[:, -1] = 255
    return pixels


def smooth_clip(frames: int = 6, size: int = 48) -> torch.Tensor:
    """Thousands of colours."""
    t, y, x = torch.meshgrid(
        torch.linspace(0, 1, frames), torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij"
    )
    return torch.stack([0.5 + 0.5 * torch.sin(4 * x + t), y, 0.5 + 0.5 * torch.cos(3 * (x + y))], dim=1)


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(10 * torch.log10(255.0**2 / (a.float() - b.float()).square().mean()))


# GIF -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_gif_with_few_colours_is_exact(tmp_path, channels):
    pixels = moving_square(channels=channels)
    back, fps = read_clip(write_clip(tmp_path / "deep" / "er" / "x.gif", pixels, 8), channels)
    assert fps == 8
    assert torch.equal(back, pixels)


def test_gif_keeps_equal_frames_apart(tmp_path):
    still = moving_square(1).expand(5, -1, -1, -1)
    back, fps = read_clip(write_clip(tmp_path / "x.gif", still, 10), 3)
    assert (len(back), fps) == (5, 10)
    assert torch.equal(back, still)


def test_gif_durations_follow_the_clock_without_drift(tmp_path):
    path = write_clip(tmp_path / "x.gif", moving_square(30), 7.5)
    with Image.open(path) as file:
        lengths = [frame.info["duration"] for frame in ImageSequence.Iterator(file)]
        assert file.info["loop"] == 0  # for ever
    ends = np.cumsum(lengths)
    assert np.abs(ends - 1000 * np.arange(1, 31) / 7.5).max() <= 5  # half a tick, at every frame
    assert len(set(lengths)) == 2
    assert read_clip(path)[1] == 7.5


@pytest.mark.parametrize(("frames", "fps"), [(1, 8.0), (5, 8.0), (16, 12.0), (49, 29.97), (10, 0.5), (3, 25.0)])
def test_rate_undoes_durations(frames, fps):
    assert rate(frame_durations(frames, fps)) == pytest.approx(fps, rel=0.05)
    if frames > 1:
        assert frame_durations(frames, rate(frame_durations(frames, fps))) == frame_durations(frames, fps)


def test_gif_never_asks_for_frames_that_viewers_slow_down():
    assert min(frame_durations(100, 90.0)) == 2


def test_gif_of_many_colours_is_close_and_steady(tmp_path):
    pixels = to_uint8(smooth_clip())
    back, _ = read_clip(write_clip(tmp_path / "x.gif", pixels, 8), 3)
    assert psnr(back, pixels) > 30
    still = pixels[:1].expand(4, -1, -1, -1)
    back, _ = read_clip(write_clip(tmp_path / "y.gif", still, 8), 3)
    assert torch.equal(back[0], back[3])  # one palette, no dithering: what stands still does not flicker


def test_gif_keeps_a_page_white():
    frames = np.full((2, 40, 40, 3), 255, dtype=np.uint8)
    frames[:, 5:15, 5:35] = np.random.default_rng(0).integers(0, 256, (2, 10, 30, 3))
    colours = Palette(256)
    for frame in frames:
        colours.add(frame)
    palette = colours.fit()
    assert (palette[colours.index(frames[0])[0, 0]] == 255).all()


def test_gif_alpha_becomes_transparency(tmp_path):
    pixels = moving_square(4, channels=4)
    pixels[:, 3, :, :12] = 0
    back, _ = read_clip(write_clip(tmp_path / "x.gif", pixels, 8), 4)
    assert torch.equal(back[:, 3], pixels[:, 3])
    opaque = (pixels[:, 3:] == 255).expand(-1, 3, -1, -1)
    assert torch.equal(back[:, :3][opaque], pixels[:, :3][opaque])


def test_grey_with_alpha_and_all_levels_fits_the_palette(tmp_path):
    ramp = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    pixels = torch.cat([ramp, torch.full_like(ramp, 255)], dim=1)
    back, _ = read_clip(write_clip(tmp_path / "x.gif", pixels, 8), 1)
    assert (back.int() - ramp.int()).abs().max() <= 1


# MP4 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fps", [7.5, 8, 29.97, 30000 / 1001])
def test_mp4_has_its_true_rate(tmp_path, fps):
    import av

    path = write_clip(tmp_path / "x.mp4", smooth_clip(15), fps)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == Fraction(fps).limit_denominator(1001)
        times = [float(frame.pts * stream.time_base) for frame in container.decode(stream)]
    assert times == pytest.approx([t / fps for t in range(15)], abs=1e-3)
    assert read_clip(path)[1] == pytest.approx(fps)


@pytest.mark.parametrize("size", [(33, 31), (32, 31), (1, 1), (7, 64)])
def test_mp4_takes_odd_sizes(tmp_path, size):
    height, width = size
    pixels = to_uint8(smooth_clip(5, 64)[:, :, :height, :width])
    back, _ = read_clip(write_clip(tmp_path / "x.mp4", pixels, 8))
    assert back.shape == (5, 3, height + height % 2, width + width % 2)
    assert psnr(back[:, :, :height, :width], pixels) > 28


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("suffix", [".gif", ".mp4", ".png"])
def test_every_format_takes_every_channel_count(tmp_path, suffix, channels):
    pixels = moving_square(1 if suffix == ".png" else 4, channels)
    back, _ = read_clip(write_clip(tmp_path / f"x{suffix}", pixels, 8), channels)
    assert back.shape == pixels.shape
    if suffix != ".mp4":
        assert torch.equal(back, pixels)


def test_a_missing_encoder_is_an_input_error(tmp_path, monkeypatch):
    import av

    def refuse(self, codec, *args, **kwargs):
        raise av.codec.codec.UnknownCodecError(codec)

    class Container:
        add_stream = refuse

    monkeypatch.setattr(av, "open", lambda *args, **kwargs: Container())
    with pytest.raises(InputError, match=r"\.mp4 needs an H\.264 encoder.*\.gif"):
        write_clip(tmp_path / "x.mp4", moving_square(), 8)


# Growing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_frames_written_in_parts_give_the_same_file(tmp_path, suffix, channels):
    pixels = moving_square(9, channels)
    with open_clip_writer(tmp_path / f"x{suffix}", 8) as clip:
        for part in (pixels[:4], pixels[4:5], pixels[5:].float() / 255):
            clip.write(part)
    at_once = write_clip(tmp_path / f"y{suffix}", pixels, 8)
    assert (tmp_path / f"x{suffix}").read_bytes() == at_once.read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_equal_pixels_give_equal_bytes_whatever_memory_held_before(tmp_path):
    """x264 must not read memory that it has not written: mallopt fills what malloc returns with a byte of our choice."""
    pixels = torch.rand(30, 3, 18, 22, generator=torch.Generator().manual_seed(0))
    libc = ctypes.CDLL(None)
    files = []
    try:
        for number, filler in enumerate((1, 85, 255)):
            libc.mallopt(_M_PERTURB, filler)
            files.append(write_clip(tmp_path / f"{number}.mp4", pixels, 8).read_bytes())
    finally:
        libc.mallopt(_M_PERTURB, 0)
    assert len(set(files)) == 1


def test_a_gif_knows_the_colours_of_its_last_frames(tmp_path):
    """A palette of the first scene would show a later one in its colours."""
    red, many, blue = moving_square(4)[:, [0, 0, 0]], to_uint8(smooth_clip(4, 24))[:, :, :20], torch.zeros(4, 3, 20, 24)
    red[:, 1:], blue[:, 2] = 0, 0.8
    with open_clip_writer(tmp_path / "x.gif", 8) as clip:
        for part in (red, many, blue):
            clip.write(part)
    back, _ = read_clip(tmp_path / "x.gif", 3)
    assert torch.equal(back[:4], red)
    assert torch.equal(back[8:], to_uint8(blue))
    assert psnr(back[4:8], many) > 28


def test_the_palette_of_a_long_gif_is_fitted_to_an_even_sample(monkeypatch):
    monkeypatch.setattr("kineograph.media.gif._PALETTE_SAMPLE", 64)
    colours = Palette(16)
    rng = np.random.default_rng(0)
    for level in np.linspace(0, 255, 200):
        colours.add(np.clip(rng.normal(level, 3, (12, 12, 3)), 0, 255).astype(np.uint8))
        assert colours._sampled <= 4 * 64
    levels = np.sort(colours.fit().mean(1))
    assert levels[0] < 30 and levels[-1] > 225
    assert np.diff(levels).max() < 60  # nothing in the middle was forgotten


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_an_empty_clip_is_refused(tmp_path, suffix):
    with pytest.raises(ValueError, match="at least one frame"), open_clip_writer(tmp_path / f"x{suffix}", 8):
        pass


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_frames_come_with_their_times(tmp_path, suffix):
    shown = list(read_frames(write_clip(tmp_path / f"x{suffix}", smooth_clip(6), 7.5)))
    assert [frame.start for frame in shown] == pytest.approx([t / 7.5 for t in range(6)], abs=0.006)


# PNG, WebP and errors -----------------------------------------------------------------------------------------------


def test_png_is_exact_and_more_frames_make_a_strip(tmp_path):
    picture = torch.rand(1, 3, 17, 13)
    back, _ = read_clip(write_clip(tmp_path / "x.png", picture, 8))
    assert torch.equal(back, to_uint8(picture))
    strip, _ = read_clip(write_clip(tmp_path / "y.png", moving_square(5), 8))
    assert strip.shape[0] == 1
    assert strip.shape[3] > 4 * strip.shape[2]


def test_an_animated_webp_is_read_with_its_times(tmp_path):
    pixels = to_uint8(smooth_clip(6))
    first, *rest = to_images(pixels)
    first.save(tmp_path / "x.webp", save_all=True, append_images=rest, duration=125, lossless=True)
    frames = list(read_frames(tmp_path / "x.webp"))
    assert [frame.start for frame in frames] == [number / 8 for number in range(6)]
    assert torch.equal(to_pixels([frame.image.convert("RGB") for frame in frames]), pixels)


def test_floats_are_clamped_and_rounded():
    pixels = torch.tensor([-1.0, 0.5, 2.0, float("nan")]).view(1, 1, 2, 2)
    assert to_uint8(pixels).flatten().tolist() == [0, 128, 255, 0]
    assert to_uint8(pixels.bfloat16()).flatten().tolist() == [0, 128, 255, 0]


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, 8, 8), torch.zeros(1, 5, 8, 8), torch.zeros(0, 3, 8, 8), torch.zeros(1, 3, 8, 8).long()]
)
def test_wrong_pixels_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="pixels have"):
        write_clip(tmp_path / "x.gif", wrong, 8)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = write_clip(tmp_path / "x.gif", moving_square(), 8)
    before = path.read_bytes()

    def die(*args, **kwargs):
        raise RuntimeError("disk")

    monkeypatch.setattr("PIL.GifImagePlugin.getdata", die)
    with pytest.raises(RuntimeError, match="disk"):
        write_clip(path, moving_square(4), 8)
    assert [file.name for file in tmp_path.iterdir()] == ["x.gif"]
    assert path.read_bytes() == before


def test_messages_name_the_file_and_the_remedy(tmp_path):
    with pytest.raises(InputError, match=r"x\.bmp.*\.gif, \.mp4"):
        write_clip(tmp_path / "x.bmp", moving_square(), 8)
    with pytest.raises(InputError, match="fps=0"):
        write_clip(tmp_path / "x.gif", moving_square(), 0)
    with pytest.raises(InputError, match="is a folder: give a picture"):
        next(read_frames(tmp_path))
    with pytest.raises(InputError, match=r"missing\.png does not exist"):
        read_clip(tmp_path / "missing.png")
    for name in ("broken.png", "broken.mp4", "broken.gif"):
        (tmp_path / name).write_bytes(b"not a picture")
        with pytest.raises(InputError, match=rf"{name} cannot be read \((?!\[Errno).*\): give a picture"):
            read_clip(tmp_path / name)


def test_pictures_are_read_upright_and_their_pages_are_not_frames(tmp_path):
    picture = Image.new("RGB", (6, 4))
    exif = picture.getexif()
    exif[0x0112] = 6  # a quarter turn, as a phone notes it
    picture.save(tmp_path / "phone.jpg", exif=exif)
    assert read_clip(tmp_path / "phone.jpg")[0].shape == (1, 3, 6, 4)
    picture.save(tmp_path / "pages.tiff", save_all=True, append_images=[Image.new("RGB", (9, 9))])
    assert read_clip(tmp_path / "pages.tiff")[0].shape == (1, 3, 4, 6)
