"""A run's trained stage, to draw with: what is asked of it is checked, read and drawn, and each sample knows where it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kineograph.core import distributed
from kineograph.core.batch import Prompts, Shape
from kineograph.core.config import Config, flatten, merge, nest, parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Task, sample_shape
from kineograph.sample.inference import BATCH, draw, draw_across_ranks, sampling_noise
from kineograph.sample.mask import Mask, read_mask
from kineograph.sample.prime import Prime, Takes, read_prime
from kineograph.sample.sketch import Sketch, read_sketch
from kineograph.stage.load import StageLoader, choose_sampling_stage
from kineograph.stage.spec import read_stage
from kineograph.train import checkpoint as checkpoints

if TYPE_CHECKING:
    from kineograph.sample.story import Story


@dataclass(frozen=True)
class Origin:
    """Where pictures came from: everything that drawing them again takes."""

    run: str
    stage: str
    step: int
    ema: bool
    weights: dict[str, str]  # run/stage of every stage that took part → sha256 of its weights
    seed: int
    captions: list[str] | None
    count: int  # a caption
    negative: str | None
    frames: int | None
    size: tuple[int, int] | None
    fps: float | None  # where another speed than the run's was asked for
    prime: dict[str, Any] | None
    sketch: dict[str, Any] | None
    mask: dict[str, Any] | None
    options: dict[str, Any]  # all of them, resolved
    changed: dict[str, Any]  # those that differ from the run's own
    device: str
    compiled: bool


@dataclass(frozen=True)
class Drawn:
    """Pictures or clips, a row each, with the caption of each row."""

    pixels: Tensor = field(repr=False)  # B T C H W, float in [0, 1], on the CPU
    fps: float
    captions: list[str | None]
    options: Any
    origin: Origin = field(repr=False)

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def save(self, folder: str | Path, format: str | None = None) -> list[Path]:
        """Write each as media with a JSON file beside it; see sample/write.py."""
        from kineograph.sample.write import write

        return write(self, folder, format)


class Sampler:
    """A trained stage that draws. `kineograph.load("runs/x")` gives one."""

    def __init__(self, stages: StageLoader, stage: str, task: Task, found: checkpoints.Checkpoint, ema: bool) -> None:
        spec = read_stage(stages.run.config(), stage)
        self.run = stages.run
        self.stage = stage
        self.task = task
        self.task_name = spec.config.task
        self.step = found.step
        self.ema = ema
        self.shape: Shape = sample_shape(task, spec.data.shape)
        self.options = getattr(spec.config, "sample", None)
        self.device = stages.device
        self.takes = Takes(task, spec.config.task, self.shape)
        self._data, self._config = spec.data, spec.config
        self._stages = stages

    @staticmethod
    def open(
        run: str | Path | RunFolder,
        checkpoint: str | int = "last",
        stage: str | None = None,
        device: str = "auto",
        ema: bool = True,
        compile: bool = False,
    ) -> Sampler:
        """Load the stage that draws and the stages that it stands on. `compile` pays when many batches are drawn; what is
        drawn may then differ in the last bits."""
        folder = run if isinstance(run, RunFolder) else RunFolder.existing(run)
        stages = StageLoader(
            folder,
            distributed.resolve_device(device),
            distributed.on_first_rank(distributed.print_note),
            compiled=compile,
        )
        name = choose_sampling_stage(folder, stage)
        found = checkpoints.select(folder.checkpoints(name), checkpoint)
        task = stages.load(name, found.step, ema)
        if not task.can_sample:
            raise InputError(
                f"stage {name!r} of {folder.path} draws nothing: {type(task).__name__} only encodes and decodes; name a generator's stage"
            )
        return Sampler(stages, name, task, found, ema)

    def sample(
        self,
        captions: Sequence[str] | str | None = None,
        *,
        count: int = 1,
        seed: int = 0,
        guidance: float | None = None,
        steps: int | None = None,
        frames: int | None = None,
        size: int | tuple[int, int] | None = None,
        fps: float | None = None,
        prime: str | Path | Tensor | None = None,
        sketch: str | Path | Tensor | None = None,
        mask: str | Path | Tensor | None = None,
        negative: str | None = None,
        options: Mapping[str, Any] | None = None,
        batch: int = BATCH,
        together: bool = False,
    ) -> Drawn:
        """`count` samples of each caption (of nothing in particular for None). The same arguments give the same pictures.

        `fps`: how fast they are shown; None: as the run's clips, or as the clip that is continued.
        `prime`: frames to begin with, as a file or T C H W; of a longer clip the last ones count (sample/prime.py).
        `sketch`: what to draw after, as a file or T C H W (sample/sketch.py).
        `mask`: which part of the picture in `prime` is drawn anew, as a file or H W bool (sample/mask.py).
        Row `caption index × count + number` has its own noise, whatever `batch` is. `options` are keys of the stage's `sample` section.
        `together`: every process of a group calls, draws its part, and the first one has all rows; the others have none.
        """
        texts = self._captions(captions, negative)
        if count < 1:
            raise InputError(f"count={count}: draw at least 1 of each caption")
        _check_speed(fps, frames or self.shape.frames)
        chosen = self.resolve(options, guidance=guidance, steps=steps)
        _check_guidance(chosen, guidance, texts, negative)
        height_width = self._size(frames, size)
        rows = [text for text in texts for _ in range(count)] if texts is not None else None
        total = count if rows is None else len(rows)
        masked = self._mask(mask, prime, height_width)
        start = self._prime(prime, frames, height_width, chosen, masked is not None)
        drawn_after = self._sketch(sketch, frames, height_width)
        height, width = height_width or (None, None)
        prompts = Prompts(
            noise=sampling_noise(seed, torch.arange(total)),
            captions=rows,
            negative=[negative] * total if negative is not None else None,
            frames=frames,
            height=height,
            width=width,
            prime=start.frames.expand(total, -1, -1, -1, -1) if start is not None else None,
            mask=masked.anew.expand(total, -1, -1) if masked is not None else None,
            batch=drawn_after.batch(total) if drawn_after is not None else None,
        )
        pixels = (draw_across_ranks if together else draw)(self.task, prompts, chosen, self.device, batch)
        origin = self._origin(
            texts, count, seed, negative, frames, height_width, fps, start, chosen, drawn_after, masked
        )
        named: list[str | None] = list(rows) if rows is not None else [None] * total
        return Drawn(pixels, fps or self._speed(start), named[: len(pixels)], chosen, origin)

    def story(
        self,
        captions: Sequence[str],
        *,
        overlap: int | None = None,
        seed: int = 0,
        guidance: float | None = None,
        steps: int | None = None,
        frames: int | None = None,
        fps: float | None = None,
        prime: str | Path | Tensor | None = None,
        sketch: str | Path | Tensor | None = None,
        negative: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Story:
        """One long clip, a scene a caption, each continuing the last `overlap` frames of the one before; see sample/story.py.

        `frames` are drawn a scene: the first shows all of them, each further one those that are new, `frames − overlap`.
        `sketch` runs along the whole story.
        """
        from kineograph.sample.story import Story, check_scenes

        self.takes.check_continues("a story")
        if not self.task.takes_captions():
            raise InputError(
                f"a story is told in captions, and {self.task_name} was trained without: kineo sample --frames N draws a long clip"
            )
        texts = self._captions(check_scenes(captions), negative)
        self._size(frames, None)
        length = frames or self.shape.frames
        _check_speed(fps, length)
        chosen = self.resolve(options, guidance=guidance, steps=steps)
        _check_guidance(chosen, guidance, texts, negative)
        named = overlap is not None
        overlap = overlap if overlap is not None else self.takes.usual_overlap(length, chosen)
        self.takes.check_overlap(overlap, length, "--overlap" if named else "sample.overlap")
        if (
            getattr(chosen, "overlap", overlap) != overlap
        ):  # a scene longer than the trained length continues itself alike
            chosen = self.resolve({**(options or {}), "overlap": overlap}, guidance=guidance, steps=steps)
        start = self._prime(prime, frames, None, chosen)
        total = length + (len(texts or []) - 1) * (length - overlap)
        drawn_after = self._sketch(sketch, total, None, scenes=True)
        origin = self._origin(texts, 1, seed, negative, frames, None, fps, start, chosen, drawn_after)
        given = start.frames if start is not None else None
        return Story(self, texts or [], overlap, length, given, chosen, origin, drawn_after, fps or self._speed(start))

    def _speed(self, start: Prime | None) -> float:
        """Frames a second of what is drawn: the run's own rate; without one, that of the clip that it continues."""
        return start.fps if start is not None and start.fps is not None else self.shape.fps

    def _prime(
        self,
        prime: str | Path | Tensor | None,
        frames: int | None,
        size: tuple[int, int] | None,
        chosen: Any,
        masked: bool = False,
    ) -> Prime | None:
        if prime is None:
            if self.task.animates:
                self._stages.note(
                    f"{self.task_name} starts from a picture, and none is given (--prime): it draws from the caption alone"
                )
            return None
        return read_prime(
            prime, self.takes, self._data, frames or self.shape.frames, size, chosen, self._stages.note, masked
        )

    def _mask(
        self, mask: str | Path | Tensor | None, prime: str | Path | Tensor | None, size: tuple[int, int] | None
    ) -> Mask | None:
        if mask is None:
            return None
        if prime is None:
            raise InputError("--mask says which part of a picture is drawn anew: give the picture with --prime")
        return read_mask(mask, self.takes, size or (self.shape.height, self.shape.width))

    def _sketch(
        self,
        sketch: str | Path | Tensor | None,
        frames: int | None,
        size: tuple[int, int] | None,
        scenes: bool = False,
    ) -> Sketch | None:
        if sketch is None:
            return None
        height_width = size or (self.shape.height, self.shape.width)
        count = frames or self.shape.frames
        return read_sketch(
            sketch, self.task, self.task_name, self._data, count, height_width, self._stages.note, scenes
        )

    def resolve(self, options: Mapping[str, Any] | None = None, **shortcuts: Any) -> Any:
        """The stage's sampling options with some of them changed. Keys may be written `sample.K` or `K`."""
        changes = {key.removeprefix("sample."): value for key, value in (options or {}).items()}
        asked = {key: value for key, value in shortcuts.items() if value is not None}
        if not changes and not asked:
            return self.options
        if not isinstance(self.options, Config):
            wrong = next(iter([*asked, *changes]))
            raise ConfigError(f"{self.task_name} has no sampling options, so {wrong} cannot be set")
        known = type(self.options).model_fields
        for key in asked:
            if key not in known:
                raise ConfigError(
                    f"--{key}: {self.task_name} has no sample.{key}; its sampling options are {', '.join(known) or 'none'}"
                )
        tree = self.options.model_dump()
        for key, value in (changes | asked).items():
            tree = merge(tree, nest(key, value))
        chosen = parse(type(self.options), tree, "sample")
        # What training never showed the network cannot be asked of it: the stage's config says what does not go together.
        parse(type(self._config), {**self._config.model_dump(exclude_unset=True), "sample": tree})
        return chosen

    def _size(self, frames: int | None, size: int | tuple[int, int] | None) -> tuple[int, int] | None:
        """Height and width, checked together with the frames: the error names what fits."""
        height_width = (size, size) if isinstance(size, int) else size
        if (frames is not None and frames < 1) or (height_width is not None and min(height_width) < 1):
            raise InputError(f"frames={frames}, size={height_width}: both start at 1")
        if frames is not None or height_width is not None:
            self.takes.check(frames or self.shape.frames, height_width)
        return height_width

    def _captions(self, captions: Sequence[str] | str | None, negative: str | None) -> list[str] | None:
        texts = [captions] if isinstance(captions, str) else None if captions is None else list(captions)
        if texts is not None and not texts:
            raise InputError(
                "there is nothing to draw: give at least one caption (or None for a model without captions)"
            )
        for text in texts or ():
            if not isinstance(text, str):
                raise InputError(f"a caption is a str, and {text!r} is of type {type(text).__name__}")
        if texts is not None and not self.task.takes_captions():
            raise InputError(
                f"{self.task_name} was trained without captions: leave out the prompts, and say how many with --count"
            )
        if negative is not None and texts is None:
            raise InputError("a negative prompt needs a prompt to be told apart from: give one")
        return texts

    def _origin(
        self,
        captions: list[str] | None,
        count: int,
        seed: int,
        negative: str | None,
        frames: int | None,
        size: tuple[int, int] | None,
        fps: float | None,
        prime: Prime | None,
        chosen: Any,
        sketch: Sketch | None = None,
        mask: Mask | None = None,
    ) -> Origin:
        return Origin(
            run=str(self.run.path),
            stage=self.stage,
            step=self.step,
            ema=self.ema,
            weights=dict(self._stages.loaded_digests),
            seed=seed,
            captions=captions,
            count=count,
            negative=negative,
            frames=frames,
            size=size,
            fps=fps,
            prime=prime.told if prime is not None else None,
            sketch=sketch.told if sketch is not None else None,
            mask=mask.told if mask is not None else None,
            options=_dump(chosen),
            changed=_changes(self.options, chosen),
            device=str(self.device),
            compiled=self._stages.compiled,
        )


def _check_speed(fps: float | None, frames: int) -> None:
    if fps is not None and not 0 < fps < math.inf:
        raise InputError(f"--fps {fps:g} is not a speed: use a number above 0")
    if fps is not None and frames == 1:
        raise InputError(f"--fps {fps:g} is the speed of a clip, and a picture is drawn: leave it out")


def _check_guidance(chosen: Any, asked: float | None, captions: list[str] | None, negative: str | None) -> None:
    """Refuse what would change nothing."""
    none = getattr(chosen, "unguided", 1)
    if negative is not None and getattr(chosen, "guidance", None) == none:
        raise InputError(
            f"a negative prompt is what guidance leads away from, and guidance={none:g} is none: raise --guidance"
        )
    if asked is not None and asked != none and captions is None:
        raise InputError(f"--guidance {asked:g} leads towards a prompt, and there is none: give one, or leave it out")


def _dump(options: Any) -> dict[str, Any]:
    return options.model_dump(mode="json") if isinstance(options, Config) else {}


def _changes(own: Any, chosen: Any) -> dict[str, Any]:
    before, after = flatten(_dump(own)), flatten(_dump(chosen))
    return {key: value for key, value in after.items() if key not in before or before[key] != value}
