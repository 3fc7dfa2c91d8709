"""`kineo report`: one file with everything inside, of bounded size."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from kineograph import cli
from kineograph.core.errors import InputError
from kineograph.studio import preset_config
from kineograph.studio.report import write_report
from tests.studio.run_folders import PROMPTS, write_evaluation, write_run


@pytest.fixture(autouse=True)
def _preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving a real preset would import torch in a process of its own."""
    base = {"stages": {"generator": {"train": {"lr": 3e-4}}}}
    monkeypatch.setattr(preset_config, "resolve_preset", {"phenaki-tiny": base}.get)


def test_a_report_holds_curves_pictures_evaluation_and_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "demo")
    write_evaluation(run, caption_accuracy=0.98046875)
    before = sorted(path for path in run.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(run), "-o", str(tmp_path / "out.html")])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    curves = json.loads(re.search(r'id="curves-data">(.*?)</script>', page, re.DOTALL)[1])
    assert [stage["name"] for stage in curves[0]] == ["tokenizer", "generator"]
    assert page.count("data:image/webp;base64,") == 2 * len(PROMPTS) + 2 + 1 + 1
    assert "0.9805" in page and "extractor reader abc" in page
    assert "stages.generator.train.lr" in page and "0.0003" in page
    assert sorted(path for path in run.rglob("*")) == before, "nothing is written into the run"


def test_a_report_refers_to_nothing_outside_and_runs_only_its_own_scripts(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=https://evil.example/x.png>"
    page = write_report([write_run(tmp_path / "demo", prompts=[evil, "x"])], tmp_path / "out.html").read_text()
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    bare = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
    assert "alert(1)</script>" not in page and "evil.example/x.png>" not in page
    assert not re.findall(r'(?:src|href|action)\s*=\s*"(?!data:|#)[^"]', bare)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#39;", "'")
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for text in [*scripts, style]:
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert len(scripts) == 3


def test_pictures_shrink_until_the_report_fits(tmp_path: Path) -> None:
    run = write_run(tmp_path / "demo")
    for path in run.glob("generator/samples/*/clip-*.gif"):
        images = [Image.effect_noise((200, 200), 60) for _ in range(5)]
        images[0].save(path, save_all=True, append_images=images[1:], duration=100)
    notes: list[str] = []
    large = write_report([run], tmp_path / "large.html", note=notes.append)
    assert not notes
    without = write_run(tmp_path / "bare")
    for folder in (*without.glob("*/samples"), without / "tokenizer" / "validation"):
        folder.rename(without / f"moved-{folder.parent.name}")
    bare = write_report([without], tmp_path / "bare.html").stat().st_size
    room = (large.stat().st_size - bare) // 2
    small = write_report([run], tmp_path / "small.html", limit=bare + room, note=notes.append)
    assert small.stat().st_size <= bare + room
    assert not notes and small.read_text().count("data:image/webp") == large.read_text().count("data:image/webp")
    least = write_report([run], tmp_path / "least.html", limit=bare + 4000, note=notes.append)
    assert least.stat().st_size <= bare + 4000
    assert "left out" in notes[0]


def test_several_runs_are_compared_in_one_report(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", changes={"lr": 5e-4})]
    page = write_report(runs, tmp_path / "out.html").read_text()
    assert len(json.loads(re.search(r'id="curves-data">(.*?)</script>', page, re.DOTALL)[1])) == 2
    assert "Different settings" in page and "0.0005" in page
    assert "one, generator" in page and "two, generator" in page


def test_a_damaged_run_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.yaml").write_text("stages: 3")
    assert "broken" in write_report([tmp_path / "torn"], tmp_path / "out.html").read_text()


@pytest.mark.parametrize(
    ("folders", "out", "words"),
    [
        (["demo"], "report.pdf", "ends in .html"),
        ([], "r.html", "name run folders"),
        (["demo"], "demo/config.yaml/r.html", "is a file; use another folder"),
        (["nothing"], "r.html", "is not a run"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, folders: list[str], out: str, words: str) -> None:
    write_run(tmp_path / "demo")
    with pytest.raises(InputError, match=words):
        write_report([tmp_path / name for name in folders], tmp_path / out)
    assert not (tmp_path / out).exists()


def test_without_jinja_the_command_names_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kineograph.studio import server

    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(InputError, match=r"pip install 'kineograph\[studio\]'"):
        write_report([tmp_path], tmp_path / "out.html")
    with pytest.raises(InputError, match=r"kineo studio needs jinja2.*pip install 'kineograph\[studio\]'"):
        server.require_packages("studio")
