"""`python -m benchmarks.race_peers RACE [--peers muse,phenaki,nuwa,dalle2,cogvideox] [--seeds K] [--lr-factor F]`

RACE/peers.json            figures, notes, versions and failures
RACE/peers.md, peers.png   ours and theirs: the table; the same prompts down
RACE/peers/NAME/           samples of the sheet's prompts, and NAME.log beside it
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.race_peers.contestant import Contestant, load_contestants
from benchmarks.race_peers.entry import BF16_FAILED
from benchmarks.race_peers.report import make_table, write_peer_sheet
from benchmarks.report import format_command
from kineograph.core.config import unknown_key
from kineograph.core.errors import InputError, KineoError, Stopped
from kineograph.core.run_folder import read_json, write_atomic, write_json


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _build_parser().parse_args(arguments)
    try:
        return race_peers(options, format_command("benchmarks.race_peers", arguments), load_contestants())
    except KineoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def race_peers(options: argparse.Namespace, command: str, known: Mapping[str, Contestant]) -> int:
    folder: Path = options.race
    race = _read_race(folder)
    device, before = _name_device(), race["machine"]["device"]
    if device != before:
        raise InputError(f"{folder} was raced on {before}, and this machine has {device}: race its peers there")
    chosen, unable = choose_peers(options.peers, folder, known)
    seeds = options.seeds or race["request"]["seeds"]
    # Entries of other minutes, data or judges stand beside nothing in this race.
    settings = {key: race["request"][key] for key in ("data", "minutes", "judge")}
    saved = read_json(folder / "peers.json")
    kept = saved.get("entries", {}) if saved.get("settings") == settings else {}
    peers: dict[str, Any] = {
        "request": {"seeds": seeds},
        "settings": settings,
        "machine": {"device": device, "torch": torch.__version__},
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "unable": unable,
        "entries": kept,
    }
    failed = []
    for seed in range(seeds):
        for contestant in chosen:
            name = name_entry(contestant.family, seed, options.lr_factor)
            if "figures" in kept.get(name, {}):
                print(f"{name}: done already")
                continue
            print(f"{name}: {contestant.title}", flush=True)
            entry = run_peer(folder, contestant, name, seed, options.lr_factor)
            if "failure" in entry:
                failed.append(name)
                print(f"{name} failed: {entry['failure']}", flush=True)
            peers["entries"][name] = entry
            write_json(folder / "peers.json", peers)
    write_json(folder / "peers.json", peers)
    table = make_table(race, peers)
    write_atomic(folder / "peers.md", table)
    sheet = write_peer_sheet(folder, race, peers)
    print(table)
    for path in filter(None, (folder / "peers.json", folder / "peers.md", sheet)):
        print(f"wrote {path}")
    if failed:
        print(
            f"error: {', '.join(failed)} failed; the same command tries again (logs in {folder / 'peers'})",
            file=sys.stderr,
        )
    return 1 if failed else 0


def name_entry(family: str, seed: int, rate: float) -> str:
    return f"{family}-{seed}" + (f"-lr{rate:g}" if rate != 1 else "")


def _read_race(folder: Path) -> dict[str, Any]:
    race = read_json(folder / "race.json")
    if not race:
        raise InputError(f"{folder} is no race: it has no race.json; make one with kineo race DATA --run {folder}")
    return race


def choose_peers(
    names: str | None, folder: Path, known: Mapping[str, Contestant]
) -> tuple[list[Contestant], dict[str, str]]:
    """The peers that race, and why others cannot. Without names, all whose family has trained in the race."""
    asked = list(dict.fromkeys(name.strip() for name in names.split(","))) if names else list(known)
    for name in asked:
        if name not in known:
            raise InputError(f"--peers: {unknown_key(name, list(known)).removeprefix('unknown key ')}")
    unable = {}
    for name in asked:
        if not (folder / "plans" / f"{name}.yaml").exists() or not (folder / "runs" / f"{name}-0").is_dir():
            unable[name] = f"{folder} has no trained {name} to stand beside; add it with kineo race --families {name}"
    if names and unable:
        raise InputError("; ".join(f"{name} cannot race here: {reason}" for name, reason in unable.items()))
    chosen = [known[name] for name in asked if name not in unable]
    if not chosen:
        raise InputError(f"{folder} has trained none of {', '.join(known)}: finish the race first")
    missing = list(dict.fromkeys(need for contestant in chosen for need in contestant.list_missing()))
    if missing:
        raise InputError(
            f"packages of peers cannot be imported: pip install {' '.join(missing)}, or choose others with --peers"
        )
    return chosen, unable


def run_peer(folder: Path, contestant: Contestant, name: str, seed: int, rate: float) -> dict[str, Any]:
    """Train and judge a peer in a process of its own, in fp32 if bf16 fails. → its entry, or the reason of its failure"""
    log, file = folder / "peers" / f"{name}.log", folder / "peers" / f"{name}.json"
    log.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    notes = []
    code = run_process(log, [str(folder), contestant.family, str(seed), str(rate), "bf16", str(file)])
    if code == BF16_FAILED:
        notes.append(f"begun again in fp32: {_last_line(log)}")
        code = run_process(log, [str(folder), contestant.family, str(seed), str(rate), "fp32", str(file)])
    if code == 0 and (entry := read_json(file)):
        return {**entry, "notes": [*notes, *entry["notes"]]}
    facts = {"peer": contestant.title, "family": contestant.family, "seed": seed, "rate": rate}
    return {**facts, "failure": f"ended with code {code}: {_last_line(log)}"[:600]}


def run_process(log: Path, words: list[str]) -> int:
    with open(log, "ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "benchmarks.race_peers.entry", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        return wait(child)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a peer; a signal ends it, and what others have reached is kept."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(
            f"stopped by {signal.Signals(number).name}; the same command goes on with the peers that are left"
        )

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return child.wait()
    except Stopped:
        child.terminate()
        child.wait()
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _name_device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.race_peers",
        description="Train public packages for the minutes of a race, on its data, and judge them like our families.",
    )
    parser.add_argument("race", type=Path, metavar="RACE", help="the folder of a finished kineo race")
    parser.add_argument("--peers", metavar="A,B", help="muse,phenaki,nuwa,dalle2,cogvideox (default: all that raced)")
    parser.add_argument("--seeds", type=_positive_int, metavar="K", help="runs of each (default: as the race)")
    parser.add_argument(
        "--lr-factor", type=_positive, default=1.0, metavar="F", help="multiply the peers' learning rates (default: 1)"
    )
    return parser


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
