"""metrics.jsonl, TensorBoard and W&B: nothing lost, nothing twice."""

from __future__ import annotations

import importlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.summary.writer import event_file_writer

from kineograph.core.errors import InputError
from kineograph.core.health import Finding
from kineograph.train import trackers
from kineograph.train.config import HubConfig, TrainConfig, WandbConfig
from kineograph.train.metrics_file import MetricsFile
from kineograph.train.trackers import TensorBoard, WeightsAndBiases, check_trackers, open_trackers


def record(step: int, stage: str = "tokenizer", split: str = "train", **numbers) -> dict:
    return {"loss": float(step), **numbers, "step": step, "split": split, "stage": stage}


def picture(path: Path, moving: bool = False) -> Path:
    first = Image.new("RGB", (8, 6), (255, 0, 0))
    rest = [Image.new("RGB", (8, 6), (0, 0, 40 * n)) for n in range(3)] if moving else []
    first.save(path, save_all=bool(rest), append_images=rest)
    return path


# metrics.jsonl ---------------------------------------------------------------------------------------------------


def test_metrics_are_one_object_a_line_in_order(tmp_path):
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    file.write(record(1, accuracy=0.5))
    file.write(record(2, caption="une bête"))
    lines = file.path.read_text(encoding="utf-8").splitlines()
    assert [list(json.loads(line))[:3] for line in lines] == [["stage", "split", "step"]] * 2
    assert "bête" in lines[1]
    assert file.read() == [record(1, accuracy=0.5), record(2, caption="une bête")]


def test_what_is_not_finite_is_null(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    values = {
        "a": float("nan"),
        "b": float("inf"),
        "c": torch.tensor(-float("inf")),
        "d": np.float32("nan"),
        "e": [1.0, float("nan")],
    }
    file.write(record(1, **values, fine=torch.tensor(2.5), whole=np.int64(7), flag=True, none=None))
    (written,) = file.read()
    assert [written[name] for name in "abcd"] == [None] * 4
    assert written["e"] == [1.0, None]
    assert (written["fine"], written["whole"], written["flag"], written["none"]) == (2.5, 7, True, None)
    assert "NaN" not in file.path.read_text()
    assert "Infinity" not in file.path.read_text()


def test_each_line_is_there_at_once(tmp_path):
    writer, reader = MetricsFile(tmp_path / "metrics.jsonl"), MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 4):
        writer.write(record(step))
        assert len(reader.read()) == step


