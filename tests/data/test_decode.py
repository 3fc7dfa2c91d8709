import io

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph.core.errors import Unreadable
from kineograph.core.safe_media import MediaLimits, Meter, read_gif_delays
from kineograph.data.decode import decode_media, probe_media
from kineograph.data.media_config import DecodeOptions
from kineograph.data.picture import to_channels
from kineograph.data.transforms import ResizeCrop
from kineograph.media.clips import write_clip


def wanted(size=(8, 8), **options) -> DecodeOptions:
    return DecodeOptions(ResizeCrop(size), **options)


def decode(path, name, options, rng):
    return decode_media(path, path.suffix, name, options, rng)


def encoded(image: Image.Image, form: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def read(tmp_path, image, name, rng, size=(8, 8), channels=3, save=None, **options):
    image.save(tmp_path / name, **(save or {}))
    return decode(tmp_path / name, name, wanted(size, channels=channels, **options), rng).pixels[0]


HALF = Image.new("RGBA", (8, 8), (255, 0, 0, 128))


@pytest.mark.parametrize(
    ("image", "name", "colour"),
    [
        (Image.new("1", (9, 9), 1), "a.png", (255, 255, 255)),
        (Image.new("L", (9, 9), 77), "a.png", (77, 77, 77)),
        (Image.new("LA", (9, 9), (100, 0)), "a.png", (255, 255, 255)),
        (Image.new("RGBA", (9, 9), (255, 0, 0, 128)), "a.png", (255, 127, 127)),
        (Image.new("RGBA", (9, 9), (255, 0, 0, 128)), "a.webp", (255, 127, 127)),
        (Image.fromarray(np.full((9, 9), 257 * 90, np.uint16)), "a.png", (90, 90, 90)),
        (Image.fromarray(np.full((9, 9), 257 * 90, np.int32)), "a.tiff", (90, 90, 90)),
        (Image.fromarray(np.full((9, 9), 0.2, np.float32)), "a.tiff", (51, 51, 51)),
        (Image.new("CMYK", (9, 9), (0, 255, 255, 0)), "a.jpg", (255, 0, 0)),
        (Image.new("RGB", (1, 1), (9, 200, 30)), "a.png", (9, 200, 30)),
        (Image.new("RGB", (3000, 2), (9, 200, 30)), "a.png", (9, 200, 30)),
        (Image.new("RGB", (2, 3000), (9, 200, 30)), "a.bmp", (9, 200, 30)),
    ],
)
def test_every_mode_becomes_rgb(tmp_path, rng, image, name, colour):
    pixels = read(tmp_path, image, name, rng, save={"lossless": True} if name.endswith("webp") else None)
    assert pixels.shape == (8, 8, 3)
    assert np.abs(pixels.astype(int) - colour).max() <= 2


def test_palette_with_transparency_is_laid_over_the_background(tmp_path, rng):
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 255, 0, 200, 0])
    image.paste(0, (0, 0, 8, 4))
    save = {"transparency": 0}
    on_white = read(tmp_path, image, "a.png", rng, save=save)
    on_black = read(tmp_path, image, "a.png", rng, save=save, background="black")
    kept = read(tmp_path, image, "a.png", rng, save=save, channels=4)
    assert on_white[0, 0].tolist() == [255, 255, 255]
    assert on_white[7, 7].tolist() == [0, 200, 0]
    assert on_black[0, 0].tolist() == [0, 0, 0]
    assert kept[0, 0, 3] == 0
    assert kept[7, 7].tolist() == [0, 200, 0, 255]


def test_palette_with_an_alpha_for_each_colour(tmp_path, rng):
    image = Image.new("P", (8, 8), 0)
    image.putpalette([255, 0, 0])
    pixels = read(tmp_path, image, "a.png", rng, save={"transparency": bytes([128])})
    assert np.abs(pixels[0, 0].astype(int) - (255, 127, 127)).max() <= 1


@pytest.mark.parametrize(("channels", "mean"), [(1, [76]), (2, [76, 128]), (3, [255, 127, 127]), (4, [255, 0, 0, 128])])
def test_channels(channels, mean):
    pixels = np.asarray(to_channels(HALF, channels)).reshape(8, 8, channels)
    expected = [166] if channels == 1 else mean  # laid over white before it turns gray
    assert np.abs(pixels[0, 0].astype(int) - expected).max() <= 2


