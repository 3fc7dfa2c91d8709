"""Guidance needs a model trained with dropped conditions: a config without them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kineograph.core.config import parse
from kineograph.core.errors import ConfigError
from kineograph.core.registry import find_task

FAMILIES: dict[str, dict[str, Any]] = {
    "muse": {"codec": "tokenizer"},
    "phenaki": {"codec": "tokenizer"},
    "nuwa": {"codec": "tokenizer"},
    "cogvideox": {"codec": "vae"},
    "dalle2.prior": {"clip": "clip"},
    "dalle2": {"clip": "clip"},
}


def read(task: str, **keys: Any) -> Any:
    return parse(find_task(task).Config, {"task": task, **FAMILIES[task], **keys})


@pytest.mark.parametrize("task", FAMILIES)
def test_guidance_without_dropout_is_refused(task):
    key = "image_dropout" if task == "dalle2" else "caption_dropout"
    guided = {"sample": {"guidance": 3.0}}
    with pytest.raises(
        ConfigError,
        match=rf"sample\.guidance=3 needs a model trained with dropped conditions, and {key}=0: set {key}=0\.1",
    ):
        read(task, **{key: 0.0}, **guided)
    read(task, **{key: 0.1}, **guided)
    read(task, **{key: 0.0}, sample={"guidance": 1.0})
    read(task, **{key: 0.0}, **guided, init="runs/x/generator")  # whose weights may know it


@pytest.mark.parametrize("task", ["muse", "phenaki", "nuwa"])
def test_without_text_there_is_nothing_to_guide(task):
    read(task, caption_dropout=0.0, text={"kind": "none"})


def test_the_decoder_has_two_conditions():
    text = {"text": {"kind": "learned"}}
    with pytest.raises(ConfigError, match="dropped conditions, and text_dropout=0"):
        read("dalle2", text_dropout=0.0, **text)
    with pytest.raises(ConfigError, match="dropped conditions, and image_dropout=0"):
        read("dalle2", image_dropout=0.0, **text)
    read("dalle2", text_dropout=0.0)  # reads none
    read("dalle2", clip=None, image_embeds="none", image_dropout=0.0, **text)


def test_schedules_that_rise_from_nothing_are_off_at_zero():
    read("dalle2", image_dropout=0.0, sample={"guidance": 0.0, "guidance_schedule": "cosine"})
    with pytest.raises(ConfigError, match=r"or sample\.guidance=0"):
        read("dalle2", image_dropout=0.0, sample={"guidance": 1.0, "guidance_schedule": "cosine"})


def test_released_weights_know_their_null_text(tmp_path):
    keys = {"task": "cogvideox", "weights": str(tmp_path), "caption_dropout": 0.0}
    assert parse(find_task("cogvideox").Config, keys).sample.guidance == 6.0
