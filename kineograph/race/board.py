"""The table of a race, for the console and as Markdown: families, upper bounds, chance, and families that could not race."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_atomic
from kineograph.race.results import COLUMNS, Column, Score, join_seeds, rank_families

Row = list[str]
BOUNDS = {"ceiling": "real held-out items", "codec": "reconstructions by the codec of {family}", "chance": "chance"}


def make_rows(record: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Head and rows of a race.json."""
    entries = record["entries"]
    families = list(dict.fromkeys(entry["family"] for entry in entries.values()))
    raced = {
        family: [entry["figures"] for entry in entries.values() if entry["family"] == family and "figures" in entry]
        for family in families
    }
    scores = {family: join_seeds(figures) for family, figures in raced.items() if figures}
    columns = [column for column in COLUMNS if any(column.title in each for each in scores.values())]
    rows = [
        [family, *(_format(scores[family].get(column.title), column) for column in columns)]
        for family in rank_families(scores)
    ]
    return ["family", *(column.title for column in columns)], rows + _make_bound_rows(entries, columns)


def _make_bound_rows(entries: dict[str, Any], columns: list[Column]) -> list[Row]:
    """What the judge gives to real items, to each codec's reconstructions, and to captions of other items."""
    if not columns or columns[0].metric != "caption_accuracy":
        return []
    found: dict[str, float] = {}
    for name, title in BOUNDS.items():
        for entry in entries.values():
            if name in entry.get("bounds", {}):  # of the first seed
                found.setdefault(title.format(**entry), entry["bounds"][name])
    return [[title, f"{value:{columns[0].form}}", *["–"] * (len(columns) - 1)] for title, value in found.items()]


def _format(score: Score | None, column: Column) -> str:
    if score is None:
        return "–"
    median = f"{score.median:{column.form}}"
    is_judged = column.metric and score.count > 1
    return f"{median} (worst of {score.count}: {score.worst:{column.form}})" if is_judged else median


def list_absent(record: dict[str, Any]) -> list[str]:
    """Lines about families that could not race or failed."""
    failed = [f"{name} failed: {entry['failure']}" for name, entry in record["entries"].items() if entry.get("failure")]
    return [*(f"{family} cannot race here: {reason}" for family, reason in record["unable"].items()), *failed]


def make_title(record: dict[str, Any]) -> str:
    minutes, seeds = record["request"]["minutes"], record["request"]["seeds"]
    parts = [f"{minutes:g} minute{'s' * (minutes != 1)}", record["machine"]["device"]]
    parts += [f"{seeds} seeds"] if seeds > 1 else []
    return f"{record['name']}: {record['shape']}, {', '.join(parts)}"


def show_board(record: dict[str, Any]) -> None:
    from rich.table import Table

    from kineograph.core.console import open_console

    head, rows = make_rows(record)
    console = open_console()
    table = Table(*head, title=make_title(record), title_justify="left")
    for row in rows:
        table.add_row(*row)
    if rows:
        console.print(table)
    for line in list_absent(record):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def make_markdown(record: dict[str, Any]) -> str:
    """A section of a board."""
    head, rows = make_rows(record)
    machine, judge = record["machine"], record["request"]["judge"]
    lines = [f"## {make_title(record)}", ""]
    lines += [f"`{record['command']}`", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += [
        f"{record['date']}; kineograph {machine['kineograph']}, torch {machine['torch']}; "
        f"{judge['samples']} held-out prompts.",
        "",
    ]
    absent = [f"- {' '.join(line.split())}" for line in list_absent(record)]
    return "\n".join([*lines, *absent, *([""] if absent else [])])


def check_board(path: Path) -> None:
    """Refuse a file that the race did not write, before hours of training."""
    if path.suffix.lower() != ".md":
        raise InputError(f"--board {path}: the board is Markdown; end its name with .md")
    if path.exists() and not path.read_text(encoding="utf-8").startswith(HEAD):
        raise InputError(f"--board {path} exists and is no board of a race: name another file")


HEAD = "# Leaderboard\n"
INTRODUCTION = (
    f"{HEAD}\nWritten by `kineo race --board`. [race.md](race.md) explains the columns, and what is comparable.\n"
)


def update_board(path: Path, record: dict[str, Any]) -> None:
    """Add the race to a board, or replace its section there."""
    text = path.read_text(encoding="utf-8") if path.exists() else INTRODUCTION
    head, *sections = text.split("\n## ")
    title = make_title(record)
    section = make_markdown(record).removeprefix("## ").rstrip() + "\n"
    kept = {part.partition("\n")[0]: part.rstrip() + "\n" for part in sections}
    kept[title] = section
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "\n## ".join([head.rstrip() + "\n", *kept.values()]))
