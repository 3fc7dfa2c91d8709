"""The pages in a real browser: scripts run, pictures play, changes arrive, and no request leaves the host."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from kineograph.studio.report import write_report
from kineograph.studio.runs import make_id
from tests.studio.conftest import expect, follow, watch_page
from tests.studio.run_folders import PROMPTS, make_record, write_evaluation, write_metrics, write_run, write_samples

pytestmark = pytest.mark.browser
STORED = Path(__file__).parents[1] / "fixtures" / "runs"


def address(runs: Path, name: str = "demo") -> str:
    return f"/run/{make_id((runs / name).resolve())}"


def test_runs_appear_change_filter_and_compare(page: Any, runs: Path) -> None:
    write_run(runs / "later", steps=500)
    page.locator("tr[data-name=later] .badge.interrupted").wait_for()
    (runs / "later" / "stopped").touch()
    page.locator("tr[data-name=later] .badge.stopped").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("demo")
    page.locator("tr[data-name=later]").wait_for(state="hidden")
    page.keyboard.press("Escape")
    page.locator("tr[data-name=later]").wait_for()
    for name in ("demo", "later"):
        page.locator(f"tr[data-name={name}] input").check()
    page.get_by_role("button", name="Compare 2").click()
    expect(page.locator(".chart").first).to_have_attribute("aria-label", re.compile("^Loss: "))
    expect(page.locator(".wall .clip")).to_have_count(4)


def test_the_filter_key_works_from_a_tick_and_a_removed_run_says_so(page: Any, runs: Path) -> None:
    write_run(runs / "doomed")
    page.locator("tr[data-name=doomed] input").check()
    page.keyboard.press("/")
    page.keyboard.type("doom")
    page.locator("tr[data-name=demo]").wait_for(state="hidden")
    follow(page, "doomed")
    page.locator(".chart canvas").first.wait_for()
    shutil.rmtree(runs / "doomed")
    page.get_by_text("This run has been removed.").wait_for()
    page.wait_for_timeout(2_500)  # a browser would connect again by now
    expect(page.locator("#live")).to_have_text("This run has been removed.")


def test_a_single_value_is_seen(page: Any, runs: Path) -> None:
    run = write_run(runs / "young")
    write_metrics(run, [make_record("generator", 1, 1.7)])
    follow(page, "young")
    page.wait_for_function("""() => {
      const canvas = document.querySelector('.chart canvas');
      if (!canvas) return false;
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200 && data[at + 2] - data[at] > 90) return true;
      return false;
    }""")  # a blue point


def test_curves_are_drawn_and_grow(page: Any, runs: Path) -> None:
    page.goto(address(runs))
    first = page.locator(".chart").first
    expect(first).to_contain_text("train 0.2")
    expect(first).to_contain_text("validation 0.4")
    with open(runs / "demo" / "metrics.jsonl", "a") as file:
        file.write(json.dumps(make_record("generator", 110, 0.0625)) + "\n")
    page.locator(".chart >> text=train 0.0625").first.wait_for()
    page.get_by_text("minutes", exact=True).click()
    page.get_by_text("tokenizer", exact=True).click()
    page.locator(".chart >> text=train 0.025").first.wait_for()
    expect(page.locator("#marks")).to_contain_text("checkpoint of step 50")


def test_clips_play_in_step_and_open_larger(page: Any, runs: Path) -> None:
    page.goto(address(runs) + "/wall")
    clips = page.locator(".wall:not(.sheets) td:not(.real) .clip canvas")
    page.locator("#play").click()  # pauses
    page.locator("#frame").fill("3")
    page.wait_for_function("""() => {
      const clips = [...document.querySelectorAll('.wall:not(.sheets) td:not(.real) .clip canvas')];
      const red = (canvas) => canvas.getContext('2d').getImageData(5, 5, 1, 1).data[0];
      return clips.length === 4 && clips.every((canvas) => red(canvas) === 130);
    }""")  # the fourth frame of each
    clips.nth(0).click()
    expect(page.locator("#large-caption")).to_have_text("a 3 moves left · step 50")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#large-caption")).to_have_text("a seven moves up · step 100")
    page.keyboard.press("Escape")
    page.locator("#large").wait_for(state="hidden")


def test_newer_samples_are_announced_also_where_not_all_steps_are_shown(page: Any, runs: Path) -> None:
    for step in range(1, 13):
        write_samples(runs / "demo", "generator", step, PROMPTS)
    page.goto(address(runs) + "/wall")
    page.get_by_text("12 of 14 steps with samples").wait_for()
    write_samples(runs / "demo", "generator", 120, PROMPTS)
    page.get_by_text("There are newer samples").wait_for()


def test_samples_written_before_the_page_is_connected_are_announced(page: Any, runs: Path) -> None:
    def write_first(route: Any) -> None:
        write_samples(runs / "demo", "generator", 120, PROMPTS)
        route.continue_()

    page.route(re.compile(r"/run/.*/live$"), write_first)
    page.goto(address(runs) + "/wall")
    page.get_by_text("There are newer samples").wait_for()


def test_other_parts_of_a_run_show(page: Any, runs: Path) -> None:
    write_evaluation(runs / "demo", caption_accuracy=0.98046875)
    follow(page, "demo")
    follow(page, "Evaluation")
    page.get_by_text("0.9805").wait_for()
    follow(page, "Config")
    page.locator("#key-filter").fill("generator lr")
    page.wait_for_function(
        "() => [...document.querySelectorAll('tbody tr')].filter(row => row.checkVisibility()).length === 1"
    )
    follow(page, "Log")
    page.locator("#log").get_by_text("1.71 M parameters").wait_for()
    page.set_viewport_size({"width": 390, "height": 800})
    for tab in ("", "/wall", "/evaluation", "/config", "/log"):
        page.goto(address(runs) + tab)
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0, tab


def test_a_whole_path_ends_with_a_drawing_that_repeats(page: Any, runs: Path) -> None:
    with tarfile.open(STORED / "phenaki.tar.xz") as archive:
        archive.extractall(runs, filter="data")
    follow(page, "phenaki")
    page.locator(".chart canvas").first.wait_for()
    follow(page, "Draw")
    page.locator("textarea").fill("a 3 moves left")
    page.get_by_label("Steps").fill("2")
    page.get_by_role("button", name="Draw").click()
    page.locator(".drawing .clip").wait_for(timeout=120_000)
    page.get_by_text("stays loaded for the next drawing and holds").wait_for()
    page.get_by_text("Repeat it").click()
    expect(page.locator(".drawing code")).to_have_text(re.compile("^kineo sample "))
    page.get_by_role("button", name="Draw").click()
    page.locator(".drawing").nth(1).wait_for(timeout=60_000)
    first, second = sorted((runs / "phenaki" / "studio").glob("*.gif"))
    assert first.read_bytes() == second.read_bytes()
    page.locator(".drawing .clip").first.click()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#large-media img")).to_have_attribute("src", re.compile(re.escape(first.name) + "$"))
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Free it").click()
    page.locator("#model").wait_for(state="hidden")


@pytest.mark.slow
def test_pages_follow_a_run_while_it_trains(page: Any, runs: Path) -> None:
    keys = ["train.steps=5000", "train.log_every=1", "train.sample_every=5", "train.batch_size=4", "train.save_first=1"]
    command = [sys.executable, "-m", "kineograph", "train", "vqgan-tiny", *keys, "--run", str(runs / "live")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        page.locator("tr[data-name=live] .badge.running").wait_for(timeout=120_000)
        page.locator("tr[data-name=live] img").wait_for(timeout=120_000)
        follow(page, "live")
        step = page.locator("#head b + *, #head").first
        before = step.inner_text()
        page.locator(".chart canvas").first.wait_for(timeout=60_000)
        label = page.locator(".chart").first.get_attribute("aria-label")
        page.wait_for_function(
            "text => document.querySelector('.chart').getAttribute('aria-label') !== text", arg=label
        )
        expect(step).not_to_have_text(before, use_inner_text=True)
        process.terminate()  # it saves, and says that it was stopped
        assert process.wait(120) == 75
        page.locator("#head .badge.stopped").wait_for(timeout=60_000)
        page.get_by_text("Resume it").wait_for()
    finally:
        process.kill()
        process.wait()


def test_a_report_opens_from_a_file_without_a_network(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kineograph.studio import preset_config

    monkeypatch.setattr(preset_config, "resolve_preset", lambda name: None)
    path = write_report([write_run(tmp_path / "demo")], tmp_path / "out.html")
    context = browser.new_context(offline=True)
    page = context.new_page()
    problems = watch_page(page, "file://")
    page.goto(path.as_uri())
    page.locator(".chart canvas").first.wait_for()
    page.locator(".wall:not(.sheets) td:not(.real) .clip").first.click()
    expect(page.locator("#large-caption")).to_have_text("a 3 moves left · step 50")
    context.close()
    assert problems == []
