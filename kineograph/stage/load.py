"""Load a run's trained stages, frozen, with the earlier stages that they refer to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from kineograph.core.capabilities import SupportsSampling
from kineograph.core.errors import InputError, KineoError
from kineograph.core.health import read_findings
from kineograph.core.notes import Note, discard
from kineograph.core.registry import find_task
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task, check_shapes, freeze, load_weights
from kineograph.stage.build import build_task, fake_tensors
from kineograph.stage.spec import StageSpec, read_stage
from kineograph.train import checkpoint
from kineograph.train.compile import compile_task, is_large


def locate_stage(reference: str, run: RunFolder) -> tuple[RunFolder, str]:
    """The run and name of a stage: `tokenizer` is a stage of `run`, `runs/x/tokenizer` one of another run."""
    if "/" not in reference:
        return run, reference
    path = Path(reference)
    return RunFolder.existing(path.parent), path.name


def open_stage_folder(path: str | Path) -> tuple[RunFolder, str]:
    """The run and the stage of a path RUN/STAGE."""
    path = Path(path)
    if RunFolder(path).exists():
        stages = ", ".join(str(path / name) for name in RunFolder(path).config()["stages"])
        raise InputError(f"{path} is a run: name one of its stages ({stages})")
    run = RunFolder.existing(path.parent)
    stages = run.config()["stages"]
    if path.name not in stages:
        raise InputError(f"{run.path} has no stage {path.name!r}: the stages are {', '.join(stages)}")
    return run, path.name


class StageLoader:
    """Loads trained stages of a run and of the runs that it refers to, each once."""

    def __init__(
        self,
        run: RunFolder,
        device: torch.device | str = "cpu",
        note: Note = discard,
        compiled: bool = False,
        graphs: bool = True,
    ) -> None:
        """`compiled` pays off when many batches are drawn; `graphs` then uses CUDA graphs, whose results the next call overwrites."""
        self.run = run
        self.device = torch.device(device)
        self.note = note
        self.compiled = compiled
        self.graphs = graphs and self.device.type == "cuda"
        if compiled:
            _check_compiler(self.device)
        self.loaded_digests: dict[str, str] = {}  # run/stage → digest of the loaded weights
        self._tasks: dict[tuple[Path, str, str | int, bool], Task] = {}

    def load(self, reference: str, which: str | int = "last", ema: bool = True) -> Task:
        """Load a stage (`tokenizer`, or `runs/x/tokenizer` of another run), frozen and on the device."""
        run, name = locate_stage(reference, self.run)
        key = (run.path.resolve(), name, which, ema)
        if key not in self._tasks:
            saved = checkpoint.select(run.checkpoints(name), which)
            self.check_references(run, name, saved)
            self._warn_if_unhealthy(run, name, saved.step)
            spec = read_stage(run.config(), name)
            self.check_fit(run, name, saved, ema)
            task = build_task(
                spec,
                lambda other: self.load(_qualify(other, run)),
                self.note,
                saved.state().get("assets"),
                for_training=False,
            )
            load_weights(task, saved.weights(ema))
            task.precision = run.config()["stages"][name].get("train", {}).get("precision", "auto")
            freeze(task.to(self.device))
            if self.compiled:
                compile_task(task, self.graphs and not is_large(task), by_block=is_large(task))
            self._tasks[key] = task
            self.loaded_digests[f"{run.path}/{name}"] = saved.digest(ema)
        return self._tasks[key]

    def check_fit(self, run: RunFolder, name: str, saved: checkpoint.Checkpoint, ema: bool) -> None:
        """Refuse a config that does not fit the weights before its model takes memory."""
        try:
            with fake_tensors(), torch.random.fork_rng(devices=[]):
                task = self._build_fake(run, name, saved)
        except KineoError:
            raise
        except Exception:  # a Task that reads tensor values while it is built
            return
        try:
            check_shapes(task, saved.weight_shapes(ema))
        except InputError as error:
            raise InputError(f"{run.path}/{name}: {error}") from None

    def _build_fake(self, run: RunFolder, name: str, saved: checkpoint.Checkpoint) -> Task:
        def build_reference(reference: str) -> Task:
            other, stage = locate_stage(_qualify(reference, run), run)
            return freeze(self._build_fake(other, stage, checkpoint.select(other.checkpoints(stage))))

        spec, assets = read_stage(run.config(), name), saved.state().get("assets")
        return build_task(spec, build_reference, discard, assets, for_training=False)

    def digest(self, reference: str) -> str:
        """Identify a stage's newest weights."""
        run, name = locate_stage(reference, self.run)
        return checkpoint.select(run.checkpoints(name)).digest()

    def find_codec(self, spec: StageSpec, run: RunFolder | None = None) -> tuple[str, str] | None:
        """The path and digest of the codec behind a stage's tokens or latents: its own, or its generator's."""
        run = run or self.run
        references = spec.referenced_stages()
        if "codec" in references:
            codec = _qualify(references["codec"], run)
            return codec, self.digest(codec)
        for reference in references.values():
            other, name = locate_stage(_qualify(reference, run), self.run)
            codec_of_other = self.find_codec(read_stage(other.config(), name), other)
            if codec_of_other is not None:
                return codec_of_other
        return None

    def find_codec_of(self, reference: str) -> str | None:
        """The digest of the codec behind another stage; None: it has none, as it is one itself."""
        run, name = locate_stage(reference, self.run)
        found = self.find_codec(read_stage(run.config(), name), run)
        return found[1] if found is not None else None

    def reference_digests(self, run: RunFolder, name: str) -> dict[str, str]:
        """The stages that a stage refers to → digests of their newest weights."""
        references = read_stage(run.config(), name).referenced_stages().values()
        return {reference: self.digest(_qualify(reference, run)) for reference in references}

    def needed_digests(self, reference: str) -> dict[str, str]:
        """The stages that drawing with a stage loads, itself left out → digests of their newest weights."""
        run, name = locate_stage(reference, self.run)
        config, digests = read_stage(run.config(), name).config, {}
        for key in (*config.references, *config.sample_references):
            if isinstance(other := getattr(config, key), str):
                path = _qualify(other, run)
                digests[path] = self.digest(path)
                digests |= self.needed_digests(path)
        return digests

    def check_references(self, run: RunFolder, name: str, saved: checkpoint.Checkpoint) -> None:
        """Warn if a stage that this one refers to was trained further since: its tokens mean something else now."""
        digests = saved.state().get("references", {})
        for reference, digest in self.reference_digests(run, name).items():
            if digests.get(reference, digest) != digest:
                self.note(
                    f"warning: {run.path}/{name} step {saved.step} was trained on older weights of {reference} "
                    f"({reference} has been trained further since): train {name} further, or again in a new run"
                )

    def _warn_if_unhealthy(self, run: RunFolder, name: str, step: int) -> None:
        """Warn if the last check of the stage's training was fatal."""
        for stage, at, finding in read_findings(run.metrics_file):
            if (stage, at, finding.severity) == (name, step, "fatal"):
                self.note(f"warning: {run.path}/{name}: {finding}")


