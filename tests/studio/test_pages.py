"""The pages over real run folders: what each shows, and what it says where there is nothing to show."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from kineograph.core.run_folder import RunFolder
from kineograph.studio import app as app_module
from kineograph.studio.runs import make_id
from tests.studio.conftest import TOKEN, open_client
from tests.studio.run_folders import PROMPTS, make_record, write_evaluation, write_gif, write_metrics, write_run


def address(runs: Path, name: str = "demo") -> str:
    return f"/run/{make_id((runs / name).resolve())}"


def test_the_list_shows_runs_and_what_to_type_without_any(client: TestClient, runs: Path, tmp_path: Path) -> None:
    page = client.get("/").text
    assert f'href="{address(runs)}"' in page and "finished" in page and "100 of 100" in page
    empty = open_client(tmp_path / "empty")
    page = empty.get("/", params={"token": TOKEN}).text
    assert "kineo train muse-tiny" in page and str(tmp_path / "empty") in page


def test_a_damaged_run_is_listed_with_its_problem_and_has_a_page(client: TestClient, runs: Path) -> None:
    (runs / "torn").mkdir()
    (runs / "torn" / "config.yaml").write_text("stages: 3")
    (runs / "torn" / "metrics.jsonl").write_text("{")
    assert "config.yaml: " in client.get("/").text
    for tab in ("", "/wall", "/evaluation", "/config", "/log", "/curves.json", "/differences"):
        assert client.get(address(runs, "torn") + tab).status_code == 200, tab


def test_a_run_that_has_just_appeared_has_a_page(client: TestClient, runs: Path) -> None:
    client.get("/")
    write_run(runs / "new")
    assert client.get(address(runs, "new")).status_code == 200


def test_a_run_that_can_go_on_says_how(client: TestClient, runs: Path) -> None:
    path = write_run(runs / "cut", steps=900)
    client.get("/")
    assert f"kineo train {path}/config.yaml --run {path}" in client.get(address(runs, "cut")).text
    assert "Resume" not in client.get(address(runs)).text


def test_curves_are_sent_by_stage_and_read_again_when_they_grow(client: TestClient, runs: Path) -> None:
    first = client.get(address(runs) + "/curves.json").json()
    assert [stage["name"] for stage in first] == ["tokenizer", "generator"]
    with open(runs / "demo" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"stage": "generator", "split": "train", "step": 101, "loss": 0.1}) + "\n")
    again = client.get(address(runs) + "/curves.json").json()
    assert again[1]["splits"]["train"]["step"][-1] == 101


def test_the_wall_has_prompts_down_and_steps_across(client: TestClient, runs: Path) -> None:
    page = client.get(address(runs) + "/wall").text
    for prompt in PROMPTS:
        assert prompt in page
    assert page.count('data-step="50"') == page.count('data-step="100"') == 3  # two prompts, online beside EMA
    assert page.count("a 3 moves left, real item: show it larger") == 1 and "/online/" not in page
    online = client.get(address(runs) + "/wall?weights=online").text
    assert online.count("/sheet/generator/samples/step-00000100/online/clip-") == 2
    assert "Input beside reconstruction" in client.get(address(runs) + "/wall?stage=tokenizer").text
    assert "Input beside reconstruction" not in page
    assert client.get(address(runs) + "/wall?stage=../../x").status_code == 200


def test_a_stage_that_drew_nothing_says_so(client: TestClient, runs: Path) -> None:
    path = write_run(runs / "bare")
    for folder in path.glob("*/samples"):
        folder.rename(path / "moved")
    client.get("/")
    assert "has drawn nothing yet" in client.get(address(runs, "bare") + "/wall?stage=generator").text


def test_a_clip_is_sent_as_a_sheet_of_frames(client: TestClient, runs: Path) -> None:
    write_gif(runs / "demo" / "clip.gif", 40, 20, frames=6, fps=10)
    answer = client.get(address(runs) + "/sheet/clip.gif")
    facts = {name: answer.headers[f"x-{name}"] for name in ("frames", "columns", "width", "height", "fps")}
    assert facts == {"frames": "6", "columns": "6", "width": "40", "height": "20", "fps": "10.000"}
    sheet = Image.open(io.BytesIO(answer.content))
    assert sheet.size == (240, 20)
    assert [sheet.getpixel((40 * n + 20, 10))[0] for n in range(5)] == [10, 50, 90, 130, 170]
    whole = client.get(address(runs) + "/file/clip.gif")
    assert whole.content == (runs / "demo" / "clip.gif").read_bytes()
    assert whole.headers["content-type"] == "image/gif"


def test_a_file_that_is_no_picture_is_refused_with_a_reason(client: TestClient, runs: Path) -> None:
    (runs / "demo" / "text.gif").write_text("GIF89a and no more")
    (runs / "demo" / "page.png").write_text("<script>alert(1)</script>")
    for name in ("text.gif", "page.png"):
        assert client.get(f"{address(runs)}/sheet/{name}").status_code == 422
    answer = client.get(address(runs) + "/file/page.png")
    assert (answer.headers["content-type"], answer.headers["x-content-type-options"]) == ("image/png", "nosniff")


def test_thumbnails_show_the_newest_samples(client: TestClient, runs: Path) -> None:
    answer = client.get(address(runs) + "/thumbnail")
    assert Image.open(io.BytesIO(answer.content)).size == (3 * 60 - 4, 56)


def test_evaluations_have_their_labels(client: TestClient, runs: Path) -> None:
    assert "kineo evaluate" in client.get(address(runs) + "/evaluation").text
    write_evaluation(runs / "demo", caption_accuracy=0.98046875)
    page = client.get(address(runs) + "/evaluation").text
    assert "0.9805" in page and "extractor reader abc" in page and ">64<" in page


def test_the_config_is_compared_with_its_preset(
    client: TestClient, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"stages": {"generator": {"task": "phenaki", "train": {"lr": 3e-4, "steps": 100, "new_key": 1}}}}
    monkeypatch.setattr(app_module, "resolve_preset", {"phenaki-tiny": base}.get)
    part = client.get(address(runs) + "/differences").text
    assert "stages.generator.train.lr" in part and "0.001" in part and "0.0003" in part
    assert "generator.train.steps" not in part and "new_key" not in part
    monkeypatch.setattr(app_module, "resolve_preset", lambda name: None)
    assert "is not installed here" in client.get(address(runs) + "/differences").text


def test_runs_are_compared(client: TestClient, runs: Path) -> None:
    other = write_run(runs / "other", changes={"lr": 5e-4})
    write_evaluation(runs / "demo", caption_accuracy=0.5)
    write_evaluation(other, caption_accuracy=0.75)
    client.get("/")
    ids = [make_id((runs / name).resolve()) for name in ("demo", "other")]
    page = client.get("/compare", params={"run": ids}).text
    assert "stages.generator.train.lr" in page and "0.0005" in page
    assert "stages.generator.train.steps" not in page
    assert "0.75" in page and "All runs have seed 0" in page
    assert "step 100, 64 samples, extractor reader abc" in page
    for prompt in PROMPTS:
        assert prompt in page
    assert page.count('data-step="100"') == 4
    write_metrics(other, [make_record("generator", 130, 0.5)])
    with RunFolder(other).lock():  # it trains on, and its newest pictures are still those of step 100
        client.get("/")
        page = client.get("/compare", params={"run": ids}).text
    assert page.count('data-step="100"') == 4
    third = write_run(runs / "third", prompts=["something else", "and more"])
    client.get("/")
    page = client.get("/compare", params={"run": [*ids, make_id(third.resolve())]}).text
    assert "something else" in page and PROMPTS[0] in page  # it shares no prompt, and shows its own
    assert "Choose two to four runs" in client.get("/compare", params={"run": ids[:1]}).text
    assert client.get("/compare", params={"run": ["nothing", "../.."]}).status_code == 200


def test_the_log_shows_its_end(client: TestClient, runs: Path) -> None:
    log = runs / "demo" / "logs" / "rank-0.log"
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    page = client.get(address(runs) + "/log").text
    assert "line 999" in page and "line 599" not in page and "line 600" in page
    log.unlink()
    log.symlink_to("/etc/hostname")
    assert "has no log yet" in client.get(address(runs) + "/log").text


def test_unknown_addresses_get_a_page_in_words(client: TestClient, runs: Path) -> None:
    answer = client.get(address(runs) + "/nothing")
    assert answer.status_code == 404 and "There is no such page" in answer.text


def test_the_page_needs_no_torch() -> None:
    code = "import kineograph.studio.app, kineograph.studio.server, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
