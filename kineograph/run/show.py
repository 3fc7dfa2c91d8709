"""Pictures while a stage trains: samples of fixed prompts, real items beside what is drawn for their captions, reconstructions beside their
inputs, and the curves."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch import Tensor

from kineograph.core import ranks
from kineograph.core.batch import Batch
from kineograph.core.noise import key_of
from kineograph.core.run_folder import RunFolder, write_atomic, write_json
from kineograph.core.task import Task
from kineograph.data.config import Split
from kineograph.media.clips import write_clip
from kineograph.media.curves import draw_curves
from kineograph.media.grids import beside, film_strip, grid, moving_grid, side_by_side
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
            for split in dict.fromkeys(self.stage.train.grids):
                self._grid(step, stepper, split)
        self._reconstructions(step, stepper)
        self.curves()

    def curves(self) -> None:
        if ranks.is_first() and self.folder.metrics_file.is_file():
            draw_curves(self.folder.metrics_file, self.folder.path / "curves.png")

    def _samples(self, step: int, stepper: Stepper) -> None:
        train = self.stage.train
        prompts, captions = self._prompts(stepper.task)
        rows = len(captions)
        out = self.folder.samples(self.stage.name, step)
        shutil.rmtree(out, ignore_errors=True)  # a run taken up from before this step draws it again
        with stepper.eval_mode() as task:
            pixels = self._draw(task, prompts, self.data.pictures(rows))
        suffix = train.format if train.format != "auto" else ("png" if pixels.shape[1] == 1 else "gif")
        listed = []
        for number, (clip, caption) in enumerate(zip(pixels, captions, strict=True)):
            path = write_clip(free_name(out, slug(caption), number, f".{suffix}"), clip, self.shape.fps)
            listed.append({"file": path.name, "prompt": caption})
            if clip.shape[0] > 1:
                film_strip(clip).save(path.with_suffix(".strip.png"))
        write_json(out / "prompts.json", listed)
        sheet = out / "grid.png"
        captions = self._logged(captions)
        grid(list(pixels), captions=captions).save(sheet)
        if stepper.averages:
            with stepper.eval_mode(ema=False) as task:
                online = self._draw(task, prompts, self.data.pictures(rows))
            write_clip(
                out / f"online-beside-ema.{_moving(online)}",
                side_by_side([("online", list(online)), ("EMA", list(pixels))]),
                self.shape.fps,
            )
        if pixels.shape[1] > 1:
            sheet = write_clip(out / "grid.gif", moving_grid(list(pixels), captions=captions), self.shape.fps)
        self._track(step, "samples", sheet, "; ".join(captions))

    def _prompts(self, task: Task) -> tuple[list[str] | None, list[str]]:
        """What is asked for, None where the task reads no captions; and what each sample is called."""
        count = self.stage.train.samples
        real = self.data.pictures(count)
        prompts = self.data.prompts(self.plan.prompts, count) if self._is_told(task, real) else None
        if prompts is not None:
            return prompts, prompts
        return None, (real.captions if real.text_embeds is not None else None) or [""] * count

    def _is_told(self, task: Task, real: Batch) -> bool:
        """Whether the task draws after captions, and not after the text that comes with the data."""
        declared = self.stage.spec.task.reads_for(self.stage.spec.config)
        return "captions" in declared or (real.text_embeds is None and task.takes_captions())

    def _grid(self, step: int, stepper: Stepper, split: Split) -> None:
        """Real items of a split beside what the averaged weights draw for their captions."""
        real = self.data.pictures(self.stage.train.samples, split)
        if real.pixels is None:  # codebook ids alone
            return
        with stepper.eval_mode() as task:
            drawn = self._draw(task, real.captions if self._is_told(task, real) else None, real)
        captions = self._logged(real.captions or [""] * len(real))
        rows = [("real", _real(real.video, real)), ("generated", list(drawn))]
        path = self.folder.samples(self.stage.name, step) / f"{split}-grid.png"
        beside(rows, captions).save(path)
        write_atomic(path.with_suffix(".txt"), "".join(f"{caption}\n" for caption in captions))
        if drawn.shape[1] > 1:
            path = write_clip(path.with_suffix(".gif"), side_by_side(rows), self.shape.fps)
        self._track(step, f"grids/{split}", path, "; ".join(captions))

    def _logged(self, captions: list[str]) -> list[str]:
        return [self.stage.train.caption_prefix + caption for caption in captions]

    def _draw(self, task: Task, prompts: list[str] | None, real: Batch) -> Tensor:
        options: Any = getattr(self.stage.spec.config, "sample", None)
        return draw_for_training(
            task,
            prompts,
            options,
            self.shape,
            seed=key_of(self.plan.seed, "samples") >> 1,
            device=self.device,
            frames=self.stage.train.sample_frames,
            count=len(real),
            real=real,
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
            ("input", _real(moved.video, batch)),
            ("EMA" if stepper.averages else "reconstruction", _real(shown, batch)),
        ]
        if stepper.averages:
            with stepper.eval_mode(ema=False) as task:
                online = task.reconstruct(moved)
            rows.insert(1, ("online", _real(online, batch)))  # type: ignore[arg-type]
        path = self.folder.validation(self.stage.name) / f"step-{step:08d}.{_moving(moved.pixels)}"  # type: ignore[arg-type]
        fps = float(batch.fps.median()) if batch.fps is not None else self.shape.fps  # clips keep their own rate
        write_clip(path, side_by_side(rows), fps)
        if batch.captions is not None:
            write_atomic(path.with_suffix(".txt"), "".join(f"{caption}\n" for caption in batch.captions))
        self._track(step, "reconstructions", path, "input, online, EMA")

    def _track(self, step: int, name: str, path: Any, caption: str) -> None:
        for tracker in self.trackers:
            tracker.media(step, f"{self.stage.name}/{name}", path, caption)


def _real(pixels: Tensor, batch: Batch) -> list[Tensor]:
    """Each row's frames without its padding, on the CPU."""
    clips = list(pixels.float().cpu())
    if batch.frame_mask is None:
        return clips
    return [clip[:length] for clip, length in zip(clips, batch.frame_mask.sum(1).tolist(), strict=True)]


def _moving(pixels: Tensor) -> str:
    return "png" if pixels.shape[1] == 1 else "gif"
