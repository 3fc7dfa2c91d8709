"""A trained stage that draws: checks a request against the stage, reads its inputs and draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kineograph.core import distributed
from kineograph.core.batch import Sound
from kineograph.core.capabilities import SupportsSampling, can_animate, makes_sound, sample_shape, takes_captions
from kineograph.core.config import Config
from kineograph.core.errors import InputError
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.core.prompt import Prompt
from kineograph.core.run_folder import RunFolder
from kineograph.process.solvers import DiffusionSample
from kineograph.sample.batches import RowBatches
from kineograph.sample.inference import draw_parts, draw_parts_across_ranks
from kineograph.sample.limits import ClipLimits
from kineograph.sample.options import dump_options, find_changes, resolve_options
from kineograph.sample.output import SampleWriter
from kineograph.sample.prime import Mask, Prime
from kineograph.sample.prompt_file import check_fields, name_prompt, refuse_scenes
from kineograph.sample.request import SampleRequest
from kineograph.sample.rows import Row, RowReader, group_rows, make_prompts
from kineograph.sample.sketch import Sketch, read_sketch
from kineograph.stage.load import StageLoader, choose_sampling_stage
from kineograph.stage.spec import read_batch, read_stage
from kineograph.train import checkpoint as checkpoints

if TYPE_CHECKING:
    from kineograph.sample.story import Story


@dataclass(frozen=True)
class Drawing:
    """A request that fits the stage, with its inputs read: ready to be drawn."""

    request: SampleRequest  # resolved
    options: Config | None  # the stage's `sample` section as used
    rows: list[Row]
    sketch: Sketch | None
    fps: list[float]  # of each row
    sidecar: dict[str, Any]  # the JSON keys that all rows share, and those of the first row's inputs


@dataclass(frozen=True)
class Samples:
    """Pictures or clips, one per row, with what draws them again."""

    clips: list[Tensor] = field(repr=False)  # T C H W each, float in [0, 1], on the CPU
    captions: list[str | None]  # of each row
    drawing: Drawing = field(repr=False)
    sounds: list[Sound] | None = field(default=None, repr=False)  # of each row; None: the stage makes no sound

    @cached_property
    def pixels(self) -> Tensor:
        """All rows, B T C H W."""
        lengths = sorted({len(clip) for clip in self.clips})
        if len(lengths) > 1:
            raise InputError(f"the clips have different lengths ({', '.join(map(str, lengths))} frames): use .clips")
        return torch.stack(self.clips)

    @property
    def fps(self) -> float:
        """Of the first row."""
        return self.drawing.fps[0]

    @property
    def options(self) -> Config | None:
        """The stage's `sample` section as used."""
        return self.drawing.options

    @property
    def request(self) -> SampleRequest:
        return self.drawing.request

    @property
    def sidecar(self) -> dict[str, Any]:
        """The JSON keys that all rows share."""
        return self.drawing.sidecar

    def __len__(self) -> int:
        return len(self.clips)

    def save(self, folder: str | Path, format: str | None = None) -> list[Path]:
        """Write each row as media with a JSON sidecar. → the media files, then a contact sheet of several."""
        writer = SampleWriter(self.drawing, Path(folder), format)
        for row, clip in enumerate(self.clips):
            writer.write(row, clip, self.sounds[row] if self.sounds is not None else None)
        return writer.finish()


