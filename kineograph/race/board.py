"""The table of a race, for the console and as Markdown: families, upper bounds, chance, and families that could not race."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_atomic
from kineograph.media.filenames import check_writable
from kineograph.race.results import COLUMNS, Column, Figures, Score, find_order, join_seeds, rank_families
from kineograph.train.health import YOUNG_STEPS

Row = list[str]
LATE = 1.25  # times the minutes of a race
UNORDERED = (
    "no figure that judges samples is there for all families, so their order means nothing: kineo weights get inception-v3 "
    "gives FID and KID"
)
BOUNDS = {"ceiling": "real held-out items", "codec": "reconstructions by the codec of {family}", "chance": "chance"}


def make_rows(record: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Head and rows of a race.json."""
    scores = _join_entries(record)
    columns = [column for column in COLUMNS if any(column.title in each for each in scores.values())]
    rows = [
        [family, *(_format(scores[family].get(column.title), column) for column in columns)]
        for family in rank_families(scores)
    ]
    return ["family", *(column.title for column in columns)], rows + _make_bound_rows(record["entries"], columns)


def _join_entries(record: dict[str, Any]) -> dict[str, dict[str, Score]]:
    """Family → its scores over the seeds that have figures."""
    raced: dict[str, list[Figures]] = {}
    for entry in record["entries"].values():
        if "figures" in entry:
            raced.setdefault(entry["family"], []).append(entry["figures"])
    return {family: join_seeds(figures) for family, figures in raced.items()}


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


def list_remarks(record: dict[str, Any]) -> list[str]:
    """Lines about families that could not race, failed, or learned nothing, and about stages that are not healthy."""
    entries = record["entries"].items()
    failed = [f"{name} failed: {entry['failure']}" for name, entry in entries if entry.get("failure")]
    unhealthy = [f"{name}: {line}" for name, entry in entries for line in entry.get("findings", [])]
    unlearned = [
        f"{family} {reason}: its place in the order means nothing"
        for family, reason in find_families_without_progress(record).items()
    ]
    minutes = record["request"]["minutes"]
    late = [
        f"{name} took {entry['figures']['minutes']:.2f} minutes instead of {minutes:g}: every stage makes one step, and they are slow"
        for name, entry in entries
        if entry.get("figures", {}).get("minutes", 0) > LATE * minutes
    ]
    unable = [f"{family} cannot race here: {reason}" for family, reason in record["unable"].items()]
    scores = _join_entries(record)
    unordered = [UNORDERED] if len(scores) > 1 and find_order(scores) is None else []
    return [*unable, *failed, *unordered, *unlearned, *late, *unhealthy]


def find_families_without_progress(record: dict[str, Any]) -> dict[str, str]:
    """Family → why its samples say nothing: they are no better than chance in any seed, or it made almost no steps."""
    families: dict[str, list[str]] = {}
    for entry in record["entries"].values():
        if "figures" in entry:
            families.setdefault(entry["family"], []).append(_explain_entry(entry, _count_samples(entry, record)))
    return {family: reasons[0] for family, reasons in families.items() if all(reasons)}


def _count_samples(entry: dict[str, Any], record: dict[str, Any]) -> int:
    """How many samples of an entry were judged: no more than there are held-out items."""
    return int(entry.get("samples", record["request"]["judge"]["samples"]))


def _explain_entry(entry: dict[str, Any], samples: int) -> str:
    accuracy, bounds = entry["figures"].get("caption accuracy"), entry.get("bounds", {})
    by_chance = samples * bounds.get("chance", 0.0)
    limit = by_chance + 3 * max(by_chance, 1.0) ** 0.5  # three standard deviations of a Poisson count
    if accuracy is not None and samples * bounds.get("ceiling", 0.0) > limit:  # there are samples enough to tell
        return "is no better than chance" if samples * accuracy <= limit else ""
    steps = entry["figures"].get("steps", YOUNG_STEPS)
    return f"made {steps:,.0f} steps, and fewer than {YOUNG_STEPS} are a trial" if steps < YOUNG_STEPS else ""


def explain_empty_race(record: dict[str, Any]) -> str | None:
    """Why the race says nothing about its families, if none of them learned the data."""
    raced = {entry["family"] for entry in record["entries"].values() if "figures" in entry}
    if not raced or raced - find_families_without_progress(record).keys():
        return None
    minutes = record["request"]["minutes"]
    return (
        f"no family learned anything in --minutes {minutes:g}, so their order means nothing: race for longer, "
        f"such as --minutes {5 * minutes:g} with another --run"
    )


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
    for line in list_remarks(record):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def make_markdown(record: dict[str, Any]) -> str:
    """A section of a board."""
    head, rows = make_rows(record)
    machine = record["machine"]
    judged = [entry for entry in record["entries"].values() if "figures" in entry]
    samples = max((_count_samples(entry, record) for entry in judged), default=0)
    lines = [f"## {make_title(record)}", ""]
    lines += [f"`{record['command']}`", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += [
        f"{record['date']}; kineograph {machine['kineograph']}, torch {machine['torch']}; {samples} held-out prompts.",
        "",
    ]
    remarks = [f"- {' '.join(line.split())}" for line in list_remarks(record)]
    return "\n".join([*lines, *remarks, *([""] if remarks else [])])


def check_board(path: Path) -> None:
    """Refuse a file that the race did not write, before hours of training."""
    if path.suffix.lower() != ".md":
        raise InputError(f"--board {path}: the board is Markdown; end its name with .md")
    check_writable(path.parent)
    if path.exists() and not path.read_bytes().startswith(HEAD.encode()):
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
