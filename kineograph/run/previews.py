"""Pictures while a stage trains: samples of fixed prompts, real items beside what is drawn for their captions, reconstructions beside their
inputs, and the curves. Or, with `train.show: latents`, what would be decoded, as tensors. Each file has its text beside it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kineograph.cache.pack import KINDS
from kineograph.core import distributed
from kineograph.core.batch import Batch, Prompts
from kineograph.core.capabilities import (
    SupportsCaching,
    SupportsLatentSampling,
    SupportsReconstruction,
    SupportsSampling,
    can_animate,
    resize_reference,
    takes_captions,
)
from kineograph.core.errors import InputError
from kineograph.core.noise import key_of
from kineograph.core.run_folder import RunFolder, write_atomic, write_json
from kineograph.core.task import Task
from kineograph.data.source import Split
from kineograph.doctor.machine import release_memory
from kineograph.media.clips import write_clip
from kineograph.media.curves import draw_curves
from kineograph.media.filenames import reserve_path, slugify
from kineograph.media.grids import (
    make_animated_comparison,
    make_animated_grid,
    make_comparison,
    make_film_strip,
    make_grid,
)
from kineograph.sample.inference import BATCH, draw_across_ranks, sampling_noise
from kineograph.stage.data import StageData
from kineograph.stage.spec import Plan, StagePlan
from kineograph.text.clip_embedding import IMAGE
from kineograph.train.stepper import Stepper
from kineograph.train.trackers import Tracker

_TOO_LARGE = (
    "not all samples were drawn, the GPU has no memory for them beside training; it goes on. "
    "A smaller train.batch_size draws fewer at a time, train.show=latents decodes none, train.sample_every=0 draws none"
)
REDRAWN = 60.0  # seconds between drawings of the curves while a stage trains: each takes the host about one


@dataclass(frozen=True)
class _Asked:
    prompts: list[str] | None  # None: the task reads no captions
    captions: list[str]  # what each sample is called
    beside: Batch  # the real items that it may draw from
    own: bool = False  # a person's prompts, not those of the items


class Previews:
    """Called by the Trainer with (step, stepper). What is drawn is encoded and written later, by the first process in the background:
    nobody waits for that."""

    def __init__(
        self,
        plan: Plan,
        stage: StagePlan,
        folder: RunFolder,
        data: StageData,
        trackers: list[Tracker],
        device: torch.device,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.plan, self.stage, self.folder, self.data = plan, stage, folder, data
        self.trackers, self.device, self.note = trackers, device, note
        self.shape = stage.spec.data.shape
        self._curves_at = time.monotonic()
        self._left: list[Callable[[], None]] = []
        self._alone = True  # whether prompts of a person's own can be drawn, as far as is known

    def __call__(self, step: int, stepper: Stepper) -> Callable[[], None]:
        """All processes draw. → what the first one has to write."""
        self._left = []
        try:
            self._draw_all(step, stepper)
        except torch.OutOfMemoryError as error:
            if distributed.is_active():  # the others would wait for this one
                raise
            self.note(f"{self.stage.name}  step {step}: {_TOO_LARGE} ({str(error).splitlines()[0]})")
        release_memory()  # drawing is far from training's shapes, and what it took is never asked for again
        writing, self._left = self._left, []
        if time.monotonic() - self._curves_at > REDRAWN:
            writing.append(self.curves)

        def write() -> None:
            for each in writing:
                each()

        return write

    def _draw_all(self, step: int, stepper: Stepper) -> None:
        if self.stage.train.show == "latents":
            self._latents(step, stepper)
            return
        if isinstance(stepper.task, SupportsSampling):
            self._samples(step, stepper)
            for split in dict.fromkeys(self.stage.train.grids):
                self._grid(step, stepper, split)
        self._reconstructions(step, stepper)

    def curves(self) -> None:
        """At the end of a stage always, before it now and then."""
        self._curves_at = time.monotonic()
        if distributed.is_first() and self.folder.metrics_file.is_file():
            draw_curves(self.folder.metrics_file, self.folder.path / "curves.png")

    def _samples(self, step: int, stepper: Stepper) -> None:
        with stepper.eval_mode() as task:
            asked, pixels = self._drawn(task)
        online = None
        if stepper.emas:
            with stepper.eval_mode(ema=False) as task:
                online = self._draw(task, asked.prompts, asked.beside)
        if distributed.is_first():
            speeds = [self.shape.fps if asked.own else self._fps(asked.beside, row) for row in range(len(pixels))]
            self._left.append(partial(self._write_samples, step, asked.captions, pixels, online, speeds))

    def _write_samples(
        self, step: int, captions: list[str], pixels: Tensor, online: Tensor | None, speeds: list[float]
    ) -> None:
        out = self.folder.samples(self.stage.name, step)
        shutil.rmtree(out, ignore_errors=True)  # a run taken up from before this step draws it again
        suffix = self._suffix(pixels)
        listed = []
        for number, (clip, caption) in enumerate(zip(pixels, captions, strict=True)):
            path = write_clip(reserve_path(out, slugify(caption), number, f".{suffix}"), clip, speeds[number])
            write_atomic(path.with_suffix(".txt"), f"{caption}\n")
            listed.append({"file": path.name, "prompt": caption})
            if clip.shape[0] > 1:
                make_film_strip(clip).save(path.with_suffix(".strip.png"))
        write_json(out / "prompts.json", listed)
        sheet = out / "grid.png"
        captions = self._logged(captions)
        make_grid(list(pixels), captions=captions).save(sheet)
        if online is not None:
            write_clip(
                out / f"online-beside-ema.{_moving(online)}",
                make_animated_comparison([("online", list(online)), ("EMA", list(pixels))]),
                self.shape.fps,
            )
        if pixels.shape[1] > 1:
            sheet = write_clip(out / "grid.gif", make_animated_grid(list(pixels), captions=captions), self.shape.fps)
        self._track(step, "samples", sheet, "; ".join(captions))

    def _suffix(self, pixels: Tensor) -> str:
        """Of a file with one clip in it."""
        wanted = self.stage.train.format
        return wanted if wanted != "auto" else _moving(pixels)

    def _latents(self, step: int, stepper: Stepper) -> None:
        """What would be decoded, undecoded: a large codec costs more memory than the model."""
        asked = self._asked(stepper.task)
        tensors: dict[str, Tensor] = {}
        with stepper.eval_mode() as task:
            if isinstance(task, SupportsLatentSampling):
                asked, tensors["samples"] = self._drawn(task, latents=True)
            real = self.data.fixed_batch(len(asked.captions))
            if real.pixels is not None and isinstance(task, SupportsCaching) and task.can_cache(self.stage.spec.config):
                tensors["inputs"] = self._in_parts(real, lambda part: _encoded(task, part))
        if not distributed.is_first():
            return
        out = self.folder.samples(self.stage.name, step)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in tensors.items()}, out / "latents.safetensors")
        listed = [{"row": row, "prompt": caption} for row, caption in enumerate(asked.captions)]
        write_json(out / "prompts.json", listed)
        write_atomic(out / "latents.txt", "".join(f"{caption}\n" for caption in asked.captions))

    @property
    def _micro(self) -> int:
        """Rows that training holds at once: as many are drawn and decoded at a time."""
        return max(1, self.stage.train.batch_size // self.stage.train.accumulate)

    def _in_parts(self, batch: Batch, make: Callable[[Batch], Tensor]) -> Tensor:
        """A few rows at a time, on the CPU afterwards. They are too few to be shared out: the first process
        makes them, and those that hold its model with it."""
        if distributed.data_rank():
            return torch.empty(0)
        places = range(len(batch))
        parts = [make(batch.rows(places[at : at + self._micro]).to(self.device)) for at in places[:: self._micro]]
        return torch.cat([part.float().cpu() for part in parts])

    def _asked(self, task: Task) -> _Asked:
        count = self.stage.train.samples
        real = self.data.fixed_batch(count)
        told = self._is_told(task, real)
        if told and self._alone and isinstance(self.plan.prompts, list):
            own = self.plan.prompts[:count]
            return _Asked(own, own, _strangers(self.data.fixed_batch(len(own)), own, can_animate(task)), own=True)
        prompts = real.captions if told else None
        given = real.text_embeds is not None or IMAGE in real.extra
        return _Asked(prompts, prompts or (real.captions if given else None) or [""] * count, real)

    def _drawn(self, task: Task, latents: bool = False) -> tuple[_Asked, Tensor]:
        """Samples, and what they are of. A stage that needs a real picture (its lower stage is not trained yet) draws validation's own captions."""
        asked = self._asked(task)
        try:
            return asked, self._draw(task, asked.prompts, asked.beside, latents)
        except InputError as error:
            if not asked.own:
                raise
            self._alone = False
            self.note(f"{self.stage.name}: captions of validation items are drawn in place of `prompts`: {error}")
            asked = self._asked(task)
            return asked, self._draw(task, asked.prompts, asked.beside, latents)

    def _is_told(self, task: Task, real: Batch) -> bool:
        """Whether the task draws after captions, and not after the text that comes with the data."""
        declared = self.stage.spec.config.reads()
        return "captions" in declared or (real.text_embeds is None and takes_captions(task))

    def _grid(self, step: int, stepper: Stepper, split: Split) -> None:
        """Real items of a split beside what the averaged weights draw for their captions."""
        real = self.data.fixed_batch(self.stage.train.samples, split)
        if real.pixels is None:  # codebook ids alone
            return
        with stepper.eval_mode() as task:
            drawn = self._draw(task, real.captions if self._is_told(task, real) else None, real)
        if distributed.is_first():
            rows = [("real", _real(resize_reference(stepper.task, real.video), real)), ("generated", list(drawn))]
            captions = self._logged(real.captions or [""] * len(real))
            self._left.append(partial(self._write_grid, step, split, rows, captions))

    def _write_grid(self, step: int, split: Split, rows: list[tuple[str, list[Tensor]]], captions: list[str]) -> None:
        path = self.folder.samples(self.stage.name, step) / f"{split}-grid.png"
        make_comparison(rows, captions).save(path)
        write_atomic(path.with_suffix(".txt"), "".join(f"{caption}\n" for caption in captions))
        if any(len(clip) > 1 for clip in rows[1][1]):
            path = write_clip(path.with_suffix(".gif"), make_animated_comparison(rows), self.shape.fps)
        self._track(step, f"grids/{split}", path, "; ".join(captions))

    def _logged(self, captions: list[str]) -> list[str]:
        return [self.stage.train.caption_prefix + caption for caption in captions]

    def _draw(self, task: Task, prompts: list[str] | None, real: Batch, latents: bool = False) -> Tensor:
        options = self.stage.spec.config.sample_options
        rows = len(prompts) if prompts is not None else len(real)
        noise = sampling_noise(key_of(self.plan.seed, "samples") >> 1, torch.arange(rows))
        asked = Prompts(noise, prompts, frames=self.stage.train.sample_frames, batch=real)
        return draw_across_ranks(task, asked, options, self.device, min(BATCH, self._micro), latents)

    def _reconstructions(self, step: int, stepper: Stepper) -> None:
        batch = self.data.fixed_batch(self.stage.train.samples)
        if batch.pixels is None:
            return
        task = stepper.task
        if not isinstance(task, SupportsReconstruction) or not task.can_reconstruct():
            return
        with stepper.eval_mode():
            shown = self._in_parts(batch, task.reconstruct)
        if stepper.emas:
            with stepper.eval_mode(ema=False):
                online = self._in_parts(batch, task.reconstruct)
        if not distributed.is_first():
            return
        inputs = _real(batch.video, batch)
        kind = "EMA" if stepper.emas else "reconstruction"
        rows = [("input", inputs), (kind, _real(shown, batch))]
        if stepper.emas:
            rows.insert(1, ("online", _real(online, batch)))
        self._left.append(partial(self._write_reconstructions, step, batch, rows))

    def _write_reconstructions(self, step: int, batch: Batch, rows: list[tuple[str, list[Tensor]]]) -> None:
        assert batch.pixels is not None
        path = self.folder.validation(self.stage.name) / f"step-{step:08d}.{_moving(batch.pixels)}"
        fps = float(batch.fps.median()) if batch.fps is not None else self.shape.fps
        write_clip(path, make_animated_comparison(rows), fps)
        captions = batch.captions or [""] * len(batch)
        if batch.captions is not None:
            write_atomic(path.with_suffix(".txt"), "".join(f"{caption}\n" for caption in captions))
        if self.stage.train.format in ("mp4", "gif"):
            self._one_by_one(
                path.with_suffix(""), batch, {"input": rows[0][1], "reconstruction": rows[-1][1]}, captions
            )
        self._track(step, "reconstructions", path, "input, online, EMA")

    def _one_by_one(self, out: Path, batch: Batch, clips: dict[str, list[Tensor]], captions: list[str]) -> None:
        """A file for each clip at its own speed, and its text."""
        shutil.rmtree(out, ignore_errors=True)
        for number, caption in enumerate(captions):
            for name, rows in clips.items():
                path = out / f"{number:03d}-{name}.{self.stage.train.format}"
                write_clip(path, rows[number], self._fps(batch, number))
            write_atomic(out / f"{number:03d}.txt", f"{caption}\n")

    def _fps(self, batch: Batch, number: int) -> float:
        """Of one item."""
        return float(batch.fps[number]) if batch.fps is not None else self.shape.fps

    def _track(self, step: int, name: str, path: Any, caption: str) -> None:
        for tracker in self.trackers:
            tracker.log_media(step, f"{self.stage.name}/{name}", path, caption)


def _strangers(real: Batch, prompts: list[str], animated: bool) -> Batch:
    """Items that have nothing to do with the prompts: what would say what is to be seen is taken out. What prompts are drawn together with
    stays: a sketch, and the picture that is `animated`."""
    extra = {name: value for name, value in real.extra.items() if not name.endswith("_embed")}
    return replace(
        real,
        pixels=real.pixels if animated else None,
        tokens=None,
        latents=None,
        text_embeds=None,
        text_mask=None,
        captions=prompts,
        extra=extra,
    )


def _real(pixels: Tensor, batch: Batch) -> list[Tensor]:
    """Each row's frames without its padding, on the CPU."""
    clips = list(pixels.float().cpu())
    if batch.frame_mask is None:
        return clips
    return [clip[:length] for clip, length in zip(clips, batch.frame_mask.sum(1).tolist(), strict=True)]


def _encoded(task: SupportsCaching, part: Batch) -> Tensor:
    made = task.precompute(part)
    return next(made[kind] for kind in KINDS if kind in made)


def _moving(pixels: Tensor) -> str:
    return "png" if pixels.shape[1] == 1 else "gif"
