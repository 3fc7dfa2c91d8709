"""The captions that a stage's vocabulary is learned from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kineograph.core.protocols import Source
from kineograph.stage.data import StageData
from kineograph.text.learned import Vocabulary


class Captioned(Source):
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def caption(self, index: int) -> str:
        return self.texts[index]

    def read(self, index: int, rng: Any) -> Any:
        raise AssertionError("captions need no pixels")

    def identity(self, index: int) -> str:
        return str(index)


def opened(texts: list[str]) -> StageData:
    source = Captioned(texts)
    stage: Any = SimpleNamespace()
    return StageData(stage, 0, source, source, {})


def test_words_are_counted_by_items() -> None:
    """A caption of fifty items is frequent, though it is one caption."""
    captions = opened(["a photograph of a rhinoceros"] * 50 + ["a cat", "a dog"]).captions()
    vocabulary = Vocabulary(Vocabulary.learn(captions, 1024), 64, print)
    assert vocabulary.count_tokens("a photograph of a rhinoceros") == 5 + 2


def test_a_large_set_is_sampled_over_its_whole_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.stage.data.VOCABULARY_CAPTIONS", 10)
    texts = [f"class {index // 20}" for index in range(95)]
    captions = opened(texts).captions()
    assert len(captions) == 10
    assert set(captions) == set(texts)
