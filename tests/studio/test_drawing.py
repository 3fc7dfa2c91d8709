"""Drawing from the page: the form, the process, uploads, and pictures that repeat."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import shlex
import shutil
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from starlette.exceptions import HTTPException
from starlette.requests import Request

from kineograph import cli
from kineograph.core.errors import InputError
from kineograph.studio import drawing
from kineograph.studio.draw_worker import Worker
from kineograph.studio.drawing import Drawer, DrawForm, Status, list_drawings, save_upload
from kineograph.studio.requests import read_body
from kineograph.studio.runs import describe_run, make_id
from tests.studio.conftest import ORIGIN, TOKEN
from tests.studio.run_folders import write_run

STORED = Path(__file__).parents[1] / "fixtures" / "runs"


def picture(width: int = 24, height: int = 16, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 10)).save(out, kind)
    return out.getvalue()


# The process that draws, without one ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(STORED / "phenaki.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "phenaki"


class Ear(Worker):
    """A worker whose events are kept."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def say(self, event: str, **values: Any) -> None:
        self.heard.append((event, values))

    def draw(self, run: Path, **form: Any) -> list[str]:
        """→ the names of the events"""
        self.heard = []
        tree = DrawForm(**form).model_dump()
        for name in ("count", "size") if tree["story"] else ("overlap",):
            tree.pop(name)
        self.run({"run": str(run), "out": str(run / "studio"), "form": tree})
        return [event for event, _ in self.heard]


def test_a_drawing_is_repeated_by_its_command_and_the_model_stays_loaded(stored: Path, tmp_path: Path) -> None:
    worker = Ear()
    events = worker.draw(stored, prompts=["a 3 moves left"], seed=5, steps=2)
    assert [event for event in events if event != "progress"] == ["loading", "drawing", "done"]
    done = worker.heard[-1][1]
    assert done["files"] == ["a-3-moves-left-0001.gif"] and done["passes"] >= 2 and done["memory"] > 0
    assert done["model"] == "generator, step 2"
    (found,) = list_drawings(stored)
    assert (found.file, found.caption, found.seed) == ("studio/a-3-moves-left-0001.gif", "a 3 moves left", 5)
    words = shlex.split(found.command)
    assert words[:2] == ["kineo", "sample"]
    words[words.index("--out") + 1] = str(tmp_path / "again")
    with pytest.raises(SystemExit):
        cli.main(words[1:])
    assert (tmp_path / "again" / "a-3-moves-left-0001.gif").read_bytes() == (stored / found.file).read_bytes()
    assert "loading" not in worker.draw(stored, prompts=["a 3 moves left"], seed=6)
    assert "loading" in worker.draw(stored, prompts=["a 3 moves left"], ema=False)


