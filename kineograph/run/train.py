"""`kineo train`: walk the stages of a plan, each one Task trained by the one Trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from kineograph.core import ranks
from kineograph.core.config import Tree, dump_yaml
from kineograph.core.errors import ConfigError, InputError, Stopped
from kineograph.core.noise import key_of
from kineograph.core.run_folder import RunFolder, write_atomic
from kineograph.core.task import BuildContext, Task, load_weights, weights_of
from kineograph.run import layers
from kineograph.run.estimate import check_stages
from kineograph.run.plan import Plan, StagePlan, make_plan, refuse_changes
from kineograph.run.show import Show
from kineograph.run.stage_data import StageData, open_data
from kineograph.run.token_cache import cached_source
from kineograph.sample.stages import Stages
from kineograph.train import checkpoint
from kineograph.train.stepper import Stepper
from kineograph.train.stop import StopRequest
from kineograph.train.trackers import MetricsFile, Tracker, check_trackers, open_trackers
from kineograph.train.trainer import Surroundings, Trainer

Resume = Literal["auto", "never", "must"]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def resolve(
    arguments: Sequence[str], run: str | Path | None = None, resume: Resume = "auto", extra: Tree | None = None
) -> tuple[Plan, RunFolder]:
    """What was typed → a checked plan and its run folder. A run that exists is the base of its own continuation."""
    if not arguments and run is None:
        raise ConfigError("name a preset or a YAML file (kineo presets lists the presets)")
    fresh = layers.read(arguments, extra) if any(not layers.is_override(a) for a in arguments) else {}
    folder = RunFolder(run if run is not None else Path("runs") / str(fresh.get("name") or "run"))
    if not folder.exists():
        if resume == "must":
            raise InputError(f"--resume must: {folder.path} holds no run to go on with")
        if folder.path.is_file():
            raise InputError(f"{folder.path} is a file: give --run a folder")
        return make_plan(fresh), folder
    if resume == "never":
        raise InputError(f"--resume never: {folder.path} holds a run already; give --run another folder")
    saved = folder.config()
    # The preset that the run was made from is in the saved config already, as it was then.
    others = [a for a in arguments if not (a == saved.get("preset") and not Path(a).is_file())]
    plan = make_plan(layers.read(others, extra, base=saved))
    refuse_changes(_comparable(saved), _comparable(plan.tree()))
    return plan, folder


def _comparable(tree: Tree) -> Tree:
    return {key: value for key, value in tree.items() if key not in ("name", "preset")}


def train(
    arguments: Sequence[str],
    *,
    run: str | Path | None = None,
    resume: Resume = "auto",
    dataset: Any = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
    extra: Tree | None = None,
    quiet: bool = False,
    note: Callable[[str], None] = say,
) -> Path:
    """Train all stages of a preset or file; the same call again resumes. → the run folder."""
    plan, folder = resolve(arguments, run, resume, extra)
    note = (lambda line: None) if quiet else note
    check_trackers(plan.stages[0].train.trackers)
    data: dict[str, StageData] = {}
    for stage in plan.stages:
        if not stage.spec.config.skip:
            memory = folder.path / ".scan.json" if folder.exists() else None
            data[stage.name] = open_data(stage, plan.seed, dataset, note, memory, data)
    check_stages(plan, data, building=not folder.exists())
    with folder.lock():
        trackers = open_trackers(plan.stages[0].train.trackers, folder.path, plan.name, plan.tree())
        stop = StopRequest()
        try:
            write_atomic(folder.config_file, dump_yaml(plan.tree()))
            folder.stopped_marker.unlink(missing_ok=True)
            with stop.listening():
                for stage in plan.stages:
                    if stage.spec.config.skip:
                        note(f"{stage.name}: skipped, as stages.{stage.name}.skip says")
                    else:
                        _StageRun(plan, stage, folder, data[stage.name], trackers, stop, on_log, quiet, note).train()
        except Stopped:
            write_atomic(folder.stopped_marker, "saved\n")
            raise
        finally:
            for tracker in trackers:
                tracker.close()
    return folder.path


def stage_seed(plan: Plan, stage: StagePlan) -> int:
    """Stages of one run draw different numbers."""
    return key_of(plan.seed, stage.name) >> 1


def build_task(
    plan: Plan, stage: StagePlan, stages: Stages, data: StageData, folder: RunFolder, note: Callable[[str], None]
) -> Task:
    """A stage's Task with its starting weights. What it once learned from the data (a vocabulary) comes from its checkpoint."""
    seed = stage_seed(plan, stage)
    torch.manual_seed(key_of(seed, "init") >> 1)
    found = checkpoint.latest(folder.checkpoints(stage.name))
    context = BuildContext(
        shape=stage.spec.data.shape,
        seed=seed,
        stage=stages.load,
        captions=data.captions,
        assets=found.state().get("assets", {}) if found else {},
        note=note,
    )
    return stage.spec.task.build(stage.spec.config, context)


