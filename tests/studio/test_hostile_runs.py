"""Runs of strangers: whatever their files hold, every page answers, and other runs are shown."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from kineograph.core.run_folder import RunFolder
from kineograph.studio.clips import decode_frames
from kineograph.studio.report import write_report
from kineograph.studio.runs import make_id
from tests.studio.conftest import TOKEN, open_client
from tests.studio.run_folders import make_record, write_metrics, write_run

HALF = "\ud83d half a character"
HUGE = 10**400


def metrics_with(**values: Any) -> list[dict[str, Any]]:
    return [make_record("generator", 1, 1.0), make_record("generator", 2, 0.5) | values]


def spoil_numbers(run: Path) -> None:
    write_metrics(run, metrics_with(a=HUGE, b=float("inf"), c=-1e308, loss=1e308, gradient_norm=HUGE, skipped=HUGE))
    best = run / "generator" / "checkpoints" / "best.json"
    best.write_text('{"step": 1, "loss": NaN}')
    record = {"values": {"caption_accuracy": HUGE, "x": float("nan")}, "labels": {"n": HUGE}, "samples": HUGE}
    results = {"validation": {"generator/step-00000100": {"caption_accuracy": record}}}
    (run / "evaluation.json").write_text(json.dumps({"results": results}))


def spoil_times(run: Path) -> None:
    write_metrics(run, metrics_with(**{"time/elapsed": 1e308}))
    text = (run / "config.yaml").read_text().replace("steps: 500", f"steps: {2**62}")
    (run / "config.yaml").write_text(text)


def spoil_steps(run: Path) -> None:
    write_metrics(
        run,
        [
            make_record("generator", 1, 1.0) | {"step": HUGE},
            make_record("generator", -5, 1.0),
            make_record("x" * 9999, 1, 1.0),
        ],
    )
    (run / "generator" / "checkpoints" / f"step-{'9' * 200}").mkdir()


def spoil_text(run: Path) -> None:
    folder = run / "generator" / "samples" / "step-00000100"
    (folder / "prompts.json").write_text(
        json.dumps([{"file": "clip-0000.gif", "prompt": HALF}, {"file": 3}, 4, {"file": "\ud800.gif"}])
    )
    finding = {"name": HALF, "severity": "fatal", "evidence": "x" * 10_000, "meaning": [1], "remedy": None}
    write_metrics(run, [*metrics_with(), {"stage": "generator", "split": "train", "step": 2, "finding": finding}])
    (run / "skipped.jsonl").write_text(json.dumps({"path": HALF, "reason": "\0"}) + "\n{\n3\n")
    (run / "logs" / "rank-0.log").write_bytes(b"\xff\xfe\0\x1b[31m line\n" * 10)


def spoil_names(run: Path) -> None:
    name = os.fsdecode(b"\xff\xfe.gif")
    folder = run / "generator" / "samples" / "step-00000100"
    (folder / "clip-0000.gif").rename(folder / name)
    (folder / "prompts.json").write_text(json.dumps([{"file": name, "prompt": "x"}]))


def spoil_nesting(run: Path) -> None:
    deep: Any = "x"
    for _ in range(600):
        deep = [deep]
    record = {"values": {"a": deep, "b": 1}, "labels": {"deep": deep, "list": [[{}]]}, "date": deep}
    results = {"validation": {"generator/step-00000100": {"m": record, "n": 3}, "odd": {}}, "test": 3}
    (run / "evaluation.json").write_text(json.dumps({"results": results}))


def spoil_folders(run: Path) -> None:
    os.mkfifo(run / "generator" / "samples" / "step-00000100" / "grid.png")
    os.mkfifo(run / "logs" / "rank-1.log")
    (run / "logs" / "rank-0.log").unlink()
    os.mkfifo(run / "logs" / "rank-0.log")
    os.mkfifo(run / "skipped.jsonl.part")
    (run / "studio").write_text("a file")
    checkpoint = run / "generator" / "checkpoints" / "step-00000100"
    for path in (checkpoint / "state.json", checkpoint / "manifest.json", checkpoint.parent / "best.json"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    (run / "generator" / "samples" / "step-00000100" / "prompts.json").unlink()
    os.mkfifo(run / "generator" / "samples" / "step-00000100" / "prompts.json")


def spoil_config(run: Path) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree |= {"data": 3, "seed": [HALF], "preset": "../../etc/passwd", "prompts": {}}
    tree["stages"]["generator"] |= {"codec": [1], "sample": {"guidance": [1], "steps": {}}, "data": {"folder": [{}]}}
    tree["stages"]["../up"] = {
        "task": "vqgan",
        "data": {"folder": "\0", "size": "x", "frames": HUGE},
        "train": {"steps": 1},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(tree))


def spoil_holes(run: Path) -> None:
    """Files of a terabyte that take no space on the disk."""
    (run / "logs").mkdir(exist_ok=True)
    checkpoint = run / "generator" / "checkpoints"
    pictures = run / "generator" / "samples" / "step-00000100"
    for path in (
        *(run / name for name in ("metrics.jsonl", "evaluation.json", "skipped.jsonl", "failed", "logs/rank-0.log")),
        *(checkpoint / name for name in ("best.json", "step-00000100/state.json", "step-00000100/manifest.json")),
        *(path for path in pictures.iterdir() if path.is_file()),
    ):
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(2**40)


SPOILS = (
    spoil_config,
    spoil_numbers,
    spoil_times,
    spoil_steps,
    spoil_text,
    spoil_names,
    spoil_nesting,
    spoil_folders,
    spoil_holes,
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_every_page_of_a_spoiled_run_answers(tmp_path: Path, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kineograph.studio import app, preset_config

    for module in (app, preset_config):
        monkeypatch.setattr(module, "resolve_preset", lambda name: None)
    run = write_run(tmp_path / "runs" / "odd", steps=500)
    write_run(tmp_path / "runs" / "fine")
    spoil(run)
    client = open_client(tmp_path / "runs")
    with RunFolder(run).lock():  # as if it were running: then its time left is computed too
        page = client.get("/", params={"token": TOKEN})
        assert page.status_code == 200 and "fine" in page.text and "odd" in page.text
        base = f"/run/{make_id(run.resolve())}"
        for tab in (
            "",
            "/wall",
            "/draw",
            "/evaluation",
            "/config",
            "/log",
            "/curves.json",
            "/thumbnail",
            "/differences",
            "/drawings",
        ):
            assert client.get(base + tab).status_code == 200, tab
        both = [make_id((tmp_path / "runs" / name).resolve()) for name in ("odd", "fine")]
        assert client.get("/compare", params={"run": both}).status_code == 200
        assert client.get("/data").status_code == 200
    write_report([run], tmp_path / "out.html")


def test_a_folder_whose_name_is_not_text_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / os.fsdecode(b"caf\xe9"), steps=500)
    client = open_client(tmp_path)
    page = client.get("/", params={"token": TOKEN})
    assert page.status_code == 200 and "caf\ufffd" in page.text
    base = f"/run/{make_id(run.resolve())}"
    for tab in ("", "/wall", "/draw", "/config"):
        assert client.get(base + tab).status_code == 200
    assert client.get(f"{base}/sheet/generator/samples/step-00000100/clip-0000.gif").status_code == 200


def test_the_pages_of_a_picture_are_not_counted() -> None:
    """Pillow follows the pages of a TIFF one by one: half a million fit into a file that is read."""
    pages, out = [Image.new("L", (8, 8), 50 * number) for number in range(5)], io.BytesIO()
    pages[0].save(out, "TIFF", save_all=True, append_images=pages[1:])
    frames, _ = decode_frames(out.getvalue(), "x.png")
    assert [frame.getpixel((0, 0)) for frame in frames] == [(0, 0, 0)]
