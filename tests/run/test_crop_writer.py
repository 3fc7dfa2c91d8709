"""`kineo data make crops`: crops of large pictures, none of which is in both splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import numpy_rng
from kineograph.data.folder import Folder, FolderConfig
from kineograph.media.clips import write_clip
from kineograph.media.frames import to_pixels
from kineograph.run.crop_writer import CropConfig, _draw_pan, draw_crop, find_title, write_crops
from kineograph.run.dataset_writer import write_dataset


def picture(seed: int, width: int = 96, height: int = 64) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def wallpapers(tmp_path: Path) -> Path:
    folder = tmp_path / "wallpapers"
    folder.mkdir()
    for seed in range(12):
        picture(seed).save(folder / f"photo {seed}.png")
    return folder


def write(folder: Path, out: Path, count: int, *settings: str, lines: list[str] | None = None) -> Path:
    return write_crops(
        [folder], out, count, ["size=16", "smallest=32", *settings], (lines if lines is not None else []).append
    )


def test_no_picture_has_crops_in_both_splits(wallpapers, tmp_path):
    out = write(wallpapers, tmp_path / "crops", 60)
    config = FolderConfig(folder=str(out), size=16, split_by="folder", validation=0.3)
    splits = [Folder.open(config, split, 0) for split in ("train", "validation")]
    train, validation = ({item.name.split("/")[0] for item in split.items} for split in splits)
    assert len(train | validation) == 12 and not train & validation and validation
    assert [len(split) for split in splits] == [5 * len(train), 5 * len(validation)]
    assert splits[0].read(0, np.random.default_rng(0)).pixels.shape == (1, 3, 16, 16)
    by_file = Folder.open(config.model_copy(update={"split_by": "file"}), "validation", 0)
    assert len({item.name.split("/")[0] for item in by_file.items}) > len(validation)


def test_keys_may_have_the_prefix_of_data(wallpapers, tmp_path):
    out = write_crops([wallpapers], tmp_path / "crops", 12, ["data.size=16", "data.smallest=32"])
    assert {Image.open(path).size for path in out.rglob("*.png")} == {(16, 16)}
    with pytest.raises(ConfigError, match="unknown key sise: did you mean size"):
        write(wallpapers, tmp_path / "others", 12, "data.sise=8")


def test_versions_of_one_picture_are_one(wallpapers, tmp_path):
    """In another size, gray and negative, mirrored, or named so."""
    first = picture(0, 192, 128)
    first.save(wallpapers / "other name.jpg")
    ImageOps.invert(picture(1, 60, 40)).save(wallpapers / "negative.png")
    ImageOps.mirror(picture(2, 60, 40)).save(wallpapers / "mirrored.png")
    picture(90, 60, 40).save(wallpapers / "photo 3_60x40.png")
    picture(91, 60, 40).save(wallpapers / "photo 4-dark.png")
    out = write(wallpapers, tmp_path / "crops", 48)
    assert len(list(out.iterdir())) == 12
    assert len(list((out / "other-name").iterdir())) == 4


@pytest.mark.parametrize(
    "path",
    ["sea.jpg", "sea_1920x1080.png", "Sea-5640x3172 (copy).jpg", "sea-d.webp", "sea/contents/images_dark/1x2.png"],
)
def test_titles_leave_out_resolution_and_tint(path):
    assert find_title(Path("/usr/share") / path) == "sea"
    assert find_title(Path("/usr/share/red.png")) == "red"


def test_crops_are_parts_of_the_picture_and_never_enlarged():
    steps = Image.fromarray(np.tile(np.arange(0, 256, 2, dtype=np.uint8), (64, 1))).convert(
        "RGB"
    )  # 64 × 128, 2 a pixel
    slopes = []
    for seed in range(40):
        crop = np.asarray(draw_crop(steps, CropConfig(size=16, zoom=4, smallest=32), numpy_rng(seed))[0], float)
        slopes.append(np.polyfit(np.arange(16), crop[8, :, 0], 1)[0] / 2)  # pixels of the picture for one of the crop
    assert 1 <= min(slopes) < 1.3 and 3 < max(slopes) <= 4.01


def test_flat_parts_are_avoided_and_flat_pictures_left_out(wallpapers, tmp_path):
    busy = Image.new("RGB", (256, 64), "white")
    busy.paste(picture(5, 32, 32), (0, 0))
    crops = [np.asarray(draw_crop(busy, CropConfig(size=16, smallest=32), numpy_rng(seed))[0]) for seed in range(40)]
    assert sum(crop.std() > 8 for crop in crops) > 20  # of one try, 3
    Image.new("RGB", (64, 64), "white").save(wallpapers / "blank.png")
    (wallpapers / "broken.png").write_bytes(b"no picture")
    picture(99, 30, 30).save(wallpapers / "small.png")
    lines: list[str] = []
    out = write(wallpapers, tmp_path / "crops", 12, lines=lines)
    assert len(list(out.iterdir())) == 12
    assert lines[0].startswith("3 files are left out, the first: ") and "shows next to nothing" in lines[0]


def test_the_same_command_writes_the_same_crops(wallpapers, tmp_path):
    one, two = (write(wallpapers, tmp_path / name, 24) for name in "ab")
    names = sorted(path.relative_to(one) for path in one.rglob("*.png"))
    assert len(names) == 24
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_several_frames_are_pans_over_pictures(wallpapers, tmp_path):
    """Each crop moves on a straight way, within its picture, and reads back as a clip."""
    out = write(wallpapers, tmp_path / "pans", 24, "frames=5", "fps=10")
    config = FolderConfig(folder=str(out), size=16, frames=5, fps=10, split_by="folder", validation=0)
    source = Folder.open(config, "train", 0)
    assert len(source) == 24
    sample = source.read(3, np.random.default_rng(0))
    assert sample.pixels.shape == (5, 3, 16, 16) and sample.fps == 10
    changes = (sample.pixels[1:].float() - sample.pixels[:-1].float()).abs().mean((1, 2, 3))
    assert changes.min() > 0
    boxes = np.array(_draw_pan(96, 64, CropConfig(size=16, smallest=32, frames=5), numpy_rng(7)))
    assert np.allclose(np.diff(boxes, axis=0, n=2), 0) and not np.allclose(boxes[0], boxes[-1])
    many = np.concatenate(
        [_draw_pan(96, 64, CropConfig(size=16, smallest=32, frames=5), numpy_rng(n)) for n in range(200)]
    )
    assert many.min() >= 0 and many[:, 2].max() <= 96 and many[:, 3].max() <= 64
    assert (many[:, 2] - many[:, 0]).min() > 15.99


def test_clips_are_cut_in_space_and_time(tmp_path):
    folder = tmp_path / "films"
    folder.mkdir()
    frames = [picture(seed // 4) for seed in range(40)]  # a new picture every 4 frames
    write_clip(folder / "film.mp4", to_pixels(frames), 8.0)
    write_clip(folder / "short.mp4", to_pixels(frames[:2]), 8.0)
    lines: list[str] = []
    out = write(folder, tmp_path / "crops", 6, "frames=5", lines=lines)
    assert "short.mp4: 0.25 s are shorter than frames=5 at fps=8" in lines[0]
    crops = sorted((out / "film").iterdir())
    assert len(crops) == 6
    starts = {np.asarray(Image.open(crop).convert("RGB")).tobytes() for crop in crops}
    assert len(starts) > 3
    with Image.open(crops[0]) as crop:
        assert crop.size == (16, 16) and crop.n_frames == 5
    with pytest.raises(InputError, match="no picture"):
        write(folder, tmp_path / "pictures", 6)  # one frame: pictures only


def test_what_cannot_be_cut_is_refused(wallpapers, tmp_path):
    out = tmp_path / "crops"
    with pytest.raises(InputError, match="add --from FOLDER"):
        write_dataset("crops", out, 10)
    with pytest.raises(InputError, match=r"--from .*nowhere does not exist"):
        write_dataset("crops", out, 10, sources=[tmp_path / "nowhere"])
    with pytest.raises(InputError, match=r"no picture of 512 px or more.*lower smallest="):
        write_dataset("crops", out, 10, sources=[wallpapers])
    with pytest.raises(InputError, match="there are 12 pictures"):
        write(wallpapers, out, 5)
    with pytest.raises(ConfigError, match="crops would be enlarged"):
        write(wallpapers, out, 50, "size=64")
    with pytest.raises(ConfigError, match="did you mean zoom"):
        write(wallpapers, out, 50, "zooom=2")
    with pytest.raises(InputError, match="remove --as"):
        write_dataset("crops", out, 50, "gif", sources=[wallpapers])
    with pytest.raises(InputError, match="--from goes with crops"):
        write_dataset("moving-digits", out, 5, sources=[wallpapers])
    assert not out.exists()
