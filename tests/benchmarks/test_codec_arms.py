from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import codec_arms
from kineograph.codec.perceptual import Lpips
from kineograph.core import weight_cache
from kineograph.core.run_folder import RunFolder
from kineograph.evaluate.metric_api import Result
from kineograph.evaluate.results_file import add_results
from kineograph.run import layers
from kineograph.run.plan import make_plan


def arguments(*words: str) -> list[str]:
    return ["--data", "photos", "--runs", "runs/arms", *words]


@pytest.mark.parametrize("preset", ["vqgan-photos", "cvivit-clips"])
def test_arms_differ_in_their_losses_alone(preset):
    """Settings of all arms do not bring back what an arm leaves out."""
    options = codec_arms._build_parser().parse_args(
        arguments("--preset", preset, "train.steps=7", "stages.tokenizer.adversarial.start=3")
    )
    plans = {}
    for arm in codec_arms.ARMS:
        words = codec_arms._train_command(arm, options)
        plans[arm] = make_plan(layers.read_config(words[2 : words.index("--run")])).stage("tokenizer")
    losses = {arm: plan.spec.config.model_dump(include={"perceptual", "adversarial"}) for arm, plan in plans.items()}
    rest = [plan.spec.config.model_dump(exclude={"perceptual", "adversarial"}) for plan in plans.values()]
    assert all(config == rest[0] for config in rest) and {plan.train.steps for plan in plans.values()} == {7}
    assert losses["l2"]["adversarial"] is None and losses["l2"]["perceptual"]["weight"] == 0
    assert losses["lpips"]["adversarial"] is None and losses["lpips"]["perceptual"]["weight"] == 1
    assert losses["gan"]["adversarial"]["start"] == 3
    assert not losses["gan-fixed"]["adversarial"]["adaptive"] and losses["gan-bce"]["adversarial"]["loss"] == "bce"


def test_unknown_arms_are_refused(capsys):
    assert codec_arms.main(arguments("--arms", "l2,gun")) == 2
    assert "--arms gun: use l2, lpips" in capsys.readouterr().err


def test_the_table_shows_the_newest_numbers(tmp_path):
    run = RunFolder(tmp_path)
    (tmp_path / "config.yaml").write_text("stages: {}\n")
    for step, psnr in ((10, 20.0), (20, 21.5)):
        results = {
            "reconstruction": Result({"psnr": psnr}, {}),
            "lpips": Result({"lpips": 0.25}, {"extractor": "lpips-alexnet 137fae61e223", "count": 64}),
        }
        add_results(run, "validation", "tokenizer", step, results)
    row = codec_arms.read_numbers(tmp_path)
    assert row["psnr"] == 21.5 and row["step"] == 20 and row["extractors"] == {"lpips": "lpips-alexnet 137fae61e223"}
    assert codec_arms.format_table({"l2": row | {"seconds": 12.3}})[-1] == "| l2 | 21.50 | 0.2500 | – | – | 12 |"


@pytest.mark.slow
def test_arms_are_trained_judged_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(codec_arms.NUMBERS, "rfid", "reconstruction")  # no Inception here
    for trunk in ("vgg16", "alexnet"):
        heads = {name: value.abs() for name, value in Lpips(trunk).state_dict().items()}  # a distance is not negative
        weight_cache.store(f"lpips-{trunk}", heads)
    random = np.random.default_rng(0)
    for number in range(20):
        path = tmp_path / "photos" / str(number % 5) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    settings = [
        "data.size=32", "data.validation=0.3", "train.steps=3", "train.batch_size=4", "train.workers=0",
        "stages.tokenizer.width=8", "stages.tokenizer.adversarial.start=1",
    ]  # fmt: skip
    runs = tmp_path / "runs"
    words = ["--data", str(tmp_path / "photos"), "--runs", str(runs), "--samples", "4", "--device", "cpu", *settings]
    assert codec_arms.main(["--arms", "l2,gan", *words]) == 0
    assert codec_arms.read_numbers(runs / "gan")["lpips"] > 0
    with Image.open(runs / "arms.png") as sheet:
        assert sheet.size == (12 * 64, 3 * 64)
        means = np.asarray(sheet, float).reshape(3, 64, 12, 64, 3).mean((1, 3, 4))  # of each tile
    assert np.abs(means - means[:1]).max() < 100  # untrained reconstructions are gray, not black
    assert '"gan"' in Path(runs / "arms.json").read_text()
