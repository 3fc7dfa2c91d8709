"""The same command trains the same weights, bit by bit; on a GPU with train.deterministic=true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kineograph.run.train import train
from tests.run.calling import written
from tests.run.test_resume import CONFIG as GAN
from tests.subprocesses import python_path
from tests.test_presets import QUICK, SHRINK

TINY = ["vqgan-tiny", "muse-tiny", "phenaki-tiny", "nuwa-tiny", "dalle2-tiny", "cogvideox-tiny"]
DETERMINISTIC = "train.deterministic=true"


def results(run: Path) -> dict[str, Any]:
    """All tensors of the last checkpoints, and the metrics without timings."""
    found: dict[str, Any] = {}
    for stage in sorted(run.glob("*/checkpoints")):
        last = max(path for path in stage.iterdir() if path.name.startswith("step-"))
        for file in sorted(last.rglob("*.safetensors")):  # several processes write a folder of shards
            kind = file.relative_to(last).parts[0].removesuffix(".safetensors")
            found |= {f"{stage.parent.name}/{kind}/{name}": value for name, value in load_file(file).items()}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = [{key: value for key, value in line.items() if key[:5] != "time/"} for line in lines]
    return found


def assert_same(first: Path, second: Path) -> None:
    ones, others = results(first), results(second)
    assert ones.keys() == others.keys() and len(ones) > 10
    metrics = zip(ones.pop("metrics"), others.pop("metrics"), strict=True)
    lines = [(one, other) for one, other in metrics if one != other]
    names = [name for name, value in ones.items() if not torch.equal(to_bytes(value), to_bytes(others[name]))]
    summary = f"{len(lines)} lines of metrics and {len(names)} of {len(ones)} tensors differ"
    assert not (lines or names), f"{summary}, first {lines[:1]}, {names[:8]}"


def to_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.flatten().view(torch.uint8)


# On the CPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", TINY)
def test_the_same_command_twice(preset: str, tmp_path: Path) -> None:
    arguments = [preset, *SHRINK[preset], *QUICK, "train.sample_every=0", DETERMINISTIC]
    runs = [train(arguments, run=tmp_path / name, quiet=True) for name in ("one", "two")]
    assert_same(*runs)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """With a discriminator, a codebook of moving averages, and accumulation."""
    keys = {"steps": 4, "save_every": 2, "validate_every": 2, "deterministic": True}
    config = written(tmp_path, {**GAN, "stages": {"tokenizer": GAN["stages"]["tokenizer"]}}, {"train": keys})
    whole = train([str(config)], run=tmp_path / "whole", quiet=True)
    parts = train([str(config), "train.steps=2"], run=tmp_path / "parts", quiet=True)
    train(["train.steps=4"], run=parts, quiet=True)
    assert_same(whole, parts)


def test_training_and_drawing_run_under_it_and_nothing_after(tmp_path: Path) -> None:
    seen: dict[str, bool] = {}

    def look(record: dict[str, object]) -> None:
        seen[str(record["split"])] = torch.are_deterministic_algorithms_enabled()

    preset = "vqgan-tiny"
    train([preset, *SHRINK[preset], *QUICK, DETERMINISTIC], run=tmp_path / "run", on_log=look, quiet=True)
    assert seen == {"train": True, "validation": True}
    assert not torch.are_deterministic_algorithms_enabled()
    train([preset, *SHRINK[preset], *QUICK], run=tmp_path / "without", on_log=look, quiet=True)
    assert seen == {"train": False, "validation": False}


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Other processes that take the cores."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def start(
    arguments: list[str], run: Path, launcher: Sequence[str] = ("-m", "kineograph"), **variables: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, "train", *arguments, "--run", str(run)],
        env={**os.environ, "PYTHONPATH": python_path(), **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("preset", TINY)
def test_other_processes_threads_and_hashes_do_not_matter(preset: str, tmp_path: Path) -> None:
    """Two threads, data workers, another PYTHONHASHSEED, and a busy loop on each core."""
    changes = ["train.steps=6", "train.batch_size=8", "train.workers=2", DETERMINISTIC]
    arguments = [preset, *SHRINK[preset], *QUICK, *changes]
    finish(start(arguments, tmp_path / "one", OMP_NUM_THREADS="2", PYTHONHASHSEED="1"))
    with busy(os.cpu_count() or 1):
        finish(start(arguments, tmp_path / "two", OMP_NUM_THREADS="2", PYTHONHASHSEED="2"))
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_two_processes_twice(tmp_path: Path) -> None:
    preset = "muse-tiny"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kineograph", "--"]
    for name in ("one", "two"):
        arguments = [preset, *SHRINK[preset], *QUICK, "train.batch_size=8", DETERMINISTIC]
        finish(start(arguments, tmp_path / name, launcher, OMP_NUM_THREADS="1"))
    assert_same(tmp_path / "one", tmp_path / "two")


# On a GPU ------------------------------------------------------------------------------------------------------------

GPU = [
    "train.steps=8", "train.save_every=4", "train.log_every=1", "train.validate_every=4", "train.validation_samples=64",
    "train.sample_every=8", "train.samples=2", "train.evaluate_every=0", "train.trackers=[]", "train.warmup=2", "train.health=off",
    DETERMINISTIC,
]  # fmt: skip
DIGITS = {
    "muse-digits": [],
    "nuwa-digits": ["stages.generator.train.batch_size=16"],
    "phenaki-digits": [],
    "dalle2-digits": ["stages.decoder.train.epoch_samples=1024", "stages.decoder.train.grids=[]", "stages.upsampler.train.grids=[]"],
    # The VAE compiled too, and its latents cached.
    "cogvideox-digits": ["data.count=512", "stages.vae.train.compile=true"],
    # C-ViViT and VQGAN with codebooks, whose updates add up with index_add_, and with a discriminator.
    "phenaki-tiny": [
        "stages.tokenizer.quantizer={kind: vq, codes: 64}",
        "stages.critic={task: phenaki.critic, generator: generator, width: 64, depth: 1, heads: 2}",
    ],
    "vqgan-tiny": [
        "data.size=64", "stages.tokenizer.quantizer={kind: vq, codes: 64}", "train.schedule=constant",
        "stages.tokenizer.adversarial={weight: 0.1, start: 2, width: 32, penalty_every: 2}",
    ],
}  # fmt: skip


def finish_all(processes: dict[Path, subprocess.Popen[str]]) -> None:
    """Wait for all, and leave each one's output beside its run."""
    for run, process in processes.items():
        output, _ = process.communicate()
        run.with_suffix(".txt").write_text(f"{output}\nexit code {process.returncode}\n")