@pytest.mark.parametrize("stage", ["generator", "tokenizer"])
def test_a_run_that_was_trained_again_under_its_name_is_loaded_again(stored: Path, tmp_path: Path, stage: str) -> None:
    run, worker = tmp_path / "run", Ear()
    shutil.copytree(stored, run)
    assert "loading" in worker.draw(run, prompts=["a 3 moves left"], steps=1)
    assert "loading" not in worker.draw(run, prompts=["a 3 moves left"], steps=1)
    manifest = next((run / stage / "checkpoints").glob("step-*/manifest.json"))
    tree, weights = json.loads(manifest.read_text()), manifest.with_name("ema.safetensors")
    save_file({name: value * 0.5 for name, value in load_file(weights).items()}, weights)
    tree["files"][weights.name]["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(tree))
    assert "loading" in worker.draw(run, prompts=["a 3 moves left"], steps=1)


def test_a_story_is_drawn_scene_by_scene(stored: Path) -> None:
    worker = Ear()
    worker.draw(stored, prompts=["a 3 moves left", "a 3 moves up"], story=True)
    notes = [values["text"] for event, values in worker.heard if event == "note"]
    assert [note.partition(",")[0] for note in notes] == ["scene 1 of 2", "scene 2 of 2"]
    story = next(item for item in list_drawings(stored) if item.is_story)
    assert story.caption == "a 3 moves left / a 3 moves up"
    assert story.command.startswith("kineo story ")


def test_mistakes_and_a_cancel_leave_the_model_loaded(stored: Path) -> None:
    worker = Ear()
    worker.draw(stored, prompts=["a 3 moves left"])
    assert worker.draw(stored, prompts=["a 3"], frames=4)[-1] == "failed"
    assert "frames=4 does not fit" in worker.heard[-1][1]["error"]
    before = {path.name for path in (stored / "studio").iterdir()}
    worker.cancel.set()
    assert worker.draw(stored, prompts=["a 3 moves left"], steps=50)[-1] == "cancelled"
    assert {path.name for path in (stored / "studio").iterdir()} == before
    worker.cancel.clear()
    assert "loading" not in worker.draw(stored, prompts=["a 3 moves left"])


def test_a_run_with_a_stranger_s_code_is_refused(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "evil").mkdir()
    text = (stored / "config.yaml").read_text().replace("task: phenaki", "task: os.system")
    (tmp_path / "evil" / "config.yaml").write_text(text)
    worker = Ear()
    assert worker.draw(tmp_path / "evil", prompts=["x"]) == ["failed"]
    assert "never typed on this machine" in worker.heard[-1][1]["error"]


# The page's side, with a process that only pretends -----------------------------------------------------------------

PRETENDED = """
import json, sys, time
say = lambda event, **values: print(json.dumps({"event": event, **values}), flush=True)
say("ready")
model = {"model": "generator, step 2", "device": "cpu", "memory": 1234}
for line in sys.stdin:
    job = json.loads(line)
    if job["do"] == "cancel":
        say("cancelled")
        continue
    prompts = job["form"]["prompts"]
    if prompts == ["die"]:
        sys.exit(9)
    if prompts == ["load"]:
        continue
    say("drawing", **model)
    if prompts == ["wait"]:
        continue
    say("progress", passes=3)
    say("failed", error="no") if prompts == ["fail"] else say("done", passes=7, seconds=0.5, **model)
"""


@pytest.fixture
def drawer() -> Any:
    drawer = Drawer([sys.executable, "-c", PRETENDED])
    yield drawer
    drawer.free()


def wait_for(drawer: Drawer, met: Callable[[Status], bool]) -> Status:
    end = time.monotonic() + 20
    while not met(drawer.status):
        assert time.monotonic() < end, drawer.status
        time.sleep(0.01)
    return drawer.status


def test_the_page_follows_the_process(drawer: Drawer, tmp_path: Path) -> None:
    run = describe_run(write_run(tmp_path / "demo"), "demo")
    drawer.draw(run, DrawForm(prompts=["a 3"]))
    status = wait_for(drawer, lambda status: status.state == "done")
    assert (status.passes, status.expected, status.memory, status.run) == (7, None, 1234, run.id)
    drawer.draw(run, DrawForm(prompts=["wait"], seed=9))
    assert wait_for(drawer, lambda status: status.state == "drawing").expected == 7  # as the one before took
    with pytest.raises(drawing.Busy):
        drawer.draw(run, DrawForm(prompts=["another"]))
    drawer.cancel()
    assert wait_for(drawer, lambda status: status.state == "cancelled").model  # it stays loaded
    drawer.draw(run, DrawForm(prompts=["fail"]))
    assert wait_for(drawer, lambda status: status.state == "failed").text == "no"
    drawer.free()
    assert drawer.status.model == ""
    drawer.draw(run, DrawForm(prompts=["a 3"]))  # in a new process
    wait_for(drawer, lambda status: status.state == "done")


def test_a_process_that_dies_or_hangs_while_it_loads_is_told(drawer: Drawer, tmp_path: Path) -> None:
    run = describe_run(write_run(tmp_path / "demo"), "demo")
    drawer.draw(run, DrawForm(prompts=["die"]))
    assert "has ended (exit code 9)" in wait_for(drawer, lambda status: status.state == "failed").text
    drawer.draw(run, DrawForm(prompts=["load"]))
    drawer.cancel()
    assert drawer.status.state == "cancelled"
    drawer.draw(run, DrawForm(prompts=["a 3"]))
    wait_for(drawer, lambda status: status.state == "done")


def test_nothing_is_written_through_a_link(drawer: Drawer, tmp_path: Path) -> None:
    path = write_run(tmp_path / "demo")
    (tmp_path / "elsewhere").mkdir()
    (path / "studio").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a link"):
        drawer.draw(describe_run(path, "demo"), DrawForm(prompts=["x"]))
    with pytest.raises(InputError, match="is a link"):
        save_upload(path, picture())
    (path / "studio").unlink()
    (path / "studio").mkdir()
    (path / "studio" / "uploads").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a link"):
        save_upload(path, picture())
    assert not any((tmp_path / "elsewhere").iterdir())


# Requests ---------------------------------------------------------------------------------------------------------


def address(runs: Path) -> str:
    return f"/run/{make_id((runs / 'demo').resolve())}"


def test_forms_are_checked_before_anything_starts(client: Any, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing.subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    for body, words in (
        ({"prompts": ["x"] * 65}, "prompts"),
        ({"prompts": ["x" * 3000]}, "2,000 characters"),
        ({"prompts": ["x"], "count": 99}, "count"),
        ({"prompts": ["x"], "device": "cuda"}, "device"),
        ({"prompts": ["x"], "prime": "../../secret.png"}, "not the name of an upload"),
        ({"prompts": ["x"], "prime": "0" * 20 + ".png"}, "is gone"),
        ({"prompts": [" "], "story": True}, "a story needs scenes"),
        ([], "no object"),
    ):
        answer = client.post(address(runs) + "/draw", json=body)
        assert answer.status_code == 422 and words in answer.json()["error"], answer.text
    assert client.post(address(runs) + "/draw", content=b"{").status_code == 422
    assert client.post(address(runs) + "/draw", content=b"[" * 2**19).status_code == 413
    assert client.post("/run/nothing/draw", json={"prompts": ["x"]}).status_code == 404


@pytest.mark.parametrize("path", ["/draw/cancel", "/draw/free", "/run/{id}/draw", "/run/{id}/upload"])
def test_no_other_site_can_draw_and_nobody_without_the_token(client: Any, runs: Path, path: str) -> None:
    path = path.replace("/run/{id}", address(runs))
    assert client.post(path, headers={"origin": "http://evil.example"}).status_code == 403
    client.cookies.clear()
    assert client.post(path).status_code == 401
    assert not (runs / "demo" / "studio").exists()


def test_an_upload_is_kept_under_its_hash(client: Any, runs: Path) -> None:
    answer = client.post(address(runs) + "/upload", content=picture(kind="JPEG")).json()
    assert (answer["width"], answer["height"]) == (24, 16)
    assert (runs / "demo" / "studio" / "uploads" / answer["name"]).read_bytes() == picture(kind="JPEG")
    assert answer["name"].endswith(".jpg")
    assert client.post(address(runs) + "/upload", content=picture(kind="JPEG")).json() == answer


def test_bad_uploads_are_refused(client: Any, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"content-length": str(200 * 2**20), "origin": ORIGIN}
    assert client.post(address(runs) + "/upload", content=iter([b"x"]), headers=large).status_code == 413
    for data, words in (
        (b"", "empty"),
        (b"<svg onload=alert(1)>", "cannot be read"),
        (picture()[:40], "cannot be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "cannot be read"),
    ):
        answer = client.post(address(runs) + "/upload", content=data)
        assert answer.status_code == 422 and words in answer.json()["error"]
    with monkeypatch.context() as patch:  # a few bytes that decode to a huge picture
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        assert "too large" in client.post(address(runs) + "/upload", content=picture()).json()["error"]
    monkeypatch.setattr(drawing, "UPLOAD_LIMITS", drawing.UPLOAD_LIMITS.model_copy(update={"pixels": 100}))
    assert "too large" in client.post(address(runs) + "/upload", content=picture()).json()["error"]
    assert not (runs / "demo" / "studio" / "uploads").exists()


def test_a_body_without_a_length_is_read_up_to_the_limit() -> None:
    read = 0

    async def receive() -> Any:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}  # for ever

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(HTTPException) as error:
        asyncio.run(read_body(request, 10_000))
    assert error.value.status_code == 413 and read == 11


def test_the_page_of_the_form_offers_what_the_config_says(client: Any, runs: Path) -> None:
    page = client.get(address(runs) + "/draw").text
    assert "No stage of this run draws" in page  # its stages have no section `sample`
    config = runs / "demo" / "config.yaml"
    config.write_text(
        config.read_text().replace(
            "    codec: tokenizer\n",
            "    codec: tokenizer\n    sample: {guidance: 1.4, steps: 18}\n    data: {frames: 9, size: [32, 32]}\n",
        )
    )
    page = client.get(address(runs) + "/draw").text
    for text in (
        'placeholder="1.4"',
        'placeholder="18"',
        'placeholder="9"',
        'placeholder="32x32"',
        "Story",
        "a 3 moves left",
    ):
        assert text in page
    (runs / "demo" / "studio").mkdir()
    (runs / "demo" / "studio" / "x.gif").write_bytes(b"")
    sidecar = {"file": "x.gif", "caption": "<b>x", "command": "kineo sample '<i>'", "seed": 3, "step": 1}
    (runs / "demo" / "studio" / "x.json").write_text(json.dumps(sidecar))
    part = client.get(address(runs) + "/drawings").text
    assert "&lt;b&gt;x" in part and "kineo sample &#39;&lt;i&gt;&#39;" in part and "<b>" not in part
    assert TOKEN not in part