def test_truncate_drops_what_lies_beyond_the_checkpoint(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (10, 20, 30):
        file.write(record(step))
        file.write(record(step, split="validation"))
    for step in (10, 20, 30):
        file.write(record(step, "generator"))
    file.write(record(5, "removed"))
    file.truncate("generator", 20, ["tokenizer", "generator"])
    kept = [(r["stage"], r["split"], r["step"]) for r in file.read()]
    assert kept == [("tokenizer", s, n) for n in (10, 20, 30) for s in ("train", "validation")] + [
        ("generator", "train", n) for n in (10, 20)
    ]
    file.truncate("tokenizer", 10)
    kept = [(r["stage"], r["step"]) for r in file.read()]
    assert kept == [("tokenizer", 10)] * 2 + [("generator", 10), ("generator", 20)]
    file.truncate("generator", 0)
    assert {r["stage"] for r in file.read()} == {"tokenizer"}
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncate_keeps_the_bytes_of_what_it_keeps(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        file.write(record(step, value=0.1 * step))
    before = file.path.read_bytes()
    file.truncate("tokenizer", 3)
    assert file.path.read_bytes() == b"".join(before.splitlines(keepends=True)[:3])


@pytest.mark.parametrize(
    "tail",
    [
        b'{"stage": "tokenizer", "st',
        b"\xff\xfe\n",
        b'{"step": 1}\n[]\n7\n',
        b'{"stage": "tokenizer", "split": "train", "step": 2}',
    ],
)
def test_a_torn_end_costs_itself_only(tmp_path, tail):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(record(1))
    with file.path.open("ab") as raw:
        raw.write(tail)
    assert file.read() == [record(1)]
    file.write(record(3))  # starts on a line of its own
    assert file.read()[-1] == record(3)
    file.truncate("tokenizer", 1)
    assert file.read() == [record(1)]
    assert len(file.path.read_bytes().splitlines()) == 1


def test_nothing_to_truncate(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate("tokenizer", 10)
    assert file.read() == []
    assert not file.path.exists()


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("kineograph.core.distributed.rank", lambda: 1)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(record(1))
    assert not file.path.exists()
    assert open_trackers(["tensorboard"], tmp_path, "x", {}) == {}
    assert not list(tmp_path.iterdir())


# TensorBoard -----------------------------------------------------------------------------------------------------


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_tags(tmp_path):
    (board,) = open_trackers(["tensorboard", "tensorboard"], tmp_path, "x", {}).values()
    board.begin("tokenizer", 0)
    board.log(record(1, note="text", flag=True, missing=None, lr=torch.tensor(0.25)))
    board.log(record(1, split="validation", psnr=20.0))
    board.close()
    folder = tmp_path / "tensorboard" / "tokenizer"
    assert points(folder, "tokenizer/train/loss") == [(1, 1.0)]
    assert points(folder, "tokenizer/train/lr") == [(1, 0.25)]
    assert points(folder, "tokenizer/validation/psnr") == [(1, 20.0)]
    for tag in ("note", "flag", "missing", "step"):
        with pytest.raises(KeyError):
            points(folder, f"tokenizer/train/{tag}")


@pytest.mark.parametrize("announced", [True, False])
def test_resume_does_not_repeat_points(tmp_path, announced, monkeypatch):
    # Files of one second and process are read in the order of this number, as text: 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    def run(stage: str, start: int, stop: int, offset: float) -> None:
        board = TensorBoard(tmp_path)
        if announced:
            board.begin(stage, start)
        for step in range(start + 1, stop + 1):
            board.log(record(step, stage, loss=step + offset))
        board.close()

    run("tokenizer", 0, 30, 0.0)
    run("generator", 0, 20, 0.0)
    run("generator", 12, 25, 0.5)  # killed at 20, back from the checkpoint at 12
    expected = [(n, float(n)) for n in range(1, 13)] + [(n, n + 0.5) for n in range(13, 26)]
    assert points(tmp_path / "generator", "generator/train/loss") == expected
    assert len(points(tmp_path / "tokenizer", "tokenizer/train/loss")) == 30  # another stage's steps are its own


def test_tensorboard_media(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "board")
    still, moving = picture(tmp_path / "a.png"), picture(tmp_path / "b.gif", moving=True)
    for step, (name, path) in enumerate({"samples": still, "clips": moving}.items()):
        board.log_media(step, f"tokenizer/{name}", path, "a red 3")
    board.close()
    events = EventAccumulator(str(tmp_path / "board" / "tokenizer"), size_guidance={"images": 0})
    events.Reload()
    assert events.Images("tokenizer/samples")[0].encoded_image_string == still.read_bytes()
    assert events.Images("tokenizer/clips")[0].encoded_image_string == moving.read_bytes()
    assert events.Images("tokenizer/clips")[0].step == 1
    assert "tokenizer/samples/caption/text_summary" in events.Tags()["tensors"]


def test_the_config_and_each_clip_are_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    still, moving = picture(tmp_path / "a.png"), picture(tmp_path / "b.gif", moving=True)
    picture(tmp_path / "c.strip.png")
    (board,) = open_trackers(["tensorboard"], tmp_path, "x", {"train": {"steps": 5}}).values()
    board.log_clips(2, "tokenizer/sample", [(still, "a 3"), (moving, "a 7"), (tmp_path / "c.mp4", "a 9")])
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "tokenizer"), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    (text,) = events.Tensors("config/text_summary")
    assert b"steps: 5" in text.tensor_proto.string_val[0]
    shown = {tag: events.Images(tag)[0].encoded_image_string for tag in events.Tags()["images"]}
    assert shown["tokenizer/sample/01"] == moving.read_bytes()
    assert shown["tokenizer/sample/02"] == (tmp_path / "c.strip.png").read_bytes()
    (caption,) = events.Tensors("tokenizer/sample/01/caption/text_summary")
    assert caption.tensor_proto.string_val[0] == b"a 7"


# Weights & Biases ------------------------------------------------------------------------------------------------


def test_wandb_asked_for_and_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what import does when a module is missing
    for call in (
        lambda: check_trackers(("wandb",)),
        lambda: open_trackers(("tensorboard", "wandb"), tmp_path, "x", {}),
    ):
        with pytest.raises(InputError, match=r"train\.trackers.*pip install kineograph\[wandb\]"):
            call()
    assert not list(tmp_path.iterdir())
    check_trackers(("tensorboard",))


def test_a_folder_named_wandb_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    try:
        with pytest.raises(InputError, match=r"kineograph\[wandb\]"):
            check_trackers(("wandb",))
    finally:
        sys.modules.pop("wandb", None)


class FakeRun:
    def __init__(self, told: list) -> None:
        self.told, self.metrics, self.steps = told, {}, []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics[name] = step_metric

    def log(self, values: dict, step: int) -> None:
        self.told.append(values)
        self.steps.append(step)

    def log_artifact(self, artifact, aliases: list[str]) -> None:
        self.told.append((artifact.name, artifact.files, aliases))

    def finish(self) -> None:
        self.told.append("finished")


class FakeWandb:
    """Stands in where only what is told matters."""

    class errors:
        Error = RuntimeError

    def __init__(self) -> None:
        self.told: list = []
        self.started: list[dict] = []

    class Artifact:
        def __init__(self, name: str, type: str, metadata: dict) -> None:
            self.name, self.metadata = name, metadata

        def add_dir(self, path: str) -> None:
            self.files = sorted(file.name for file in Path(path).iterdir())

    def Settings(self, **settings):
        return settings

    def Image(self, path, caption=None):
        return ("image", Path(path).name, caption)

    def Video(self, path, caption=None):
        return ("video", Path(path).name, caption)

    def init(self, **arguments):
        self.started.append(arguments)
        return FakeRun(self.told)


def test_wandb_continues_one_run_and_repeats_nothing(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setattr(trackers, "_import_wandb", lambda: fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    counted: list[int] = []
    for start, stop in ((0, 4), (2, 6)):
        tracker = WeightsAndBiases(tmp_path, "demo", {"seed": 3})
        for step in range(start + 1, stop + 1):
            tracker.log(record(step))
        assert tracker._run.metrics == {
            "tokenizer/step": None,
            "tokenizer/*": "tokenizer/step",
        }  # stages have steps of their own
        tracker.log_media(stop, "tokenizer/samples", picture(tmp_path / "a.png"), "a 3")
        tracker.log_media(stop, "tokenizer/clips", picture(tmp_path / "b.gif", moving=True))
        tracker.close()
        counted += tracker._run.steps
    first, second = fake.started
    assert first["id"] == second["id"]
    assert (first["project"], first["name"], first["config"], first["dir"]) == (
        "kineograph",
        "demo",
        {"seed": 3},
        str(tmp_path),
    )
    assert counted == list(range(len(counted)))  # an offline run continues where the last one ended
    steps = [told["tokenizer/step"] for told in fake.told if "tokenizer/train/loss" in told]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [told["tokenizer/samples"] for told in fake.told if "tokenizer/samples" in told] == [
        ("image", "a.png", "a 3")
    ] * 2
    assert [told["tokenizer/clips"][0] for told in fake.told if "tokenizer/clips" in told] == ["video"] * 2


def test_wandb_goes_where_it_is_told_and_stays_there(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setattr(trackers, "_import_wandb", lambda: fake)
    monkeypatch.setenv("WANDB_PROJECT", "from the environment")
    open_trackers(["wandb"], tmp_path, "demo", {}, WandbConfig(project="p", entity="team", id="abc"))
    again = WeightsAndBiases(tmp_path, "demo", {})  # nothing was logged yet, and the id is known already
    assert [(start["project"], start["entity"], start["id"]) for start in fake.started] == [
        ("p", "team", "abc"),
        ("from the environment", None, "abc"),
    ]
    again.log(record(5, split="validation"))
    again.log({"stage": "tokenizer", "split": "validation", "step": 5, "metric/fid": 2.0})  # of the same step
    assert [sorted(told) for told in fake.told] == [
        ["tokenizer/step", "tokenizer/validation/loss"],
        ["tokenizer/step", "tokenizer/validation/metric/fid"],
    ]


def test_wandb_keeps_checkpoints(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setattr(trackers, "_import_wandb", lambda: fake)
    folder = tmp_path / "step-00000004"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    for _ in range(2):  # a resumed run does not send it again
        WeightsAndBiases(tmp_path, "my run", {}).log_checkpoint("decoder", 4, folder, best=True)
    assert fake.told == [("my-run-decoder", ["model.safetensors"], ["latest", "step-4", "best"])]


def test_each_clip_is_an_item_of_wandb(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setattr(trackers, "_import_wandb", lambda: fake)
    tracker = WeightsAndBiases(tmp_path, "demo", {})
    for _ in range(2):  # once a step
        tracker.log_clips(3, "generator/sample", [(tmp_path / "a.png", "a 3"), (tmp_path / "b.mp4", "a 7")])
    assert fake.told == [
        {
            "generator/sample/00": ("image", "a.png", "a 3"),
            "generator/sample/01": ("video", "b.mp4", "a 7"),
            "generator/step": 3,
        }
    ]


# A model hub -----------------------------------------------------------------------------------------------------


def test_checkpoints_go_to_a_folder_of_the_hub(tmp_path, monkeypatch):
    from kineograph.train import trackers

    calls: list = []

    class Api:
        def create_repo(self, repo, private, exist_ok):
            calls.append((repo, private))

        def upload_folder(self, repo_id, folder_path, commit_message):
            if len(calls) > 3:
                raise OSError("no network")
            calls.append((repo_id, Path(folder_path).name, commit_message))

    monkeypatch.setattr(trackers, "import_hub", lambda: type("module", (), {"HfApi": Api}))
    (tracker,) = open_trackers(
        ["hub"], tmp_path, "demo", {"stages": {"tokenizer": {}}}, hub=HubConfig(repo="me/demo")
    ).values()
    for step, best in ((4, True), (8, False)):
        saved = tmp_path / f"step-{step}"
        saved.mkdir()
        (saved / "model.safetensors").write_text(f"step {step}")
        tracker.log_checkpoint("tokenizer", step, saved, best)
    hub = tmp_path / "hub"
    assert (hub / "tokenizer" / "latest" / "model.safetensors").read_text() == "step 8"
    assert (hub / "tokenizer" / "best" / "model.safetensors").read_text() == "step 4"
    assert sorted(path.name for path in hub.iterdir()) == ["README.md", "config.yaml", "tokenizer"]
    uploads = [("me/demo", "hub", f"demo: tokenizer, step {step}") for step in (4, 8)]
    assert calls == [("me/demo", True), uploads[0], ("me/demo", True), uploads[1]]
    with pytest.warns(
        UserWarning, match=r"train\.hub\.repo=me/demo.*step 9, was not uploaded \(no network\); it is in"
    ):
        tracker.log_checkpoint("tokenizer", 9, saved, best=False)


def test_a_hub_that_takes_nothing_is_refused():
    with pytest.raises(ValueError, match="set log_checkpoints=true"):
        TrainConfig(trackers=("hub",))
    assert TrainConfig(trackers=("hub",), log_checkpoints=True).hub.repo is None


def test_wandb_that_refuses_names_the_remedy(tmp_path, monkeypatch):
    fake = FakeWandb()

    def refuse(**arguments):
        raise RuntimeError("no API key")

    fake.init = refuse
    monkeypatch.setattr(trackers, "_import_wandb", lambda: fake)
    with pytest.raises(InputError, match=r"no API key.*wandb login.*WANDB_MODE=offline"):
        WeightsAndBiases(tmp_path, "demo", {})


@pytest.mark.timeout(120)
def test_wandb_works_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    tensorboard, tracker = open_trackers(("tensorboard", "wandb"), tmp_path, "demo", {"train": {"steps": 5}}).values()
    tracker.begin("tokenizer", 0)
    tracker.log(record(1, bad=float("nan")))
    tracker.log_media(1, "tokenizer/samples", picture(tmp_path / "a.png"), "a 3")
    tracker.log_media(1, "tokenizer/clips", picture(tmp_path / "b.gif", moving=True), "a 7")
    saved = tmp_path / "step-00000001"
    saved.mkdir()
    (saved / "model.safetensors").write_bytes(b"weights of step 1")
    for one in (tensorboard, tracker):
        one.log_checkpoint("tokenizer", 1, saved, True)
    tracker.close()
    tensorboard.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    kinds = {path.suffix for path in run.rglob("media/**/*") if path.is_file()}
    assert kinds == {".png", ".gif"}
    (log,) = run.glob("*.wandb")
    # W&B's own service process writes the file, and may still be at it when finish() has returned.
    deadline = time.monotonic() + 60
    while b"tokenizer/train/loss" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"tokenizer/train/loss" in log.read_bytes()
    assert b"demo-tokenizer" in log.read_bytes()  # the artifact
    assert any(
        file.read_bytes() == b"weights of step 1" for file in (tmp_path / "WANDB_DATA_DIR").rglob("*") if file.is_file()
    )


def test_two_threads_log_to_wandb(tmp_path, monkeypatch):
    """Numbers come from the training thread, pictures from the saver's."""
    fake = FakeWandb()
    monkeypatch.setattr(trackers, "_import_wandb", lambda: fake)
    tracker = WeightsAndBiases(tmp_path, "demo", {})
    tracker.begin("tokenizer", 0)
    path = picture(tmp_path / "a.png")
    with ThreadPoolExecutor(2) as pool:
        numbers = pool.submit(lambda: [tracker.log(record(step)) for step in range(1, 51)])
        pictures = pool.submit(lambda: [tracker.log_media(step, "tokenizer/a", path) for step in range(1, 51)])
        numbers.result(), pictures.result()
    reached = json.loads((tmp_path / "wandb" / "kineograph.json").read_text())["reached"]
    assert reached == {"tokenizer/train/train": 50, "tokenizer/a": 50}


COLLAPSED = Finding("codec_collapsed", "fatal", "explained_variance is 0", "It is dead.", "Lower train.lr.", 0.0, 0.1)


def test_findings_go_to_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.log(record(5, split="health", finding=COLLAPSED.to_json(), codec_collapsed=0.0))
    board.close()
    assert points(tmp_path / "tokenizer", "tokenizer/health/codec_collapsed") == [(5, 0.0)]
    events = EventAccumulator(str(tmp_path / "tokenizer"))
    events.Reload()
    (text,) = events.Tensors("tokenizer/health/text_summary")
    assert b"fatal: codec_collapsed: explained_variance is 0. It is dead." in text.tensor_proto.string_val[0]


def test_findings_go_to_wandb_beside_the_numbers_of_their_step(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setattr(trackers, "_import_wandb", lambda: fake)
    tracker = WeightsAndBiases(tmp_path, "demo", {})
    for name in ("codec_collapsed", "one_code"):
        finding = COLLAPSED.to_json() | {"name": name}
        tracker.log({"stage": "tokenizer", "split": "health", "step": 5, "finding": finding, name: 0.0})
    tracker.log(record(5))
    logged = {name for told in fake.told for name in told}
    assert logged >= {
        "tokenizer/train/loss",
        "tokenizer/health/codec_collapsed",
        "tokenizer/health/one_code",
    }
