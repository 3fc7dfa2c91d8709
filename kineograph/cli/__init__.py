"""The command line: `kineo COMMAND`. Commands import heavy packages themselves, so that --help stays fast."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from typer import Exit, Option, Typer

from kineograph.cli import data, evaluation, sampling, studio, training, weights
from kineograph.cli.options import print_to_stderr

app = Typer(
    name="kineo",
    help="Train, sample and evaluate text-to-image and text-to-video models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (training, sampling, evaluation, data, weights, studio):
    app.add_typer(group.app)


def _print_version(asked: bool) -> None:
    if asked:
        from kineograph import __version__

        print(f"kineograph {__version__}")
        raise Exit()


@app.callback()
def options(
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_SHARED = {"train", "cache", "evaluate", "sample"}  # commands that run on every rank


def _rank() -> int | None:
    """This process's rank; None without a launcher, or with half of its variables (the commands in _SHARED report that)."""
    from kineograph.core.errors import InputError
    from kineograph.run.launch import read_launcher_env

    try:
        env = read_launcher_env()
    except InputError:
        return None
    return None if env is None else env.rank


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; print an expected error as one plain message on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if not debug and "WORLD_SIZE" in os.environ:  # before torch is imported: its warnings come once per process
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = [word for word in words if word != "--debug"]
    if words[:1] == ["--"]:  # keeps torchrun from reading --run as its own --run-path; some versions pass it on
        words = words[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name that the terminal cannot show
    try:
        _check_encoding(words)
        if not (_SHARED & set(words)) and _rank():  # rank 0 runs it alone
            return
        app(args=words, prog_name="kineo", standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        _report(error, words)


def _check_encoding(words: list[str]) -> None:
    for number, word in enumerate(words, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # how Python holds bytes that are not UTF-8
            from kineograph.core.errors import InputError

            raise InputError(f"argument {number} is not UTF-8: {os.fsencode(word)!r}; convert it, or rename the file")


_LESS_TRAINING_MEMORY = (
    "lower train.batch_size or raise train.accumulate, set train.checkpointing=true, or make the model smaller (kineo doctor shows "
    "what takes how much); while samples are drawn, set sample.batch=1, while metrics are computed, evaluate.batch=1"
)
_OUT_OF_MEMORY = {  # what helps, by command
    "sample": "lower --batch (or sample.batch in RUN/config.yaml; 1 draws one at a time), --frames or --size",
    "story": "lower --frames (frames of a scene)",
    "evaluate": "lower --batch (or evaluate.batch in RUN/config.yaml; 1 takes one sample at a time), or choose fewer --metrics",
}


def _report(error: Any, words: Sequence[str] = ()) -> None:
    """Print an error as one message and exit with its code. Each rank prints its own; a stop is printed by rank 0."""
    from kineograph.core.errors import KineoError

    rank = _rank()
    prefix = "error: " if rank is None else f"error: rank {rank}: "
    if isinstance(error, KineoError):
        if error.exit_code != 75:
            print_to_stderr(f"{prefix}{error}")
        elif not rank:
            print_to_stderr(str(error))
        sys.exit(error.exit_code)
    on_gpu = type(error).__name__ == "OutOfMemoryError"
    if on_gpu or isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's message on a CPU
        remedy = next((_OUT_OF_MEMORY[word] for word in words if word in _OUT_OF_MEMORY), _LESS_TRAINING_MEMORY)
        print_to_stderr(f"{prefix}the {'GPU' if on_gpu else 'machine'} is out of memory: {remedy}\n{error}")
        sys.exit(1)
    if isinstance(error, OSError) and error.filename is not None:  # a file that is gone, protected, too long …
        print_to_stderr(f"{prefix}{error.filename}: {error.strerror}")
        sys.exit(2 if error.errno == errno.ENAMETOOLONG else 1)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # a write, which names no file
        print_to_stderr(f"{prefix}{error.strerror}: free disk space, and run the same command again")
        sys.exit(1)
    print_to_stderr(f"{prefix}unexpected {type(error).__name__}: {error} (kineo --debug … shows where)")
    sys.exit(1)
