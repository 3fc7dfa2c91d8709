"""The pages in a real browser: scripts run, pictures play, changes arrive, and no request leaves the host."""

from __future__ import annotations

import json
import shutil
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kineograph.studio.app import create_app
from kineograph.studio.report import write_report
from kineograph.studio.runs import make_id
from kineograph.studio.server import allowed_hosts
from tests.studio.conftest import TOKEN
from tests.studio.run_folders import make_record, write_evaluation, write_run

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")
EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
STORED = Path(__file__).parents[1] / "fixtures" / "runs"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        try:
            opened = engine.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        except playwright.Error:
            pytest.skip("no Chromium: make test-browser installs one")
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, runs: Path) -> Iterator[Any]:
    """A page at the list of runs; fails at errors of scripts and requests to other hosts."""
    listening = socket.create_server(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    app = create_app([runs], TOKEN, allowed_hosts("127.0.0.1"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    context = browser.new_context(base_url=base, viewport={"width": 1200, "height": 800})
    context.set_default_timeout(20_000)
    page = context.new_page()
    problems = watch(page, base)
    page.goto(f"/?token={TOKEN}")
    yield page
    context.close()
    server.should_exit = True
    thread.join(10)
    assert problems == []


def watch(page: Any, base: str) -> list[str]:
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("request", lambda r: problems.append(r.url) if not r.url.startswith((base, "data:", "blob:")) else None)
    return problems


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
    page.locator(".chart canvas").first.wait_for()
    assert page.locator(".chart").first.get_attribute("aria-label").startswith("Loss: ")
    assert page.locator(".wall .clip").count() == 4


def test_curves_are_drawn_and_grow(page: Any, runs: Path) -> None:
    page.goto(address(runs))
    first = page.locator(".chart").first
    assert "train 0.2" in first.inner_text() and "validation 0.4" in first.inner_text()
    with open(runs / "demo" / "metrics.jsonl", "a") as file:
        file.write(json.dumps(make_record("generator", 110, 0.0625)) + "\n")
    page.locator(".chart >> text=train 0.0625").first.wait_for()
    page.get_by_text("minutes", exact=True).click()
    page.get_by_text("tokenizer", exact=True).click()
    page.locator(".chart >> text=train 0.025").first.wait_for()
    assert "checkpoint of step 50" in page.locator("#marks").inner_text()


def test_clips_play_in_step_and_open_larger(page: Any, runs: Path) -> None:
    page.goto(address(runs) + "/wall")
    red = "node => node.getContext('2d').getImageData(5, 5, 1, 1).data[0]"
    clips = page.locator(".wall:not(.sheets) .clip canvas")
    page.locator("#play").click()  # pauses
    page.locator("#frame").fill("3")
    for number in range(4):
        assert clips.nth(number).evaluate(red) == 130  # the fourth frame of each
    clips.nth(0).click()
    assert page.locator("#large-caption").inner_text() == "a 3 moves left · step 50"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#large-caption").inner_text() == "a seven moves up · step 100"
    page.keyboard.press("Escape")
    page.locator("#large").wait_for(state="hidden")


def test_other_parts_of_a_run_show(page: Any, runs: Path) -> None:
    write_evaluation(runs / "demo", caption_accuracy=0.98046875)
    page.get_by_role("link", name="demo").click()
    page.get_by_role("link", name="Evaluation").click()
    page.get_by_text("0.9805").wait_for()
    page.get_by_role("link", name="Config").click()
    page.locator("#key-filter").fill("generator lr")
    assert page.locator("tbody tr:visible").count() == 1
    page.get_by_role("link", name="Log").click()
    assert "1.71 M parameters" in page.locator("#log").inner_text()
    page.set_viewport_size({"width": 390, "height": 800})
    for tab in ("", "/wall", "/evaluation", "/config", "/log"):
        page.goto(address(runs) + tab)
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0, tab


@pytest.mark.slow
def test_a_drawing_is_made_with_a_stored_run(page: Any, runs: Path) -> None:
    with tarfile.open(STORED / "phenaki.tar.xz") as archive:
        archive.extractall(runs, filter="data")
    page.locator("tr[data-name=phenaki]").wait_for()
    page.goto(address(runs, "phenaki") + "/draw")
    page.locator("textarea").fill("a 3 moves left")
    page.locator("#go").click()
    page.locator(".drawing .clip").wait_for(timeout=120_000)
    page.get_by_text("stays loaded for the next drawing").wait_for()
    page.get_by_text("Repeat it").click()
    assert page.locator(".drawing code").inner_text().startswith("kineo sample ")
    page.locator("#free").click()
    page.locator("#model").wait_for(state="hidden")


def test_a_report_opens_from_a_file_without_a_network(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kineograph.studio import preset_config

    monkeypatch.setattr(preset_config, "resolve_preset", lambda name: None)
    path = write_report([write_run(tmp_path / "demo")], tmp_path / "out.html")
    context = browser.new_context(offline=True)
    page = context.new_page()
    problems = watch(page, "file://")
    page.goto(path.as_uri())
    page.locator(".chart canvas").first.wait_for()
    page.locator(".wall:not(.sheets) .clip").first.click()
    assert page.locator("#large-caption").inner_text() == "a 3 moves left · step 50"
    context.close()
    assert problems == []
