"""A trained stage that draws: checks a request against the stage, reads its inputs and draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kineograph.core import distributed
from kineograph.core.batch import Prompts
from kineograph.core.capabilities import SupportsSampling, can_animate, sample_shape, takes_captions
from kineograph.core.config import Config, flatten, merge, nest, parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.core.run_folder import RunFolder
from kineograph.process.solvers import DiffusionSample
from kineograph.sample.inference import BATCH, draw, draw_across_ranks, sampling_noise
from kineograph.sample.limits import ClipLimits
from kineograph.sample.output import save_samples
from kineograph.sample.prime import Mask, Prime, read_mask, read_prime
from kineograph.sample.request import SampleRequest
from kineograph.sample.sketch import Sketch, read_sketch
from kineograph.stage.load import StageLoader, choose_sampling_stage
from kineograph.stage.spec import read_stage
from kineograph.train import checkpoint as checkpoints

if TYPE_CHECKING:
    from kineograph.sample.story import Story


@dataclass(frozen=True)
class Samples:
    """Pictures or clips, one per row, with what draws them again."""

    pixels: Tensor = field(repr=False)  # B T C H W, float in [0, 1], on the CPU
    fps: float
    captions: list[str | None]  # of each row
    options: Config | None  # the stage's `sample` section as used
    request: SampleRequest = field(repr=False)  # resolved
    sidecar: dict[str, Any] = field(repr=False)  # the JSON keys that all rows share

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def save(self, folder: str | Path, format: str | None = None) -> list[Path]:
        """Write each row as media with a JSON sidecar. → the media files, then a contact sheet of several."""
        return save_samples(self, Path(folder), format)


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
        self._data, self._config, self._stages = spec.data, spec.config, stages

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
        return Sampler.open(
            request.run, request.checkpoint, request.stage, request.device, request.ema, request.compile
        )

    def sample(
        self,
        prompts: Sequence[str] | str | None = None,
        *,
        size: int | tuple[int, int] | None = None,
        batch: int = BATCH,
        **fields: Any,
    ) -> Samples:
        """`count` samples of each prompt; `fields` are those of SampleRequest. The same arguments give the same pictures, for any `batch`."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        size = (size, size) if isinstance(size, int) else size
        return self.draw(self._make_request(prompts, size=size, **fields), batch)

    def story(self, scenes: Sequence[str], **fields: Any) -> Story:
        """One long clip, a scene per caption, each continuing the last `overlap` frames of the previous one; see sample/story.py."""
        from kineograph.sample.story import check_scenes

        return self.plan_story(self._make_request(check_scenes(scenes), **fields))

    def _make_request(self, prompts: Sequence[str] | None, **fields: Any) -> SampleRequest:
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

    def draw(self, request: SampleRequest, batch: int = BATCH, across_ranks: bool = False) -> Samples:
        """Row `prompt index × count + number` has its own noise. With `across_ranks` all ranks call this, and rank 0 gets all rows."""
        if request.overlap is not None:
            raise InputError(f"overlap={request.overlap} has an effect in a story only: leave it out")
        request, options = self._resolve(request)
        mask = self._read_mask(request)
        prime = self._read_prime(request, options)
        sketch = self._read_sketch(request, request.frames or self.shape.frames)
        captions = [text for text in request.prompts for _ in range(request.count)] if request.prompts else None
        rows = len(captions) if captions is not None else request.count
        height, width = request.size or (None, None)
        prompts = Prompts(
            noise=sampling_noise(request.seed, torch.arange(rows)),
            captions=captions,
            negative=[request.negative] * rows if request.negative is not None else None,
            frames=request.frames,
            height=height,
            width=width,
            prime=prime.frames.expand(rows, -1, -1, -1, -1) if prime is not None else None,
            mask=mask.inpaint.expand(rows, -1, -1) if mask is not None else None,
            batch=sketch.to_batch(rows) if sketch is not None else None,
        )
        pixels = (draw_across_ranks if across_ranks else draw)(self.task, prompts, options, self.device, batch)
        labels: list[str | None] = list(captions) if captions is not None else [None] * rows
        sidecar = self._build_sidecar(request, options, prime, sketch, mask)
        return Samples(pixels, self._fps(request, prime), labels[: len(pixels)], options, request, sidecar)

    def plan_story(self, request: SampleRequest) -> Story:
        """A story ready to be drawn. `frames` are drawn per scene: the first shows all of them, each later one `frames − overlap`."""
        from kineograph.sample.story import Story

        if request.count != 1 or request.size is not None or request.mask is not None:
            raise InputError("count, size and mask have no effect in a story: leave them out")
        self.limits.check_continues("a story")
        if not takes_captions(self.task):
            raise InputError(
                f"a story needs captions, and {self.task_name} was trained without: draw a long clip with kineo sample --frames N"
            )
        frames = request.frames or self.shape.frames
        overlap = request.overlap
        if overlap is None:
            resolved = self.resolve_options(request.options, guidance=request.guidance, steps=request.steps)
            overlap = self.limits.default_overlap(frames, resolved)
        self.limits.check_overlap(overlap, frames, "--overlap" if request.overlap is not None else "sample.overlap")
        extra = request.options
        if self.options is not None and "overlap" in type(self.options).model_fields:
            # A scene longer than the trained length continues itself by the same overlap.
            extra = {**extra, "overlap": overlap}
        request, options = self._resolve(replace(request, overlap=overlap, options=extra))
        prime = self._read_prime(request, options)
        scenes = request.prompts or []
        sketch = self._read_sketch(request, frames + (len(scenes) - 1) * (frames - overlap), story=True)
        sidecar = self._build_sidecar(request, options, prime, sketch)
        given = prime.frames if prime is not None else None
        return Story(self, request, overlap, frames, given, options, sketch, self._fps(request, prime), sidecar)

    # Checking ----------------------------------------------------------------------------------------------------

    def _resolve(self, request: SampleRequest) -> tuple[SampleRequest, Config | None]:
        """Check a request against the stage. → the request with stage, step and changed options filled in; the options as used."""
        if request.prompts is not None and not takes_captions(self.task):
            raise InputError(f"{self.task_name} was trained without captions: leave the prompts out, and use --count")
        frames = request.frames or self.shape.frames
        if request.fps is not None and frames == 1:
            raise InputError(f"--fps {request.fps:g} has no effect on a picture: leave it out")
        options = self.resolve_options(request.options, guidance=request.guidance, steps=request.steps)
        check_guidance(options, request)
        if request.frames is not None or request.size is not None:
            self.limits.check_shape(frames, request.size)
        changed = _changed_options(self.options, options)
        return replace(request, guidance=None, steps=None, options=changed, **self._own_fields()), options

    def resolve_options(self, options: Mapping[str, Any] | None = None, **flags: Any) -> Config | None:
        """The stage's sampling options with `options` (keys `sample.K` or `K`) and then flags such as guidance applied."""
        changes = {key.removeprefix("sample."): value for key, value in (options or {}).items()}
        flags = {key: value for key, value in flags.items() if value is not None}
        if not changes and not flags:
            return self.options
        if self.options is None:
            raise ConfigError(f"{self.task_name} has no sampling options: leave out {', '.join([*flags, *changes])}")
        known = type(self.options).model_fields
        for key in flags:
            if key not in known:
                raise ConfigError(f"--{key}: {self.task_name} has no sample.{key}; use {', '.join(known) or 'none'}")
        tree = self.options.model_dump()
        for key, value in (changes | flags).items():
            tree = merge(tree, nest(key, value))
        resolved = parse(type(self.options), tree, "sample")
        # Sampling cannot use what training left out (guidance without caption dropout, say): the stage's config checks that.
        parse(type(self._config), {**self._config.model_dump(exclude_unset=True), "sample": tree})
        return resolved

    # Reading -----------------------------------------------------------------------------------------------------

    def _read_mask(self, request: SampleRequest) -> Mask | None:
        if request.mask is None:
            return None
        return read_mask(request.mask, self.limits, request.size or (self.shape.height, self.shape.width))

    def _read_prime(self, request: SampleRequest, options: Config | None) -> Prime | None:
        note, frames = self._stages.note, request.frames or self.shape.frames
        if request.prime is not None:
            masked = request.mask is not None
            return read_prime(request.prime, self.limits, self._data, frames, request.size, options, note, masked)
        if can_animate(self.task):
            note(f"{self.task_name} animates a picture, and --prime is not set: drawing from the caption alone")
        return None

    def _read_sketch(self, request: SampleRequest, frames: int, story: bool = False) -> Sketch | None:
        if request.sketch is None:
            return None
        size = request.size or (self.shape.height, self.shape.width)
        return read_sketch(
            request.sketch, self.task, self.task_name, self._data, frames, size, self._stages.note, story
        )

    def _fps(self, request: SampleRequest, prime: Prime | None) -> float:
        return request.fps or (prime.fps if prime is not None else None) or self.shape.fps

    def _build_sidecar(
        self,
        request: SampleRequest,
        options: Config | None,
        prime: Prime | None,
        sketch: Sketch | None,
        mask: Mask | None = None,
    ) -> dict[str, Any]:
        return {
            **request.to_sidecar(),
            "weights": dict(self._stages.loaded_digests),  # run/stage → sha256
            "options": _dump(options),
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


def _dump(options: Config | None) -> dict[str, Any]:
    return options.model_dump(mode="json") if options is not None else {}


def _changed_options(original: Config | None, options: Config | None) -> dict[str, Any]:
    before, after = flatten(_dump(original)), flatten(_dump(options))
    return {key: value for key, value in after.items() if key not in before or before[key] != value}
