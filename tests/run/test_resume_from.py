"""Runs and weights from elsewhere: a web server, a file, a tar, a tracker's artifact; checked, put into place whole, and gone on from."""

from __future__ import annotations

import functools
import http.server
import io
import shutil
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from kineograph.core.errors import ConfigError, InputError
from kineograph.core.run_folder import RunFolder
from kineograph.run import resume_from
from kineograph.run.plan import make_plan
from kineograph.run.train import train as run_train
from kineograph.text.learned import ASSET
from kineograph.train import checkpoint, remote_checkpoint
from tests.run import clip_tasks
from tests.run.test_phases import lines

STEPS, HALF = 6, 3


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)
    monkeypatch.setattr("kineograph.stage.data.VOCABULARY_CAPTIONS", 200)


def train(folder: Path, name: str, **changes: Any) -> Path:
    return clip_tasks.train(folder, name, train__steps=STEPS, train__save_every=HALF, train__keep_last=9, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints at steps 3 and 6."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)
        patch.setattr("kineograph.stage.data.VOCABULARY_CAPTIONS", 200)
        return train(tmp_path_factory.mktemp("elsewhere"), "whole")


@pytest.fixture(scope="module")
def server(whole: Path) -> Iterator[str]:
    """The run's folder on a web server of this machine."""
    pytest.importorskip("aiohttp", reason="pip install kineograph[http]")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path.startswith("/endless"):
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):
                    while True:
                        self.wfile.write(bytes(2**16))
                return None
            if self.path != "/torn.tar":
                return super().do_GET()
            self.send_response(200)  # promises more than it gives
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"0123456789")
            self.close_connection = True

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(whole.parent))
    ) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def step(run: Path, stage: str, number: int = HALF) -> Path:
    return run / stage / "checkpoints" / f"step-{number:08d}"


def tar_of(path: Path, out: Path) -> Path:
    with tarfile.open(out, "w:gz" if out.suffix == ".tgz" else "w") as archive:
        archive.add(path, path.name)
    return out


def go_on(run: Path, *sources: str, told: list[str] | None = None, words: tuple[str, ...] = ()) -> Path:
    note = (told if told is not None else []).append
    return run_train(list(words), run=run, resume_from=sources, note=note)


def assert_same(run: Path, whole: Path) -> None:
    """As if the other run had gone on: the same weights, and the same lines after the checkpoint."""
    for stage in ("codec", "generator"):
        found, expected = step(run, stage, STEPS), step(whole, stage, STEPS)
        for name in ("model", "ema", "optimizer"):
            ours, theirs = (checkpoint.Checkpoint(path, STEPS).tensors(name) for path in (found, expected))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert lines(run) == [line for line in lines(whole) if line["stage"] == "generator" and line["step"] > HALF]


# A run goes on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["http folder", "http tar", "file folder", "file tar", "path"])
def test_a_run_goes_on_from_elsewhere(whole: Path, server: str, tmp_path: Path, kind: str) -> None:
    codec, generator = step(whole, "codec", STEPS), step(whole, "generator")
    url = f"{server}/{generator.relative_to(whole.parent)}"
    if kind == "http tar":
        tar_of(generator, whole.parent / "generator.tar")
        url = f"{server}/generator.tar"
    elif kind == "file folder":
        url = generator.as_uri()
    elif kind == "file tar":
        url = tar_of(generator, tmp_path / "generator.tgz").as_uri()
    elif kind == "path":
        url = str(generator)
    told: list[str] = []
    run = go_on(tmp_path / "here", codec.as_uri(), url, told=told)
    assert f"generator: step {HALF} from {url}" in told
    assert_same(run, whole)
    assert yaml.safe_load((run / "config.yaml").read_text()) == yaml.safe_load((whole / "config.yaml").read_text())
    assert not list(tmp_path.glob(".fetching-*"))
    # the same command again fetches nothing: the sources may be gone
    told.clear()
    assert go_on(run, codec.as_uri(), url, told=told) == run
    assert len([line for line in told if "was fetched before" in line]) == 2


def test_what_is_typed_is_laid_onto_the_fetched_config(whole: Path, tmp_path: Path) -> None:
    sources = [str(step(whole, "codec", STEPS)), str(step(whole, "generator"))]
    run = go_on(tmp_path / "here", *sources, words=("train.steps=8",))
    assert checkpoint.select(run / "generator" / "checkpoints").step == 8
    with pytest.raises(ConfigError, match=r"train\.lr differs"):
        go_on(tmp_path / "other", *sources, words=("train.lr=0.5",))


