from __future__ import annotations

import json

import pytest
import yaml
from PIL import Image

from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_json
from kineograph.evaluate import results_file
from kineograph.evaluate.compare import compare
from kineograph.evaluate.metric_api import Result
from kineograph.train import checkpoint
from tests.sample.tiny_task import TinyCodec, log, make_run, save_stage


def train_record(stage: str, step: int, loss: float | None, rate: float, elapsed: float) -> dict:
    return {
        "stage": stage,
        "split": "train",
        "step": step,
        "loss": loss,
        "time/samples_per_second": rate,
        "time/elapsed": elapsed,
    }


@pytest.fixture
def full(tmp_path):
    """A run that has been trained and judged."""
    run = make_run(tmp_path / "full", steps=20)
    log(
        run,
        train_record("tokenizer", 20, 0.5, 900.0, 30.0),
        train_record("generator", 10, 2.0, 90.0, 60.0),
        train_record("generator", 15, None, 110.0, 80.0),
        train_record("generator", 20, 1.0, 100.0, 100.0),
    )
    with open(run.metrics_file, "a") as file:
        file.write('{"stage": "generator", "split": "tr')  # torn by a kill
    checkpoint.write_best(run.checkpoints("generator"), 20, 0.75)
    rates = {"caption_accuracy": 0.9, "digit": 0.95, "place": 1.0}
    results_file.add_results(run, "validation", "generator", 20, {"caption_accuracy": Result(rates, {"ceiling": 0.99})})
    results_file.add_results(
        run,
        "validation",
        "tokenizer",
        20,
        {
            "reconstruction": Result({"psnr": 21.5}),
            "codebook": Result({"codebook_use": 0.5, "codebook_perplexity": 1.5}),
        },
    )
    return run


def test_known_values_side_by_side(full, tmp_path):
    bare = make_run(tmp_path / "bare", "tokenizer", steps=40)
    found = compare([full.path, bare.path])
    rows = found.rows()
    values = {title.strip(): cells[0].value for title, cells in rows.items()}
    assert values["stages"] == "TinyCodec + TinyGenerator"
    assert values["parameters"] == 21  # 4 × 4 + 4 + 1
    assert values["parameters, all stages"] == 22
    assert values["steps"] == 20
    assert values["best validation loss"] == 0.75
    assert values["caption accuracy"] == 0.9
    assert values["digit right"] == 0.95
    assert values["PSNR, dB"] == 21.5
    assert values["codebook use"] == 0.5
    assert values["training samples/s"] == 100.0
    assert values["training time"] == 130.0  # both stages
    assert "colour right" not in values
    assert rows["caption accuracy"][1].text == "–"
    assert list(rows).index("  digit right") == list(rows).index("caption accuracy") + 1
    assert rows["steps"][1].text == "20 of 40"


def test_a_finished_run_is_not_told_to_train(full):
    full.metrics_file.unlink()
    (full.checkpoints("generator") / "best.json").unlink()
    found = compare([full.path])
    assert found.missing() == [f"kineo evaluate {full.path}   fills best validation loss"]
    assert "training time" not in found.rows()
    results_file.add_results(full, "validation", "generator", 20, {"loss": Result({"loss": 0.6})})
    assert compare([full.path]).rows()["best validation loss"][0].value == 0.6


def test_missing_values_name_the_command_that_fills_them(full, tmp_path):
    bare = make_run(tmp_path / "bare", "tokenizer")
    lines = compare([full.path, bare.path]).missing()
    judge = next(line for line in lines if line.startswith(f"kineo evaluate {bare.path}"))
    assert "PSNR" in judge
    assert "caption accuracy" not in judge  # its generator is not trained, so evaluating would not help
    assert not any(str(full.path) in line and "caption" in line for line in lines)
    assert any(line.startswith(f"kineo train {bare.path}/config.yaml --run {bare.path} ") for line in lines)
    tested = compare([full.path], split="test").missing()
    assert any(
        line.startswith(f"kineo evaluate {full.path} --split test") and "caption accuracy" in line for line in tested
    )


def test_a_codec_without_codes_is_not_asked_for_their_use(tmp_path, monkeypatch):
    coded = compare([make_run(tmp_path / "coded", "tokenizer").path]).missing()
    assert any("codebook use" in line for line in coded)
    monkeypatch.setattr(TinyCodec, "has_codebook", False)  # as of continuous latents
    smooth = compare([make_run(tmp_path / "smooth", "tokenizer").path]).missing()
    assert any("PSNR" in line for line in smooth) and not any("codebook" in line for line in smooth)