class Sampler:
    """A trained stage that draws. `kineograph.load("runs/x")` returns one."""

    def __init__(self, stages: StageLoader, stage: str, step: int, ema: bool) -> None:
        spec = read_stage(stages.run.config(), stage)
        self.run, self.stage, self.step, self.ema = stages.run, stage, step, ema
        self.task = stages.load(stage, step, ema)
        if not isinstance(self.task, SupportsSampling):
            raise InputError(
                f"stage {stage!r} of {self.run.path} cannot sample: {type(self.task).__name__} only encodes and decodes; "
                "use the stage of a generator"
            )
        self.task_name = spec.config.task
        self.shape = sample_shape(self.task, spec.data.shape)
        self.options = spec.config.sample_options
        self.device = stages.device
        self.limits = ClipLimits(self.task, self.task_name, self.shape)
        self._spec, self._data, self._config, self._stages = spec, spec.data, spec.config, stages
        self._batches: dict[tuple[Any, ...], RowBatches] = {}

    @staticmethod
    def open(
        run: str | Path | RunFolder,
        checkpoint: str | int = "last",
        stage: str | None = None,
        device: str = "auto",
        ema: bool = True,
        compile: bool = False,
    ) -> Sampler:
        """Load the stage that draws and the stages that it refers to."""
        folder = run if isinstance(run, RunFolder) else RunFolder.existing(run)
        note = distributed.on_first_rank(distributed.print_note)
        stages = StageLoader(folder, distributed.resolve_device(device), note, compiled=compile)
        enable_flash_attention_3(stages.device)
        name = choose_sampling_stage(folder, stage)
        return Sampler(stages, name, checkpoints.select(folder.checkpoints(name), checkpoint).step, ema)

    @staticmethod
    def for_request(request: SampleRequest) -> Sampler:
        """Open the run of a request; refuse first, without loading it, a prompt's field that its task cannot use."""
        folder = RunFolder.existing(request.run)
        check_fields(
            [prompt for prompt in request.prompts or () if isinstance(prompt, Prompt)],
            read_stage(folder.config(), choose_sampling_stage(folder, request.stage)),
        )
        return Sampler.open(
            request.run, request.checkpoint, request.stage, request.device, request.ema, request.compile
        )

    def sample(
        self,
        prompts: Sequence[str | Prompt] | str | Prompt | None = None,
        *,
        size: int | tuple[int, int] | None = None,
        **fields: Any,
    ) -> Samples:
        """`count` samples of each prompt; `fields` are those of SampleRequest. The same arguments give the same pictures, for any `batch`."""
        prompts = [prompts] if isinstance(prompts, str | Prompt) else prompts
        size = (size, size) if isinstance(size, int) else size
        return self.draw(self._make_request(prompts, size=size, **fields))

    def story(self, scenes: Sequence[str | Prompt], **fields: Any) -> Story:
        """One long clip, a scene per caption, each continuing the last `overlap` frames of the previous one; see sample/story.py."""
        from kineograph.sample.story import check_scenes

        return self.plan_story(self._make_request(check_scenes(scenes), **fields))

    def _make_request(self, prompts: Sequence[str | Prompt] | None, **fields: Any) -> SampleRequest:
        return SampleRequest(prompts=list(prompts) if prompts is not None else None, **self._own_fields(), **fields)

    def _own_fields(self) -> dict[str, Any]:
        """The fields of a request that opening the run has settled."""
        return {
            "run": str(self.run.path),
            "stage": self.stage,
            "checkpoint": self.step,
            "ema": self.ema,
            "device": str(self.device),
            "compile": self._stages.compiled,
        }

    def draw(self, request: SampleRequest, across_ranks: bool = False) -> Samples:
        """Row `prompt index × count + number` has its own noise. With `across_ranks` all ranks call this, and rank 0 gets all rows."""
        drawing = self.plan(request)
        clips = {row: (clip, sound) for row, clip, sound in self.draw_clips(drawing, across_ranks)}
        captions = [row.caption for row in drawing.rows]
        ordered = [clips[row] for row in sorted(clips)]
        sounds = [sound for _, sound in ordered if sound is not None]
        return Samples([clip for clip, _ in ordered], captions[: len(clips)], drawing, sounds or None)

    def plan(self, request: SampleRequest) -> Drawing:
        """Check a request against the stage and read its inputs."""
        if request.overlap is not None:
            raise InputError(f"overlap={request.overlap} has an effect in a story only: leave it out")
        entries = [prompt for prompt in request.prompts or () if isinstance(prompt, Prompt)]
        check_fields(entries, self._spec)
        refuse_scenes(entries, "draw it with kineo story")
        request, options = self._resolve(request)
        for prompt in entries:
            with name_prompt(prompt):
                check_guidance(options, replace(request, negative=prompt.negative))
        rows = self._read_rows(request, options)
        sketch = self._read_sketch(request, max(row.frames or self.shape.frames for row in rows))
        fps = [self._fps(request, row.prime) for row in rows]
        first = rows[0]  # most requests have one picture for all rows
        sidecar = self._build_sidecar(request, options, sketch, first.prime, first.mask)
        return Drawing(request, options, rows, sketch, fps, sidecar)

    def draw_clips(self, drawing: Drawing, across_ranks: bool = False) -> Iterator[tuple[int, Tensor, Sound | None]]:
        """→ the number of a row, its pixels, T C H W, and its sound; rows of one shape follow one another. Several ranks: all on rank 0."""
        request, draw = drawing.request, draw_parts_across_ranks if across_ranks else draw_parts
        for indices in group_rows(drawing.rows):
            rows = [drawing.rows[index] for index in indices]
            frames = rows[0].frames
            sketch = drawing.sketch.to_batch(len(rows), 0, frames) if drawing.sketch is not None else None
            batches = self._choose_batches(request, frames)
            left = iter(indices)
            prompts = make_prompts(rows, request.size, sketch)
            for part in draw(self.task, prompts, drawing.options, self.device, batches):
                sounds = part.sound if part.sound is not None else [None] * len(part.pixels)
                for clip, sound in zip(part.pixels, sounds, strict=True):
                    yield next(left), clip, self.to_sound(sound)

    def to_sound(self, samples: Tensor | None) -> Sound | None:
        """The sound T S of a clip that the stage has drawn."""
        rate = self.shape.sample_rate
        return Sound(samples, rate) if samples is not None and rate is not None else None

    def _choose_batches(self, request: SampleRequest, frames: int | None) -> RowBatches:
        """Samples at a time; what was found to fit holds for later calls."""
        key = (request.batch, frames, request.size)
        if key not in self._batches:
            rows = request.batch or read_batch(self.run.config(), "sample")
            # A second batch size would be compiled again.
            measure = not self._stages.compiled
            self._batches[key] = RowBatches(rows, self.device, measure=measure, note=self._stages.note)
        return self._batches[key]

    def plan_story(self, request: SampleRequest) -> Story:
        """A story ready to be drawn. `frames` are drawn per scene: the first shows all of them, each later one `frames − overlap`."""
        from kineograph.sample.story import Story, plan_scenes

        if request.count != 1 or request.size is not None or request.mask is not None:
            raise InputError("count, size and mask have no effect in a story: leave them out")
        if request.overlap is not None and request.options.keys() & {"overlap", "sample.overlap"}:
            raise InputError("sample.overlap is set twice, by --overlap too: leave one of them out")
        self.limits.check_continues("a story")
        if not takes_captions(self.task):
            raise InputError(
                f"a story needs captions, and {self.task_name} was trained without: draw a long clip with kineo sample --frames N"
            )
        check_fields([scene for scene in request.prompts or () if isinstance(scene, Prompt)], self._spec)
        resolved = self.resolve_options(request.options, guidance=request.guidance, steps=request.steps)
        scenes = plan_scenes(request, self.limits, resolved)
        overlap = request.overlap or self.limits.default_overlap(request.frames or self.shape.frames, resolved)
        extra = self._with_overlap(request.options, overlap)
        prompts = request.entries or []
        request, options = self._resolve(replace(request, overlap=overlap, options=extra))
        for scene, prompt in zip(scenes, prompts, strict=True):
            with name_prompt(prompt):
                check_guidance(options, replace(request, negative=scene.negative))
                self.limits.check_shape(scene.frames)
                # A scene longer than the trained length continues itself by the same overlap.
                scene.options = self.resolve_options(self._with_overlap(request.options, scene.overlap))
        first = replace(request, prompts=[prompts[0].model_copy(update={"overlap": None})])
        with name_prompt(prompts[0]):
            prime = self._read_rows(first, options)[0].prime
        sketch = self._read_sketch(request, scenes[-1].stop, story=True)
        sidecar = self._build_sidecar(request, options, sketch, prime)
        return Story(self, request, scenes, prime, options, sketch, self._fps(request, prime), sidecar)

    def _with_overlap(self, options: dict[str, Any], overlap: int) -> dict[str, Any]:
        has_overlap = self.options is not None and "overlap" in type(self.options).model_fields
        if not has_overlap:
            return options
        return {key: value for key, value in options.items() if key.removeprefix("sample.") != "overlap"} | {
            "overlap": overlap
        }

    # Checking ----------------------------------------------------------------------------------------------------

    def _resolve(self, request: SampleRequest) -> tuple[SampleRequest, Config | None]:
        """Check a request against the stage. → the request with stage, step and changed options filled in; the options as used."""
        if request.has_captions and not takes_captions(self.task):
            raise InputError(f"{self.task_name} was trained without captions: leave the prompts out, and use --count")
        frames = request.frames or self.shape.frames
        longest = max((prompt.frames or frames for prompt in request.entries or ()), default=frames)
        if request.fps is not None and longest == 1:
            raise InputError(f"--fps {request.fps:g} has no effect on a picture: leave it out")
        options = self.resolve_options(request.options, guidance=request.guidance, steps=request.steps)
        check_guidance(options, request)
        if request.prompts is None and request.prime is None and request.sketch is None and takes_captions(self.task):
            raise InputError(
                f'there is no prompt, and {self.task_name} draws captions: give one; "" draws unconditionally'
            )
        if request.frames is not None or request.size is not None:
            self.limits.check_shape(frames, request.size)
        changed = find_changes(self.options, options)
        return replace(request, guidance=None, steps=None, options=changed, **self._own_fields()), options

    def resolve_options(self, options: Mapping[str, Any] | None = None, **flags: Any) -> Config | None:
        """The stage's sampling options with `options` (keys `sample.K` or `K`) and then flags such as guidance applied."""
        return resolve_options(self._config, options, **flags)

    # Reading -----------------------------------------------------------------------------------------------------

    def _read_rows(self, request: SampleRequest, options: Config | None) -> list[Row]:
        rows = RowReader(self.limits, self._data, options, self._stages.note).read(request)
        if can_animate(self.task) and any(row.prime is None for row in rows):
            missing = "--prime is not set" if all(row.prime is None for row in rows) else "some prompts have none"
            self._stages.note(f"{self.task_name} animates a picture, and {missing}: drawing from the caption alone")
        return rows

    def _read_sketch(self, request: SampleRequest, frames: int, story: bool = False) -> Sketch | None:
        if request.sketch is None:
            return None
        size = request.size or (self.shape.height, self.shape.width)
        return read_sketch(
            request.sketch, self.task, self.task_name, self._data, frames, size, self._stages.note, story
        )

    def _fps(self, request: SampleRequest, prime: Prime | None) -> float:
        if makes_sound(self.task):
            if request.fps is not None:
                raise InputError(f"--fps {request.fps:g}: frames and sound would no longer go together; leave it out")
            return self.shape.fps
        return request.fps or (prime.fps if prime is not None else None) or self.shape.fps

    def _build_sidecar(
        self,
        request: SampleRequest,
        options: Config | None,
        sketch: Sketch | None,
        prime: Prime | None,
        mask: Mask | None = None,
    ) -> dict[str, Any]:
        return {
            **request.to_sidecar(),
            # run/stage → sha256; not a copy, since drawing may load more stages.
            "weights": self._stages.loaded_digests,
            "options": dump_options(options),
            "prime": prime.record if prime is not None else None,
            "sketch": sketch.record if sketch is not None else None,
            "mask": mask.record if mask is not None else None,
        }


def check_guidance(options: Config | None, request: SampleRequest) -> None:
    """Refuse what would have no effect."""
    neutral = options.neutral_guidance if isinstance(options, DiffusionSample) else 1
    if request.negative is not None and dict(options or ()).get("guidance") == neutral:
        raise InputError(f"--negative has no effect at guidance={neutral:g}: raise --guidance")
    if request.guidance is not None and request.guidance != neutral and request.prompts is None:
        raise InputError(f"--guidance {request.guidance:g} has no effect without a prompt: give one, or leave it out")