def test_a_later_checkpoint_than_the_folders_own_is_gone_on_from(whole: Path, tmp_path: Path) -> None:
    run = go_on(tmp_path / "here", str(step(whole, "codec", STEPS)), str(step(whole, "generator")))
    shutil.rmtree(step(run, "generator", STEPS))
    told: list[str] = []
    go_on(run, str(step(whole, "generator", STEPS)), told=told)
    assert "generator: finished at step 6" in told
    assert any(line.startswith("nothing was left to train: a run keeps its own config.yaml") for line in told)
    told.clear()
    earlier = tar_of(step(whole, "generator"), tmp_path / "earlier.tar")
    go_on(run, str(earlier), told=told)
    assert any("is at step 6 already" in line for line in told)


def test_a_stage_needs_the_stages_that_it_stands_on(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"generator needs codec, of which .* has no checkpoint"):
        go_on(tmp_path / "deep" / "here", str(step(whole, "generator")))
    assert list(tmp_path.iterdir()) == []


def test_another_runs_checkpoint_is_refused(whole: Path, tmp_path: Path) -> None:
    other = train(tmp_path, "other", seed=5)
    before = sorted(path.name for path in step(other, "generator").parent.iterdir())
    with pytest.raises(ConfigError, match="seed differs"):
        go_on(other, str(step(whole, "generator", STEPS)))
    assert sorted(path.name for path in step(other, "generator").parent.iterdir()) == before


def test_a_run_folder_must_be_named(whole: Path) -> None:
    with pytest.raises(InputError, match="--resume-from needs --run"):
        run_train([], resume_from=[str(step(whole, "codec"))])


def test_the_best_that_stayed_elsewhere_is_not_pointed_to(whole: Path, tmp_path: Path) -> None:
    sources = [str(step(whole, "codec", STEPS)), str(step(whole, "generator"))]
    path = tmp_path / "generator"
    shutil.copytree(sources[1], path)
    checkpoint.write_json(path / "phase.json", {"phase": "train", "best": -1.0, "best_step": 2})
    run = go_on(tmp_path / "here", sources[0], str(path))
    assert not (run / "generator" / "checkpoints" / "best.json").exists()
    assert (
        checkpoint.select(run / "generator" / "checkpoints").state()["best"] == -1.0
    )  # nothing that is worse becomes the best


# What is not whole -----------------------------------------------------------------------------------------------


def broken(whole: Path, folder: Path, how: str) -> Path:
    path = Path(shutil.copytree(step(whole, "codec"), folder / "codec"))
    if how == "a flipped bit":
        content = bytearray((path / "model.safetensors").read_bytes())
        content[-3] ^= 1
        (path / "model.safetensors").write_bytes(content)
    elif how == "a missing file":
        (path / "optimizer.safetensors").unlink()
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "a torn tar":
        whole_tar = tar_of(path, folder / "whole.tar").read_bytes()
        path = folder / "torn.tar"
        path.write_bytes(whole_tar[: len(whole_tar) // 2])
    return path


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("a flipped bit", "does not match its checksum"),
        ("a missing file", "optimizer.safetensors is missing"),
        ("no manifest", "neither a checkpoint"),
        ("a torn tar", "not a tar that can be unpacked|is missing|bytes instead of"),
    ],
)
def test_what_is_broken_is_refused_and_leaves_nothing(whole: Path, tmp_path: Path, how: str, told: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path = broken(whole, source, how)
    with pytest.raises(InputError, match=told):
        go_on(tmp_path / "runs" / "here", path.as_uri())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("path", ["/nothing/step-00000001", "/nothing.tar"])
def test_what_the_server_does_not_have(server: str, tmp_path: Path, path: str) -> None:
    with pytest.raises(InputError, match=r"cannot be fetched: .* was not found"):
        go_on(tmp_path / "here", server + path)
    with pytest.raises(InputError, match="no such file"):
        go_on(tmp_path / "here", "file:///nothing/at/all")
    assert list(tmp_path.iterdir()) == []


def test_a_tar_that_leads_outside_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        member = tarfile.TarInfo("../../outside.txt")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(InputError, match="leads outside"):
        go_on(tmp_path / "runs" / "here", str(tmp_path / "bad.tar"))
    assert not list(tmp_path.rglob("outside.txt"))


def test_a_manifest_that_leads_outside_is_refused(whole: Path, server: str, tmp_path: Path) -> None:
    path = whole.parent / "evil"
    shutil.copytree(step(whole, "codec"), path, dirs_exist_ok=True)
    (path / "manifest.json").write_text('{"files": {"../secret": {"bytes": 1, "sha256": ""}}}')
    with pytest.raises(InputError, match="which is not a file of a checkpoint"):
        go_on(tmp_path / "here", f"{server}/evil")


def test_a_connection_that_ends_too_early(server: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"torn\.tar cannot be fetched: .*run the same command again"):
        go_on(tmp_path / "here", f"{server}/torn.tar")


@pytest.mark.timeout(60)
def test_answers_without_end_are_given_up(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_checkpoint, "_MAX_JSON", 10**6)
    with pytest.raises(InputError, match=r"endless/manifest.json has more than the 1,000,000 bytes that it should"):
        go_on(tmp_path / "run", f"{server}/endless")
    monkeypatch.setattr("kineograph.core.remote_files._RESERVED", 2**60)
    with pytest.raises(InputError, match="bytes of the disk are free: free disk space"):
        go_on(tmp_path / "run", f"{server}/endless.tar")
    assert not (tmp_path / "run").exists()


def test_weights_alone_are_no_run(whole: Path, tmp_path: Path) -> None:
    save_file({"gain": torch.ones(())}, tmp_path / "weights.safetensors")
    with pytest.raises(InputError, match=r"weights alone: to start from them set stages\.x\.init"):
        go_on(tmp_path / "here", str(tmp_path / "weights.safetensors"))


# Warm starts -----------------------------------------------------------------------------------------------------


FROZEN: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.0, "ema": {"decay": 0.0}}


