"""Opening a run's trained stages: config and checkpoint to a frozen Task, with the earlier stages that it refers to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from kineograph.core.config import StageConfig
from kineograph.core.errors import InputError
from kineograph.core.kernels import find_kernels
from kineograph.core.registry import find_task
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import BuildContext, Task, compile_task, freeze, is_large, load_weights
from kineograph.stage.spec import read_stage
from kineograph.train import checkpoint


class StageLoader:
    """Trained stages of a run and of the runs that it refers to, each loaded once."""

    def __init__(
        self,
        run: RunFolder,
        device: torch.device | str = "cpu",
        note: Callable[[str], None] = lambda line: None,
        compiled: bool = False,
        graphs: bool = True,
    ) -> None:
        self.run = run
        self.device = torch.device(device)
        find_kernels(self.device)
        self.note = note
        self.compiled = compiled  # pays when many batches are drawn
        self.graphs = (
            graphs and self.device.type == "cuda"
        )  # those as CUDA graphs, whose results last until the next ones
        if compiled:
            _check_compiler(self.device)
        self.opened: dict[str, str] = {}  # run/stage → digest of the weights that were loaded
        self._loaded: dict[tuple[Path, str, str], Task] = {}

    def load(self, reference: str, which: str | int = "last", ema: bool = True) -> Task:
        """`tokenizer` of this run, or `runs/x/tokenizer` of another; frozen, on the device."""
        run, name = self.locate(reference)
        key = (run.path.resolve(), name, f"{which}-{ema}")
        if key not in self._loaded:
            found = checkpoint.select(run.checkpoints(name), which)
            self.check_references(run, name, found)
            task = build(run, name, found.state().get("assets", {}), self._sibling(run), self.note)
            load_weights(task, found.weights(ema))
            task.precision = run.config()["stages"][name].get("train", {}).get("precision", "auto")
            self._loaded[key] = freeze(task.to(self.device))  # type: ignore[assignment]
            if self.compiled:
                compile_task(task, self.graphs and not is_large(task), by_block=is_large(task))
            self.opened[f"{run.path}/{name}"] = found.digest(ema)
        return self._loaded[key]

    def digest(self, reference: str) -> str:
        """Identifies a stage's trained weights."""
        run, name = self.locate(reference)
        return checkpoint.select(run.checkpoints(name)).digest()

    def codec_of(self, config: StageConfig, run: RunFolder | None = None) -> tuple[str, str] | None:
        """The codec that a stage's tokens or latents are made by, its own or that of the generator that it stands on: where it lies, and its digest."""
        run = run or self.run
        for key in sorted(config.references, key=lambda key: key != "codec"):
            name = getattr(config, key)
            if not isinstance(name, str):
                continue
            reference = self._seen_from(run, name)
            if key == "codec":
                return reference, self.digest(reference)
            other, inner = self.locate(reference)
            found = self.codec_of(read_stage(other.config(), inner).config, other)
            if found is not None:
                return found
        return None

    def references(self, run: RunFolder, name: str) -> dict[str, str]:
        """The stages that a stage stands on, by the digests of their weights now."""
        config = read_stage(run.config(), name).config
        wanted = [getattr(config, key) for key in config.references if isinstance(getattr(config, key), str)]
        return {reference: self.digest(self._seen_from(run, reference)) for reference in wanted}

    def check_references(self, run: RunFolder, name: str, found: checkpoint.Checkpoint) -> None:
        """Say so when a stage's codec (or generator) was trained on after it: its tokens mean something else now."""
        saved = found.state().get("references", {})
        for reference, digest in self.references(run, name).items():
            if saved.get(reference, digest) != digest:
                self.note(
                    f"warning: step {found.step} of {run.path}/{name} was trained with other weights of {reference} than lie there now "
                    f"({reference} was trained on since): train {name} on, or anew in another run"
                )

    @staticmethod
    def _seen_from(run: RunFolder, reference: str) -> str:
        return reference if "/" in reference else f"{run.path}/{reference}"

    def locate(self, reference: str) -> tuple[RunFolder, str]:
        if "/" not in reference:
            return self.run, reference
        path = Path(reference)
        return RunFolder.existing(path.parent), path.name

    def _sibling(self, run: RunFolder) -> Callable[[str], Task]:
        """How a stage of `run` sees other stages: plain names are its own run's."""
        if run.path == self.run.path:
            return self.load
        return lambda name: self.load(name if "/" in name else f"{run.path}/{name}")


def _check_compiler(device: torch.device) -> None:
    """torch.compile writes C++ for a CPU; without a compiler it would only say so in the middle of drawing."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    if device.type == "cpu" and not any(shutil.which(name) for name in names):
        raise InputError(
            f"--compile on a CPU needs a C++ compiler, and {' and '.join(names)} {'is' if len(names) == 1 else 'are'} not there: "
            "install g++, name yours in CXX, or leave --compile out"
        )


def build(
    run: RunFolder, name: str, assets: dict[str, str], stage: Callable[[str], Task], note: Callable[[str], None]
) -> Task:
    """A stage's Task as its saved config says, with fresh weights."""
    spec = read_stage(run.config(), name)
    context = BuildContext(shape=spec.data.shape, stage=stage, assets=assets, note=note, name=name)
    return spec.task.build(spec.config, context)


def sampling_stage(run: RunFolder, wanted: str | None = None) -> str:
    """The stage that `kineo sample` draws with: the one asked for, or the last that is trained and can sample."""
    tree = run.config()
    names = list(tree["stages"])
    if wanted is not None:
        if wanted not in names:
            raise InputError(f"{run.path} has no stage {wanted!r}: the stages are {', '.join(names)}")
        return wanted
    drawing = [name for name in names if find_task(tree["stages"][name]["task"]).sample is not Task.sample]
    for name in reversed(drawing):
        if checkpoint.saved_steps(run.checkpoints(name)):
            return name
    why = f"{', '.join(drawing)} is not trained yet" if drawing else "none of them is a generator"
    raise InputError(f"{run.path} has no trained stage that draws samples: of its stages ({', '.join(names)}) {why}")
