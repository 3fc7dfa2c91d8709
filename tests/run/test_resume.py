"""A run that was killed goes on as if nothing had happened: `loss` after the checkpoint is bit-identical."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from kineograph.cli import main
from tests.torture import processes

# A GAN stage (two players, a codebook with moving averages) and a transformer stage, both as small as they get.
CONFIG = {
    "seed": 3,
    "prompts": ["a red 3 at the top left", "a blue 5 at the centre"],
    "data": {"source": "moving_digits", "size": 16, "frames": 1, "glyphs": 2},
    "train": {
        "steps": 6, "batch_size": 8, "log_every": 1, "save_every": 2, "validate_every": 3, "validation_samples": 8,
        "sample_every": 0, "workers": 0, "warmup": 2, "trackers": [], "device": "cpu", "accumulate": 2,
    },
    "stages": {
        "tokenizer": {
            "task": "vqgan", "width": 8, "multipliers": [1, 2], "patch": 2, "quantizer": {"kind": "vq", "codes": 32, "dim": 4},
            "adversarial": {"width": 8, "start": 3, "penalty_every": 2, "levels": 2}, "perceptual": {"weight": 0},
        },
        "generator": {"task": "muse", "codec": "tokenizer", "width": 32, "depth": 1, "heads": 2, "text": {"kind": "learned", "width": 16, "depth": 1}},
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    processes.import_modules()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    return path


def command(config: Path, run: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "kineograph", "train", str(config), "--run", str(run), *more]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def live(config: Path, run: Path, *more: str, death: processes.Kill | None = None) -> processes.ProcessResult:
    """The command in a process forked from this one, which has imported everything."""
    run.parent.mkdir(exist_ok=True)
    log = run.parent / f"log-{len(list(run.parent.glob('log-*')))}"
    return processes.wait([processes.start(command(config, run, *more)[3:], log, run, death)], log)


def train(config: Path, run: Path, *more: str) -> processes.ProcessResult:
    done = live(config, run, *more)
    assert done.codes == [0], done.text
    return done


def refused(config: Path, run: Path, *more: str) -> bool:
    """Whether this command ends with 2; in this process, since it ends at once."""
    with pytest.raises(SystemExit) as ended:
        main(command(config, run, *more)[3:])
    return ended.value.code == 2


def losses(run: Path) -> dict[tuple[str, str, int], float]:
    found: dict[tuple[str, str, int], float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        key = (record["stage"], record["split"], record["step"])
        assert key not in found, f"{key} was logged twice"
        found[key] = record["loss"]
    return found


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], float]:
    """Losses of a run that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(config, run)
    found = losses(run)
    assert len([key for key in found if key[:2] == ("tokenizer", "train")]) == 6
    assert len([key for key in found if key[:2] == ("generator", "train")]) == 6
    return found


def test_killed_inside_saves(config: Path, whole: dict, tmp_path: Path) -> None:
    """Each life ends in another part of a save."""
    run = tmp_path / "run"
    places = [("remove_leftovers", 1), ("write_json", 3), ("sync_folder", 2), ("save_file", 4), ("flush_and_hash", 6)]
    for place, nth in places:
        died = live(config, run, death=processes.Kill("save", nth=nth, place=("checkpoint", place)))
        assert died.killed, f"{place}: {died.text}"
    train(config, run)
    assert losses(run) == whole


def test_killed_anywhere_again_and_again(config: Path, whole: dict, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for touch in (60, 25, 120, 45):
        died = live(config, run, death=processes.Kill("touch", nth=touch))
        assert died.killed, died.text
    train(config, run)
    assert losses(run) == whole


def _lines(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def begin(config: Path, run: Path, *more: str, lines: int = 1) -> tuple[int, Path]:
    """Start the command in a forked process and wait for so many lines of metrics. → its id, and the file of its output"""
    log = run.parent / "log"
    process = processes.start(command(config, run, *more)[3:], log, run)
    while _lines(run) < lines and not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.01)
    return process, log


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_saves_and_ends_with_75(config: Path, whole: dict, tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    process, log = begin(config, run, lines=5)
    os.kill(process, number)
    done = processes.wait([process], log)
    assert done.codes == [75], done.text
    assert (run / "stopped").is_file()
    assert "run the same command to go on" in done.text and "Traceback" not in done.text
    train(config, run)
    assert not (run / "stopped").exists()
    assert losses(run) == whole


def test_damaged_checkpoint_falls_back(config: Path, whole: dict, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config, run)
    newest = sorted((run / "generator" / "checkpoints").glob("step-*"))[-1]
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    done = train(config, run)
    assert newest.name in done.text and "checksum" in done.text
    assert losses(run) == whole


def test_resume_rules(config: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    run = tmp_path / "run"
    assert refused(config, run, "--resume", "must")
    assert not run.exists()
    train(config, run, "train.steps=2")
    before = (run / "config.yaml").read_text()
    for words, named in (
        (["--resume", "never"], "holds a run already"),
        (["train.lr=1e-5"], "train.lr"),
        (["stages.generator.depth=2"], "stages.generator.depth"),
        (["seed=4"], "seed"),
        (["data.glyphs=3"], "data.glyphs"),
    ):
        assert refused(config, run, *words), words
        said = capfd.readouterr().err
        assert named in said and "Traceback" not in said
        assert (run / "config.yaml").read_text() == before
    train(config, run, "train.steps=4", "train.save_every=1", "prompts=[a green 1 at the centre]")
    assert max(step for stage, split, step in losses(run)) == 4


def test_run_in_use_is_refused(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, log = begin(config, run, "train.steps=100000")
    try:
        done = live(config, run, "train.steps=100000")
        assert done.codes == [3]
        assert str(first) in done.text
    finally:
        os.kill(first, signal.SIGKILL)
        processes.wait([first], log)
    train(config, run, "train.steps=3")


@pytest.mark.slow
def test_signal_to_the_whole_process_group(config: Path, tmp_path: Path) -> None:
    """As schedulers send it: data workers and their server hear it too, and must not take the last step with them."""
    run = tmp_path / "run"
    words = command(config, run, "train.workers=2", "train.steps=100000")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
    while _lines(run) < 5 and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert "Traceback" not in errors
    assert (run / "stopped").is_file()