def _qualify(reference: str, run: RunFolder) -> str:
    return reference if "/" in reference else f"{run.path}/{reference}"


def _check_compiler(device: torch.device) -> None:
    """Refuse --compile on a CPU without a C++ compiler: torch would fail in the middle of drawing."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    if device.type == "cpu" and not any(shutil.which(name) for name in names):
        raise InputError(
            f"--compile on a CPU needs a C++ compiler ({' or '.join(names)}), and none was found: "
            "install g++, set CXX to your compiler, or leave --compile out"
        )


def choose_sampling_stage(run: RunFolder, name: str | None = None) -> str:
    """The stage that `kineo sample` draws with: `name`, or the last trained stage that can sample."""
    stages = run.config()["stages"]
    if name is not None:
        if name not in stages:
            raise InputError(f"{run.path} has no stage {name!r}: the stages are {', '.join(stages)}")
        return name
    generators = [name for name in stages if issubclass(find_task(stages[name]["task"]), SupportsSampling)]
    for generator in reversed(generators):
        if checkpoint.saved_steps(run.checkpoints(generator)):
            return generator
    reason = (
        f"{', '.join(generators)} is not trained yet; kineo train --run {run.path} goes on"
        if generators
        else f"none of them is a generator; kineo evaluate {run.path} reconstructs held-out items, and kineo presets lists generators"
    )
    raise InputError(f"{run.path} has no trained stage that draws samples (stages: {', '.join(stages)}): {reason}")
