"""curves.png from files as they are found: torn, long, with nulls."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from PIL import Image

from kineograph.media import curves
from kineograph.media.curves import draw_curves, read_records

pytestmark = pytest.mark.usefixtures("real_curves")


def line(stage: str, step: int, split: str = "train", **numbers) -> str:
    return json.dumps({"stage": stage, "split": split, "step": step, **numbers}) + "\n"


def nasty(path) -> None:
    """Blank, torn and foreign lines; nulls; infinities as old writers left them; a stage with one point; text among the numbers."""
    lines = ["\n", "[1, 2]\n", "null\n", '{"stage": "tokenizer"}\n']
    for step in range(1, 301):
        numbers = {
            "loss": None if step == 70 else 2 * math.exp(-step / 100) + 0.1,
            "discriminator/loss": 1.0,
            "gradient_norm": 1.0 + step % 7,
            "lr": 3e-4,
            "codebook/use": step / 300,
            "time/samples_per_second": 100.0,
            "note": "words",
            "flag": True,
        }
        lines.append(line("tokenizer", step * 10, **numbers))
    lines.append('{"stage": "tokenizer", "split": "tr\n')
    lines.append('{"stage": "tokenizer", "split": "train", "step": 3001, "loss": Infinity}\n')
    lines.append(line("tokenizer", 3000, "validation", loss=0.2, psnr=24.0))
    lines += [line("generator", step, loss=0.0 if step == 5 else -1.0 / step, lr=0.0) for step in range(1, 40)]
    lines.append(line("critic", 1, loss=0.7))
    path.write_bytes("".join(lines).encode() + b'\xff\xfe{"stage": "critic", "st')


def test_a_nasty_file_gives_a_picture(tmp_path):
    nasty(tmp_path / "metrics.jsonl")
    out = draw_curves(tmp_path / "metrics.jsonl", tmp_path / "plots" / "curves.png")
    with Image.open(out) as image:
        assert image.size[0] >= 1000
        assert len(np.unique(np.asarray(image.convert("L")))) > 50
    assert [file.name for file in out.parent.iterdir()] == ["curves.png"]


def test_what_goes_into_which_panel(tmp_path):
    nasty(tmp_path / "metrics.jsonl")
    records = list(read_records(tmp_path / "metrics.jsonl"))
    axis = curves._Axis(records)
    panels = {panel.title: panel.curves for panel in curves._build_panels(records, axis)}
    assert set(panels["loss of tokenizer"]) == {"train", "validation", "discriminator/loss, train"}
    assert set(panels["loss of tokenizer"]["train"]) == {"tokenizer"}
    assert set(panels["loss of generator"]) == set(panels["loss of critic"]) == {"train"}
    assert set(panels["learning rate"]) == {"lr"}
    assert set(panels["gradient norm"]) == {"gradient_norm"}
    assert set(panels["samples per second"]) == {"time/samples_per_second"}
    assert set(panels["shares"]) == {"codebook/use, train"}
    assert set(panels["PSNR, dB"]) == {"psnr, validation"}
    gap = [y for _, y in panels["loss of tokenizer"]["train"]["tokenizer"] if math.isnan(y)]
    assert len(gap) == 1  # the null


def test_each_unit_has_an_axis_of_its_own(tmp_path):
    """A score of 30 dB beside a loss of 0.01 would flatten it."""
    names = ["reconstruction", "quantizer", "kl", "psnr", "codes/use", "accuracy", "explained_variance", "codes/perplexity",
             "tokens/distinct", "tokens/entropy", "retrieval/image_to_text", "temperature", "cosine/text", "metric/fid",
             "metric/kid", "metric/psnr", "metric/caption_accuracy", "time/step_ms", "skipped", "lr", "gradient_norm"]  # fmt: skip
    numbers = dict.fromkeys(names, 0.3) | {"loss": 0.6, "quantizer": 0.0, "cross_entropy": 0.6}
    (tmp_path / "metrics.jsonl").write_text("".join(line("only", step, **numbers) for step in (1, 2)))
    records = list(read_records(tmp_path / "metrics.jsonl"))
    panels = {panel.title: panel.curves for panel in curves._build_panels(records, curves._Axis(records))}
    assert {title: [name.removesuffix(", train") for name in found] for title, found in panels.items()} == {
        # A term of 0 is switched off, and one that equals the loss shows nothing more.
        "loss of only": ["train", "reconstruction", "kl", "tokens/entropy"],
        "PSNR, dB": ["psnr", "metric/psnr"],
        "shares": [
            "codes/use",
            "accuracy",
            "explained_variance",
            "retrieval/image_to_text",
            "metric/caption_accuracy",
        ],
        "number of codes": ["codes/perplexity", "tokens/distinct"],
        "temperature": ["temperature"],
        "cosines": ["cosine/text"],
        "metric/fid": ["metric/fid"],
        "metric/kid": ["metric/kid"],
        "learning rate": ["lr"],
        "gradient norm": ["gradient_norm"],
    }


def test_stages_follow_one_another():
    records = [{"stage": "a", "step": 100}, {"stage": "b", "step": 1000}, {"stage": "b", "step": 500}]
    axis = curves._Axis(records)
    assert axis.position("a", 0) == 0
    assert axis.position("a", 100) == axis.position("b", 0) == pytest.approx(0.2)  # short, but wide enough to read
    assert axis.position("b", 500) == pytest.approx(0.7)
    assert axis.end == pytest.approx(1.2)
    assert axis.ticks()[1] == ["0", "100", "500", "1k"]


def test_a_long_file_is_thinned_and_keeps_the_rare(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "DENSE", 50)
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        file.writelines(line("first", step, loss=1.0) for step in range(1, 21))
        for step in range(1, 20_001):
            file.write(line("second", step, loss=1.0, lr=0.1))
            if step % 1000 == 0:
                file.write(line("second", step, "validation", loss=1.0))
    records = list(read_records(path))
    assert len(records) < 1000
    kinds = [(record["stage"], record.get("split")) for record in records]
    assert kinds.count(("first", "train")) == 20
    assert kinds.count(("second", "validation")) == 20
    assert max(record["step"] for record in records) > 19_000


@pytest.mark.parametrize("content", ["", "\n", '{"stage": "a", "step": 1}\n', line("a", 1, loss=None)])
def test_no_metrics_yet(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    with Image.open(draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")) as image:
        assert image.size[0] > 0


def test_smoothing_keeps_constants_and_gaps():
    y = np.full(50, 3.0)
    y[20] = np.nan
    smooth = curves._smooth(y, 7)
    assert np.isnan(smooth[20])
    assert np.allclose(np.delete(smooth, 20), 3.0)


def test_findings_are_marked_where_they_were_made(tmp_path, monkeypatch):
    finding = {"name": "codec_collapsed", "severity": "fatal", "value": 0.01}
    lines = [line("tokenizer", step, loss=1.0) for step in range(1, 5 * curves.DENSE)]
    lines.insert(4 * curves.DENSE, line("tokenizer", 4 * curves.DENSE, "health", finding=finding, codec_collapsed=0.01))
    lines.append(line("generator", 100, loss=1.0))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    records = list(read_records(tmp_path / "metrics.jsonl"))
    axis = curves._Axis(records)
    (mark,) = curves.find_marks(records, axis)
    assert (mark.name, mark.severity) == ("codec_collapsed", "fatal")
    assert mark.x == pytest.approx(axis.position("tokenizer", 4 * curves.DENSE))
    assert not any("collapsed" in name for panel in curves._build_panels(records, axis) for name in panel.curves)
    drawn = []
    monkeypatch.setattr(curves, "_draw_marks", lambda axes, marks, named: drawn.append((marks, named)))
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    # Named in the panel of its stage's loss; the generator's has none; a line in those that all stages share.
    assert drawn[:2] == [([mark], True), ([], True)]
    assert not drawn[2:] or all(found == ([mark], False) for found in drawn[2:])


def test_marks_are_drawn(tmp_path):
    """In colours that no curve has."""
    lines = [line("tokenizer", step, loss=1.0 / step, gradient_norm=1.0) for step in range(1, 20)]
    finding = {"name": "loss_spike", "severity": "fatal"}
    lines.append(line("tokenizer", 10, "health", finding=finding))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with Image.open(draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    assert any(red > 2 * max(green, blue) for red, green, blue in colours)  # blended with the background
