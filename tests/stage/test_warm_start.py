"""`init`: weights of another stage, the words that they belong to, and what the log says of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kineograph.core.errors import InputError
from kineograph.text.learned import ASSET
from kineograph.train import checkpoint
from tests.run.clip_tasks import BASE, train

GENERATOR: dict[str, Any] = BASE["stages"]["generator"]
FIRST = GENERATOR | {"data": {"frames": 1, "stills": 0.0}}  # pictures: captions say places
FROZEN: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.0, "ema": {"decay": 0.0}}
TOKENS = "text.tokens.weight"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)


def stages(**named: dict[str, Any]) -> dict[str, Any]:
    return {"codec": BASE["stages"]["codec"], **named}


def run(folder: Path, named: dict[str, Any], name: str = "run", lines: list[str] | None = None, **changes: Any) -> Path:
    return train(folder, name, lines, stages=named, data__stills=0.0, train__validate_every=0, **changes)


def weights(path: Path, stage: str) -> dict[str, torch.Tensor]:
    return checkpoint.select(path / stage / "checkpoints").weights()


def words(path: Path, stage: str) -> str:
    return checkpoint.select(path / stage / "checkpoints").state()["assets"][ASSET]


def vocabulary(text: str) -> set[str]:
    return {token.removeprefix("Ġ") for token in json.loads(text)["model"]["vocab"]}


def told(lines: list[str], stage: str) -> str:
    (line,) = [line for line in lines if line.startswith(f"{stage}: ") and "taken from" in line]
    return line


def test_pictures_then_clips_speak_one_vocabulary(tmp_path: Path) -> None:
    second = GENERATOR | {"init": "images", "train": FROZEN}
    lines: list[str] = []
    path = run(tmp_path, stages(images=FIRST, clips=second), lines=lines)
    assert words(path, "images") == words(path, "clips")
    known = vocabulary(words(path, "images"))
    assert {"corner", "moves", "drifts", "sits"} <= known  # pictures say places, clips say motions
    before, after = weights(path, "images"), weights(path, "clips")
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert told(lines, "clips") == f"clips: {len(after)} of {len(after)} tensors taken from images"


def test_a_stage_that_nothing_starts_from_learns_its_own_words(tmp_path: Path) -> None:
    path = run(tmp_path, stages(images=FIRST, clips=GENERATOR))
    assert words(path, "images") != words(path, "clips")
    assert "drifts" not in vocabulary(words(path, "images"))
    assert "corner" not in vocabulary(words(path, "clips"))


def test_heirs_of_heirs_are_heard_too(tmp_path: Path) -> None:
    middle = FIRST | {"init": "images"}
    path = run(tmp_path, stages(images=FIRST, more=middle, clips=GENERATOR | {"init": "more"}))
    assert "drifts" in vocabulary(words(path, "images"))
    assert words(path, "images") == words(path, "more") == words(path, "clips")


def test_another_runs_words_come_with_its_weights(tmp_path: Path) -> None:
    first = run(tmp_path, stages(images=FIRST), "first")
    lines: list[str] = []
    clips = GENERATOR | {"init": f"{first}/images", "codec": f"{first}/codec", "train": FROZEN}
    second = run(tmp_path, {"clips": clips}, "second", lines=lines)
    assert words(second, "clips") == words(first, "images")
    assert "drifts" not in vocabulary(words(second, "clips"))
    assert torch.equal(weights(second, "clips")[TOKENS], weights(first, "images")[TOKENS])
    assert "tensors taken from" in told(lines, "clips")


def test_weights_that_know_another_codec_are_told_of(tmp_path: Path) -> None:
    first, lines = run(tmp_path, stages(images=FIRST), "first"), list[str]()
    start = FIRST | {"init": f"{first}/images"}
    run(tmp_path, stages(images=start | {"codec": f"{first}/codec"}), "same", lines=lines)
    assert not any("another codec" in line for line in lines)
    run(tmp_path, stages(images=start), "other", lines=lines, seed=9)
    (line,) = [line for line in lines if "another codec" in line]
    assert f"{first}/images was trained with another codec than {tmp_path}/other/codec" in line
    assert "set stages.images.codec" in line


def file_of(path: Path, stage: str, folder: Path, **changed: torch.Tensor) -> str:
    save_file(weights(path, stage) | changed, folder / "given.safetensors")
    return str(folder / "given.safetensors")


def test_a_file_has_no_words_so_its_embeddings_stay_behind(tmp_path: Path) -> None:
    first = run(tmp_path, stages(images=FIRST), "first")
    given = weights(first, "images")
    lines: list[str] = []
    start = FIRST | {"codec": f"{first}/codec", "train": FROZEN, "init": file_of(first, "images", tmp_path)}
    second = run(tmp_path, {"images": start}, "second", lines=lines)
    found = weights(second, "images")
    assert found[TOKENS].shape == given[TOKENS].shape  # it would have fitted
    assert not torch.equal(found[TOKENS], given[TOKENS])
    assert all(torch.equal(value, given[name]) for name, value in found.items() if name != TOKENS)
    assert f"{len(found) - 1} of {len(found)} tensors" in told(lines, "images")
    assert f"of a vocabulary that may be another one: {TOKENS}" in told(lines, "images")


def test_bytes_mean_the_same_in_every_file(tmp_path: Path) -> None:
    plain = {"kind": "learned", "tokenizer": "byte", "width": 8, "depth": 0, "positions": "learned", "length": 64}
    first = run(tmp_path, stages(images=FIRST | {"text": plain}), "first")
    start = FIRST | {"codec": f"{first}/codec", "train": FROZEN, "text": plain}
    start["init"] = file_of(first, "images", tmp_path)
    second = run(tmp_path, {"images": start}, "second")
    assert torch.equal(weights(second, "images")[TOKENS], weights(first, "images")[TOKENS])


def test_the_log_names_what_was_not_taken(tmp_path: Path) -> None:
    first = run(tmp_path, stages(images=FIRST), "first")
    wider = FIRST | {
        "text": {"kind": "learned", "width": 8, "depth": 0, "positions": "learned", "length": 30},
        "init": f"{first}/images",
    }
    lines: list[str] = []
    run(tmp_path, {"images": wider | {"codec": f"{first}/codec"}}, "second", lines=lines)
    line = told(lines, "images")
    assert "; of another shape: text.positions." in line
    assert TOKENS not in line
    deeper = wider | {"text": {"kind": "learned", "width": 8, "depth": 1, "heads": 1, "length": 24}}
    lines.clear()
    run(tmp_path, {"images": deeper | {"codec": f"{first}/codec"}}, "third", lines=lines)
    assert "; not there: text.transformer." in told(lines, "images") and " more" in told(lines, "images")


@pytest.mark.parametrize("kind", ["stage", "run", "file"])
def test_nothing_that_fits_is_an_error_before_anything_is_trained(tmp_path: Path, kind: str) -> None:
    """A codec is no start for a generator, wherever its weights lie or are yet to come from."""
    init, many = "codec", r"\d+"
    if kind == "run":
        init = str(run(tmp_path, {"codec": BASE["stages"]["codec"]}, "other") / "codec")
    elif kind == "file":
        save_file({"strange": torch.zeros(3)}, tmp_path / "strange.safetensors")
        init, many = str(tmp_path / "strange.safetensors"), "1"
    told = rf"stages\.images\.init={init}: none of its {many} tensors fits .* of a {FIRST['task']}"
    with pytest.raises(InputError, match=told):
        run(tmp_path, stages(images=FIRST | {"init": init}))
    assert not (tmp_path / "run").exists()


def test_a_fetched_start_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    save_file({"strange": torch.zeros(3)}, tmp_path / "strange.safetensors")
    with pytest.raises(InputError, match=r"stages\.images\.init=file:.*none of its 1 tensors fits"):
        run(tmp_path, stages(images=FIRST | {"init": f"file://{tmp_path}/strange.safetensors"}))


def test_a_stage_that_has_begun_goes_on_without_what_it_began_with(tmp_path: Path) -> None:
    first = run(tmp_path, stages(images=FIRST), "first")
    codec = run(tmp_path, {"codec": BASE["stages"]["codec"]}, "codec")
    clips = GENERATOR | {"init": f"{first}/images", "codec": f"{codec}/codec"}
    whole = run(tmp_path, {"clips": clips}, "whole", train__steps=6)
    parts = run(tmp_path, {"clips": clips}, "parts", train__steps=3)
    shutil.rmtree(first)
    lines: list[str] = []
    assert run(tmp_path, {"clips": clips}, "parts", lines=lines, train__steps=6) == parts
    assert not any("taken from" in line for line in lines)
    for name, value in weights(whole, "clips").items():
        assert torch.equal(value, weights(parts, "clips")[name]), name
    assert words(whole, "clips") == words(parts, "clips")


def test_a_skipped_stage_must_be_trained_to_start_from(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"stages\.clips\.init=images: .*skipped and has no checkpoint"):
        run(tmp_path, stages(images=FIRST | {"skip": True}, clips=GENERATOR | {"init": "images"}))
    assert not (tmp_path / "run").exists()
