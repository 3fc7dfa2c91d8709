"""Every page in a real browser: runs in every state, data, plans; readable by everybody, on phones too."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kineograph.core.run_folder import RunFolder
from kineograph.studio import memory_plan
from kineograph.studio.runs import make_id
from tests.studio.conftest import TOKEN, expect, follow, open_page, serve_pages
from tests.studio.run_folders import write_dataset, write_evaluation, write_run
from tests.studio.test_browser import STORED
from tests.studio.test_plan_pages import STAGE

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


@dataclass(frozen=True)
class Site:
    base: str
    runs: Path
    photos: Path

    def run(self, name: str) -> str:
        return f"/run/{make_id((self.runs / name).resolve())}"

    @property
    def data(self) -> str:
        return f"/data/{make_id(self.photos.resolve())}"

    def addresses(self) -> list[str]:
        """Every page, and every state that looks different."""
        tabs = [self.run("demo") + tab for tab in ("", "/wall", "/draw", "/evaluation", "/config", "/log")]
        more = [self.run("phenaki") + "/draw", self.run("torn"), self.run("cut"), self.run("training")]
        ids = [self.run(name).removeprefix("/run/") for name in ("demo", "cut")]
        compared = f"/compare?run={ids[0]}&run={ids[1]}"
        return ["/", *tabs, *more, "/compare", compared, self.data, "/plan", "/plan/muse-tiny"]


@pytest.fixture(scope="module")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server over a real run, and over runs that are done, running, interrupted and damaged."""
    folder = tmp_path_factory.mktemp("site")
    runs, photos = folder / "runs", write_dataset(folder / "photos")
    write_run(runs / "demo", prompts=["a 3 moves left", HOSTILE])
    write_evaluation(runs / "demo", caption_accuracy=0.98)
    (runs / "demo" / "skipped.jsonl").write_text('{"path": "a.png", "reason": "it is empty"}\n')
    write_run(runs / "cut", steps=500)
    write_run(runs / "training", steps=500)
    shutil.copytree(runs / "cut", runs / "torn")
    (runs / "torn" / "config.yaml").write_text("stages: 3")
    with tarfile.open(STORED / "phenaki.tar.xz") as archive:
        archive.extractall(runs, filter="data")
    with pytest.MonkeyPatch.context() as patch:
        line = json.dumps(STAGE)
        patch.setattr(memory_plan, "worker_command", lambda preset: [sys.executable, "-c", f"print({line!r})"])
        with RunFolder(runs / "training").lock(), serve_pages(runs, data=[photos]) as base:
            yield Site(base, runs, photos)


@pytest.fixture
def opened(browser: Any, site: Site) -> Iterator[Any]:
    with open_page(browser, site.base) as page:
        yield page


def test_runs_show_their_state(opened: Any, site: Site) -> None:
    states = {"demo": "finished", "cut": "interrupted", "training": "running", "torn": "broken"}
    for name, state in states.items():
        opened.locator(f"tr[data-name={name}] .badge.{state}").wait_for()
    expect(opened.locator("tr[data-name=torn]")).to_contain_text("`stages` is no mapping")
    opened.goto(site.run("torn"))
    opened.locator("#head .badge.broken").wait_for()
    opened.locator(".chart canvas").first.wait_for()  # its metrics can still be read
    opened.goto(site.run("cut"))
    expect(opened.locator(".command code")).to_have_text(re.compile("^kineo train "))


def test_text_of_a_run_stays_text(opened: Any, site: Site) -> None:
    opened.goto(site.run("demo") + "/wall")
    opened.get_by_text(HOSTILE).first.wait_for()
    opened.goto(site.run("demo") + "/wall?weights=online")
    expect(opened.locator(".wall:not(.sheets) td:not(.real) .clip")).to_have_count(4)
    opened.goto(site.data)
    opened.get_by_text("<b>bold</b> digit").first.wait_for(timeout=60_000)
    assert "owned" not in opened.title() and opened.locator("img[src=x]").count() == 0


def test_data_is_searched_and_filtered(opened: Any, site: Site) -> None:
    follow(opened, "Data")
    opened.locator(".item").nth(3).wait_for(timeout=60_000)
    opened.keyboard.press("/")
    opened.keyboard.type("red")
    opened.get_by_text("1 of 4 items").wait_for()
    expect(opened.locator(".item")).to_contain_text("a red wide one")
    opened.keyboard.press("Escape")
    opened.get_by_text("4 of 4 items").wait_for()
    opened.locator("select[name=show]").select_option("problems")
    opened.get_by_text("1 of 4 items").wait_for()
    expect(opened.locator(".item")).to_contain_text("torn.png")


def test_a_plan_follows_the_slider(opened: Any, site: Site) -> None:
    follow(opened, "Plan")
    opened.keyboard.press("/")
    opened.keyboard.type("muse tiny")
    opened.locator(".card:visible").click()
    opened.get_by_text("Fits", exact=True).wait_for()
    for _ in range(30):
        opened.get_by_label("Memory of the GPU").press("ArrowLeft")
    opened.get_by_text("Does not fit.").wait_for()
    for _ in range(9):
        opened.get_by_label("Memory of the GPU").press("ArrowRight")
    expect(opened.locator("#memory-said")).to_have_text("40 GiB")
    opened.locator(".command code >> text=stages.generator.train.accumulate=2").wait_for()


@pytest.mark.slow
def test_a_tokenizer_rebuilds_an_item(opened: Any, site: Site) -> None:
    opened.goto(site.data)
    figure = opened.locator(".item[data-item='clip.gif']")
    figure.wait_for(timeout=60_000)
    opened.get_by_label("Reconstruct with").select_option(label="phenaki, tokenizer")
    figure.get_by_role("button", name="Reconstruct").click()
    figure.get_by_text("PSNR").wait_for(timeout=120_000)
    opened.get_by_text("stays loaded").wait_for()
    opened.get_by_role("button", name="Free it").click()
    opened.locator("#model").wait_for(state="hidden")


def check_with_axe(page: Any, site: Site, addresses: list[str]) -> None:
    Axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing").Axe
    found = []
    for address in addresses:
        page.goto(address)
        if address == site.data:
            page.locator(".item").first.wait_for(timeout=60_000)
        for violation in Axe().run(page).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                targets = [node["target"] for node in violation["nodes"]][:3]
                found.append(f"{address}: {violation['id']} {targets}")
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0, address
    assert found == []


def test_axe_finds_nothing_serious(browser: Any, site: Site) -> None:
    with open_page(browser, site.base) as page:
        check_with_axe(page, site, ["/", site.run("demo"), site.data, "/plan/muse-tiny"])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1600])
def test_axe_finds_nothing_serious_on_any_page(browser: Any, site: Site, scheme: str, width: int) -> None:
    with open_page(browser, site.base, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        check_with_axe(page, site, site.addresses())


def test_without_a_token_nothing_is_shown(browser: Any, site: Site) -> None:
    context = browser.new_context(base_url=site.base)
    page = context.new_page()
    for address in ("/", f"/?token={TOKEN}x", site.run("demo"), site.data):
        assert page.goto(address).status == 401
        expect(page.locator("body")).to_contain_text("kineo studio")
    context.close()
