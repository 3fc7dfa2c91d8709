"""`kineo report`: runs as one HTML file without outside references, small enough to be mailed."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kineograph.core.errors import InputError, Unreadable
from kineograph.core.run_folder import RunFolder, write_atomic
from kineograph.media.filenames import check_writable
from kineograph.studio.clips import make_sheet
from kineograph.studio.run_files import OutsideRun
from kineograph.studio.runs import Run, describe_run
from kineograph.studio.wall import Wall, read_wall

LIMIT = 20_000_000  # bytes of the file
STEPS = 6  # of a wall
# Longer side of a frame, frames of a clip, quality: the first that fits is taken.
QUALITIES = ((256, 48, 82), (160, 32, 76), (112, 16, 70), (72, 9, 60))
SCRIPTS = ("uplot.js", "charts.js", "clips.js")


@dataclass(frozen=True)
class Picture:
    """A sheet of frames inside the file."""

    src: str
    frames: int
    columns: int
    width: int
    height: int
    fps: float


def write_report(
    folders: Sequence[Path], out: Path, limit: int = LIMIT, note: Callable[[str], None] = lambda line: None
) -> Path:
    """Write curves, samples over steps, evaluations and configs of some runs into one file of at most `limit` bytes."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise InputError(
            "kineo report needs jinja2, which is not installed: pip install 'kineograph[studio]'"
        ) from None
    if out.suffix.lower() not in (".html", ".htm") or out.is_dir():
        raise InputError(f"--out {out} is not a name for a page: use one that ends in .html")
    check_writable(out.parent)
    if not folders:
        raise InputError("nothing to report: name run folders (kineo runs lists them)")
    runs = [_open_run(folder) for folder in folders]
    values = [_read_run(run) for run in runs]
    empty = _render(runs, values, {})
    room = limit - len(empty.encode())
    if room < 0:
        raise InputError(
            f"the curves and configs of {len(runs)} runs take more than {limit:,} bytes: report fewer at once"
        )
    pictures, left_out = _embed(runs, values, room)
    if left_out:
        note(f"{left_out} pictures did not fit into {limit / 1e6:g} MB and are left out; report fewer runs at once")
    write_atomic(out, _render(runs, values, pictures))
    return out


def _open_run(folder: Path) -> Run:
    run = RunFolder.existing(folder)
    return replace(describe_run(run.path.resolve(), run.path.resolve().name), preview=())


def _read_run(run: Run) -> dict[str, Any]:
    """What the file shows of a run, without its pictures."""
    from kineograph.studio.curves import read_curves, to_json
    from kineograph.studio.preset_config import resolve_preset
    from kineograph.studio.run_details import list_settings, read_config, read_evaluation, read_skipped, stage_names

    tree = read_config(run.path)
    stages = stage_names(tree)
    preset = tree.get("preset") if isinstance(tree.get("preset"), str) else None
    base = resolve_preset(preset) if preset else None
    changed = list_settings(tree, base) if base is not None else []
    skipped, _ = read_skipped(run.path)
    return {
        "curves": to_json(read_curves(run.path, stages)),
        "walls": [wall for stage in stages if (wall := read_wall(run.path, stage, STEPS)).rows],
        "results": read_evaluation(run.path),
        "preset": preset,
        "base": base,
        "changed": [setting for setting in changed if setting.differs and setting.values[0] is not None],
        "settings": list_settings(tree),
        "skipped": len(skipped),
    }


def _render(runs: Sequence[Run], values: Sequence[dict[str, Any]], pictures: dict[tuple[str, str], Picture]) -> str:
    from kineograph.studio import pages
    from kineograph.studio.comparison import compare_runs

    static = pages.read_static()
    styles = static["uplot.css"].decode() + static["studio.css"].decode()
    scripts = [static[name].decode() for name in SCRIPTS]
    policy = (
        f"default-src 'none'; img-src data:; style-src {pages.content_hash(styles)}; "
        f"script-src {' '.join(map(pages.content_hash, scripts))}; base-uri 'none'; form-action 'none'"
    )
    sheets = [{file: picture for (run_id, file), picture in pictures.items() if run_id == run.id} for run in runs]
    return pages.render(
        "report.html",
        runs=runs,
        parts=[value | {"sheets": sheet} for value, sheet in zip(values, sheets, strict=True)],
        compared=compare_runs(runs) if len(runs) > 1 else None,
        policy=policy,
        styles=styles,
        scripts=scripts,
        written=time.time(),
    )


def _embed(
    runs: Sequence[Run], values: Sequence[dict[str, Any]], room: int
) -> tuple[dict[tuple[str, str], Picture], int]:
    """The pictures of all walls at the best quality that fits into `room` bytes. → by run and file, and how many are left out"""
    wanted = [(run, file) for run, value in zip(runs, values, strict=True) for file in _list_files(value["walls"])]
    for side, frames, quality in QUALITIES:
        embedded, size, left_out = {}, 0, 0
        is_last = (side, frames, quality) == QUALITIES[-1]
        for run, file in wanted:
            try:
                sheet = make_sheet(run.path, file, side, frames, quality)
            except (OutsideRun, Unreadable):
                continue
            source = f"data:image/webp;base64,{base64.b64encode(sheet.data).decode()}"
            taken = len(source) + 2 * len(file.encode()) + 600  # and the element around it
            if size + taken > room:
                left_out += 1
                if not is_last:
                    break
                continue
            size += taken
            embedded[run.id, file] = Picture(source, sheet.frames, sheet.columns, sheet.width, sheet.height, sheet.fps)
        if not left_out or is_last:
            return embedded, left_out
    raise AssertionError


def _list_files(walls: Sequence[Wall]) -> list[str]:
    """The files of some walls, those of the newest steps first: they are the last to be left out."""
    found = []
    for wall in walls:
        for column in reversed(range(len(wall.steps))):
            found += [row.files[column] for row in wall.rows if row.files[column]]
        found += [row.real for row in wall.rows if row.real]
    return [file for file in dict.fromkeys(found) if file]
