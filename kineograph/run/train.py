"""`kineo train`: train the stages of a plan one after another, each one Task, by the one Trainer."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kineograph.core import distributed
from kineograph.core.capabilities import ComparesWithinBatch, SupportsCaching
from kineograph.core.config import Tree
from kineograph.core.errors import KineoError, RunFailed, Stopped
from kineograph.core.health import read_findings
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.core.notes import Note, discard
from kineograph.core.run_folder import RunFolder, write_atomic
from kineograph.core.task import Task
from kineograph.core.trust import accept
from kineograph.data.decoded_cache import keep_if_small
from kineograph.data.loader import warn_of_shared_memory, worker_error
from kineograph.doctor.machine import release_memory
from kineograph.doctor.step_flops import count_step_flops
from kineograph.run.cache import StageCache
from kineograph.run.checks import check_stages
from kineograph.run.compile_ahead import CompileAhead, select_stages
from kineograph.run.launch import is_main_process, process_group, set_group_timeout
from kineograph.run.metrics import TrainingMetrics
from kineograph.run.open_data import open_data, resolve_epochs
from kineograph.run.plan import Resume, make_plan, resolve_run
from kineograph.run.previews import Previews
from kineograph.run.resume_from import fetch_checkpoints
from kineograph.stage.data import StageData
from kineograph.stage.data_record import write_records
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import Plan, StagePlan
from kineograph.stage.warm_start import build_for_training
from kineograph.train import checkpoint
from kineograph.train.determinism import deterministic_algorithms, set_deterministic_environment
from kineograph.train.metrics_file import MetricsFile
from kineograph.train.phases import Cursor, is_finished
from kineograph.train.precision import warn_of_bf16_weights
from kineograph.train.rank_log import RankLog
from kineograph.train.stepper import Stepper
from kineograph.train.stop import StopRequest
from kineograph.train.trackers import Tracker, check_trackers, open_trackers
from kineograph.train.trainer import Trainer, TrainerHooks, describe_failure, saved_cursor


@dataclass(frozen=True)
class _Run:
    """Shared by the stages of a run while they train."""

    plan: Plan
    folder: RunFolder
    stop: StopRequest
    trackers: dict[str, Tracker]  # only in the first process
    rank_log: RankLog
    note: Note
    on_log: Callable[[dict[str, Any]], None] | None
    quiet: bool


def train(
    arguments: Sequence[str],
    *,
    run: str | Path | None = None,
    resume: Resume = "auto",
    dataset: Any = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
    extra: Tree | None = None,
    quiet: bool = False,
    note: Note = distributed.print_note,
    resume_from: Sequence[str] = (),
) -> Path:
    """Train all stages of a preset or file; the same call again resumes. → the run folder.

    `resume_from` names checkpoints that lie elsewhere, to resume from (train/remote_checkpoint.py lists the places).
    """
    quiet = quiet or not is_main_process()
    if quiet:
        note = discard
    with process_group():
        if resume_from:
            distributed.run_on_first(lambda: fetch_checkpoints(resume_from, run, note))
        plan, folder = _resolve_on_all_ranks(arguments, run, resume, extra)
        if any(stage.train.deterministic for stage in plan.stages):
            set_deterministic_environment()
        set_group_timeout(max(stage.train.timeout for stage in plan.stages))
        check_trackers(plan.trackers, plan.stages[0].train.hub)
        data: dict[str, StageData] = {}
        for stage in plan.stages:
            if not stage.spec.config.skip:
                data[stage.name] = open_data(stage, plan.seed, dataset, note, folder.path, data)
        plan = resolve_epochs(plan, data, note)
        begun = any(checkpoint.saved_steps(folder.checkpoints(stage.name)) for stage in plan.stages)
        check_stages(plan, data, folder, building=not distributed.broadcast_object(begun))
        with _lock(folder), closing(RankLog(folder.path)) as rank_log, rank_log.capture_warnings():
            first = plan.stages[0].train
            trackers = open_trackers(plan.trackers, folder.path, plan.name, plan.tree(), first.wandb, first.hub)
            note = rank_log.with_note(note)
            try:
                _train_stages(_Run(plan, folder, StopRequest(), trackers, rank_log, note, on_log, quiet), data)
            finally:
                for tracker in trackers.values():
                    tracker.close()
    return folder.path


def _resolve_on_all_ranks(
    arguments: Sequence[str], run: str | Path | None, resume: Resume, extra: Tree | None
) -> tuple[Plan, RunFolder]:
    """The first process reads the config; all processes get the same plan."""
    if not distributed.is_active():
        return resolve_run(arguments, run, resume, extra)
    resolved = distributed.run_on_first(lambda: resolve_run(arguments, run, resume, extra))
    if resolved is None:
        tree, path = distributed.broadcast_object(None)
        accept(tree)  # the first process has checked it
        return make_plan(tree), RunFolder(path)
    plan, folder = resolved
    distributed.broadcast_object([plan.tree(), str(folder.path)])
    return plan, folder


@contextmanager
def _lock(folder: RunFolder) -> Iterator[None]:
    """Lock the run folder; the first process does so for all."""
    with ExitStack() as stack:
        distributed.run_on_first(lambda: stack.enter_context(folder.lock()))
        if distributed.is_first():
            folder.remove_leftovers()
        distributed.barrier()
        yield


def _train_stages(run: _Run, data: dict[str, StageData]) -> None:
    try:
        if distributed.is_first():
            _write_run_files(run.plan, run.folder, data)
        distributed.barrier()
        with run.stop.handle_signals(), _compile_ahead(run) as may_compile:
            trained = False
            for stage in run.plan.stages:
                if stage.spec.config.skip:
                    run.note(f"{stage.name}: skipped (stages.{stage.name}.skip=true)")
                else:
                    training = _StageTraining(run, stage, data[stage.name], may_compile)
                    with deterministic_algorithms(training.device) if stage.train.deterministic else nullcontext():
                        trained |= training.train()
                    _release_stage()
            if not trained:
                run.note(
                    "nothing was left to train: a run keeps its own config.yaml. To train anew, give --run another folder"
                )
    except Stopped:
        if distributed.is_first():
            write_atomic(run.folder.stopped_marker, "saved\n")
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, KineoError) else f"{type(error).__name__}: {error}"
        run.rank_log.write(f"error: {reason}" if isinstance(error, KineoError) else traceback.format_exc())
        if not run.folder.failed_marker.exists():  # of several processes, the first to fail knows why
            with suppress(OSError):  # a full disk
                write_atomic(run.folder.failed_marker, f"{reason}\n")
        raise


@contextmanager
def _compile_ahead(run: _Run) -> Iterator[Callable[[str], bool]]:
    """Compile unfinished stages in a second process, where the config says so. → whether a stage should be compiled yet"""
    stages = [stage.name for stage in select_stages(run.plan) if not _is_finished(run.folder, stage)]
    if not stages:
        yield lambda stage: True
        return
    with CompileAhead(run.folder, stages, run.note) as ahead:
        yield ahead.is_ready


def _is_finished(folder: RunFolder, stage: StagePlan) -> bool:
    saved = checkpoint.latest(folder.checkpoints(stage.name))
    return saved is not None and is_finished(stage.train, saved_cursor(stage.train, saved))


def _write_run_files(plan: Plan, folder: RunFolder, data: dict[str, StageData]) -> None:
    """Write what a run folder holds before its first stage trains."""
    folder.write_config(plan.tree())
    # Stages that read the same data share one source.
    for stage_data in {id(each.source): each for each in data.values()}.values():
        stage_data.write_scan(folder.path)
    write_records(folder, {name: stage_data.describe_items() for name, stage_data in data.items()})
    for name, stage_data in data.items():
        stage_data.write_buckets(folder.stage(name) / "buckets.json")
    for marker in (folder.stopped_marker, folder.failed_marker):
        marker.unlink(missing_ok=True)


def _release_stage() -> None:
    """Free a finished stage's memory: compiled code and CUDA graphs outlive the modules that they were made for."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    release_memory()


