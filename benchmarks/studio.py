"""How fast the studio answers: `python -m benchmarks.studio`. A list of 1,000 runs after the first scan, a run with 10⁶ records."""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from starlette.testclient import TestClient

from kineograph.studio.app import create_app
from kineograph.studio.runs import make_id

RUNS = 1_000
RECORDS = 1_000_000
CONFIG = "name: {name}\nseed: 0\nstages:\n  generator: {{task: muse, train: {{steps: 1000000, lr: 0.001}}}}\n"


def main() -> None:
    print(f"{platform.machine()}, {_name_cpu()}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        for number in range(RUNS):
            _write_run(root / "many" / f"run-{number:04d}", 50)
        client = _open(root / "many")
        _tell(f"{RUNS:,} runs, first scan", [_time(lambda: client.get("/"))])
        _tell(f"{RUNS:,} runs, listed again", [_time(lambda: client.get("/")) for _ in range(5)])
        path = _write_run(root / "long" / "run", RECORDS)
        size = (path / "metrics.jsonl").stat().st_size
        client = _open(root / "long")
        client.get("/")
        address = f"/run/{make_id(path)}"
        _tell(
            f"{RECORDS:,} records ({size / 2**20:,.0f} MiB), page and curves", [_time(lambda: _show(client, address))]
        )


def _open(root: Path) -> TestClient:
    client = TestClient(create_app([root], "token", {"127.0.0.1"}), base_url="http://127.0.0.1:8765")
    client.cookies.set("kineo-studio", "token")
    return client


def _show(client: TestClient, address: str) -> None:
    assert client.get(address).status_code == 200
    assert len(client.get(f"{address}/curves.json").json()[0]["splits"]["train"]["step"]) > 300


def _write_run(path: Path, records: int) -> Path:
    (path / "generator" / "checkpoints" / f"step-{records:08d}").mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG.format(name=path.name))
    numbers = {"loss": 1.5, "lr": 1e-3, "gradient_norm": 0.7, "accuracy": 0.3, "skipped": 0.0}
    times = {"time/elapsed": 0.5, "time/samples_per_second": 900.0, "time/step_ms": 71.0, "time/mfu": 0.41}
    with open(path / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, records + 1):
            split = "validation" if step % 1000 == 0 else "train"
            tree = {"stage": "generator", "split": split, "step": step, **numbers, **times, "time/elapsed": step / 10}
            file.write(json.dumps(tree) + "\n")
    return path


def _time(act: Callable[[], object]) -> tuple[float, float]:
    """→ seconds on the clock, and of this process"""
    begin, used = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - begin, time.process_time() - used


def _tell(what: str, seconds: list[tuple[float, float]]) -> None:
    clock, used = (1000 * statistics.median(values) for values in zip(*seconds, strict=True))
    spread = f" (median of {len(seconds)})" if len(seconds) > 1 else ""
    print(f"{what}: {clock:,.0f} ms, {used:,.0f} ms of them computing{spread}", flush=True)


def _name_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown CPU")


if __name__ == "__main__":
    main()
