"""Who may talk to the page, and that nobody leaves the run folders with it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from kineograph.studio.runs import make_id
from tests.studio.conftest import TOKEN, open_client
from tests.studio.run_folders import write_gif, write_run


def test_without_the_token_nothing_is_answered(runs: Path) -> None:
    client = open_client(runs)
    run_id = make_id((runs / "demo").resolve())
    for path in (
        "/",
        "/live",
        "/compare",
        "/static/page.js",
        f"/run/{run_id}",
        f"/run/{run_id}/curves.json",
        "/nothing",
    ):
        answer = client.get(path)
        assert answer.status_code == 401, path
        assert "demo" not in answer.text
    assert client.get("/", params={"token": "wrong"}).status_code == 401
    assert client.get("/", params={"token": ""}).status_code == 401
    assert client.get("/", headers={"cookie": "kineo-studio=wrong"}).status_code == 401
    assert client.get("/", headers={"cookie": "kineo-studio=\x01; ="}).status_code == 401


def test_the_token_moves_from_the_address_into_a_cookie(runs: Path) -> None:
    client = open_client(runs)
    answer = client.get("/compare", params={"token": TOKEN, "run": "x"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/compare?run=x")
    assert "httponly" in answer.headers["set-cookie"].lower()
    assert client.get("/").status_code == 200


@pytest.mark.parametrize("other", ['a={"x":1}', "x[y]=1", "a=b c"])
def test_cookies_of_other_programs_on_this_machine_do_not_lock_out(runs: Path, other: str) -> None:
    client = open_client(runs)
    client.get("/", params={"token": TOKEN})
    (own,) = (f"{cookie.name}={cookie.value}" for cookie in client.cookies.jar)
    client.cookies.clear()
    assert client.get("/", headers={"cookie": f"{other}; {own}"}).status_code == 200


def test_the_token_never_redirects_to_another_host(runs: Path) -> None:
    answer = open_client(runs).get(
        "http://127.0.0.1:8765//evil.example/", params={"token": TOKEN}, follow_redirects=False
    )
    assert answer.headers["location"].startswith("/") and not answer.headers["location"].startswith("//")


@pytest.mark.parametrize(
    ("host", "header", "known"),
    [
        ("127.0.0.1", "127.0.0.1:8765", True),
        ("127.0.0.1", "localhost:9999", True),  # a forwarded port
        ("127.0.0.1", "[::1]:8765", True),
        ("127.0.0.1", "evil.example", False),  # DNS rebinding
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "192.168.0.7:8765", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "[broken", False),
        ("0.0.0.0", "192.168.0.7:8765", True),
        ("0.0.0.0", "evil.example:8765", False),
    ],
)
def test_only_known_hosts_are_answered(runs: Path, host: str, header: str, known: bool) -> None:
    answer = open_client(runs, host=host).get(
        "/", params={"token": TOKEN}, headers={"host": header}, follow_redirects=False
    )
    assert answer.status_code == (303 if known else 421)


def test_a_post_from_another_site_is_refused(client: TestClient) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", ""):
        assert client.post("/compare", headers={"origin": origin}).status_code == 403
    assert client.post("/compare").status_code == 405  # let through, and there is nothing to post to


def test_every_answer_carries_the_policy(client: TestClient) -> None:
    for path in ("/", "/nothing", "/static/page.js"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    page = client.get("/").text
    assert "<script>" not in page and "style=" not in page and " on" + "click=" not in page
    assert "http://" not in page.replace("http://127.0.0.1", "") and "https://" not in page


SECRETS = [
    "../../secret.png",
    "..%2f..%2fsecret.png",
    "%2e%2e/%2e%2e/secret.png",
    "%2e%2e%2f%2e%2e%2fsecret.png",
    "%252e%252e%252f%252e%252e%252fsecret.png",
    "generator/../../../secret.png",
    "..\\..\\secret.png",
    "/etc/hostname",
    "%2fetc%2fhostname",
    "out.png",  # a link to a file outside
    "folder/secret.png",  # a linked folder
    "nul%00.png",
    "config.yaml",
    "metrics.jsonl",
    "logs/rank-0.log",
    "generator",
    "a" * 5000 + ".png",
    "missing.png",
]


@pytest.mark.parametrize("kind", ["file", "sheet"])
def test_no_path_leads_out_of_a_run(client: TestClient, runs: Path, kind: str) -> None:
    run = runs / "demo"
    (run / "out.png").symlink_to(runs.parent / "secret.png")
    (run / "folder").symlink_to(runs.parent)
    write_gif(run / "fine.gif")
    base = f"/run/{make_id(run.resolve())}/{kind}"
    absolute = quote(str(runs.parent / "secret.png"), safe="")
    for path in [*SECRETS, absolute, absolute.replace("%2F", "/")]:
        answer = client.get(f"{base}/{path}")
        assert answer.status_code == 404, path
        assert b"secret" not in answer.content
    assert client.get(f"{base}/fine.gif").status_code == 200


def test_a_run_outside_the_roots_has_no_address(client: TestClient, runs: Path) -> None:
    other = write_run(runs.parent / "other" / "private")
    for run_id in (make_id(other.resolve()), "..", "%2e%2e", "demo", quote(str(other), safe="")):
        assert "private" not in client.get(f"/run/{run_id}").text


def test_text_of_a_run_stays_text(runs: Path) -> None:
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    path = write_run(runs / "<b>evil", prompts=[evil, "x"], changes={"note": evil})
    (path / "logs" / "rank-0.log").write_text(evil + "\n")
    (path / "skipped.jsonl").write_text('{"path": "<i>p</i>", "reason": "<i>r</i>"}\n')
    client = open_client(runs)
    client.get("/", params={"token": TOKEN})
    run_id = make_id(path.resolve())
    demo = make_id((runs / "demo").resolve())
    for page in (
        "/",
        *(f"/run/{run_id}{tab}" for tab in ("", "/wall", "/evaluation", "/config", "/log")),
        f"/compare?run={run_id}&run={demo}",
    ):
        text = client.get(page).text
        assert "<img src=x" not in text and "<b>evil" not in text and "<i>" not in text, page
    assert "&lt;img src=x" in client.get(f"/run/{run_id}/wall").text
    assert "&lt;img src=x" in client.get(f"/run/{run_id}/log").text
    assert "&lt;img src=x" in client.get(f"/run/{run_id}/config").text
    assert "&lt;i&gt;p" in client.get(f"/run/{run_id}/evaluation").text
