"""Stories: one long clip, a scene per caption. Each scene continues the last frames of the previous one.

Only one scene is in memory at a time, and its frames are written as they are drawn, so a story can have any length.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kineograph.core.batch import Batch, Prompts
from kineograph.core.config import Config
from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_atomic, write_json
from kineograph.core.text_file import split_lines
from kineograph.media.clips import open_clip_writer
from kineograph.media.filenames import reserve_path, slugify
from kineograph.media.frames import to_uint8
from kineograph.media.grids import STRIP, make_titled_strips, select_evenly
from kineograph.sample.inference import draw, sampling_noise
from kineograph.sample.output import library_versions
from kineograph.sample.request import STORY_FORMATS, SampleRequest, check_format

if TYPE_CHECKING:
    from kineograph.sample.sampler import Sampler
    from kineograph.sample.sketch import Sketch

SHEET = 24  # scenes on a sheet at most


class Story:
    """A story ready to be drawn. Each iteration draws it again and yields the new frames of each scene, T C H W.

    Scene s uses the noise of row s of a sampling call, so the first scene is the clip that `sample` draws for its caption.
    """

    def __init__(
        self,
        sampler: Sampler,
        request: SampleRequest,
        overlap: int,
        frames: int,
        prime: Tensor | None,
        options: Config | None,
        sketch: Sketch | None,
        fps: float,
        sidecar: dict[str, Any],
    ) -> None:
        self.request, self.captions = request, request.prompts or []
        self.overlap, self.frames, self.fps = overlap, frames, fps
        self.prime = prime  # K C H W: the frames that the first scene continues
        self.options, self.sketch, self.sidecar = options, sketch, sidecar
        self._sampler = sampler

    def __len__(self) -> int:
        """Scenes."""
        return len(self.captions)

    def frame_range(self, scene: int) -> range:
        """The frames of the video that a scene (from 0) adds: all that the first one draws, those after the overlap later."""
        new = self.frames - self.overlap
        stop = self.frames + scene * new
        return range(stop - new if scene else 0, stop)

    @property
    def total(self) -> int:
        """Frames of the video."""
        return self.frame_range(len(self) - 1).stop

    def __iter__(self) -> Iterator[Tensor]:
        prime, shown = self.prime, 0  # the frames that the scene continues; how many of them the video has already
        for scene in range(len(self)):
            new = self._draw(scene, prime)[shown:]  # T C H W
            # A clone: a view would keep the whole scene in memory.
            prime = (new if prime is None else torch.cat([prime, new]))[-self.overlap :].clone()
            shown = self.overlap
            yield new
            del new  # free it before the next scene is drawn

    def _draw(self, scene: int, prime: Tensor | None) -> Tensor:
        sampler, request = self._sampler, self.request
        prompts = Prompts(
            noise=sampling_noise(request.seed, torch.tensor([scene])),
            captions=[self.captions[scene]],
            negative=[request.negative] if request.negative is not None else None,
            frames=request.frames,
            prime=prime[None] if prime is not None else None,
            batch=self._sketch_batch(scene),
        )
        pixels = draw(sampler.task, prompts, self.options, sampler.device)[0]  # T C H W
        if len(pixels) != self.frames:
            raise InputError(
                f"{sampler.task_name} returned {len(pixels)} frames instead of {self.frames}: a Task that continues clips "
                "returns all frames, the given ones included"
            )
        return pixels

    def _sketch_batch(self, scene: int) -> Batch | None:
        """The sketch under all frames that a scene draws, the continued ones included."""
        if self.sketch is None:
            return None
        return self.sketch.to_batch(1, self.frame_range(scene).stop - self.frames, self.frames)

    def save(
        self, folder: str | Path, format: str | None = None, note: Callable[[str], None] | None = None
    ) -> list[Path]:
        """Draw and write the video, a sheet of the scenes, the scenes as text, and a JSON sidecar. → the video and the sheet.

        `note` gets a line per scene. The video gets its name when it is complete: an interrupted call leaves none.
        """
        check_format(format, allowed=STORY_FORMATS)
        folder, note = Path(folder), note or (lambda line: None)
        suffix = f".{format or STORY_FORMATS[0]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot create the folder {folder}: {error.strerror}; use another") from None
        unfinished = folder / f".{secrets.token_hex(4)}.part{suffix}"
        pictured = select_evenly(len(self), SHEET)
        strips: list[tuple[str, Tensor]] = []
        try:
            with open_clip_writer(unfinished, self.fps) as video:
                scenes = iter(self)
                for scene in range(len(self)):
                    note(self._title(scene))
                    frames = next(scenes)
                    video.write(frames)
                    if scene in pictured:
                        strips.append((self._title(scene), to_uint8(frames[select_evenly(len(frames), STRIP)])))
                    del frames  # free them before the next scene is drawn
            path = reserve_path(folder, slugify(f"story {self.captions[0]}"), 1, suffix)
            try:
                sheet = path.with_suffix(".png")
                make_titled_strips(strips).save(sheet)
                write_atomic(path.with_suffix(".txt"), "\n".join(self.captions) + "\n")
                write_json(path.with_suffix(".json"), self._build_sidecar(path, pictured, format))
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

    def _build_sidecar(self, path: Path, pictured: list[int], format: str | None) -> dict[str, Any]:
        shape = self._sampler.shape
        options = {key: value for key, value in self.request.options.items() if key != "overlap"}  # --overlap sets it
        request = replace(self.request, options=options)
        own = {key: value for key, value in self.sidecar.items() if key not in ("captions", "count", "size", "frames")}
        return {
            "file": path.name,
            "command": request.to_command("story", [str(path.with_suffix(".txt"))], path.parent, format),
            "overlap": self.overlap,
            "frames": self.frames,  # per scene
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
        }


# Scenes ----------------------------------------------------------------------------------------------------------


def read_scenes(path: str | Path) -> list[str]:
    """Read a scene per line, UTF-8; blank lines and lines that begin with # are skipped."""
    path = Path(path)
    remedy = "give a text file with one scene per line"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: {remedy}") from None
    except UnicodeDecodeError:
        text = "\0"
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    if "\0" in text:
        raise InputError(f"{path} is not UTF-8 text: {remedy}")
    scenes = [line.strip() for line in split_lines(text)]
    scenes = [scene for scene in scenes if scene and not scene.startswith("#")]
    if not scenes:
        raise InputError(f"{path} holds no scenes: write one per line (blank lines and lines with # are skipped)")
    return scenes


def check_scenes(captions: Sequence[str]) -> list[str]:
    """Refuse scenes that a file of scenes could not hold: a story is repeated from such a file."""
    if isinstance(captions, str):
        raise InputError("a story is a list of captions, one per scene: give [caption, caption, …]")
    scenes = [caption.strip() if isinstance(caption, str) else caption for caption in captions]
    for number, scene in enumerate(scenes, 1):
        if not isinstance(scene, str) or not scene or scene.startswith("#") or {"\n", "\r"} & set(scene):
            raise InputError(
                f"scene {number}, {scene!r}, is not valid: give one line of text that does not begin with #"
            )
    return scenes
