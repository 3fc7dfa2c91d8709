"""docs/launching.md is true: its commands start, its files parse, its keys exist; and torchrun brings a run that hangs back to life."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kineograph.core.errors import InputError
from kineograph.run import launch, layers
from kineograph.run.launch import read_launcher_env
from kineograph.run.plan import make_plan
from kineograph.train.step_timer import PARTS
from tests.subprocesses import free_port, python_path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
CONFIG = {
    "seed": 3,
    "data": {"source": "moving_digits", "size": 16, "frames": 1, "glyphs": 2},
    "train": {
        "steps": 6, "batch_size": 8, "save_every": 2, "validate_every": 0, "sample_every": 0, "workers": 0, "trackers": [], "device": "cpu",
        "log_every": 1,
    },
    "stages": {
        "tokenizer": {"task": "vqgan", "width": 8, "multipliers": [1, 2], "patch": 2, "quantizer": {"kind": "fsq", "levels": [4, 4]},
                      "adversarial": {"weight": 0}, "perceptual": {"weight": 0}},
    },
}  # fmt: skip


@pytest.mark.parametrize("bound_by_slurm", [False, True])
def test_a_process_may_see_its_own_gpu_only(monkeypatch: pytest.MonkeyPatch, bound_by_slurm: bool) -> None:
    chosen: list[int] = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored after the test
    if bound_by_slurm:
        monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(launch, "_init_process_group", lambda backend, env: None)
    with nullcontext() if bound_by_slurm else pytest.raises(InputError, match="start one process per GPU"):
        launch._initialize(launch.LauncherEnv("srun", 3, 4, 3, 4, "127.0.0.1", 29400))
    assert chosen == [0] * bound_by_slurm


# What the document says ------------------------------------------------------------------------------------------


def launched() -> list[list[str]]:
    """The words after `kineograph` in every command of the document."""
    joined = re.sub(r"\\\n\s*", " ", TEXT)
    lines = [
        line.strip() for line in joined.splitlines() if re.search(r"-m kineograph (-- )?\w", line) and "…" not in line
    ]
    found = [shlex.split(line) for line in lines]
    for document in manifests():
        for container in containers(document):
            found.append(container["command"])
    return [words[words.index("kineograph") + 1 :] for words in found]


def manifests() -> list[Any]:
    blocks = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def containers(tree: Any) -> list[dict[str, Any]]:
    if isinstance(tree, dict):
        own = tree.get("containers", [])
        return own + [each for value in tree.values() for each in containers(value)]
    return [each for value in tree for each in containers(value)] if isinstance(tree, list) else []


def test_trainings_that_are_shown_are_plans() -> None:
    trainings = [words for words in launched() if "train" in words]
    assert len(trainings) == 7
    for words in trainings:
        options = {at + 1 for at, word in enumerate(words) if word == "--run"}
        rest = [word for at, word in enumerate(words) if at not in options and not word.startswith("--")]
        make_plan(layers.read_config(rest[rest.index("train") + 1 :]))


def test_manifests_are_what_they_say() -> None:
    kinds = {document["kind"]: document for document in manifests()}
    assert kinds.keys() == {"Service", "Job", "PyTorchJob"}
    service, job = kinds["Service"], kinds["Job"]
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = containers(job)
    name = job["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-0.{service['metadata']['name']}:29400" in container["command"]
    assert f"--nnodes={job['spec']['completions']}" in container["command"]


def test_the_batch_script_is_one(tmp_path: Path) -> None:
    (script,) = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "train.sbatch").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "train.sbatch")], check=True)


def test_every_key_of_time_stands_in_the_table() -> None:
    told = set(re.findall(r"^\| `(time/\w+)` \|", TEXT, re.MULTILINE))
    sources = "".join(path.read_text() for path in (ROOT / "kineograph" / "train").glob("*.py"))
    written = set(re.findall(r'"(time/\w+)"', sources)) | {f"time/{part}_ms" for part in ("data", *PARTS)}
    written |= {f"time/{name}" for name in re.findall(r'"((?:host_)?memory_gib)"', sources)}
    assert told == written


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1"}, "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, "mpirun"),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "3"}, "srun"),
    ],
)
def test_launchers_that_are_named_are_understood(environment: dict[str, str], launcher: str) -> None:
    place = read_launcher_env(environment)
    assert place is not None
    assert (place.launcher, place.rank, place.world) == (launcher, 3, 4)


# The commands themselves -----------------------------------------------------------------------------------------


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *words]


def environment(**more: str) -> dict[str, str]:
    lone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return {**lone, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path(), **more}


def start(words: list[str], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**more), cwd=ROOT
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its processes with it
        process.communicate(timeout=60)
        raise
    return process.returncode, out, err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    return path


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_torchrun_on_one_machine_and_on_two(config: Path, tmp_path: Path) -> None:
    """Two machines are two agents that meet at a rendezvous, here on one."""
    alone, one, two, mpi = (tmp_path / name for name in ("alone", "one", "two", "mpi"))

    def train(run: Path) -> list[str]:
        return ["train", str(config), "--run", str(run)]

    code, out, err = ended(start([sys.executable, "-m", "kineograph", *train(alone)]))
    assert code == 0, err
    code, out, err = ended(
        start(torchrun("--standalone", "--nproc-per-node", "2", "-m", "kineograph", "--", *train(one)))
    )
    assert code == 0, err
    assert out.count("done:") == 1
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "x", "--rdzv-backend", "c10d"]
    meeting += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    agents = [start(torchrun(*meeting, "-m", "kineograph", "--", *train(two))) for _ in range(2)]
    results = [ended(agent) for agent in agents]
    assert [code for code, _, _ in results] == [0, 0], results
    port = str(free_port())
    ranks = [
        start(
            [sys.executable, "-m", "kineograph", *train(mpi)],
            OMPI_COMM_WORLD_RANK=str(rank),
            OMPI_COMM_WORLD_SIZE="2",
            OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
            OMPI_COMM_WORLD_LOCAL_SIZE="2",
            MASTER_PORT=port,
        )
        for rank in range(2)
    ]
    results = [ended(rank) for rank in ranks]
    assert [code for code, _, _ in results] == [0, 0], results
    for run in (one, two, mpi):
        assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
        assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


HANGS_ONCE = """
import os, sys, time
from kineograph.data import loader
steps = loader.Loader.steps
def stuck(self, start, stop):
    for step, batches in enumerate(steps(self, start, stop), start):
        if step == 4 and self.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(3600)
        yield batches
loader.Loader.steps = stuck
from kineograph.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_that_hangs_is_started_again_and_goes_on(config: Path, tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    code, _, err = ended(start([sys.executable, "-m", "kineograph", "train", str(config), "--run", str(alone)]))
    assert code == 0, err
    (tmp_path / "hangs.py").write_text(HANGS_ONCE)
    words = torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(tmp_path / "hangs.py"), "--")
    code, out, err = ended(start([*words, "train", str(config), "--run", str(run), "train.watchdog=15"]))
    assert code == 0, err
    assert "watchdog: exits with code 1 after 15 s without progress" in err
    assert "done:" in out
    first, second = ((run / "logs" / f"rank-{rank}.log").read_text() for rank in range(2))
    assert "stuck" in second, "the stack that hung"
    assert "from step 4" in first, "the second life begins at the checkpoint"
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
