"""`kineo train`: walk the stages of a plan, each one Task trained by the one Trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from kineograph.core import distributed
from kineograph.core.capabilities import SupportsCaching
from kineograph.core.config import Tree, dump_yaml
from kineograph.core.errors import Stopped
from kineograph.core.run_folder import RunFolder, write_atomic
from kineograph.core.task import Task
from kineograph.data.loader import worker_error
from kineograph.doctor.machine import release_memory
from kineograph.doctor.step_flops import work_of
from kineograph.run.cache import open_stage_cache
from kineograph.run.checks import check_stages
from kineograph.run.launch import is_main_process, process_group, set_group_timeout
from kineograph.run.metrics import Evaluate
from kineograph.run.plan import make_plan
from kineograph.run.resolve import Resume, resolve
from kineograph.run.resume_from import fetch_checkpoints
from kineograph.run.show import Show
from kineograph.run.stage_data import open_data
from kineograph.stage.data import StageData
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import Plan, StagePlan
from kineograph.stage.warm_start import build_for_training
from kineograph.train import checkpoint
from kineograph.train.phases import Cursor, is_finished, skip_removed_phases
from kineograph.train.rank_log import RankLog
from kineograph.train.stepper import Stepper
from kineograph.train.stop import StopRequest
from kineograph.train.trackers import MetricsFile, Tracker, check_trackers, open_trackers
from kineograph.train.trainer import Trainer, TrainerHooks


def train(
    arguments: Sequence[str],
    *,
    run: str | Path | None = None,
    resume: Resume = "auto",
    dataset: Any = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
    extra: Tree | None = None,
    quiet: bool = False,
    note: Callable[[str], None] = distributed.print_note,
    resume_from: Sequence[str] = (),
) -> Path:
    """Train all stages of a preset or file; the same call again resumes. → the run folder.

    `resume_from` names checkpoints that lie elsewhere, to go on from (train/remote_checkpoint.py says where that may be).
    """
    quiet = quiet or not is_main_process()
    with process_group():
        return _train(
            arguments,
            run,
            resume,
            dataset,
            on_log,
            extra,
            quiet,
            (lambda line: None) if quiet else note,
            resume_from,
        )


def _train(
    arguments: Sequence[str],
    run: str | Path | None,
    resume: Resume,
    dataset: Any,
    on_log: Callable[[dict[str, Any]], None] | None,
    extra: Tree | None,
    quiet: bool,
    note: Callable[[str], None],
    resume_from: Sequence[str],
) -> Path:
    """What every process of the group does. The first one decides, writes and speaks."""
    if resume_from and distributed.is_first():
        fetch_checkpoints(resume_from, run, note)
    plan, folder = _agreed(arguments, run, resume, extra)
    set_group_timeout(max(stage.train.timeout for stage in plan.stages))
    wanted = list(dict.fromkeys(name for stage in plan.stages for name in stage.train.trackers))
    check_trackers(wanted)
    data: dict[str, StageData] = {}
    for stage in plan.stages:
        if not stage.spec.config.skip:
            data[stage.name] = open_data(stage, plan.seed, dataset, note, folder.path, data)
    begun = distributed.broadcast_object(
        any(checkpoint.saved_steps(folder.checkpoints(stage.name)) for stage in plan.stages)
    )
    check_stages(plan, data, folder, building=not begun)
    with _held(folder), ExitStack() as stack:
        rank_log = RankLog(folder.path)
        stack.callback(rank_log.close)
        stack.enter_context(rank_log.capture_warnings())
        note = rank_log.with_note(note)
        trackers: dict[str, Tracker] = {}
        if distributed.is_first():
            opened_trackers = open_trackers(wanted, folder.path, plan.name, plan.tree(), plan.stages[0].train.wandb)
            trackers = dict(zip(wanted, opened_trackers, strict=False))
        stop = StopRequest()
        try:
            if distributed.is_first():
                _begin(plan, folder, data)
            distributed.barrier()
            with stop.handle_signals():
                for stage in plan.stages:
                    if stage.spec.config.skip:
                        note(f"{stage.name}: skipped, as stages.{stage.name}.skip says")
                    else:
                        told = [tracker for name, tracker in trackers.items() if name in stage.train.trackers]
                        _StageRun(
                            plan, stage, folder, data[stage.name], told, stop, on_log, quiet, note, rank_log
                        ).train()
                        _forget()
        except Stopped:
            if distributed.is_first():
                write_atomic(folder.stopped_marker, "saved\n")
            raise
        finally:
            for tracker in trackers.values():
                tracker.close()
    return folder.path


def _agreed(
    arguments: Sequence[str], run: str | Path | None, resume: Resume, extra: Tree | None
) -> tuple[Plan, RunFolder]:
    """The plan as the first process makes it, on all of them."""
    found = resolve(arguments, run, resume, extra) if distributed.is_first() else None
    if not distributed.is_active():
        assert found is not None
        return found
    said = distributed.broadcast_object([found[0].tree(), str(found[1].path)] if found is not None else None)
    return found or (make_plan(said[0]), RunFolder(said[1]))


@contextmanager
def _held(folder: RunFolder) -> Iterator[None]:
    """The run's lock, which the first process holds for all."""
    if not distributed.is_first():
        distributed.barrier()
        yield
        return
    with folder.lock():
        distributed.barrier()
        yield


def _begin(plan: Plan, folder: RunFolder, data: dict[str, StageData]) -> None:
    """What a run folder holds before its first stage trains."""
    write_atomic(folder.config_file, dump_yaml(plan.tree()))
    for opened in {id(found.source): found for found in data.values()}.values():  # stages share what they read alike
        opened.write_scan(folder.path)
    for name, opened in data.items():
        opened.write_buckets(folder.stage(name) / "buckets.json")
    folder.stopped_marker.unlink(missing_ok=True)


