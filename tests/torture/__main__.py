"""`make torture KILLS=200`: kill runs at random moments and meet every other fault, then write what was seen.

Ends with 1 if any run went on wrongly. The report is a JSON file and a Markdown file beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.torture import faults, kills, processes
from tests.torture.elastic import elastic
from tests.torture.kills import Layout, Tally
from tests.torture.tiny import CONFIG, write_config

WITHOUT_DROPOUT = {"stages__toy__dropout": 0.0}  # whose draws depend on how many processes share a batch
ROUNDING = 2e-5  # relative: sums over other numbers of processes are added up in another order
ONE = Layout("1 process", 1, ("stages.toy.train.parallel=replicate",))
DDP = Layout("2 processes, DDP", 2, ("stages.toy.train.parallel=replicate",))
FSDP = Layout("2 processes, FSDP2", 2, ("stages.toy.train.parallel=shard",))
HYBRID = Layout("4 processes, hybrid", 4, ("stages.toy.train.parallel={layout: hybrid, shard: 2}",))


def main() -> int:
    wanted = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    wanted.add_argument("--kills", type=int, default=200, help="kills in all (200)")
    wanted.add_argument("--minutes", type=float, default=25, help="stop killing after so long (25)")
    wanted.add_argument("--seed", type=int, default=0)
    wanted.add_argument("--out", type=Path, default=Path("torture"), help="folder of the report (torture)")
    wanted.add_argument("--only", choices=("kills", "faults"), help="one half of it")
    wanted.add_argument("--alone", action="store_true", help="single processes only")
    wanted.add_argument("--device", default="cpu", help="cuda: single processes on one GPU, with train.deterministic")
    asked = wanted.parse_args()
    if asked.device != "cpu":
        asked.alone = True
        CONFIG["train"] |= {
            "device": asked.device,
            "deterministic": True,
            "compile": False,
        }  # which would take most of each process
    processes.import_modules()
    began = time.monotonic()
    rng = random.Random(asked.seed)
    place = Path(tempfile.mkdtemp(prefix="torture-"))
    deadline = began + 60 * asked.minutes
    print(f"working in {place}", flush=True)

    outcomes = _all_faults(place, asked.alone, rng) if asked.only != "kills" else []
    tallies = _all_kills(place, asked, rng, deadline) if asked.only != "faults" else []
    failed = _report(asked, tallies, outcomes, time.monotonic() - began)
    if not failed:
        shutil.rmtree(place)
    return 1 if failed else 0


def _all_faults(place: Path, alone: bool, rng: random.Random) -> list[tuple[str, faults.Outcome]]:
    outcomes: list[tuple[str, faults.Outcome]] = []
    config = write_config(place / "tiny.yaml")
    kills.run_undisturbed(config, place / "undisturbed", kills.ALONE)
    outcomes += _meet(faults.EVERYWHERE + faults.ALONE_ONLY, place, config, place / "undisturbed", kills.ALONE)
    if not alone:
        config = write_config(place / "together.yaml", **WITHOUT_DROPOUT)
        for layout in (DDP, FSDP):
            reference = place / f"undisturbed-{layout.name.split()[-1]}"
            kills.run_undisturbed(config, reference, layout)
            chosen = faults.EVERYWHERE if layout is FSDP else (faults.sigterm, faults.missing_shard)
            outcomes += _meet(chosen, place / layout.name, config, reference, layout)
            restarted = faults.Scenario(place / layout.name / "elastic", config, reference, layout)
            restarted.folder.mkdir(parents=True)
            outcomes.append((layout.name, elastic(restarted, 3, rng)))
            print(f"{layout.name}: {outcomes[-1][1].name}: {outcomes[-1][1].wrong or 'as promised'}", flush=True)

    return outcomes


def _all_kills(place: Path, asked: Any, rng: random.Random, deadline: float) -> list[Tally]:
    tallies = []
    plans: list[tuple[str, list[Layout], float, float, dict[str, Any]]] = [
        ("1 process", [kills.ALONE], 0.4 if not asked.alone else 1.0, 0.0, {}),
    ]
    if not asked.alone:
        plans += [
            ("2 processes, DDP", [DDP], 0.15, 0.0, WITHOUT_DROPOUT),
            ("2 processes, FSDP2", [FSDP], 0.2, 0.0, WITHOUT_DROPOUT),
            ("another layout after each kill: 1, 2 (DDP), 2 (FSDP2), 4 (hybrid)", [ONE, DDP, FSDP, HYBRID], 0.25, ROUNDING, WITHOUT_DROPOUT),
        ]  # fmt: skip
    for number, (name, layouts, share, tolerance, changes) in enumerate(plans):
        count = round(asked.kills * share)
        tallies.append(
            kills.kill_runs(place / f"kills-{number}", layouts, count, rng, deadline, _say, tolerance, name, changes)
        )
    return tallies


def _say(line: str) -> None:
    print(line, flush=True)


def _meet(chosen: Any, place: Path, config: Path, reference: Path, layout: Layout) -> list[tuple[str, faults.Outcome]]:
    return [(layout.name, o) for o in faults.run_faults(chosen, place / "faults", config, reference, layout, _say)]


def _report(asked: Any, tallies: list[Tally], outcomes: list[tuple[str, faults.Outcome]], seconds: float) -> bool:
    """Write both files. → whether anything was not as promised."""
    import torch

    total = {
        "kills": sum(t.kills for t in tallies),
        "continuations": sum(t.continuations for t in tallies),
        "wrong_continuations": sum(len(t.wrong) for t in tallies),
        "faults": len(outcomes),
        "faults_not_as_promised": sum(bool(o.wrong) for _, o in outcomes),
    }
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = f"{platform.machine()}, {asked.device}, {torch.get_num_threads()} thread a process, torch {torch.__version__}, Python {platform.python_version()}"
    record = {
        "when": when, "machine": machine, "seed": asked.seed, "seconds": round(seconds), "total": total,
        "kills": [t.record() for t in tallies],
        "faults": [{"layout": layout, **vars(o)} for layout, o in outcomes],
    }  # fmt: skip
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "report.json").write_text(json.dumps(record, indent=2) + "\n")
    lines = [
        "# Torture report", "",
        f"{when} · {machine} · seed {asked.seed} · {seconds / 60:.1f} min", "",
        f"**{total['kills']} kills, {total['continuations']} continuations, {total['wrong_continuations']} wrong.** "
        f"{total['faults']} other faults, {total['faults_not_as_promised']} not as promised.", "",
        "| run | kills | by the clock | touching a file | inside the save | continuations | wrong | held against the undisturbed run |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for t in tallies:
        close = f"within {t.tolerance:g}" if t.tolerance else "bit for bit"
        lines.append(
            f"| {t.name} | {t.kills} | {t.ways['moment']} | {t.ways['touch']} | {t.ways['save']} | {t.continuations} | {len(t.wrong)} | {close} |"
        )
    lines += ["", "| fault | processes | exit codes | as promised | what it said |", "|---|---|---|---|---|"]
    for layout, o in outcomes:
        said = o.message.replace("|", "/").replace(str(Path(tempfile.gettempdir())), "…")
        verdict = "yes" if not o.wrong else "**no**: " + o.wrong[0].replace("\n", " ").replace("|", "/")[:300]
        lines.append(f"| {o.name} | {layout} | {', '.join(map(str, o.codes))} | {verdict} | {said[:160]} |")
    for t in tallies:
        lines += ["", *(f"- {reason}" for reason in t.wrong)] if t.wrong else []
    (asked.out / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[4:5]))
    print(asked.out / "report.md")
    return bool(total["wrong_continuations"] or total["faults_not_as_promised"])


if __name__ == "__main__":
    sys.exit(main())
