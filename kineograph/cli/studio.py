"""`kineo studio` and `kineo report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from kineograph.cli.options import Trust, print_to_stderr

app = Typer()


@app.command()
def studio(
    folders: Annotated[
        list[Path] | None, Argument(metavar="[RUNS …]", help="Folders of runs, or run folders.", show_default="runs")
    ] = None,
    port: Annotated[
        int | None, Option(min=1, max=65_535, help="Port to listen on.", show_default="8765, or the next free one")
    ] = None,
    host: Annotated[str, Option(help="Address to listen on; others can reach any but 127.0.0.1.")] = "127.0.0.1",
    data: Annotated[
        list[Path] | None,
        Option(metavar="DIR", help="A folder of pictures or clips to show and check; may be repeated."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Show runs in a browser: curves, samples over steps, evaluations, comparisons; draw with them; look at data; plan a run.

    Prints the address to open. Needs the extra `studio`.
    """
    from kineograph.studio.server import serve

    serve(folders or [], host, port, print_to_stderr, trust, data or [])


@app.command()
def report(
    runs: Annotated[list[Path], Argument(help="Run folders.")],
    out: Annotated[Path, Option("--out", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write curves, samples over steps, evaluations and configs of runs as one HTML file, to open anywhere or to mail."""
    from kineograph.studio.report import write_report

    print(write_report(runs, out, note=print_to_stderr))