def warm(whole: Path, folder: Path, init: str, told: list[str] | None = None) -> dict[str, torch.Tensor]:
    generator = {**clip_tasks.BASE["stages"]["generator"], "codec": f"{whole}/codec", "init": init, "train": FROZEN}
    run = clip_tasks.train(folder, "warm", told, stages={"generator": generator}, train__validate_every=0)
    assert not list(run.rglob(".fetching-*"))
    return checkpoint.select(run / "generator" / "checkpoints").weights()


def test_weights_from_a_url(whole: Path, server: str, tmp_path: Path) -> None:
    given = checkpoint.Checkpoint(step(whole, "generator"), HALF).weights()
    save_file(given, whole.parent / "given.safetensors")
    found = warm(whole, tmp_path, f"{server}/given.safetensors")
    assert torch.equal(found["head.weight"], given["head.weight"])
    assert not torch.equal(found["text.tokens.weight"], given["text.tokens.weight"])  # of words that nobody knows


def test_a_checkpoint_from_a_url_brings_its_words(whole: Path, server: str, tmp_path: Path) -> None:
    saved = checkpoint.Checkpoint(step(whole, "generator"), HALF)
    told: list[str] = []
    found = warm(whole, tmp_path, f"{server}/whole/generator/checkpoints/step-{HALF:08d}", told)
    assert all(torch.equal(found[name], value) for name, value in saved.weights().items())
    words = checkpoint.select(tmp_path / "warm" / "generator" / "checkpoints").state()["assets"][ASSET]
    assert words == saved.state()["assets"][ASSET]


def test_a_warm_start_that_is_not_there_is_refused_before_anything_is_written(
    whole: Path, server: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"none\.safetensors cannot be fetched: .* was not found"):
        warm(whole, tmp_path, f"{server}/none.safetensors")
    assert not (tmp_path / "warm").exists()


# A tracker's artifacts -------------------------------------------------------------------------------------------


class FakeWandb:
    """An account with some artifacts."""

    class errors:
        class Error(Exception):
            pass

    init = None

    def __init__(self, stored: dict[str, Path]) -> None:
        self.stored = stored

    def Api(self) -> FakeWandb:
        return self

    def artifact(self, name: str) -> Any:
        if name not in self.stored:
            raise self.errors.Error(f"artifact {name} not found")
        path = self.stored[name]

        class Artifact:
            def download(self, root: str) -> str:
                return str(shutil.copytree(path, root))

        return Artifact()


def test_a_run_and_weights_from_a_tracker(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"me/p/demo-codec:best": step(whole, "codec", STEPS), "me/p/demo-generator:v0": step(whole, "generator")}
    monkeypatch.setattr(remote_checkpoint, "import_wandb", lambda why: FakeWandb(stored))
    run = go_on(tmp_path / "here", "wandb:me/p/demo-codec:best", "wandb:me/p/demo-generator:v0")
    assert_same(run, whole)
    found = warm(whole, tmp_path, "wandb:me/p/demo-generator:v0")
    saved = checkpoint.Checkpoint(step(whole, "generator"), HALF).weights()
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    with pytest.raises(InputError, match=r"wandb:me/p/x:v0 cannot be fetched: artifact .* not found.*wandb login"):
        go_on(tmp_path / "other", "wandb:me/p/x:v0")


def test_an_artifact_without_wandb_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(InputError, match=r"kept by wandb, which is not installed: pip install kineograph\[wandb\]$"):
        go_on(tmp_path / "here", "wandb:me/p/x:v0")


def test_a_clip_that_is_no_stage_need_not_be_taken_up(tmp_path):
    decoder = {"task": "dalle2", "clip": {"kind": "given", "width": 8}}
    plan = make_plan({"data": {"source": "moving_digits", "size": 16}, "stages": {"decoder": decoder}})
    item = resume_from._RemoteCheckpoint("elsewhere", tmp_path, "decoder", 3, {})
    resume_from._check_references(plan, RunFolder(tmp_path), item, [item])