def _forget() -> None:
    """What a finished stage held: compiled code and CUDA graphs outlive the modules that they were made for."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    release_memory()


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
        rank_log: RankLog,
    ) -> None:
        self.rank_log = rank_log
        self.plan, self.stage, self.folder, self.data = plan, stage, folder, data
        self.trackers, self.stop, self.on_log, self.quiet, self.note = trackers, stop, on_log, quiet, note
        self.metrics = MetricsFile(folder.metrics_file)
        self.device = distributed.resolve_device(stage.train.device)
        self.checkpoints = folder.checkpoints(stage.name)
        self.stages = StageLoader(folder, self.device, note)

    def train(self) -> None:
        stage = self.stage
        found = checkpoint.latest_on_all_ranks(self.checkpoints)
        if found is not None:
            self.stages.check_references(self.folder, stage.name, found)
        if found is not None and is_finished(
            stage.train, skip_removed_phases(stage.train, Cursor(found.step, found.phase))
        ):
            self.note(f"{stage.name}: finished at step {found.step}")
            return
        task = build_for_training(self.plan, stage, self.stages, self.data, self.note)
        stepper = Stepper(
            task,
            stage.train,
            {name: stage.players[name] for name in task.players},
            self.device,
            self.plan.stage_seed(stage.name),
        )
        source = open_stage_cache(stage, task, self.stages, self.folder, self.data, self.device, self.stop, self.note)
        if source is None or (isinstance(task, SupportsCaching) and task.always_encode()):
            stepper.compile_stages()
        evaluate = Evaluate(self.plan, stage, self.data, self.stages) if stage.train.metrics else None
        if evaluate is not None:
            with stepper.eval_mode() as judged:
                evaluate.check(judged)
        show = Show(self.plan, stage, self.folder, self.data, self.trackers, self.device, self.note)
        hooks = TrainerHooks(
            checkpoints=self.checkpoints,
            log=self._log,
            validation_batches=self.data.validation_batches if stage.train.validate_every else None,
            evaluate=evaluate,
            draw_samples=show if stage.train.sample_every else None,
            publish=self._publish,
            extra_state={
                "assets": task.assets(),
                "config": self.plan.tree(),
                "references": self.stages.reference_digests(self.folder, stage.name),
            },
            stop=self.stop,
            quiet=self.quiet,
            rank_log=self.rank_log,
            step_flops=work_of(self.plan, stage, task, self.data, self.device, self.note),
        )
        loader = self.data.loader(source)
        if found is not None:
            loader.load_position(found.state().get("data", {}))
        hooks.extra_state["data"] = loader.position  # written with each checkpoint as it then is
        trainer = Trainer(stage.name, stepper, loader, hooks)
        start = trainer.resume()
        self._take_up(start)
        self._describe(task, start)
        try:
            with self._watchdog():
                trainer.fit(start)
        except BaseException as error:
            with suppress(OSError):  # what went wrong first is what a person must hear
                self.data.write_skipped(self.folder.path / "skipped.jsonl", loader)
                show.curves()
            if (
                isinstance(error, RuntimeError)
                and "DataLoader worker" in str(error)
                and "killed by signal" in str(error)
            ):
                raise worker_error(
                    str(error)
                ) from None  # torch tells of a worker's death wherever the process is just then
            raise
        for skipped in distributed.all_gather_object(loader.skipped):
            loader.skipped.update(skipped)
        self.data.write_skipped(self.folder.path / "skipped.jsonl", loader)
        show.curves()

    def _watchdog(self) -> AbstractContextManager[None]:
        seconds = self.stage.train.watchdog
        if seconds is None:
            return nullcontext()
        logs = self.rank_log.path.parent
        self.note(f"watchdog: exits with code 1 after {seconds:g} s without progress, and writes the stacks to {logs}")
        return self.rank_log.watchdog(seconds)

    def _take_up(self, start: Cursor) -> None:
        """Forget what was told beyond the checkpoint."""
        if not distributed.is_first():
            return
        told = self.metrics.truncate(self.stage.name, start.step, [s.name for s in self.plan.stages], start.phase)
        inside = start.phase in ("validate", "evaluate", "sample")
        for tracker in self.trackers:
            tracker.begin(self.stage.name, start.step - inside)
            for record in told if inside else ():  # trackers forget a step as a whole: what stays of it is told again
                tracker.log(record)

    def _publish(self, saved: checkpoint.Checkpoint, best: bool) -> None:
        for tracker in self.trackers:
            tracker.checkpoint(self.stage.name, saved.step, saved.path, best)

    def _describe(self, task: Task, start: Cursor) -> None:
        trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
        tokens = task.tokens_per_clip()
        self.note(
            f"{self.stage.name}: {type(task).__name__}, {trained / 1e6:.2f} M parameters"
            + (f", {tokens} tokens a clip" if tokens else "")
            + f", on {self.device}"
            + (f", from step {start.step}" if start.step else "")
            + (f", to {start.phase}" if start.phase != "train" else "")
        )
        plain = any(player.optimizer == "adamw" for player in self.stage.players.values())
        if plain and any(p.requires_grad and p.dtype == torch.bfloat16 for p in task.parameters()):
            self.note(
                f"warning: {self.stage.name} trains weights of 16 bits with optimizer=adamw, which loses what is small beside a weight: "
                "set train.optimizer=adamw_8bit (or adamw_split)"
            )

    def _log(self, record: dict[str, Any]) -> None:
        if not distributed.is_first():
            return
        self.metrics.write(record)
        for tracker in self.trackers:
            tracker.log(record)
        if self.on_log is not None:
            self.on_log(record)
