"""Kineograph trains, samples and evaluates text-to-image and text-to-video models.

import kineograph as kg

run = kg.train("muse-tiny", **{"data.source": "folder", "data.folder": "photos"}, on_log=print)
samples = kg.load(run).sample(["a red 3 at the top left"], count=4)
samples.save("drawn")
kg.load("runs/clips").story(["a red 3 moves left", "a red 3 moves up"]).save("stories")
kg.evaluate(run, ["reconstruction", "loss"])["psnr"]
tokens = kg.load_stage(run / "tokenizer").encode(pixels)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kineograph.core.errors import KineoError
    from kineograph.core.prompt import Prompt
    from kineograph.core.task import Task
    from kineograph.evaluate.runner import Evaluation
    from kineograph.sample.sampler import Sampler

__version__ = "0.1.0"
__all__ = ["KineoError", "Prompt", "evaluate", "load", "load_stage", "train"]

# torch's OpenMP threads spin at every barrier. On cores that other processes use too, they spin away the time of the
# thread that they wait for: 124 s instead of 26 s for 60 steps of phenaki-tiny beside one busy loop a core. A short
# spin costs nothing on idle cores. OpenMP reads this when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def train(
    *what: str | Path,
    dataset: Any = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
    run: str | Path | None = None,
    resume: Literal["auto", "never", "must"] = "auto",
    resume_from: Sequence[str] = (),
    quiet: bool = False,
    trust: bool = False,
    **settings: Any,
) -> Path:
    """Train presets, YAML or JSON files, with dotted keys as settings. Call it again to resume. → the run folder.

    `dataset` is your own torch Dataset, in place of `data.source`; `on_log` gets every record of metrics.jsonl, and the
    samples of a step: `{"split": "samples", "samples": [{"caption", "pixels" (T C H W), "fps"}, …], …}`; `resume_from`
    names checkpoints elsewhere (URLs, `wandb:…`) to continue from; `trust` runs the code that runs and checkpoints from
    elsewhere name, until this process ends.
    """
    from kineograph.run.train import train as run_training

    _trust(trust)
    if dataset is not None:
        settings = {"data.source": "dataset", **settings}
    return run_training(
        [str(item) for item in what],
        run=run,
        resume=resume,
        dataset=dataset,
        on_log=on_log,
        extra=settings,
        quiet=quiet,
        resume_from=resume_from,
    )


def load(
    run: str | Path,
    checkpoint: str | int = "last",
    device: str = "auto",
    stage: str | None = None,
    trust: bool = False,
) -> Sampler:
    """Open a trained run: `.sample([...])` draws prompts, `.story([...])` one long clip, a scene per caption.

    `trust` runs the code that a run from elsewhere names, until this process ends.
    """
    _trust(trust)
    from kineograph.sample.sampler import Sampler

    return Sampler.open(run, checkpoint=checkpoint, device=device, stage=stage)


def load_stage(
    path: str | Path,
    checkpoint: str | int = "last",
    device: str = "auto",
    ema: bool = True,
    trust: bool = False,
) -> Task:
    """Open one trained stage, RUN/STAGE, as a frozen torch module on its device.

    A codec has `.encode(pixels)` and `.decode(tokens)`, a CLIP `.embed_images(pixels)` and `.embed_texts(captions)`.
    """
    _trust(trust)
    from kineograph.core.distributed import print_note, resolve_device
    from kineograph.stage.load import StageLoader, open_stage_folder

    run, stage = open_stage_folder(path)
    return StageLoader(run, resolve_device(device), print_note).load(stage, checkpoint, ema)


def evaluate(
    run: str | Path, metrics: Sequence[str] | None = None, *, trust: bool = False, **options: Any
) -> Evaluation:
    """Judge a trained run as `kineo evaluate` does: `evaluation["caption_accuracy"]`; `.show()` prints the table.

    `metrics`: names, or None for all that apply; `options`: those of the command, such as `samples=512`, `batch=8`,
    and `dataset=…` for a run that was trained on your own Dataset.
    """
    _trust(trust)
    from kineograph.evaluate.runner import evaluate as run_evaluation

    return run_evaluation(run, metrics, **options)


def _trust(trust: bool) -> None:
    from kineograph.core.trust import trust_all

    if trust:
        trust_all()


# Importing the package kineograph.train hides the function of that name; the package then calls the one here.
_FUNCTIONS = {"train": train, "evaluate": evaluate}


def __getattr__(name: str) -> Any:
    if name == "Prompt":
        from kineograph.core.prompt import Prompt

        return Prompt
    if name == "KineoError":
        from kineograph.core.errors import KineoError

        return KineoError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
