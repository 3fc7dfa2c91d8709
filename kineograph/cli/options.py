"""Options that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kineograph.core.text_file import escape_controls

Run = Annotated[Path, Argument(help="A run folder, such as runs/muse-tiny.")]
Checkpoint = Annotated[str, Option(help="last, best, or a step.")]
Stage = Annotated[str | None, Option(help="Which stage draws.", show_default="the last that can")]
Seed = Annotated[int, Option(min=0)]
Batch = Annotated[
    int | None,
    Option(min=1, help="Samples at a time; fewer take less memory.", show_default="as set, or as many as fit"),
]
Guidance = Annotated[float | None, Option(help="Classifier-free guidance scale.")]
Steps = Annotated[int | None, Option(min=1, help="Sampling steps.")]
SamplingOptions = Annotated[list[str] | None, Option("--set", metavar="sample.K=V", help="Any other sampling option.")]
Compile = Annotated[
    bool,
    Option("--compile", help="torch.compile: the first batch is slow, others faster; on a CPU with a C++ compiler."),
]
Device = Annotated[str, Option(help="auto, cpu, cuda, cuda:1 …")]


def _set_trust(trusted: bool) -> None:
    if trusted:
        from kineograph.core.trust import trust_all

        trust_all()


Trust = Annotated[
    bool,
    Option("--trust", callback=_set_trust, help="Run code that a run from elsewhere names: dotted paths and pipes."),
]


def print_to_stderr(line: str) -> None:
    # One write: lines of several processes would mix.
    print(f"{escape_controls(line)}\n", end="", file=sys.stderr, flush=True)
