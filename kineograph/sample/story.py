"""Stories: one long clip, a scene per caption. Each scene continues the last frames of the previous one.

Only one scene is in memory at a time, and its frames are written as they are drawn, so a story can have any length.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kineograph.core.batch import Prompts, Sound
from kineograph.core.capabilities import makes_sound
from kineograph.core.config import Config
from kineograph.core.errors import InputError
from kineograph.core.noise import Noise
from kineograph.core.prompt import Prompt
from kineograph.core.run_folder import write_atomic, write_json
from kineograph.media.clips import open_clip_writer, write_wav
from kineograph.media.filenames import reserve_path, slugify
from kineograph.media.frames import to_uint8
from kineograph.media.grids import STRIP, make_titled_strips, select_evenly
from kineograph.media.mp4 import Mp4Writer
from kineograph.sample.inference import draw, sampling_noise
from kineograph.sample.limits import ClipLimits
from kineograph.sample.output import library_versions
from kineograph.sample.prime import Prime
from kineograph.sample.prompt_file import SEPARATOR, name_prompt, write_prompts
from kineograph.sample.request import STORY_FORMATS, SampleRequest, check_format

if TYPE_CHECKING:
    from kineograph.sample.sampler import Sampler
    from kineograph.sample.sketch import Sketch

SHEET = 24  # scenes on a sheet at most
OWN = ("negative", "image", "seed")  # fields of a scene, for the sidecar


@dataclass
class Scene:
    """One scene of a story."""

    prompt: Prompt
    negative: str | None
    frames: int  # drawn, the continued ones included
    overlap: int  # frames of the previous scene that it continues
    start: int  # first frame of the video that it adds
    noise: Noise
    options: Config | None = None

    @property
    def stop(self) -> int:
        """Frames of the video up to its end."""
        return self.start + self.frames - (self.overlap if self.start else 0)


def plan_scenes(request: SampleRequest, limits: ClipLimits, options: Config | None) -> list[Scene]:
    """Frames and overlap of each scene: its own, the request's, or the stage's. An overlap that does not fit is refused."""
    scenes: list[Scene] = []
    prompts = request.entries or []
    for number, prompt in enumerate(prompts):
        with name_prompt(prompt):
            _check_fields(prompt, number)
            frames = prompt.frames or request.frames or limits.shape.frames
            given = prompt.overlap or request.overlap
            overlap = given if given is not None else limits.default_overlap(frames, options)
            before = scenes[-1].stop if scenes else 0
            if scenes or len(prompts) == 1 or frames > limits.shape.frames:
                limits.check_overlap(overlap, frames, "--overlap" if given is not None else "sample.overlap")
            if scenes and overlap > before:
                raise InputError(
                    f"overlap={overlap} is more than the {before} frames before this scene: lower --overlap, or lengthen them"
                )
            negative = prompt.negative if prompt.negative is not None else request.negative
            seed, slot = (request.seed, number) if prompt.seed is None else (prompt.seed, 0)
            noise = sampling_noise(seed, torch.tensor([slot]))
            scenes.append(Scene(prompt, negative, frames, overlap, before, noise))
    return scenes


def _check_fields(prompt: Prompt, number: int) -> None:
    if prompt.scene not in (None, number + 1):
        raise InputError(f"scene={prompt.scene} is the {number + 1}. scene of the story: number them 1, 2, 3 …")
    if prompt.mask is not None:
        raise InputError("mask has no effect in a story: remove it")
    if number == 0 and prompt.overlap is not None:
        raise InputError(f"overlap={prompt.overlap} has no effect: the first scene continues none; remove it")
    if number > 0 and prompt.image is not None:
        raise InputError("image has no effect: this scene continues the previous one; only the first can have an image")


class Story:
    """A story ready to be drawn. Each iteration draws it again and yields the new frames of each scene, T C H W.

    Scene s uses the noise of row s of a sampling call, so the first scene is the clip that `sample` draws for its caption. A scene
    with a seed of its own uses the noise of row 0 of a call with that seed.
    """

    def __init__(
        self,
        sampler: Sampler,
        request: SampleRequest,
        scenes: list[Scene],
        prime: Prime | None,
        options: Config | None,
        sketch: Sketch | None,
        fps: float,
        sidecar: dict[str, Any],
    ) -> None:
        self.request, self.scenes, self.captions = request, scenes, request.captions or []
        assert request.overlap is not None
        # Of scenes without their own.
        self.overlap, self.frames = request.overlap, request.frames or sampler.shape.frames
        self.prime = prime.frames if prime is not None else None  # K C H W: the frames that the first scene continues
        self.options, self.sketch, self.fps, self.sidecar = options, sketch, fps, sidecar
        self._sampler = sampler

    def __len__(self) -> int:
        """Scenes."""
        return len(self.scenes)

    def frame_range(self, scene: int) -> range:
        """The frames of the video that a scene (from 0) adds: all that the first one draws, those after the overlap later."""
        return range(self.scenes[scene].start, self.scenes[scene].stop)

    @property
    def total(self) -> int:
        """Frames of the video."""
        return self.scenes[-1].stop

    def __iter__(self) -> Iterator[Tensor]:
        for frames, _ in self.draw_scenes():
            yield frames

    def draw_scenes(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The new frames of each scene, T C H W, and their sound, T S, where the stage makes any."""
        shown: Tensor | None = None  # the last frames of the video so far
        for number, scene in enumerate(self.scenes):
            prime = self.prime if shown is None else shown[-scene.overlap :]
            first = 0 if shown is None else scene.overlap
            pixels, sound = self._draw(scene, prime)
            new = pixels[first:]  # T C H W
            needed = max((later.overlap for later in self.scenes[number + 1 :]), default=1)
            # A clone: a view would keep the whole scene in memory.
            shown = (new if shown is None else torch.cat([shown, new]))[-needed:].clone()
            yield new, sound[first:] if sound is not None else None
            del new, pixels, prime  # free them before the next scene is drawn

    def _draw(self, scene: Scene, prime: Tensor | None) -> tuple[Tensor, Tensor | None]:
        sampler = self._sampler
        prompts = Prompts(
            noise=scene.noise,
            captions=[scene.prompt.prompt],
            negative=[scene.negative] if scene.negative is not None else None,
            frames=scene.prompt.frames or self.request.frames,
            prime=prime[None] if prime is not None else None,
            batch=self.sketch.to_batch(1, scene.stop - scene.frames, scene.frames) if self.sketch is not None else None,
        )
        drawn = draw(sampler.task, prompts, scene.options, sampler.device)
        pixels = drawn.pixels[0]  # T C H W
        if len(pixels) != scene.frames:
            raise InputError(
                f"{sampler.task_name} returned {len(pixels)} frames instead of {scene.frames}: a Task that continues clips "
                "returns all frames, the given ones included"
            )
        return pixels, drawn.sound[0] if drawn.sound is not None else None

    def save(
        self, folder: str | Path, format: str | None = None, note: Callable[[str], None] | None = None
    ) -> list[Path]:
        """Draw and write the video, a sheet of the scenes, the scenes as text, and a JSON sidecar. → the video and the sheet.

        `note` gets a line per scene. The video gets its name when it is complete: an interrupted call leaves none.
        """
        check_format(format, allowed=STORY_FORMATS)
        folder, note = Path(folder), note or (lambda line: None)
        sounds: list[Tensor] = []
        rate = self._sampler.shape.sample_rate if makes_sound(self._sampler.task) else None
        suffix = f".{format or (STORY_FORMATS[0] if rate is None else 'mp4')}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot create the folder {folder}: {error.strerror}; use another") from None
        unfinished = folder / f".{secrets.token_hex(4)}.part{suffix}"
        pictured = select_evenly(len(self), SHEET)
        strips: list[tuple[str, Tensor]] = []
        try:
            with open_clip_writer(unfinished, self.fps, rate) as video:
                scenes = self.draw_scenes()
                for scene in range(len(self)):
                    note(self._title(scene))
                    frames, sound = next(scenes)
                    if isinstance(video, Mp4Writer):
                        video.write(frames, sound)
                    else:
                        video.write(frames)
                    if sound is not None:
                        sounds.append(sound)
                    if scene in pictured:
                        strips.append((self._title(scene), to_uint8(frames[select_evenly(len(frames), STRIP)])))
                    del frames  # free them before the next scene is drawn
            path = reserve_path(folder, slugify(f"story {self.captions[0]}"), 1, suffix)
            try:
                sheet = path.with_suffix(".png")
                make_titled_strips(strips).save(sheet)
                self._write_scenes(path)
                write_json(path.with_suffix(".json"), self._build_sidecar(path, pictured, format))
                if rate is not None:
                    write_wav(path.with_suffix(".wav"), Sound(torch.cat(sounds), rate))
                os.replace(unfinished, path)
            except BaseException:
                path.unlink(missing_ok=True)  # the empty file that reserves the name
                raise
        finally:
            unfinished.unlink(missing_ok=True)
        if len(pictured) < len(self):
            note(f"the sheet shows {len(pictured)} of {len(self)} scenes")
        return [path, sheet]

    def _title(self, scene: int) -> str:
        frames = self.frame_range(scene)
        return f"scene {scene + 1} of {len(self)}, frames {frames.start + 1} to {frames.stop}: {self.captions[scene]}"

    def _scenes_path(self, path: Path) -> Path:
        """The file of scenes beside the video: text if that can hold them."""
        plain = all(
            scene.prompt.to_json().keys() <= {"prompt", "scene"}
            and not scene.prompt.prompt.startswith("#")
            and SEPARATOR not in scene.prompt.prompt
            for scene in self.scenes
        )
        return path.with_suffix(".txt" if plain else ".jsonl")

    def _write_scenes(self, path: Path) -> None:
        file = self._scenes_path(path)
        if file.suffix == ".txt":
            write_atomic(file, "\n".join(self.captions) + "\n")
        else:
            write_prompts(file, [scene.prompt for scene in self.scenes])

    def _build_sidecar(self, path: Path, pictured: list[int], format: str | None) -> dict[str, Any]:
        shape = self._sampler.shape
        options = {key: value for key, value in self.request.options.items() if key != "overlap"}  # --overlap sets it
        request = replace(self.request, options=options)
        own = {key: value for key, value in self.sidecar.items() if key not in ("captions", "count", "size", "frames")}
        return {
            "file": path.name,
            "command": request.to_command("story", [str(self._scenes_path(path))], path.parent, format),
            "overlap": self.overlap,
            "frames": self.frames,  # per scene, where it has no number of its own
            "scenes": [self._describe_scene(scene) for scene in range(len(self))],
            "sheet": {"file": path.with_suffix(".png").name, "scenes": [scene + 1 for scene in pictured]},
            **own,
            "drawn": {
                "frames": self.total,
                "size": [shape.height, shape.width],
                "channels": shape.channels,
                "fps": self.fps,
            },
            "versions": library_versions(),
        }

    def _describe_scene(self, scene: int) -> dict[str, Any]:
        """Frames count from 1, both ends included; seconds from 0."""
        frames = self.frame_range(scene)
        return {
            "caption": self.captions[scene],
            "frames": [frames.start + 1, frames.stop],
            "seconds": [round(frames.start / self.fps, 3), round(frames.stop / self.fps, 3)],
            **{key: value for key, value in self.scenes[scene].prompt.to_json().items() if key in OWN},
            **({"overlap": self.scenes[scene].overlap} if scene else {}),
        }


# Scenes ----------------------------------------------------------------------------------------------------------


def check_scenes(captions: Sequence[str | Prompt]) -> list[str | Prompt]:
    """Refuse scenes that a file of scenes could not hold: a story is repeated from such a file."""
    if isinstance(captions, str):
        raise InputError("a story is a list of captions, one per scene: give [caption, caption, …]")
    scenes = [caption.strip() if isinstance(caption, str) else caption for caption in captions]
    for number, scene in enumerate(scenes, 1):
        if isinstance(scene, Prompt):
            continue
        if not isinstance(scene, str) or not scene or scene.startswith("#") or {"\n", "\r"} & set(scene):
            raise InputError(
                f"scene {number}, {scene!r}, is not valid: give one line of text that does not begin with #"
            )
    return scenes
