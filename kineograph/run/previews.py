"""Files to look at while a stage trains: samples of fixed prompts, grids of real and generated clips, reconstructions, curves.

With `train.show: latents` undecoded samples, as tensors. Captions are written beside each file.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from kineograph.cache.pack import KINDS
from kineograph.core import distributed
from kineograph.core.batch import Batch, Sound
from kineograph.core.capabilities import (
    SupportsCaching,
    SupportsLatentSampling,
    SupportsReconstruction,
    SupportsSampling,
    can_animate,
    resize_reference,
    sample_shape,
    takes_captions,
)
from kineograph.core.errors import InputError
from kineograph.core.noise import key_of
from kineograph.core.notes import Note, discard
from kineograph.core.run_folder import RunFolder, write_atomic, write_json
from kineograph.core.task import Task
from kineograph.data.open_source import Split
from kineograph.doctor.machine import release_memory
from kineograph.media.clips import choose_format, write_clip
from kineograph.media.curves import draw_curves
from kineograph.media.filenames import reserve_path, slugify
from kineograph.media.grids import (
    make_animated_comparison,
    make_animated_grid,
    make_comparison,
    make_film_strip,
    make_grid,
)
from kineograph.sample.batches import MOST, RowBatches
from kineograph.sample.inference import draw_across_ranks
from kineograph.sample.limits import ClipLimits
from kineograph.sample.prompt_file import check_fields
from kineograph.sample.request import SampleRequest
from kineograph.sample.rows import Row, RowReader, group_rows, make_prompts
from kineograph.stage.data import StageData
from kineograph.stage.spec import Plan, StagePlan
from kineograph.text.clip_embedding import IMAGE
from kineograph.train.stepper import Stepper
from kineograph.train.trackers import Tracker

_OUT_OF_MEMORY = (
    "not all samples were drawn, since the GPU has no memory left beside training, which goes on. "
    "Lower train.batch_size, or set train.show=latents or train.sample_every=0"
)
CURVES_EVERY = 60.0  # seconds; drawing the curves takes about one


@dataclass(frozen=True)
class _Subjects:
    """The rows to draw, with the items behind them."""

    rows: list[Row]
    captions: list[str]  # the label of each sample
    real: Batch  # real items, for tasks that draw from one
    from_config: bool = False  # `prompts` of the config, not captions of the items


class _Clips(NamedTuple):
    """Drawn clips by row."""

    pixels: list[Tensor]  # or latents
    sounds: list[Sound | None]


class Previews:
    """Draws when the Trainer calls it with (step, stepper); the first process encodes and writes the files in the background."""

    def __init__(
        self,
        plan: Plan,
        stage: StagePlan,
        folder: RunFolder,
        data: StageData,
        trackers: list[Tracker],
        device: torch.device,
        note: Note = discard,
        on_samples: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.on_samples = on_samples
        self.plan, self.stage, self.folder, self.data = plan, stage, folder, data
        self.trackers, self.device, self.note = trackers, device, note
        self.shape = stage.spec.data.shape
        self._curves_at = time.monotonic()
        self._writes: list[Callable[[], None]] = []  # left to the background
        self._prompts_work = True  # until drawing the config's prompts fails
        self._rows: list[Row] | None = None  # of the config's prompts
        # The other processes cannot know that one of them draws fewer at a time.
        self._batches = RowBatches(
            plan.sample.rows, device, most=min(MOST, stage.train.micro_batch_size), measure=False, retry=not distributed.is_active(),
            key="sample.batch", note=lambda line: self.note(f"{stage.name}: {line}"),
        )  # fmt: skip

    def __call__(self, step: int, stepper: Stepper) -> Callable[[], None]:
        """Draw on all processes. → a function that writes the files, for the first process"""
        self._writes = []
        try:
            self._draw_all(step, stepper)
        except torch.OutOfMemoryError as error:
            if distributed.is_active():  # the other processes would wait forever
                raise
            self.note(f"{self.stage.name}  step {step}: {_OUT_OF_MEMORY} ({str(error).splitlines()[0]})")
        release_memory()  # training never reuses blocks of these shapes
        writes, self._writes = self._writes, []
        if time.monotonic() - self._curves_at > CURVES_EVERY:
            writes.append(self.draw_curves)

        def write() -> None:
            for part in writes:
                part()

        return write

    def _draw_all(self, step: int, stepper: Stepper) -> None:
        if self.stage.train.show == "latents":
            self._save_latents(step, stepper)
            return
        if isinstance(stepper.task, SupportsSampling):
            self._draw_samples(step, stepper)
            for split in dict.fromkeys(self.stage.train.grids):
                self._draw_grid(step, stepper, split)
        self._draw_reconstructions(step, stepper)

    def draw_curves(self) -> None:
        """Draw the curves of the run: now and then, and at the end of a stage."""
        self._curves_at = time.monotonic()
        if distributed.is_first() and self.folder.metrics_file.is_file():
            draw_curves(self.folder.metrics_file, self.folder.path / "curves.png")

    def _draw_samples(self, step: int, stepper: Stepper) -> None:
        with stepper.eval_mode() as task:
            subjects, (pixels, sounds) = self._draw_subjects(task)
        online = None
        if stepper.emas:
            with stepper.eval_mode(ema=False) as task:
                online = self._draw(task, subjects.rows, subjects.real).pixels
        if distributed.is_first():
            fps = [
                self.shape.fps if subjects.from_config else self._fps(subjects.real, row) for row in range(len(pixels))
            ]
            self._writes.append(partial(self._write_samples, step, subjects, pixels, sounds, online, fps))
            if self.on_samples is not None:
                clips = [
                    {"caption": caption, "pixels": clip, "fps": rate}
                    for caption, clip, rate in zip(subjects.captions, pixels, fps, strict=True)
                ]
                self.on_samples({"stage": self.stage.name, "split": "samples", "step": step, "samples": clips})
            if not subjects.from_config and any(subjects.captions) and subjects.real.pixels is not None:
                real = _trim_padding(resize_reference(stepper.task, subjects.real.video), subjects.real)
                self._writes.append(partial(self._write_real, step, real, fps))

    def _write_samples(
        self,
        step: int,
        subjects: _Subjects,
        pixels: list[Tensor],
        sounds: list[Sound | None],
        online: list[Tensor] | None,
        fps: list[float],
    ) -> None:
        out = self.folder.samples(self.stage.name, step)
        shutil.rmtree(out, ignore_errors=True)  # of a step that is repeated after a resume
        listed, files = [], []
        captions = subjects.captions
        for number, (clip, sound, caption) in enumerate(zip(pixels, sounds, captions, strict=True)):
            suffix = choose_format(clip, sound) if self.stage.train.format == "auto" else self.stage.train.format
            path = write_clip(reserve_path(out, slugify(caption), number, f".{suffix}"), clip, fps[number], sound)
            write_atomic(path.with_suffix(".txt"), f"{caption}\n")
            listed.append({"file": path.name, **_describe_row(subjects.rows[number], caption)})
            files.append(path)
            if online is not None:  # the same prompt and noise, with the weights of this step
                write_clip(out / "online" / path.name, online[number], fps[number])
            if clip.shape[0] > 1:
                make_film_strip(clip).save(path.with_suffix(".strip.png"))
        write_json(out / "prompts.json", listed)
        sheet = out / "grid.png"
        captions = self._add_prefix(captions)
        make_grid(pixels, captions=captions).save(sheet)
        longest = max(pixels, key=len)
        if online is not None:
            write_clip(
                out / f"online-beside-ema.{choose_format(longest)}",
                make_animated_comparison([("online", online), ("EMA", pixels)]),
                self.shape.fps,
            )
        if len(longest) > 1:
            sheet = write_clip(out / "grid.gif", make_animated_grid(pixels, captions=captions), self.shape.fps)
        self._track(step, "samples", sheet, "; ".join(captions))
        for tracker in self.trackers:
            tracker.log_clips(step, f"{self.stage.name}/sample", list(zip(files, captions, strict=True)))

    def _write_real(self, step: int, real: list[Tensor], fps: list[float]) -> None:
        """Write the items whose captions are drawn, each once and under the name of its samples."""
        samples = self.folder.samples(self.stage.name, step)
        listed = json.loads((samples / "prompts.json").read_text(encoding="utf-8"))
        for number, entry in enumerate(listed):
            path = samples.parent / "real" / entry["file"]
            if not path.exists():
                write_clip(path, real[number], fps[number])

    def _save_latents(self, step: int, stepper: Stepper) -> None:
        """Save undecoded samples: decoding with a large codec may take more memory than the model."""
        subjects = self._choose_subjects(stepper.task)
        tensors: dict[str, Tensor] = {}
        with stepper.eval_mode() as task:
            if isinstance(task, SupportsLatentSampling):
                subjects, (drawn, _) = self._draw_subjects(task, latents=True)
                alike = len({latents.shape for latents in drawn}) == 1
                tensors |= (
                    {"samples": torch.stack(drawn)} if alike else {f"samples.{n}": z for n, z in enumerate(drawn)}
                )
            real = self.data.fixed_batch(len(subjects.captions))
            if real.pixels is not None and isinstance(task, SupportsCaching) and task.can_cache(self.stage.spec.config):
                tensors["inputs"] = self._map_in_parts(real, lambda part: _encode(task, part))
        if not distributed.is_first():
            return
        out = self.folder.samples(self.stage.name, step)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in tensors.items()}, out / "latents.safetensors")
        listed = [
            {"row": number, **_describe_row(row, caption)}
            for number, (row, caption) in enumerate(zip(subjects.rows, subjects.captions, strict=True))
        ]
        write_json(out / "prompts.json", listed)
        write_atomic(out / "latents.txt", "".join(f"{caption}\n" for caption in subjects.captions))

    def _map_in_parts(self, batch: Batch, function: Callable[[Batch], Tensor]) -> Tensor:
        """Apply a function to a few rows at a time. → the results on the CPU; empty except on the first data rank"""
        if distributed.data_rank():
            return torch.empty(0)
        rows, micro = range(len(batch)), self.stage.train.micro_batch_size
        parts = [function(batch.rows(rows[start : start + micro]).to(self.device)) for start in rows[::micro]]
        return torch.cat([part.float().cpu() for part in parts])

    def _choose_subjects(self, task: Task) -> _Subjects:
        count = self.stage.train.samples
        real = self.data.fixed_batch(count)
        uses_captions = self._uses_captions(task, real)
        if uses_captions and self._prompts_work and isinstance(self.plan.prompts, list):
            captions = [prompt.prompt for prompt in self.plan.prompts[:count]]
            unrelated = _remove_content(self.data.fixed_batch(len(captions)), captions, can_animate(task))
            if self._rows is None:
                self._rows = read_prompt_rows(self.plan, self.stage, task, self.note)
            return _Subjects(self._rows, captions, unrelated, from_config=True)
        has_embeddings = real.text_embeds is not None or IMAGE in real.extra
        labels = real.captions if uses_captions or has_embeddings else None
        return _Subjects(self._make_rows(real, uses_captions), labels or [""] * count, real)

    def _make_rows(self, real: Batch, uses_captions: bool) -> list[Row]:
        """A row for each real item, of its caption."""
        captions = real.captions if uses_captions and real.captions is not None else [None] * len(real)
        seed, frames = key_of(self.plan.seed, "samples") >> 1, self.stage.train.sample_frames
        return [Row(None, caption, seed, slot, frames=frames) for slot, caption in enumerate(captions)]

    def _draw_subjects(self, task: Task, latents: bool = False) -> tuple[_Subjects, _Clips]:
        """Draw the config's prompts, or captions of validation items if the task needs a real picture (of an untrained lower stage)."""
        try:
            subjects = self._choose_subjects(task)
            return subjects, self._draw(task, subjects.rows, subjects.real, latents)
        except InputError as error:
            if not self._prompts_work or not isinstance(self.plan.prompts, list):
                raise
            self._prompts_work = False
            self.note(f"{self.stage.name}: draws captions of validation items instead of `prompts`: {error}")
            subjects = self._choose_subjects(task)
            return subjects, self._draw(task, subjects.rows, subjects.real, latents)

    def _uses_captions(self, task: Task, real: Batch) -> bool:
        """Whether the task draws from captions, not from text embeddings in the data."""
        declared = self.stage.spec.config.reads()
        return "captions" in declared or (real.text_embeds is None and takes_captions(task))

    def _draw_grid(self, step: int, stepper: Stepper, split: Split) -> None:
        """Compare real items of a split with samples of their captions, drawn with EMA weights."""
        real = self.data.fixed_batch(self.stage.train.samples, split)
        if real.pixels is None:  # codebook ids alone
            return
        with stepper.eval_mode() as task:
            samples = self._draw(task, self._make_rows(real, self._uses_captions(task, real)), real).pixels
        if distributed.is_first():
            rows = [
                ("real", _trim_padding(resize_reference(stepper.task, real.video), real)),
                ("generated", samples),
            ]
            captions = self._add_prefix(real.captions or [""] * len(real))
            self._writes.append(partial(self._write_grid, step, split, rows, captions))

    def _write_grid(self, step: int, split: Split, rows: list[tuple[str, list[Tensor]]], captions: list[str]) -> None:
        path = self.folder.samples(self.stage.name, step) / f"{split}-grid.png"
        make_comparison(rows, captions).save(path)
        write_atomic(path.with_suffix(".txt"), "".join(f"{caption}\n" for caption in captions))
        if any(len(clip) > 1 for clip in rows[1][1]):
            path = write_clip(path.with_suffix(".gif"), make_animated_comparison(rows), self.shape.fps)
        self._track(step, f"grids/{split}", path, "; ".join(captions))

    def _add_prefix(self, captions: list[str]) -> list[str]:
        return [self.stage.train.caption_prefix + caption for caption in captions]

    def _draw(self, task: Task, rows: list[Row], real: Batch, latents: bool = False) -> _Clips:
        """→ the rows' pixels or latents on the first process; none elsewhere"""
        options = self.stage.spec.config.sample_options
        clips: dict[int, Tensor] = {}
        sounds: dict[int, Tensor] = {}
        for indices in group_rows(rows):
            beside = real if len(indices) == len(real) else real.rows(indices)
            prompts = make_prompts([rows[index] for index in indices], batch=beside)
            drawn = draw_across_ranks(task, prompts, options, self.device, self._batches, latents)
            clips |= dict(zip(indices, drawn.pixels, strict=False))
            sounds |= dict(zip(indices, drawn.sound if drawn.sound is not None else (), strict=False))
        rate, order = self.shape.sample_rate or 0, sorted(clips)
        heard = [Sound(sounds[row], rate) if row in sounds else None for row in order]
        return _Clips([clips[row] for row in order], heard)

    def _draw_reconstructions(self, step: int, stepper: Stepper) -> None:
        batch = self.data.fixed_batch(self.stage.train.samples)
        if batch.pixels is None:
            return
        task = stepper.task
        if not isinstance(task, SupportsReconstruction) or not task.can_reconstruct():
            return
        with stepper.eval_mode():
            reconstructed = self._map_in_parts(batch, task.reconstruct)
        if stepper.emas:
            with stepper.eval_mode(ema=False):
                online = self._map_in_parts(batch, task.reconstruct)
        if not distributed.is_first():
            return
        inputs = _trim_padding(batch.video, batch)
        kind = "EMA" if stepper.emas else "reconstruction"
        rows = [("input", inputs), (kind, _trim_padding(reconstructed, batch))]
        if stepper.emas:
            rows.insert(1, ("online", _trim_padding(online, batch)))
        self._writes.append(partial(self._write_reconstructions, step, batch, rows))

    def _write_reconstructions(self, step: int, batch: Batch, rows: list[tuple[str, list[Tensor]]]) -> None:
        assert batch.pixels is not None
        path = self.folder.validation(self.stage.name) / f"step-{step:08d}.{choose_format(batch.pixels[0])}"
        fps = float(batch.fps.median()) if batch.fps is not None else self.shape.fps
        write_clip(path, make_animated_comparison(rows), fps)
        captions = batch.captions or [""] * len(batch)
        if batch.captions is not None:
            write_atomic(path.with_suffix(".txt"), "".join(f"{caption}\n" for caption in captions))
        if self.stage.train.format in ("mp4", "gif"):
            clips = {"input": rows[0][1], "reconstruction": rows[-1][1]}
            self._write_one_by_one(path.with_suffix(""), batch, clips, captions)
        self._track(step, "reconstructions", path, "input, online, EMA")

    def _write_one_by_one(self, out: Path, batch: Batch, clips: dict[str, list[Tensor]], captions: list[str]) -> None:
        """Write a file for each clip, at its own fps, and one for its caption."""
        shutil.rmtree(out, ignore_errors=True)
        for number, caption in enumerate(captions):
            for name, rows in clips.items():
                path = out / f"{number:03d}-{name}.{self.stage.train.format}"
                write_clip(path, rows[number], self._fps(batch, number))
            write_atomic(out / f"{number:03d}.txt", f"{caption}\n")

    def _fps(self, batch: Batch, row: int) -> float:
        return float(batch.fps[row]) if batch.fps is not None else self.shape.fps

    def _track(self, step: int, name: str, path: Any, caption: str) -> None:
        for tracker in self.trackers:
            tracker.log_media(step, f"{self.stage.name}/{name}", path, caption)


