"""The wall: what a stage drew during training, prompts down and steps across."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from kineograph.core.text_file import parse_json
from kineograph.studio.run_files import MEDIA, OutsideRun, find_file, read_text

STEPS = 12  # shown at once, evenly chosen
PROMPTS = 64
_STEP = re.compile(r"step-(\d{8,15})")
# Files beside the samples, in the order of the rows.
_SHEETS = {
    "validation-grid": "Real beside drawn, held-out captions",
    "train-grid": "Real beside drawn, training captions",
    "test-grid": "Real beside drawn, test captions",
    "online-beside-ema": "Online weights beside EMA",
}
RECONSTRUCTIONS = "Input beside reconstruction"


@dataclass
class WallRow:
    """A prompt or a kind of sheet, with the file of each step (None where there is none)."""

    title: str
    files: list[str | None]
    is_sheet: bool = False
    real: str | None = None  # the item whose caption is drawn


@dataclass
class Wall:
    stage: str
    steps: list[int] = field(default_factory=list)  # ascending
    rows: list[WallRow] = field(default_factory=list)
    total: int = 0  # steps with pictures, shown or not
    has_online: bool = False  # samples of the online weights were kept beside those of the EMA


def read_wall(run: Path, stage: str, most: int = STEPS, online: bool = False) -> Wall:
    """The pictures of a stage, of its EMA or its online weights. Of many steps the first, the last and an even choice are shown."""
    samples = {step: run / stage / "samples" / name for step, name in _list_steps(run / stage / "samples")}
    rebuilt = dict(_list_steps(run / stage / "validation"))
    every = sorted({*samples, *rebuilt})
    chosen = every
    if len(every) > most:
        chosen = [every[-1 - number * (len(every) - 1) // max(1, most - 1)] for number in reversed(range(most))]
    wall = Wall(stage, chosen, total=len(every))
    prompts: dict[tuple[str, int], WallRow] = {}
    sheets: dict[str, WallRow] = {}
    for column, step in enumerate(chosen):
        if step in samples:
            _add_samples(run, samples[step], column, len(chosen), prompts, sheets, online)
            wall.has_online = wall.has_online or (samples[step] / "online").is_dir()
        if step in rebuilt:
            found = _as_media(run, run / stage / "validation" / rebuilt[step])
            _set(sheets, RECONSTRUCTIONS, column, len(chosen), found)
    wall.rows = list(prompts.values())[:PROMPTS]
    order = [*_SHEETS.values(), RECONSTRUCTIONS]
    wall.rows += sorted(sheets.values(), key=lambda row: order.index(row.title))
    wall.rows = [row for row in wall.rows if any(row.files)]
    return wall


def _list_steps(folder: Path) -> list[tuple[int, str]]:
    """Steps and names of the entries of a folder, such as step-00000500 or step-00000500.gif."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
    found = [(match, name) for name in names if (match := _STEP.match(name))]
    return [(int(m[1]), name) for m, name in found if Path(name).suffix in ("", *MEDIA) and Path(name).stem == m[0]]


def _add_samples(
    run: Path,
    folder: Path,
    column: int,
    columns: int,
    prompts: dict[tuple[str, int], WallRow],
    sheets: dict[str, WallRow],
    online: bool,
) -> None:
    seen: dict[str, int] = {}
    for file, prompt in read_prompts(run, folder):
        number = seen[prompt] = seen.get(prompt, 0) + 1  # a prompt may be drawn several times
        row = prompts.setdefault((prompt, number), WallRow(prompt, [None] * columns))
        row.files[column] = _as_media(run, folder / "online" / file if online else folder / file)
        row.real = row.real or _as_media(run, folder.parent / "real" / file)
    for name, title in _SHEETS.items():
        for suffix in (".gif", ".mp4", ".png"):
            if found := _as_media(run, folder / f"{name}{suffix}"):
                _set(sheets, title, column, columns, found)
                break
    if not seen and (found := _as_media(run, folder / "grid.gif") or _as_media(run, folder / "grid.png")):
        prompts.setdefault(("", 0), WallRow("All samples", [None] * columns)).files[column] = found


def _set(sheets: dict[str, WallRow], title: str, column: int, columns: int, file: str | None) -> None:
    if file is not None:
        sheets.setdefault(title, WallRow(title, [None] * columns, is_sheet=True)).files[column] = file


def read_prompts(run: Path, folder: Path) -> list[tuple[str, str]]:
    """File and prompt of each sample in prompts.json."""
    try:
        listed = parse_json(read_text(run, folder.relative_to(run) / "prompts.json"))
    except ValueError:
        return []
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return [(entry["file"], str(entry.get("prompt", ""))) for entry in entries if isinstance(entry.get("file"), str)]


def _as_media(run: Path, path: Path) -> str | None:
    """The path below the run folder of a picture or clip that exists."""
    if path.suffix not in MEDIA:
        return None
    try:
        found = find_file(run, path).relative_to(run.resolve()).as_posix()
        found.encode()  # a name that is not UTF-8 has no address
    except (OutsideRun, ValueError):
        return None
    return found
