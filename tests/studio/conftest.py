from __future__ import annotations

import importlib.util
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


def open_client(*roots: Path, host: str = "127.0.0.1") -> Any:
    """A browser without the token."""
    from starlette.testclient import TestClient

    from kineograph.studio.app import create_app
    from kineograph.studio.server import allowed_hosts

    app = create_app(roots, TOKEN, allowed_hosts(host))
    return TestClient(app, base_url=ORIGIN, headers={"origin": ORIGIN})
