"""`kineo data show`: items as the model will see them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from kineograph.cli import app
from kineograph.core.errors import ConfigError, InputError
from kineograph.run.data_sheet import read_data_config, show_data


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A red picture with blue ends, which a centre crop cuts off."""
    pixels = np.zeros((32, 96, 3), np.uint8)
    pixels[..., 0], pixels[:, :24], pixels[:, 72:] = 255, (0, 0, 255), (0, 0, 255)
    (tmp_path / "photos").mkdir()
    Image.fromarray(pixels).save(tmp_path / "photos/a.png")
    (tmp_path / "photos/a.txt").write_text("red")
    return tmp_path / "photos"


def colours(path: Path) -> set[tuple[int, int, int]]:
    image = Image.open(path).convert("RGB")
    return {colour for count, colour in image.getcolors(1 << 16) if count > 500}


def test_the_sheet_shows_what_the_model_sees(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "out/sheet.png"
    lines: list[str] = []
    assert show_data(wide, ["size=32", "validation=0"], out, note=lines.append) == out
    assert (255, 0, 0) in colours(out) and (0, 0, 255) not in colours(out)
    assert "100% cropped" in "\n".join(lines)
    show_data(wide, ["data.size=32", "resize=stretch", "validation=0"], out)
    assert {(255, 0, 0), (0, 0, 255)} <= colours(out)
    show_data(wide, ["size=32", "channels=1", "validation=0"], out)
    assert all(red == green == blue for red, green, blue in colours(out))


def test_a_preset_gives_the_keys(wide: Path) -> None:
    config = read_data_config(wide, ["nuwa-tiny", "frames=5"])
    assert (config.source, config.size, config.frames, config.channels) == ("folder", (32, 32), 5, 3)
    with pytest.raises(ConfigError, match="--stage x: the stages are tokenizer, generator"):
        read_data_config(wide, ["nuwa-tiny"], "x")
    with pytest.raises(ConfigError, match="only a preset or file has stages"):
        read_data_config(wide, [], "x")


def test_arrays_and_shards_are_recognised(tmp_path: Path) -> None:
    np.save(tmp_path / "videos.npy", np.zeros((4, 3, 3, 16, 16), np.uint8))
    assert read_data_config(tmp_path, []).source == "memmap"
    (tmp_path / "0.tar").touch()
    assert read_data_config(tmp_path, []).source == "webdataset"


def test_the_command(wide: Path, tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(wide / "b.png")
    (wide / "c.png").write_bytes(b"broken")
    out = tmp_path / "sheet.png"
    result = CliRunner().invoke(app, ["data", "show", str(wide), "frames=3", "validation=0", "--out", str(out)])
    assert result.exit_code == 0 and out.is_file()
    assert "2 of 3 train items, 3 × 32 × 32 with 3 channels" in result.output
    assert "cannot be read: c.png" in result.output


def test_items_that_cannot_be_read_are_replaced_by_the_next(wide: Path, tmp_path: Path) -> None:
    for number in range(30):
        if number < 22:
            (wide / f"b{number:02}.png").write_bytes(b"broken")
        else:
            Image.new("RGB", (32, 32)).save(wide / f"b{number:02}.png")
    lines: list[str] = []
    show_data(wide, ["size=32", "validation=0"], tmp_path / "sheet.png", count=6, note=lines.append)
    assert lines[-1].startswith("6 of 31 train items, ")
    lines.clear()
    show_data(wide, ["size=32", "validation=0"], tmp_path / "sheet.png", count=16, note=lines.append)
    assert lines[-1].startswith("9 of 31 train items, ")
    assert sum(line.startswith("cannot be read: b") for line in lines) == 16
    assert "… and 6 more; kineo data check lists them all" in lines


def test_refusals(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the sheet is a picture"):
        show_data(wide, [], tmp_path / "sheet.mp4")
    (wide / "a.png").write_bytes(b"broken")
    with pytest.raises(InputError, match="none of the items can be read"):
        show_data(wide, ["validation=0"], tmp_path / "sheet.png")
