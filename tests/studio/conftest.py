from __future__ import annotations

import importlib.util
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.studio.run_folders import write_run

TOKEN = "a-long-random-token"
ORIGIN = "http://127.0.0.1:8765"
# `make venv` installs the extra `studio`; elsewhere the rest of the suite runs without it.
collect_ignore_glob = [] if importlib.util.find_spec("starlette") else ["test_*.py"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one finished run, and a secret beside it."""
    write_run(tmp_path / "runs" / "demo")
    (tmp_path / "secret.png").write_bytes(b"secret")
    return tmp_path / "runs"


@pytest.fixture
def client(runs: Path) -> Any:
    """A browser that has opened the printed address."""
    client = open_client(runs)
    assert client.get("/", params={"token": TOKEN}).status_code == 200
    return client


def open_client(*roots: Path, host: str = "127.0.0.1", data: Sequence[Path] = ()) -> Any:
    """A browser without the token."""
    from starlette.testclient import TestClient

    from kineograph.studio.app import create_app
    from kineograph.studio.server import allowed_hosts

    app = create_app(roots, TOKEN, allowed_hosts(host), data=data)
    return TestClient(app, base_url=ORIGIN, headers={"origin": ORIGIN})


# A real browser ----------------------------------------------------------------------------------------------------

ARGUMENTS = [
    "--no-sandbox",  # containers often run as root
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # nothing but this machine can be reached
]


@pytest.fixture(scope="module")  # its event loop runs until it ends, and other modules run their own
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as engine:
        try:
            opened = engine.chromium.launch(executable_path=executable, args=ARGUMENTS)
        except playwright.Error:
            pytest.skip("no Chromium was found: make test-browser installs one")
        yield opened
        opened.close()


@contextmanager
def serve_pages(*roots: Path, data: Sequence[Path] = ()) -> Iterator[str]:
    """A real server. → its address"""
    import uvicorn

    from kineograph.studio.app import create_app
    from kineograph.studio.server import allowed_hosts

    listening = socket.create_server(("127.0.0.1", 0))
    app = create_app(roots, TOKEN, allowed_hosts("127.0.0.1"), data=data)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@contextmanager
def open_page(browser: Any, base: str, **options: Any) -> Iterator[Any]:
    """A page at the list of runs; fails at errors of scripts and requests to other hosts."""
    context = browser.new_context(base_url=base, **{"viewport": {"width": 1200, "height": 800}, **options})
    context.set_default_timeout(20_000)
    page = context.new_page()
    problems = watch_page(page, base)
    page.goto(f"/?token={TOKEN}")
    yield page
    context.close()
    assert problems == []


def follow(page: Any, name: str) -> None:
    """Click a link, and wait until the scripts of its page listen."""
    with page.expect_navigation():
        page.get_by_role("link", name=name).click()


def expect(found: Any) -> Any:
    """Playwright's assertions, which wait for what a script of the page is about to do."""
    from playwright.sync_api import expect

    expect.set_options(timeout=20_000)
    return expect(found)


@pytest.fixture
def page(browser: Any, runs: Path) -> Iterator[Any]:
    with serve_pages(runs) as base, open_page(browser, base) as page:
        yield page


def watch_page(page: Any, base: str) -> list[str]:
    """Collects errors of scripts, what the console calls an error, and requests that leave the host."""
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("request", lambda r: problems.append(r.url) if not r.url.startswith((base, "data:", "blob:")) else None)
    return problems
