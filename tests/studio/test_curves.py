"""Curves: columns, panels and marks from metrics.jsonl, short and long."""

from __future__ import annotations

import json
import time
from pathlib import Path

from kineograph.studio import curves, metric_records
from kineograph.studio.curves import read_curves, to_json
from kineograph.studio.metric_records import read_records, sample_records
from tests.studio.run_folders import make_record, write_checkpoint, write_metrics, write_run


def only(run: Path, records: list[dict]) -> curves.StageCurves:
    run.mkdir(exist_ok=True)
    write_metrics(run, records)
    (stage,) = read_curves(run, [])
    return stage


def test_training_and_validation_share_a_panel(tmp_path: Path) -> None:
    tokenizer, generator = read_curves(write_run(tmp_path / "run"), ["tokenizer", "generator"])
    assert (tokenizer.name, generator.name) == ("tokenizer", "generator")
    panels = {panel.title: panel for panel in generator.panels}
    assert [(curve.label, curve.split) for curve in panels["Loss"].curves] == [
        ("train", "train"),
        ("validation", "validation"),
    ]
    assert panels["Loss"].log and not panels["Learning rate"].log
    assert generator.splits["train"].step[-1] == 100
    assert generator.splits["train"].minutes[-1] == 50 / 60
    assert generator.splits["validation"].minutes == [50 / 60]  # validation has no time of its own
    assert "Skipped updates" not in panels  # none were
    assert generator.panels[0].title == "Loss"


def test_families_of_numbers_share_a_panel(tmp_path: Path) -> None:
    values = {"loss/t0000-0249": 0.1, "loss/t0250-0499": 0.2, "latents/std_00": 1.0, "latents/std_01": 2.0}
    values |= {"loss/masked000-025": 0.1, "loss/masked075-100": 0.1, "cross_entropy": 0.3}
    stage = only(
        tmp_path / "run", [make_record("vae", 1, 0.3, **{"time/forward_ms": 1.0, "time/data_ms": 2.0}, **values)]
    )
    panels = {panel.title: [curve.label for curve in panel.curves] for panel in stage.panels}
    assert panels["Loss by noise range"] == ["timesteps 0–249", "timesteps 250–499"]
    assert panels["Loss by mask share"] == ["0–25 % masked", "75–100 % masked"]
    assert "Cross entropy" in panels
    assert panels["Latents/std, each"] == ["std_00", "std_01"]
    assert panels["Milliseconds by part"] == ["forward", "data"]


def test_null_stays_a_gap_and_nothing_not_finite_reaches_json(tmp_path: Path) -> None:
    records = [make_record("s", 1, 1.0), make_record("s", 2, None), make_record("s", 3, float("nan"))]
    stage = only(tmp_path / "run", records)
    assert stage.splits["train"].values["loss"] == [1.0, None, None]
    json.dumps(to_json([stage]), allow_nan=False)


def test_marks_tell_saves_resumes_skips_and_findings(tmp_path: Path) -> None:
    run = tmp_path / "run"
    finding = {"name": "flat", "severity": "warning", "evidence": "x is 1", "meaning": "Bad.", "remedy": "Fix it."}
    records = [make_record("s", step, 1.0) for step in (10, 20, 30)]
    records[1]["skipped"] = records[2]["skipped"] = 2.0
    records.append({"stage": "s", "split": "train", "step": 30, "finding": finding})
    write_checkpoint(run, "s", 20)
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text(
        "2026-01-02 03:04:05  s: Toy, 1 M parameters, on cpu\n2026-01-02 03:05:05  s: Toy, 1 M parameters, on cpu, from step 20, to save\n"
    )
    marks = only(run, records).marks
    assert [(mark.step, mark.kind) for mark in marks] == [
        (20, "resume"),
        (20, "save"),
        (20, "skipped"),
        (30, "warning"),
    ]
    texts = [mark.text for mark in marks]
    assert texts[0] == "resumed from step 20 on 2026-01-02 03:05"
    assert texts[2] == "2 updates skipped: the gradient was not finite"
    assert texts[3] == "flat: x is 1. Bad. Fix it."


def test_thinning_keeps_spikes(tmp_path: Path) -> None:
    records = [make_record("s", step, 1.0) for step in range(1, 5001)]
    records[1234]["loss"], records[3210]["loss"] = 900.0, 0.001
    stage = only(tmp_path / "run", records)
    column = stage.splits["train"]
    assert len(column.step) <= 1.5 * curves.POINTS
    assert (column.step[0], column.step[-1]) == (1, 5000)
    assert column.values["loss"][column.step.index(1235)] == 900.0
    assert column.values["loss"][column.step.index(3211)] == 0.001


def test_of_a_long_file_every_validation_and_finding_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(metric_records, "WHOLE", 1000)
    monkeypatch.setattr(metric_records, "SAMPLES", 60)
    monkeypatch.setattr(metric_records, "CHUNK", 777)  # texts lie across chunks
    records = []
    for step in range(1, 3001):
        stage = "short" if step <= 100 else "long"
        records.append(make_record(stage, step, 1.0))
        if step % 100 == 0:
            records.append({"stage": stage, "split": "validation", "step": step, "loss": 2.0})
    records.append({"stage": "long", "split": "train", "step": 3000, "finding": {"name": "flat", "severity": "fatal"}})
    write_run(tmp_path / "run")
    write_metrics(tmp_path / "run", records)
    read = read_records(tmp_path / "run")
    assert [r["step"] for r in read if r["split"] == "validation"] == list(range(100, 3001, 100))
    assert sum("finding" in r for r in read) == 1
    training = [r for r in read if r["split"] == "train" and "finding" not in r]
    assert 60 <= len(training) <= 200
    assert sum(r["stage"] == "short" for r in training) >= 15  # 3 % of the file, and still a curve
    keys = [(r["step"], r["split"] != "train") for r in read if "finding" not in r]
    assert keys == sorted(set(keys)), "each once, in order"


def test_a_few_records_are_read_from_the_whole_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_metrics(run, [make_record("s", step, 1.0) for step in range(1, 2001)])
    steps = [record["step"] for record in sample_records(run, 10)]
    assert steps[0] == 1 and steps[-1] == 2000 and len(steps) <= 20
    assert steps == sorted(steps)


def test_a_large_file_is_read_in_well_under_a_second(tmp_path: Path) -> None:
    """A tenth of a million records, in a tenth of the time that a million may take."""
    run = tmp_path / "run"
    run.mkdir()
    line = json.dumps(make_record("s", 1, 1.0, padding="x" * 300)) + "\n"
    with open(run / "metrics.jsonl", "w") as file:
        file.writelines(line.replace('"step": 1,', f'"step": {step},', 1) for step in range(1, 100_001))
    begin = time.process_time()
    (stage,) = read_curves(run, [])
    assert time.process_time() - begin < 0.4
    assert len(stage.splits["train"].step) > 300


def test_garbage_in_the_file_is_left_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    good = json.dumps(make_record("s", 7, 1.0))
    lines = [
        "",
        "nonsense",
        "[1, 2]",
        '{"stage": 3, "step": 1}',
        '{"stage": "s", "step": true}',
        "[" * 5000,
        good,
        good[:20],
    ]
    (run / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    (stage,) = read_curves(run, [])
    assert stage.splits["train"].step == [7]


def test_a_run_without_metrics_has_no_panels(tmp_path: Path) -> None:
    (stage,) = read_curves(tmp_path, ["tokenizer"])
    assert (stage.name, stage.panels) == ("tokenizer", [])
