"""A family in a user's own package needs three files: its module, its preset and its test. Nothing of ours names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import kineograph as kg

FAMILY = Path(__file__).parent / "fixtures" / "outside_family"


def test_a_family_with_codec_text_and_picture_embeddings_trains_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FAMILY)
    monkeypatch.setenv("KINEO_PRESETS", str(FAMILY / "presets"))
    run = kg.train("portrait-tiny", run=tmp_path / "run", quiet=True, **{"train.device": "cpu"})
    assert list((run / "generator" / "samples" / "step-00000002").glob("*.png"))
    samples = kg.load(run, device="cpu").sample(["a red 3 at the top left"], count=2)
    assert samples.pixels.shape == (2, 1, 3, 16, 16)
    sys.modules.pop("portrait", None)
