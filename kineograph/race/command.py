"""`kineo race DATA`: plan, train, judge and compare; the same command goes on where it was interrupted.

RACE/plans/FAMILY.yaml    the recipe of a family, which may be edited before its first run
RACE/runs/FAMILY-SEED     ordinary run folders
RACE/logs, RACE/samples   what the commands printed; the sheet's samples
RACE/prompts.txt          the sheet's prompts, captions of held-out items
RACE/race.json            every figure, with the request and the machine
RACE/sheet.png            the same prompts down, families across
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kineograph import __version__
from kineograph.core import distributed
from kineograph.core.errors import InputError, RunFailed
from kineograph.core.notes import Note
from kineograph.core.registry import find_metric
from kineograph.core.run_folder import read_json, write_atomic, write_json
from kineograph.doctor.machine import list_gpus
from kineograph.evaluate.weights import list_available
from kineograph.race.board import check_board, explain_empty_race, show_board, update_board
from kineograph.race.plan import RacePlan, choose_families, choose_prompts, plan_race, read_data, write_plans
from kineograph.race.recipe import list_families
from kineograph.race.results import collect_figures
from kineograph.race.runner import Entry, Judge, Runner
from kineograph.race.sheet import write_sheet

FORMAT = 1
SETTLED = ("data", "minutes")  # of a request: another value is another race


def race(
    data: str,
    settings: Sequence[str] = (),
    *,
    run: Path | None = None,
    families: Sequence[str] | None = None,
    minutes: float = 5.0,
    seeds: int = 1,
    metrics: str | None = None,
    samples: int = 256,
    extractors: Sequence[str] = (),
    frames: int | None = None,
    size: int | None = None,
    jobs: int = 1,
    board: Path | None = None,
    plan_only: bool = False,
    trust: bool = False,
    command: str = "",
    note: Note = print,
) -> Path:
    """Race families on data. → the race folder.

    Raises RunFailed at the end if an entry failed, or if none learned anything; all others are judged and in the table.
    """
    device = distributed.resolve_device().type
    chosen = choose_families(families)
    for name in metrics.split(",") if metrics else ():
        find_metric(name.strip())
    if board is not None:
        check_board(board)
    planned = read_data(data, settings, frames, size, device)
    folder = run or Path("runs") / f"race-{planned.name}"
    judge = Judge(samples, metrics, tuple(extractors), tuple(list_available()))
    record = _open_record(folder, planned, minutes, seeds, judge, command)
    if jobs > 1:
        note(
            f"--jobs {jobs}: entries that share a device slow one another down; compare only those that ran in the same way"
        )
    note(f"planning {', '.join(chosen)} for {planned.name}: {planned.shape}")
    plan_race(planned, chosen, minutes, folder, device)
    for family, reason in planned.unable.items():
        note(f"{family} cannot race here: {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    write_plans(planned, folder)
    record["unable"] |= planned.unable
    if not (folder / "race.json").exists():  # the plans are for these data and minutes
        write_json(folder / "race.json", record)
    if plan_only:
        note(f"plans of {', '.join(planned.plans)} in {folder / 'plans'}; run the same command without --plan to race")
        return folder
    prompts, real = choose_prompts(planned.config)
    write_atomic(folder / "prompts.txt", "".join(f"{' '.join(prompt.split())}\n" for prompt in prompts))
    entries = [Entry(family, seed, folder) for seed in range(seeds) for family in planned.plans]
    _run_entries(record, entries, Runner(judge, note, trust), jobs, folder, note)
    judged = [Entry(known["family"], 0, folder) for known in record["entries"].values() if known.get("seed") == 0]
    drawn = {entry.family: entry.samples for entry in judged}
    sheet = write_sheet(folder / "sheet.png", [" ".join(prompt.split()) for prompt in prompts], real, drawn)
    show_board(record)
    for path in filter(None, (folder / "race.json", sheet)):
        note(f"wrote {path}")
    if board is not None:
        update_board(board, record)
        note(f"wrote {board}")
    failed = [entry.name for entry in entries if record["entries"][entry.name].get("failure")]
    if failed:
        raise RunFailed(f"{', '.join(failed)} failed; the same command tries again (logs are in {folder / 'logs'})")
    if unlearned := explain_empty_race(record):
        raise RunFailed(unlearned)
    return folder


def _open_record(
    folder: Path, planned: RacePlan, minutes: float, seeds: int, judge: Judge, command: str
) -> dict[str, Any]:
    """The record of a new race, or of one that goes on."""
    request = {"data": planned.data, "minutes": minutes, "seeds": seeds, "judge": asdict(judge)}
    saved = read_record(folder / "race.json")
    if folder.exists() and not saved and any(folder.iterdir()) and not (folder / "plans").is_dir():
        raise InputError(f"{folder} holds something else than a race: give --run another folder")
    gpus = [gpu.name for gpu in list_gpus()] if torch.cuda.is_available() else []
    machine = {"device": gpus[0] if gpus else "CPU", "torch": torch.__version__, "kineograph": __version__}
    if saved and saved["device"] not in (None, machine["device"]):
        raise InputError(
            f"{folder} was raced on {saved['device']}, and this machine has {machine['device']}: figures of different devices do "
            "not compare; go on there, or give --run another folder"
        )
    for key in SETTLED if saved else ():
        if saved["request"].get(key) != request[key]:
            raise InputError(
                f"{folder} holds a race with {key} {saved['request'].get(key)}, and this one has {request[key]}: "
                "give --run another folder"
            )
    return {
        "format": FORMAT,
        "name": planned.name,
        "shape": str(planned.shape),
        "request": request,
        "machine": machine,
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "unable": saved.get("unable", {}),
        "entries": saved.get("entries", {}),
    }


def read_record(path: Path) -> dict[str, Any]:
    """What a race.json says that can be used; empty if it holds none. Odd entries are left out, so that they race again."""
    saved = read_json(path)
    if not isinstance(saved.get("request"), dict):
        return {}
    unable, entries, machine = (
        part if isinstance(part, dict) else {} for part in map(saved.get, ("unable", "entries", "machine"))
    )
    return {
        "request": saved["request"],
        "device": machine.get("device"),
        "unable": {family: reason for family, reason in unable.items() if isinstance(reason, str)},
        "entries": {name: entry for name, entry in entries.items() if _is_entry(entry)},
    }


def _is_entry(entry: Any) -> bool:
    def holds_numbers(key: str) -> bool:
        values = entry.get(key, {})
        return isinstance(values, dict) and all(isinstance(value, int | float) for value in values.values())

    return (
        isinstance(entry, dict)
        and entry.get("family") in list_families()
        and isinstance(entry.get("failure", ""), str)
        and isinstance(entry.get("samples", 0), int)
        and holds_numbers("figures")
        and holds_numbers("bounds")
    )


def _run_entries(
    record: dict[str, Any],
    entries: Sequence[Entry],
    runner: Runner,
    jobs: int,
    folder: Path,
    note: Note,
) -> None:
    """Run the entries that have no figures by this judge yet. race.json is written after each, and keeps other families' figures."""
    judge, lock = asdict(runner.judge), threading.Lock()
    judge |= {key: list(judge[key]) for key in ("extractors", "weights")}  # as JSON has them
    record["request"]["judge"] = judge
    known_entries = {name: known for name, known in record["entries"].items() if known.get("judge") == judge}
    record["entries"] = {entry.name: {"family": entry.family} for entry in entries} | known_entries

    def is_judged(entry: Entry) -> bool:
        known = record["entries"][entry.name]
        return "figures" in known and known.get("judge") == judge and entry.run.exists()

    def finish(entry: Entry, failure: str | None) -> None:
        result: dict[str, Any] = {"family": entry.family, "seed": entry.seed, "run": str(entry.run), "judge": judge}
        if failure is None:
            result["figures"], extra = collect_figures(entry.run, runner.judge.metrics)
            result |= extra | {"findings": runner.findings.get(entry.name, [])}
        else:
            result["failure"] = failure
            note(f"{entry.name} failed: {failure}")
        with lock:
            record["entries"][entry.name] = result
            write_json(folder / "race.json", record)

    write_json(folder / "race.json", record)
    runner.run([entry for entry in entries if not is_judged(entry)], jobs, finish)
    write_json(folder / "race.json", record)