class _StageTraining:
    """Puts together what one stage's training needs."""

    def __init__(self, run: _Run, stage: StagePlan, data: StageData, may_compile: Callable[[str], bool]) -> None:
        self.run, self.stage, self.data, self.may_compile = run, stage, data, may_compile
        self.device = distributed.resolve_device(stage.train.device)
        enable_flash_attention_3(self.device)
        self.stages = StageLoader(run.folder, self.device, run.note)
        self.metrics = MetricsFile(run.folder.metrics_file)
        self.trackers = [tracker for name, tracker in run.trackers.items() if name in stage.train.trackers]

    def train(self) -> bool:
        """→ False if nothing was left to train."""
        run, stage, data = self.run, self.stage, self.data
        started = time.monotonic()
        checkpoints = run.folder.checkpoints(stage.name)
        saved = checkpoint.latest_on_all_ranks(checkpoints)
        if saved is not None:
            self.stages.check_references(run.folder, stage.name, saved)
            if is_finished(stage.train, saved_cursor(stage.train, saved)):
                self._refuse_unhealthy(saved.step)
                run.note(f"{stage.name}: finished at step {saved.step}")
                return False
        task = build_for_training(run.plan, stage, self.stages, data, run.note)
        players = {name: stage.players[name] for name in task.players}
        seed, may_compile = run.plan.stage_seed(stage.name), partial(self.may_compile, stage.name)
        stepper = Stepper(task, stage.train, players, self.device, seed, may_compile)
        cache = StageCache(stage, task, self.stages, run.folder, data, self.device, run.note)
        source = cache.open(run.stop)
        if source is None or (isinstance(task, SupportsCaching) and task.always_encode()):
            stepper.compile_stages()
        loader = data.loader(source)
        if stage.train.keep_decoded and (
            kept := keep_if_small(loader.source, max(loader.workers, 1) * distributed.local_world())
        ):
            run.note(f"{stage.name}: {kept}")
        if warning := warn_of_shared_memory(loader.workers):
            run.note(warning)
        if saved is not None:
            loader.load_position(saved.state().get("data", {}))
        previews = Previews(run.plan, stage, run.folder, data, self.trackers, self.device, run.note, run.on_log)
        hooks = TrainerHooks(
            checkpoints=checkpoints,
            log=self._log,
            validation_batches=data.validation_batches,
            evaluate=self._open_metrics(stepper),
            draw_samples=previews if stage.train.sample_every else None,
            publish=self._publish,
            extra_state={
                "assets": task.assets(),
                "config": run.plan.tree(),
                "references": self.stages.reference_digests(run.folder, stage.name),
                "data": loader.position,  # called for each checkpoint
            },
            stop=run.stop,
            quiet=run.quiet,
            rank_log=run.rank_log,
            step_flops=count_step_flops(run.plan, stage, task, data, loader.source, self.device, run.note),
            warm_started=stage.spec.config.init is not None,
            started=started,
        )
        trainer = Trainer(stage.name, stepper, loader, hooks)
        start = trainer.resume()
        self._truncate_logs(start)
        trainer.health.replay(record for record in self.metrics.read() if record["stage"] == stage.name)
        self._describe(task, start)
        skipped_file = run.folder.path / "skipped.jsonl"
        try:
            with self._watchdog():
                trainer.fit(start)
        except BaseException as error:
            with suppress(OSError):  # report the first error, not one of cleaning up
                data.write_skipped(skipped_file, loader)
                previews.draw_curves()
            # torch reports the death of a worker wherever the process happens to be.
            message = str(error)
            if isinstance(error, RuntimeError) and "DataLoader worker" in message and "killed by signal" in message:
                raise worker_error(message) from None
            raise
        for skipped in distributed.all_gather_object(loader.skipped):
            loader.skipped.update(skipped)
        data.write_skipped(skipped_file, loader)
        previews.draw_curves()
        return True

    def _refuse_unhealthy(self, step: int) -> None:
        """Refuse to go on from a finished stage whose last check, made while train.health was warn, was fatal."""
        if self.stage.train.health != "stop":
            return
        found = read_findings(self.run.folder.metrics_file)
        here = [finding for name, at, finding in found if (name, at) == (self.stage.name, step)]
        fatal = [describe_failure(self.stage.name, finding) for finding in here if finding.severity == "fatal"]
        if (message := distributed.broadcast_object(fatal[:1])) != []:
            raise RunFailed(message[0])

    def _open_metrics(self, stepper: Stepper) -> TrainingMetrics | None:
        if not self.stage.train.metrics:
            return None
        metrics = TrainingMetrics(self.run.plan, self.stage, self.data, self.stages)
        with stepper.eval_mode() as task:
            metrics.check(task)
        return metrics

    def _watchdog(self) -> AbstractContextManager[None]:
        seconds, rank_log = self.stage.train.watchdog, self.run.rank_log
        if seconds is None:
            return nullcontext()
        self.run.note(
            f"watchdog: exits with code 1 after {seconds:g} s without progress, and writes the stacks to {rank_log.path.parent}"
        )
        return rank_log.watchdog(seconds)

    def _truncate_logs(self, start: Cursor) -> None:
        """Drop the metrics that were logged after the checkpoint."""
        if not distributed.is_first():
            return
        stages = [stage.name for stage in self.run.plan.stages]
        kept = self.metrics.truncate(self.stage.name, start.step, stages, start.phase)
        in_phase = start.phase in ("validate", "evaluate", "sample")
        for tracker in self.trackers:
            tracker.begin(self.stage.name, start.step - in_phase)
            # Trackers drop a whole step: log again what is kept of it.
            for record in kept if in_phase else ():
                tracker.log(record)

    def _publish(self, saved: checkpoint.Checkpoint, best: bool) -> None:
        for tracker in self.trackers:
            tracker.log_checkpoint(self.stage.name, saved.step, saved.path, best)

    def _describe(self, task: Task, start: Cursor) -> None:
        trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
        tokens = task.tokens_per_clip()
        item = "clip" if self.stage.spec.data.shape.frames > 1 else "picture"
        self.run.note(
            f"{self.stage.name}: {type(task).__name__}, {trained / 1e6:.2f} M parameters"
            + (f", {tokens} tokens a {item}" if tokens else "")
            + f", on {self.device}"
            + (f", from step {start.step}" if start.step else "")
            + (f", to {start.phase}" if start.phase != "train" else "")
        )
        train = self.stage.train
        if train.accumulate > 1 and isinstance(task, ComparesWithinBatch):
            line = task.describe_micro_batch(train.micro_batch_size)
            if line is not None:
                self.run.note(f"warning: {self.stage.name} {line}")
        for line in warn_of_bf16_weights(task, self.stage.train, self.stage.players):
            self.run.note(f"warning: {self.stage.name} {line}")

    def _log(self, record: dict[str, Any]) -> None:
        if not distributed.is_first():
            return
        self.metrics.write(record)
        for tracker in self.trackers:
            tracker.log(record)
        if self.run.on_log is not None:
            self.run.on_log(record)
