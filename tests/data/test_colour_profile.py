import io
import warnings

import numpy as np
import pytest
from PIL import Image, ImageCms

from kineograph.data.check import check_folder
from kineograph.data.decode import decode_media
from kineograph.data.media_config import DecodeOptions
from kineograph.data.transforms import ResizeCrop


def swapped_profile() -> bytes:
    """An RGB profile whose red and green are exchanged: what it says of a colour cannot be missed."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    red, green = data.index(b"rXYZ"), data.index(b"gXYZ")
    data[red : red + 4], data[green : green + 4] = b"gXYZ", b"rXYZ"
    assert data.count(b"s\0R\0G\0B") or data.count(b"sRGB")
    return bytes(data).replace(b"s\0R\0G\0B", b"x\0x\0x\0x")  # not taken for sRGB by its name


def read(path, channels=3):
    options = DecodeOptions(ResizeCrop((8, 8)), channels=channels)
    return decode_media(path, path.suffix, path.name, options, np.random.default_rng(0)).pixels[0, 4, 4].tolist()


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_colours_follow_the_profile(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (16, 16), (200, 40, 40)).save(path, icc_profile=swapped_profile())
    red, green, blue = read(path)
    assert green > 150 > red
    assert read(path, channels=1)[0] == pytest.approx(0.299 * red + 0.587 * green + 0.114 * blue, abs=4)


def test_alpha_and_srgb_stay(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGBA", (16, 16), (200, 40, 40, 128)).save(path, icc_profile=swapped_profile())
    assert read(path, channels=4)[3] == 128
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.new("RGB", (16, 16), (200, 41, 42)).save(path, icc_profile=srgb)
    assert read(path) == [200, 41, 42]


def test_a_damaged_profile_is_ignored_with_a_note(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (16, 16), (200, 40, 40)).save(path, icc_profile=b"not a profile" * 20)
    with pytest.warns(UserWarning, match=r"colour profile \(ICC\) that cannot be used"):
        assert read(path) == [200, 40, 40]
    Image.new("RGB", (16, 16)).save(tmp_path / "b.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_folder(tmp_path)
    assert (
        "colours: 1 pictures have a colour profile (ICC) that cannot be used, and are read as sRGB, such as a.png"
        in report.lines()
    )
    assert not report.problems


def test_a_printers_colours(tmp_path):
    """CMYK without a profile, or with one of RGB, is converted as before."""
    plain, profiled = io.BytesIO(), tmp_path / "a.jpg"
    image = Image.new("CMYK", (16, 16), (0, 200, 200, 0))
    image.save(plain, "JPEG")
    image.save(profiled, icc_profile=swapped_profile())
    (tmp_path / "b.jpg").write_bytes(plain.getvalue())
    with pytest.warns(UserWarning, match="read as sRGB"):
        assert read(profiled) == read(tmp_path / "b.jpg")
