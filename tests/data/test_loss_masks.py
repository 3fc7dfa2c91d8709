"""data.masks: NAME-mask.png beside NAME.*, with the crop of its item."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kineograph.core.batch import Batch, Sample
from kineograph.core.errors import InputError, Unreadable
from kineograph.data.check import check_folder
from kineograph.data.folder import Folder

RANDOM = {"crop": "resized", "crop_area": (0.3, 0.6), "flip": 0.5, "rotate": True}


def checkers(height: int = 48, width: int = 64) -> np.ndarray:
    """A picture that is its own mask: black and white fields of 16 pixels, all different under crop, flip and rotation."""
    fields = np.random.default_rng(0).integers(0, 2, (height // 16, width // 16))
    return np.kron(fields, np.ones((16, 16))).astype(np.uint8) * 255


def opened(root: Path, **options: object) -> Folder:
    keys = {"folder": str(root), "size": 16, "validation": 0, "channels": 1, "masks": True}
    return Folder.open(Folder.Config.model_validate(keys | options), "train", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cat.png", "cat-mask.png", "sub/dog.jpg", "sub/dog-mask.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(checkers()).save(tmp_path / name, quality=100)
    return tmp_path


@pytest.mark.parametrize("kept", [False, True])
def test_a_mask_has_the_crop_of_its_picture(folder: Path, kept: bool) -> None:
    source = opened(folder, **RANDOM)
    assert [source.identity(index) for index in range(len(source))] == ["cat.png", "sub/dog.jpg"]
    if kept:
        source.keep_decoded(10**8)
    drawn = set()
    for seed in range(12):
        sample = source.read(seed % 2, np.random.default_rng(seed))
        assert (sample.pixels[0, 0].int() - sample.loss_mask.int()).abs().float().mean() < 8
        drawn.add(bytes(sample.loss_mask.numpy()))
    assert len(drawn) == 12


def test_a_mask_has_the_crop_of_its_clip(tmp_path: Path, make_video) -> None:
    frames = np.repeat(np.repeat(checkers()[None, :, :, None], 3, 3), 12, 0)
    make_video(tmp_path / "film.mp4", frames, crf="1")
    frames_of_gif = [Image.fromarray(frame[..., 0]) for frame in frames]
    frames_of_gif[0].save(tmp_path / "loop.gif", save_all=True, append_images=frames_of_gif[1:], duration=100)
    for stem in ("film", "loop"):
        Image.fromarray(checkers()).save(tmp_path / f"{stem}-mask.png")
    source = opened(tmp_path, frames=3, fps=8, **RANDOM)
    assert len(source) == 2
    for seed in range(8):
        sample = source.read(seed % 2, np.random.default_rng(seed))
        assert (sample.pixels[-1, 0].int() - sample.loss_mask.int()).abs().float().mean() < 12


def test_the_captions_drawn_are_those_without_masks(folder: Path) -> None:
    """A mask leaves rng where it was."""
    states = []
    for masks in (False, True):
        rng = np.random.default_rng(3)
        opened(folder, masks=masks, **RANDOM).read(0, rng)
        states.append(rng.random())
    assert states[0] == states[1]


def test_bars_and_items_without_a_mask_count(folder: Path) -> None:
    (folder / "sub/dog-mask.png").unlink()
    source = opened(folder, resize="contain", background="black")
    assert "1 of 2 items have no mask and count whole, such as sub/dog.jpg" in source.note
    samples = [source.read(index, np.random.default_rng(0)) for index in range(2)]
    assert (samples[0].loss_mask[:2] == 255).all() and samples[1].loss_mask is None
    batch = Batch.collate(samples, range(2))
    assert batch.loss_mask.shape == (2, 16, 16) and (batch.loss_mask[1] == 255).all()
    assert Batch.collate([Sample(pixels=torch.zeros(1, 1, 2, 2))], [0]).loss_mask is None


def test_masks_are_no_items_and_unused_ones_are_named(folder: Path) -> None:
    source = opened(folder, masks=False)
    assert len(source) == 2 and not source.has_loss_masks
    assert "2 items have a mask, such as cat-mask.png" in source.note and "data.masks=true" in source.note
    assert source.read(0, np.random.default_rng(0)).loss_mask is None


def test_a_mask_of_another_size_is_counted(folder: Path) -> None:
    Image.new("L", (32, 48)).save(folder / "cat-mask.png")
    reason = "its mask cat-mask.png has 32 × 48 pixels, and it has 64 × 48: give the mask the size of its picture"
    with pytest.raises(Unreadable, match=reason):
        opened(folder).read(0, np.random.default_rng(0))
    report = check_folder(folder)
    assert ("cat.png", reason) in report.problems and len(report.problems) == 1
    assert report.count == 2 and any("masks: 2 of 2 items have one" in note for note in report.notes)


def test_masks_that_nothing_has_are_refused(folder: Path) -> None:
    for name in ("cat-mask.png", "sub/dog-mask.png"):
        (folder / name).unlink()
    with pytest.raises(InputError, match=r"data.masks=true.*none of 2 items.*such as cat-mask\.png"):
        opened(folder)


def test_a_changed_mask_changes_the_fingerprint(folder: Path) -> None:
    before = opened(folder).fingerprint()
    Image.new("L", (64, 48)).save(folder / "cat-mask.png")
    assert opened(folder).fingerprint() != before
