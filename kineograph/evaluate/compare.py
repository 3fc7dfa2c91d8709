"""`kineo compare`: runs side by side, from their folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kineograph.core.console import open_console
from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_json
from kineograph.data.open_source import is_location
from kineograph.evaluate.run_summary import Cell, RunSummary, summarize_run

MISSING = object()  # a key that a run's config does not have
# Keys of data.*, or of a part of a mix, that change nothing about held-out items.
TRAINING_ONLY = (
    "max_unreadable", "shuffle", "shuffle_tags", "resample", "flip", "rotate", "crop", "crop_area", "crop_aspect"
)  # fmt: skip
RATES = ("caption accuracy", "  digit right", "  colour right", "  direction right", "  place right", "codebook use")
_COLOURS = ("#1f6fb2", "#d1495b", "#2e933c", "#8e5ea2", "#e08e2b", "#4aa3a2", "#7a6f5d", "#c2649a")


@dataclass
class Comparison:
    runs: list[RunSummary]
    split: str

    @property
    def names(self) -> list[str]:
        """Folder names, or whole paths where two names are equal."""
        short = [run.path.name for run in self.runs]
        return short if len(set(short)) == len(short) else [str(run.path) for run in self.runs]

    def rows(self) -> dict[str, list[Cell]]:
        """Row → a cell for each run. Rows without any value or command are omitted."""
        table = {title: [run.cells[title] for run in self.runs] for title in self.runs[0].cells}
        return {
            title: cells
            for title, cells in table.items()
            if any(cell.value is not None or (cell.command and not cell.optional) for cell in cells)
        }

    def missing(self) -> list[str]:
        """Commands that would fill empty cells, each with the rows that it fills."""
        rows: dict[str, list[str]] = {}
        for title, cells in self.rows().items():
            for cell in cells:
                if cell.value is None and cell.command:
                    rows.setdefault(cell.command, []).append(title.strip())
        return [f"{command}   fills {', '.join(dict.fromkeys(titles))}" for command, titles in rows.items()]

    def data_differences(self) -> list[str]:
        """Keys of data.* in which the runs differ, with their values: figures of different data do not compare."""
        summaries = self.runs
        digests = {run.items for run in summaries}
        # The same items may lie in several places, and other items in the same one.
        keys = [
            key
            for key in summaries[0].data
            if key.rpartition(".")[2] not in TRAINING_ONLY and (None in digests or not is_location(key))
        ]
        lines = []
        for key in keys:
            values = [run.data.get(key, MISSING) for run in summaries]  # earlier versions wrote fewer keys
            if MISSING not in values and any(value != values[0] for value in values):
                lines.append(f"data.{key}: " + ", ".join(f"{v} in {name}" for name, v in zip(self.names, values)))
        if not lines and len(digests) > 1 and None not in digests:
            lines.append(f"the {self.split} items themselves (names and sizes are compared)")
        return lines

    def protocol_differences(self) -> list[str]:
        """Rows whose values were computed in different ways, with the labels that differ. Labels that a record lacks are not compared."""
        found: dict[str, list[str]] = {}  # difference → rows
        for title, cells in self.rows().items():
            known = [
                (name, cell.protocol) for name, cell in zip(self.names, cells, strict=True) if cell.value is not None
            ]
            for label in dict.fromkeys(label for _, protocol in known for label in protocol):
                values = [(name, protocol[label]) for name, protocol in known if label in protocol]
                if any(value != values[0][1] for _, value in values):
                    text = f"{label}: " + ", ".join(f"{value} in {name}" for name, value in values)
                    found.setdefault(text, []).append(title.strip())
        return [f"{', '.join(titles)}: {text}" for text, titles in found.items()]

    def findings(self) -> list[str]:
        """What was fatally wrong with stages in training."""
        return [f"{name}: {line}" for name, run in zip(self.names, self.runs, strict=True) for line in run.fatal]

    def table(self) -> Any:
        """A rich table with a column for each run."""
        from rich.table import Table

        table = Table("", *self.names, title=f"{len(self.runs)} runs, {self.split}", title_justify="left")
        for title, cells in self.rows().items():
            table.add_row(title, *(cell.text for cell in cells))
        return table

    def show(self) -> None:
        console = open_console()
        console.print(self.table())
        if differences := self.data_differences():
            console.print(
                "warning: the runs are judged on different data, so their figures do not compare:", markup=False
            )
            for line in differences:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        if differences := self.protocol_differences():
            console.print(
                "warning: these figures were computed in different ways, so they do not compare:", markup=False
            )
            for line in differences:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        if findings := self.findings():
            console.print(
                "warning: these stages learned nothing, so figures that depend on them say little:", markup=False
            )
            for line in findings:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        missing = self.missing()
        if missing:
            console.print("– is not known yet:", markup=False)
            for line in missing:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

    def json(self) -> dict[str, Any]:
        rows = self.rows()
        return {
            "split": self.split,
            "runs": {
                str(run.path): {title.strip(): cells[index].value for title, cells in rows.items()}
                for index, run in enumerate(self.runs)
            },
            "missing": self.missing(),
            "findings": self.findings(),
            "data differences": self.data_differences(),
            "protocol differences": self.protocol_differences(),
        }

    def write(self, folder: str | Path) -> list[Path]:
        """Write comparison.json, and comparison.png where there is something to plot."""
        folder = Path(folder)
        write_json(folder / "comparison.json", self.json())
        written = [folder / "comparison.json"]
        if self.plot(folder / "comparison.png"):
            written.append(folder / "comparison.png")
        return written

    def plot(self, path: Path) -> bool:
        """Plot rates as bars and training losses over time as curves. → whether there was anything to plot"""
        rows = self.rows()
        rates = [title for title in RATES if title in rows and any(cell.value is not None for cell in rows[title])]
        curves = [(name, run.losses) for name, run in zip(self.names, self.runs, strict=True) if run.losses]
        if not rates and not curves:
            return False
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        figure = Figure(figsize=(6 * (bool(rates) + bool(curves)), 4.2), layout="constrained")
        axes = list(figure.subplots(1, bool(rates) + bool(curves), squeeze=False)[0])
        if rates:
            self._bars(axes.pop(0), rates, rows)
        if curves:
            for name, points in curves:
                axes[0].plot(*zip(*points, strict=True), color=self._colour(name), linewidth=1.2)
            axes[0].set(xlabel="minutes of training", ylabel="training loss", title="Loss of the judged stage")
        figure.legend(
            handles=[Patch(color=self._colour(name), label=name) for name in self.names],
            loc="outside lower center",
            ncols=min(4, len(self.runs)),
            frameon=False,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        return True

    def _bars(self, axis: Any, rates: list[str], rows: dict[str, list[Cell]]) -> None:
        width = 0.8 / len(self.runs)
        for index, name in enumerate(self.names):
            positions = [place + width * (index - (len(self.runs) - 1) / 2) for place in range(len(rates))]
            heights = [float(rows[title][index].value or 0) for title in rates]
            axis.bar(positions, heights, width * 0.92, color=self._colour(name))
        axis.set_xticks(range(len(rates)), [title.strip() for title in rates], rotation=20, ha="right")
        axis.set(ylim=(0, 1), title=f"Shares, {self.split}")

    def _colour(self, name: str) -> str:
        return _COLOURS[self.names.index(name) % len(_COLOURS)]


def compare(runs: Sequence[str | Path], split: str = "validation") -> Comparison:
    """Summarize each run."""
    if not runs:
        raise InputError("nothing to compare: name run folders (kineo runs lists them)")
    return Comparison([summarize_run(run, split) for run in runs], split)