def test_the_codec_of_a_cascade_is_that_of_the_judged_stage(full):
    tree = full.config()
    tree["stages"] = {"small": tree["stages"]["tokenizer"], **tree["stages"]}
    full.config_file.write_text(yaml.safe_dump(tree, sort_keys=False))
    results_file.add_results(full, "validation", "small", 20, {"reconstruction": Result({"psnr": 11.0})})
    assert compare([full.path]).rows()["PSNR, dB"][0].value == 21.5


def test_a_judgement_of_an_older_checkpoint_says_so(full):
    save_stage(full, "generator", 30)
    assert compare([full.path]).rows()["caption accuracy"][0].text == "90.0 % @ step 20"


def test_what_was_not_drawn_from_captions_says_so(full):
    for told, text in (
        ("image_embed of the data", "90.0 % (of image_embed of the data)"),
        ("captions, through prior=x", "90.0 %"),
    ):
        labels = {"drawn from": told, "extractor": "inception-v3 abc", "count": 12}
        results = {"caption_accuracy": Result({"caption_accuracy": 0.9}, labels), "fid": Result({"fid": 12.0}, labels)}
        results_file.add_results(full, "validation", "generator", 20, results)
        rows = compare([full.path]).rows()
        assert rows["caption accuracy"][0].text == text
        assert ("of image_embed of the data)" in rows["FID"][0].text) == told.startswith("image")


def test_figures_of_different_protocols_are_named(full, tmp_path, capsys):
    other = make_run(tmp_path / "other")
    common = {"extractor": "inception-v3 abc", "count": 50, "real": 50}
    for run, more in ((full, {"mode": "clean", "subsets": "100 × 50"}), (other, {"mode": "tensorflow"})):
        results = {name: Result({name: 1.0}, common | more) for name in ("fid", "kid")}
        results_file.add_results(run, "validation", "generator", 20, results)
    found = compare([full.path, other.path])
    assert found.protocol_differences() == ["FID, KID: mode: clean in full, tensorflow in other"]
    assert found.rows()["FID"][0].text == "1.00 (inception-v3 abc, clean, 50)"
    found.show()
    assert "computed in different ways" in capsys.readouterr().out
    assert found.json()["protocol differences"] == found.protocol_differences()
    assert not compare([full.path, full.path]).protocol_differences()


def test_written_as_json_and_picture(full, tmp_path):
    other = make_run(tmp_path / "elsewhere" / "full")
    found = compare([full.path, other.path])
    assert found.names == [str(full.path), str(other.path)]  # two runs of one name are told apart
    found.show()
    json_file, picture = found.write(tmp_path / "out")
    saved = json.loads(json_file.read_text())
    assert saved["runs"][str(full.path)]["caption accuracy"] == 0.9
    assert saved["runs"][str(other.path)]["caption accuracy"] is None
    assert Image.open(picture).width > 600
    nothing = compare([other.path]).write(tmp_path / "nothing")
    assert [path.name for path in nothing] == ["comparison.json"]


def test_mistakes(tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        compare([tmp_path])
    with pytest.raises(InputError, match="nothing to compare"):
        compare([])


def test_different_data_are_named(full, tmp_path, capsys):
    """Figures of other items, sizes or lengths do not compare; where the same items lie does not matter."""
    same, other = make_run(tmp_path / "same", steps=20), make_run(tmp_path / "other", steps=20)
    assert compare([full.path, same.path]).data_differences() == []
    tree = other.config()
    tree["stages"]["generator"]["data"] = {**(tree["stages"]["generator"].get("data") or {}), "size": [64, 64]}
    other.write_config(tree)
    found = compare([full.path, same.path, other.path])
    tree["stages"]["generator"]["data"] |= {"flip": 0.5, "shuffle": False}
    other.config_file.write_text(yaml.safe_dump(tree))
    tree = same.config()
    tree["stages"]["generator"]["data"] = {
        **(tree["stages"]["generator"].get("data") or {}),
        "flip": 0.0,
        "shuffle": True,
    }
    same.config_file.write_text(yaml.safe_dump(tree))
    found = compare([same.path, other.path])
    assert [line[:10] for line in found.data_differences()] == ["data.size:"], "others change the training only"
    found = compare([full.path, same.path, other.path])
    (line,) = found.data_differences()
    assert line.startswith("data.size: ") and line.endswith("[64, 64] in other")
    assert found.json()["data differences"] == [line]
    found.show()
    assert "judged on different data, so their figures do not compare" in capsys.readouterr().out
    for run, digest in ((full, "1f"), (same, "2e")):
        write_json(run.data_file, {"generator": {"location": {}, "validation": {"items": 9, "digest": digest}}})
    (line,) = compare([full.path, same.path]).data_differences()
    assert "validation items themselves" in line