@pytest.fixture(scope="module")
def gpu_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family trained twice, compiled, by processes that share nothing; those of different families run side by side."""
    folder = tmp_path_factory.mktemp("gpu")
    for name in ("one", "two"):
        processes = {}
        for preset, changes in DIGITS.items():
            run = folder / preset / name
            run.parent.mkdir(exist_ok=True)
            cache = str(folder / f"cache-{preset}-{name}")
            processes[run] = start([preset, *GPU, *changes], run, TORCHINDUCTOR_CACHE_DIR=cache)
        finish_all(processes)
    return folder


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preset", DIGITS)
def test_two_processes_on_a_gpu(preset: str, gpu_runs: Path) -> None:
    for name in ("one", "two"):
        output = (gpu_runs / preset / f"{name}.txt").read_text()
        assert output.endswith("exit code 0\n"), output[-4000:]
    assert_same(gpu_runs / preset / "one", gpu_runs / preset / "two")


@pytest.mark.gpu
@pytest.mark.timeout(1200)
def test_a_run_resumed_on_a_gpu(gpu_runs: Path) -> None:
    preset = "vqgan-tiny"
    run = gpu_runs / preset / "resumed"
    finish(start([preset, *GPU, *DIGITS[preset], "train.steps=4"], run))
    finish(start(["train.steps=8"], run))
    assert_same(gpu_runs / preset / "one", run)