class _StageRun:
    """Everything that one stage's training needs, put together."""

    def __init__(
        self,
        plan: Plan,
        stage: StagePlan,
        folder: RunFolder,
        data: StageData,
        trackers: list[Tracker],
        stop: StopRequest,
        on_log: Callable[[dict[str, Any]], None] | None,
        quiet: bool,
        note: Callable[[str], None],
    ) -> None:
        self.plan, self.stage, self.folder, self.data = plan, stage, folder, data
        self.trackers, self.stop, self.on_log, self.quiet, self.note = trackers, stop, on_log, quiet, note
        self.metrics = MetricsFile(folder.metrics_file)
        self.device = ranks.device_of(stage.train.device)
        self.checkpoints = folder.checkpoints(stage.name)
        self.stages = Stages(folder, self.device, note)

    def train(self) -> None:
        stage = self.stage
        done = checkpoint.steps(self.checkpoints)
        if (
            done
            and done[-1] >= stage.train.steps
            and checkpoint.problem(checkpoint.at(self.checkpoints, done[-1]).path) is None
        ):
            self.note(f"{stage.name}: finished at step {done[-1]}")
            return
        task = build_task(self.plan, stage, self.stages, self.data, self.folder, self.note)
        self._warm_start(task)
        stepper = Stepper(
            task,
            stage.train,
            {name: stage.players[name] for name in task.players},
            self.device,
            stage_seed(self.plan, stage),
        )
        source = cached_source(self.plan, stage, task, self.stages, self.folder, self.data, self.device, self.note)
        show = Show(self.plan, stage, self.folder, self.data, self.trackers, self.device)
        around = Surroundings(
            checkpoints=self.checkpoints,
            log=self._log,
            validation=self.data.validation_batches if stage.train.validate_every else None,
            show=show if stage.train.sample_every else None,
            saved={"assets": task.assets(), "config": self.plan.tree()},
            stop=self.stop,
            quiet=self.quiet,
        )
        loader = self.data.loader(source)
        trainer = Trainer(stage.name, stepper, loader, around)
        start = trainer.resume()
        self.metrics.truncate(stage.name, start, [s.name for s in self.plan.stages])
        for tracker in self.trackers:
            tracker.begin(stage.name, start)
        self._describe(task, start)
        try:
            trainer.fit(start)
        finally:
            self.data.write_skipped(self.folder.path / "skipped.jsonl", loader)
            show.curves()

    def _warm_start(self, task: Task) -> None:
        """Copy what fits from `init`; the run's own checkpoint, if there is one, overrides it afterwards."""
        init = self.stage.spec.config.init
        if init is None:
            return
        if init.endswith(".safetensors"):
            given = checkpoint.read_file(Path(init))
        else:
            run, name = self.stages.locate(init)
            given = checkpoint.choose(run.checkpoints(name)).weights()
        own = weights_of(task)
        fitting = {name: value for name, value in given.items() if name in own and own[name].shape == value.shape}
        if not fitting:
            raise InputError(
                f"stages.{self.stage.name}.init={init}: none of its {len(given)} tensors fits a name and shape of this stage"
            )
        load_weights(task, own | fitting)
        self.note(f"{self.stage.name}: {len(fitting)} of {len(own)} tensors taken from {init}")

    def _describe(self, task: Task, start: int) -> None:
        trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
        tokens = task.tokens_per_clip()
        self.note(
            f"{self.stage.name}: {type(task).__name__}, {trained / 1e6:.2f} M parameters"
            + (f", {tokens} tokens a clip" if tokens else "")
            + f", on {self.device}"
            + (f", from step {start}" if start else "")
        )

    def _log(self, record: dict[str, Any]) -> None:
        self.metrics.write(record)
        for tracker in self.trackers:
            tracker.log(record)
        if self.on_log is not None:
            self.on_log(record)
