"""What a run loses of its data is said once, before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.run import clip_tasks
from tests.run.clip_tasks import BASE, train


def test_losses_are_said_once_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 16), (50 * number, 90, 90)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a long caption " * 20 if number else "short")
    data = {"source": "folder", "folder": str(folder), "size": 16, "frames": 5, "validation": 0}
    monkeypatch.setattr(clip_tasks, "BASE", {**BASE, "data": data})
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)
    lines: list[str] = []
    train(tmp_path, lines=lines, train__steps=1, train__batch_size=4, train__validate_every=0)
    assert lines.count("what data.* makes of the items (4 items measured):") == 1  # both stages read the same items
    assert sum("100% cropped" in line for line in lines) == 1
    assert sum("100% single pictures" in line for line in lines) == 1
    cut = "generator: 3 of 4 captions are cut to 24 tokens; raise stages.generator.text.length"
    assert [line for line in lines if "captions are cut" in line and "raise" in line] == [cut]
