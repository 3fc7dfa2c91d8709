"""The table and the sheet of ours and theirs, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.race_peers.entry import UNGUIDED
from kineograph.race.board import make_markdown
from kineograph.race.plan import choose_prompts
from kineograph.race.sheet import write_sheet


def join_records(race: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
    """One record, in which a peer is a family of its own; only families that a peer stands beside."""
    families = {entry["family"] for entry in peers["entries"].values()}
    entries = {f"{name} (ours)": entry for name, entry in race["entries"].items() if entry["family"] in families}
    for name, entry in peers["entries"].items():
        title = _title(entry)
        entries[f"{name} ({title})"] = {**entry, "family": title}
        if UNGUIDED in entry:
            entries[f"{name}, {UNGUIDED}"] = {**entry[UNGUIDED], "family": f"{title}, {UNGUIDED}"}
    request = {**race["request"], "seeds": max(race["request"]["seeds"], peers["request"]["seeds"])}
    return {**race, "entries": entries, "request": request, "unable": peers["unable"], "command": peers["command"]}


def _title(entry: dict[str, Any]) -> str:
    return entry["peer"] + (f", lr × {entry['rate']:g}" if entry.get("rate", 1) != 1 else "")


def make_table(race: dict[str, Any], peers: dict[str, Any]) -> str:
    """Markdown: the table, and what was done for each peer."""
    lines = [make_markdown(join_records(race, peers))]
    told: set[str] = set()
    for entry in peers["entries"].values():
        if _title(entry) in told or "notes" not in entry:
            continue
        told.add(_title(entry))
        stages = ", ".join(
            f"{name} {stage['steps']:,} steps of {stage['batch']} in {stage['precision']}"
            for name, stage in entry["stages"].items()
        )
        lines += [f"{_title(entry)} beside {entry['family']} ({stages}):", ""]
        lines += [f"- {note}" for note in entry["notes"]]
        lines += [f"- {name} skipped: {reason}" for name, reason in entry.get("skipped", {}).items()] + [""]
    return "\n".join(lines)


def write_peer_sheet(folder: Path, race: dict[str, Any], peers: dict[str, Any]) -> Path | None:
    """The race's prompts down; real items, ours and theirs across (first seed)."""
    from kineograph.data.open_source import parse_data_config

    prompts, real = choose_prompts(parse_data_config(race["request"]["data"]))
    drawn: dict[str, Path] = {}
    for name, entry in peers["entries"].items():
        if entry["seed"] == 0 and "figures" in entry:
            drawn[entry["family"]] = folder / "samples" / f"{entry['family']}-0"
            drawn[_title(entry)] = folder / "peers" / name
    return write_sheet(folder / "peers.png", [" ".join(prompt.split()) for prompt in prompts], real, drawn)