def test_opaque_picture_gets_full_alpha():
    assert np.asarray(to_channels(Image.new("L", (2, 2), 5), 2))[0, 0].tolist() == [5, 255]
    assert np.asarray(to_channels(Image.new("CMYK", (2, 2), 0), 4))[0, 0].tolist() == [255, 255, 255, 255]


def test_resizing_does_not_bleed_hidden_colour(tmp_path, rng):
    """Transparent green beside opaque red: the hidden green must not tint the edge."""
    image = Image.new("RGBA", (64, 64), (0, 255, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 37, 64))
    pixels = read(tmp_path, image, "a.png", rng, channels=4)
    assert pixels[..., 1][pixels[..., 3] > 20].max() < 30


def test_values_outside_the_range_are_refused(tmp_path, rng):
    with pytest.raises(Unreadable, match="0 to 1 is expected"):
        read(tmp_path, Image.fromarray(np.full((4, 4), 300.0, np.float32)), "a.tiff", rng)


def test_exif_orientation_sets_upright(tmp_path, rng):
    image = Image.new("RGB", (16, 16), "black")
    image.paste((255, 255, 255), (0, 0, 16, 8))  # white on top
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise: white to the right
    pixels = read(tmp_path, image, "a.jpg", rng, save={"exif": exif, "quality": 95})
    assert pixels[:, :3].max() < 60
    assert pixels[:, 5:].min() > 200


def test_large_jpeg_decodes_small_but_alike(tmp_path, rng):
    """Decoding at a fraction of the size is a shortcut and must not change the picture."""
    y, x = np.mgrid[0:600, 0:800]
    image = Image.fromarray(np.stack([x * 255 // 800, y * 255 // 600, 128 + 60 * np.sin(x / 40)], -1).astype(np.uint8))
    small = read(tmp_path, image, "a.jpg", rng, size=(48, 64), save={"quality": 98})
    exact = np.asarray(image.resize((64, 48), Image.Resampling.BICUBIC))
    assert np.abs(small.astype(int) - exact).mean() < 2


def test_downscaling_is_antialiased(tmp_path, rng):
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    assert np.abs(read(tmp_path, Image.fromarray(stripes), "a.png", rng).astype(int) - 127).max() <= 12


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.gif"])
def test_truncated_pictures_are_refused_and_accepted_by_option(tmp_path, rng, name):
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    if name == "a.gif":
        noise.save(tmp_path / name, save_all=True, append_images=[noise.rotate(90)], duration=100)
    else:
        noise.save(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * 0.75)])
    with pytest.raises(Unreadable) as caught:
        decode(tmp_path / name, "x/" + name, wanted((64, 64)), rng)
    assert caught.value.path == "x/" + name
    if name != "a.webp":  # its decoder gives all or nothing
        pixels = decode(tmp_path / name, name, wanted((64, 64), truncated=True), rng).pixels
        assert np.abs(pixels[0, :20].astype(int) - np.asarray(noise)[:20]).mean() < 60  # unrelated noise: 85


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.png", b"", "0 bytes"),
        ("a.gif", b"", "0 bytes"),
        ("a.mp4", b"", "0 bytes"),
        ("a.jpg", b"hello" * 100, "not a PNG"),
        ("a.gif", b"GIF89a", "not a PNG"),
        ("a.mp4", b"hello" * 100, "not a video"),
    ],
)
def test_broken_files_say_why(tmp_path, rng, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Unreadable, match=reason):
        decode(tmp_path / name, name, wanted(), rng)


def test_missing_file(tmp_path, rng):
    with pytest.raises(Unreadable, match="no longer exists"):
        decode(tmp_path / "a.png", "a.png", wanted(), rng)


def test_second_view_inside_a_phone_picture_is_no_frame(tmp_path, rng):
    first, second = Image.new("RGB", (32, 32), (200, 0, 0)), Image.new("RGB", (32, 32), (0, 0, 200))
    first.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[second])
    clip = decode(tmp_path / "a.jpg", "a.jpg", wanted(frames=2), rng)
    assert len(clip.pixels) == 1
    assert clip.pixels[0, 0, 0, 0] > 180


def test_pages_are_no_frames(tmp_path, rng):
    Image.new("L", (8, 8), 9).save(tmp_path / "a.tiff", save_all=True, append_images=[Image.new("L", (8, 8), 99)])
    assert decode(tmp_path / "a.tiff", "a.tiff", wanted(frames=2), rng).pixels.max() == 9


# Animations ---------------------------------------------------------------------------------------------------------


