"""Pictures while a stage trains: samples of fixed prompts, reconstructions beside their inputs, and the curves."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch import Tensor

from kineograph.core import ranks
from kineograph.core.noise import key_of
from kineograph.core.run_folder import RunFolder, write_json
from kineograph.core.task import Task
from kineograph.media.clips import write_clip
from kineograph.media.curves import draw_curves
from kineograph.media.grids import film_strip, grid, moving_grid, side_by_side
from kineograph.media.names import free_name, slug
from kineograph.run.plan import Plan, StagePlan
from kineograph.run.stage_data import StageData
from kineograph.sample.draw import draw_for_training
from kineograph.train.stepper import Stepper
from kineograph.train.trackers import Tracker


class Show:
    """Called by the Trainer with (step, stepper)."""

    def __init__(
        self,
        plan: Plan,
        stage: StagePlan,
        folder: RunFolder,
        data: StageData,
        trackers: list[Tracker],
        device: torch.device,
    ) -> None:
        self.plan, self.stage, self.folder, self.data, self.trackers, self.device = (
            plan,
            stage,
            folder,
            data,
            trackers,
            device,
        )
        self.shape = stage.spec.data.shape

    def __call__(self, step: int, stepper: Stepper) -> None:
        if not ranks.is_first():
            return
        if stepper.task.can_sample:
            self._samples(step, stepper)
        self._reconstructions(step, stepper)
        self.curves()

    def curves(self) -> None:
        if ranks.is_first() and self.folder.metrics_file.is_file():
            draw_curves(self.folder.metrics_file, self.folder.path / "curves.png")

    def _samples(self, step: int, stepper: Stepper) -> None:
        train = self.stage.train
        prompts = self.data.prompts(self.plan.prompts, train.samples)
        out = self.folder.samples(self.stage.name, step)
        shutil.rmtree(out, ignore_errors=True)  # a run taken up from before this step draws it again
        with stepper.eval_mode() as task:
            pixels = self._draw(task, prompts)
        captions = prompts or [""] * len(pixels)
        suffix = train.format if train.format != "auto" else ("png" if pixels.shape[1] == 1 else "gif")
        listed = []
        for number, (clip, caption) in enumerate(zip(pixels, captions, strict=True)):
            path = write_clip(free_name(out, slug(caption), number, f".{suffix}"), clip, self.shape.fps)
            listed.append({"file": path.name, "prompt": caption})
            if clip.shape[0] > 1:
                film_strip(clip).save(path.with_suffix(".strip.png"))
        write_json(out / "prompts.json", listed)
        sheet = out / "grid.png"
        grid(list(pixels), captions=captions).save(sheet)
        if stepper.averages:
            with stepper.eval_mode(ema=False) as task:
                online = self._draw(task, prompts)
            write_clip(
                out / f"online-beside-ema.{_moving(online)}",
                side_by_side([("online", list(online)), ("EMA", list(pixels))]),
                self.shape.fps,
            )
        if pixels.shape[1] > 1:
            sheet = write_clip(out / "grid.gif", moving_grid(list(pixels), captions=captions), self.shape.fps)
        self._track(step, "samples", sheet, "; ".join(captions))

    def _draw(self, task: Task, prompts: list[str] | None) -> Tensor:
        options: Any = getattr(self.stage.spec.config, "sample", None)
        rows = len(prompts) if prompts is not None else self.stage.train.samples
        return draw_for_training(
            task,
            prompts,
            options,
            self.shape,
            seed=key_of(self.plan.seed, "samples") >> 1,
            device=self.device,
            frames=self.stage.train.sample_frames,
            count=rows,
            real=self.data.pictures(rows),
        )

    def _reconstructions(self, step: int, stepper: Stepper) -> None:
        batch = self.data.pictures(self.stage.train.samples)
        if batch.pixels is None:
            return
        moved = batch.to(self.device)
        with stepper.eval_mode() as task:
            shown = task.reconstruct(moved)
        if shown is None:
            return
        rows = [
            ("input", list(moved.video.cpu())),
            ("EMA" if stepper.averages else "reconstruction", list(shown.float().cpu())),
        ]
        if stepper.averages:
            with stepper.eval_mode(ema=False) as task:
                online = task.reconstruct(moved)
            rows.insert(1, ("online", list(online.float().cpu())))  # type: ignore[union-attr]
        path = self.folder.validation(self.stage.name) / f"step-{step:08d}.{_moving(moved.pixels)}"  # type: ignore[arg-type]
        write_clip(path, side_by_side(rows), self.shape.fps)
        self._track(step, "reconstructions", path, "input, online, EMA")

    def _track(self, step: int, name: str, path: Any, caption: str) -> None:
        for tracker in self.trackers:
            tracker.media(step, f"{self.stage.name}/{name}", path, caption)


def _moving(pixels: Tensor) -> str:
    return "png" if pixels.shape[1] == 1 else "gif"
