"""Plan: presets as cards, and which settings make one fit a GPU."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import pytest

from kineograph.doctor import estimate
from kineograph.run.layers import preset_names, read_config
from kineograph.run.plan import make_plan
from kineograph.run.presets import list_presets
from kineograph.studio import memory_plan, pages
from kineograph.studio.estimate_worker import describe_stages
from kineograph.studio.memory_plan import CACHE, GIB, Estimator, Fit, make_command, read_stage_memory
from kineograph.studio.plan_pages import PICTURES


def memory(**changes: int) -> dict[str, int]:
    parts = {"weights": 2, "gradients": 2, "optimizer": 4, "ema": 2, "text": 0, "activations": 30} | changes
    return {part: size * GIB for part, size in parts.items()}


STAGE = {
    "name": "generator", "task": "Muse", "trained": 10**9, "frozen": 0, "clip": [1, 64, 64], "precision": "bf16",
    "batch_size": 8, "accumulate": 1, "micro": 8, "sample_bytes": 3.5 * GIB, "usable": 0.9, "memory": memory(),
    "savings": [[["train.checkpointing=true"], memory(activations=8)], [["train.ema.decay=0"], memory(ema=0)]],
    "combinations": [
        [["train.checkpointing=true"], memory(activations=8)],
        [["train.checkpointing=true", CACHE, "train.accumulate=8"], memory(activations=1, ema=0)],
    ],
}  # fmt: skip


def test_the_first_choice_that_fits_is_the_cheapest_one() -> None:
    stage = read_stage_memory(STAGE)
    choices = {size: stage.choose(size * GIB) for size in (48, 32, 24, 10, 4)}
    assert choices[48] == stage.base  # 40 of 43.2 usable
    assert choices[32] is not None and choices[32].settings == ("train.accumulate=2",)  # the same result, only slower
    assert choices[24] is not None and choices[24].settings == ("train.accumulate=4",)
    assert choices[10] is not None and choices[10].settings == (
        "train.checkpointing=true",
        "cache=true",
        "train.accumulate=8",
    )
    assert choices[4] is None
    for size, fit in choices.items():
        assert fit is None or fit.total <= 0.9 * size * GIB


def test_what_to_type_names_the_stage_of_each_setting() -> None:
    preset = next(preset for preset in list_presets() if preset.name == "muse-base")
    fits = {"tokenizer": Fit((), {}), "generator": Fit(("cache=true", "train.ema.decay=0", "stages.generator.x=1"), {})}
    keys = "stages.generator.cache=true stages.generator.train.ema.decay=0 stages.generator.x=1"
    assert make_command(preset, fits) == f"{preset.command} {keys}"


def test_every_preset_has_a_card_and_pictures_are_small_and_of_real_presets(client: Any) -> None:
    page = client.get("/plan").text
    for name in preset_names():
        assert f'href="/plan/{name}"' in page
    assert page.count("No picture of its results") == len(preset_names()) - len(PICTURES)
    shipped = {name: len(data) for name, data in pages.read_static().items() if name.startswith("preset-")}
    assert shipped.keys() == {f"preset-{name}.webp" for name in PICTURES} and PICTURES.keys() <= set(preset_names())
    assert sum(shipped.values()) < 300_000


def wait_for_fit(client: Any, size: int) -> str:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        answer = client.get("/plan/muse-tiny/fit", params={"memory": size})
        if answer.status_code == 200:
            return answer.text
        assert answer.status_code == 202 and "Estimating" in answer.text
        time.sleep(0.02)
    raise AssertionError("the estimate has not ended")


def test_the_slider_asks_for_bars_settings_and_a_command(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps(STAGE)
    monkeypatch.setattr(memory_plan, "worker_command", lambda preset: [sys.executable, "-c", f"print({line!r})"])
    assert "Memory of the GPU" in client.get("/plan/muse-tiny").text
    fits = wait_for_fit(client, 48)
    assert "kineo train muse-tiny<" in fits and "activations 30 GiB" in fits
    assert "stages.generator.train.accumulate=2" in wait_for_fit(client, 32)
    small = wait_for_fit(client, 4)
    assert "Does not fit." in small and "Not every stage fits 4 GiB" in small and "kineo train muse-tiny<" not in small
    assert client.get("/plan/nothing").status_code == 404
    assert client.get("/plan/..%2fmuse-tiny/fit").status_code == 404


def test_an_estimate_that_fails_is_told_in_words(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "worker_command", lambda preset: [sys.executable, "-c", "raise SystemExit(3)"])
    assert "exit code 3" in wait_for_fit(client, 24)
    with pytest.raises(KeyError):
        Estimator().estimate("../muse-tiny")


def test_the_process_that_estimates_says_what_doctor_says() -> None:
    out = io.StringIO()
    describe_stages(["vqgan-tiny", "stages.tokenizer.multipliers=[1]", "data.size=16", "train.batch_size=2"], out)
    (stage,) = map(read_stage_memory, map(json.loads, out.getvalue().splitlines()))
    assert stage.name == "tokenizer" and stage.base.total > 0 and stage.trained > 10_000
    assert all(fit.total < stage.base.total for fit in stage.savings)
    totals = [fit.total for fit in stage.combinations]
    assert totals == sorted(totals, reverse=True) and len(stage.combinations[-1].settings) > 2
    assert estimate._CACHED == CACHE
    preset = next(preset for preset in list_presets() if preset.name == "vqgan-tiny")
    cached = Fit((*stage.combinations[-1].settings, "cache=true"), {})
    words = make_command(preset, {"tokenizer": cached}).split()
    assert words[:2] == ["kineo", "train"]
    train = make_plan(read_config(words[2:])).stage("tokenizer").train  # every key exists
    assert train.optimizer == "adamw_8bit" and train.accumulate > 1