def animation(path, delays):
    """Frame i is a flat gray of 40 i; each stays for its own delay in ms."""
    frames = [Image.new("L", (8, 8), 40 * index) for index in range(len(delays))]
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        duration=delays,
        loop=0,
        **({"lossless": True} if path.suffix == ".webp" else {}),
    )


def shown(clip):
    return [round(float(frame.mean()) / 40) for frame in clip.pixels]


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_variable_durations_are_followed(tmp_path, rng, name):
    animation(tmp_path / name, [100, 500, 100, 300])
    clip = decode(tmp_path / name, name, wanted(frames=10, fps=10), rng)
    assert shown(clip) == [0, 1, 1, 1, 1, 1, 2, 3, 3, 3]
    assert clip.fps == 10


def test_without_fps_frames_are_consecutive(tmp_path, rng):
    animation(tmp_path / "a.gif", [100, 500, 100, 300])
    clip = decode(tmp_path / "a.gif", "a.gif", wanted(frames=4), rng)
    assert shown(clip) == [0, 1, 2, 3]
    assert clip.fps == pytest.approx(4.0)


def test_short_clip_gives_what_it_has(tmp_path, rng):
    animation(tmp_path / "a.gif", [100, 100, 100])
    assert shown(decode(tmp_path / "a.gif", "a.gif", wanted(frames=8, fps=10), rng)) == [0, 1, 2]


def test_random_start_reaches_every_window(tmp_path):
    animation(tmp_path / "a.gif", [100] * 6)
    starts = {
        tuple(shown(decode(tmp_path / "a.gif", "a", wanted(frames=4, fps=10), np.random.default_rng(seed))))
        for seed in range(30)
    }
    assert starts == {(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5)}


def test_one_frame_of_a_clip(tmp_path):
    animation(tmp_path / "a.gif", [100] * 6)
    found = {
        shown(decode(tmp_path / "a.gif", "a", wanted(frames=1, fps=10), np.random.default_rng(seed)))[0]
        for seed in range(60)
    }
    assert found == set(range(6))


def test_eight_fps_gif_whose_delays_are_rounded_keeps_its_frames(tmp_path, rng):
    animation(tmp_path / "a.gif", [120] * 6)  # 125 ms cannot be stored
    assert shown(decode(tmp_path / "a.gif", "a", wanted(frames=6, fps=8), rng)) == [0, 1, 2, 3, 4, 5]


def test_gif_delays_match_pillow(tmp_path):
    animation(tmp_path / "a.gif", [30, 70, 250])
    data = (tmp_path / "a.gif").read_bytes()
    assert read_gif_delays(data, Meter(MediaLimits())) == [0.03, 0.07, 0.25]
    assert read_gif_delays(data[:-1], Meter(MediaLimits())) == [0.03, 0.07, 0.25]  # many lack the trailer
    with pytest.raises(Unreadable, match="inside frame 3"):
        read_gif_delays(data[:-6], Meter(MediaLimits()))


def test_unset_delays_play_as_in_a_viewer(tmp_path):
    animation(tmp_path / "a.gif", [0, 0])
    assert probe_media(tmp_path / "a.gif", ".gif", "a", decode_all=True) == (8, 8, 2, pytest.approx(0.2))


def test_gif_with_transparency_builds_on_earlier_frames(tmp_path, rng):
    first = Image.new("RGBA", (8, 8), (200, 0, 0, 255))
    second = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    second.paste((0, 0, 200, 255), (0, 0, 4, 8))
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second], duration=100, disposal=1)
    clip = decode(tmp_path / "a.gif", "a", wanted(frames=2), rng)
    assert clip.pixels[1, 0, 0].tolist() == [0, 0, 200]
    assert clip.pixels[1, 0, 7].tolist() == [200, 0, 0]


def test_a_gif_at_its_own_rate_gives_every_frame_once(tmp_path):
    """At 8 frames a second a GIF's delays are 12 and 13 hundredths: its clock must not make frames come twice."""
    shades = np.arange(17, dtype=np.uint8) * 15
    frames = torch.from_numpy(shades)[:, None, None, None].expand(17, 1, 8, 8).float() / 255
    write_clip(tmp_path / "clip.gif", frames, 8.0)
    asked = wanted(channels=1, frames=17, fps=8.0)
    clip = decode(tmp_path / "clip.gif", "clip.gif", asked, np.random.default_rng(0))
    assert clip.pixels[:, 0, 0, 0].tolist() == shades.tolist()