def read_prompt_rows(plan: Plan, stage: StagePlan, task: Task, note: Note) -> list[Row]:
    """Read the inputs of the config's prompts for a stage; refuses what the stage cannot draw."""
    assert isinstance(plan.prompts, list)
    spec, train = stage.spec, stage.train
    prompts = plan.prompts[: train.samples]
    check_fields(prompts, spec)
    seed = key_of(plan.seed, "samples") >> 1
    request = SampleRequest(plan.name, spec.name, prompts=prompts, seed=seed, frames=train.sample_frames)
    limits = ClipLimits(task, spec.config.task, sample_shape(task, spec.data.shape))
    return RowReader(limits, spec.data, spec.config.sample_options, note).read(request)


def _describe_row(row: Row, caption: str) -> dict[str, Any]:
    """For prompts.json."""
    return {"prompt": caption} | (row.prompt.to_json() if row.prompt is not None else {})


def _remove_content(real: Batch, prompts: list[str], animates: bool) -> Batch:
    """Remove what shows the content of unrelated items; a sketch, or the picture that a task `animates`, stays."""
    extra = {name: value for name, value in real.extra.items() if not name.endswith("_embed")}
    return replace(
        real,
        pixels=real.pixels if animates else None,
        tokens=None,
        latents=None,
        text_embeds=None,
        text_mask=None,
        captions=prompts,
        extra=extra,
    )


def _trim_padding(pixels: Tensor, batch: Batch) -> list[Tensor]:
    """Each row's frames without padding, on the CPU."""
    clips = list(pixels.float().cpu())
    if batch.frame_mask is None:
        return clips
    return [clip[:length] for clip, length in zip(clips, batch.frame_mask.sum(1).tolist(), strict=True)]


def _encode(task: SupportsCaching, part: Batch) -> Tensor:
    encoded = task.precompute(part)
    return next(encoded[kind] for kind in KINDS if kind in encoded)
