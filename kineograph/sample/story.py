"""Story mode: one long clip, a scene a caption. Each scene is drawn from the last frames of the one before, whose copies are then
dropped, so that the frames run on. One scene is alive at a time, and its frames are written as they come: any length fits in memory."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kineograph.core.batch import Batch, Prompts
from kineograph.core.errors import InputError
from kineograph.core.lines import lines_of
from kineograph.core.run_folder import write_atomic, write_json
from kineograph.media.clips import open_clip_writer
from kineograph.media.filenames import reserve_path, slugify
from kineograph.media.frames import to_uint8
from kineograph.media.grids import STRIP, make_titled_strips, select_evenly
from kineograph.sample.inference import draw, sampling_noise
from kineograph.sample.write import option_words, versions

if TYPE_CHECKING:
    from kineograph.sample.sampler import Origin, Sampler
    from kineograph.sample.sketch import Sketch

FORMATS = ("gif", "mp4")
SHEET = 24  # scenes on a sheet at most


class Story:
    """A story that is ready to be drawn. Iterating draws it, anew each time: the new frames of scene after scene, T C H W.

    Scene s draws with the noise of row s of a sampling call, so the first is the clip that `sample` draws for its caption.
    """

    def __init__(
        self,
        sampler: Sampler,
        captions: list[str],
        overlap: int,
        frames: int,
        prime: Tensor | None,
        options: Any,
        origin: Origin,
        sketch: Sketch | None = None,
        fps: float | None = None,
    ) -> None:
        self.captions, self.overlap, self.frames = captions, overlap, frames
        self.prime = prime  # K C H W: what the first scene begins with
        self.options, self.origin = options, origin
        self.sketch = sketch  # from the first frame of the story on
        self.fps = fps if fps is not None else sampler.shape.fps
        self._sampler = sampler

    def __len__(self) -> int:
        """Scenes."""
        return len(self.captions)

    def shown(self, scene: int) -> range:
        """Which frames of the video a scene (from 0) adds: the first all that it draws, later ones what follows the overlap."""
        new = self.frames - self.overlap
        return (
            range(0, self.frames) if scene == 0 else range(self.frames + (scene - 1) * new, self.frames + scene * new)
        )

    @property
    def total(self) -> int:
        """Frames of the video."""
        return self.shown(len(self) - 1).stop

    def __iter__(self) -> Iterator[Tensor]:
        given, kept = self.prime, 0  # what the scene begins with, and how much of that was shown already
        for scene in range(len(self)):
            new = self._draw(scene, given)[kept:]  # T C H W
            given = (new if given is None else torch.cat([given, new]))[-self.overlap :].clone()  # no view of the scene
            kept = self.overlap
            yield new
            del new  # not alive while the next one is drawn

    def _draw(self, scene: int, given: Tensor | None) -> Tensor:
        sampler = self._sampler
        prompts = Prompts(
            noise=sampling_noise(self.origin.seed, torch.tensor([scene])),
            captions=[self.captions[scene]],
            negative=[self.origin.negative] if self.origin.negative is not None else None,
            frames=self.origin.frames,
            prime=given[None] if given is not None else None,
            batch=self._sketched(scene),
        )
        pixels = draw(sampler.task, prompts, self.options, sampler.device)[0]  # T C H W
        if len(pixels) != self.frames:
            raise InputError(
                f"{sampler.task_name} drew {len(pixels)} frames where {self.frames} were asked for: a Task that continues gives all "
                "frames of a clip, those that it was given among them"
            )
        return pixels

    def _sketched(self, scene: int) -> Batch | None:
        """The sketch under all frames that a scene draws, those that it begins from among them."""
        if self.sketch is None:
            return None
        return self.sketch.batch(1, self.shown(scene).stop - self.frames, self.frames)

    def save(
        self, folder: str | Path, format: str | None = None, note: Callable[[str], None] | None = None
    ) -> list[Path]:
        """Draw and write the video; beside it a sheet of the scenes, the scenes as text, and a JSON file that tells how to draw
        it again. → the video and the sheet. `note` hears of every scene before it is drawn.

        The video gets its name when it is complete: a call that is interrupted leaves nothing under one.
        """
        check_story_format(format)
        folder = Path(folder)
        suffix = f".{format or FORMATS[0]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be made to write a story in: {error.strerror}") from None
        unfinished = folder / f".{secrets.token_hex(4)}.part{suffix}"
        rows = select_evenly(len(self), SHEET)
        pictured: list[tuple[str, Tensor]] = []
        say = note or (lambda line: None)
        try:
            with open_clip_writer(unfinished, self.fps) as video:
                drawn = iter(self)
                for scene in range(len(self)):
                    say(self._title(scene))
                    frames = next(drawn)
                    video.write(frames)
                    if scene in rows:
                        pictured.append((self._title(scene), to_uint8(frames[select_evenly(len(frames), STRIP)])))
                    del frames  # before the next ones are drawn
            path = reserve_path(folder, slugify(f"story {self.captions[0]}"), 1, suffix)
            try:
                sheet = self._write_beside(path, rows, pictured, format)
                os.replace(unfinished, path)
            except BaseException:
                path.unlink(missing_ok=True)  # the empty file that holds the name
                raise
        finally:
            unfinished.unlink(missing_ok=True)
        if len(rows) < len(self):
            say(f"the sheet shows {len(rows)} of {len(self)} scenes")
        return [path, sheet]

    def _title(self, scene: int) -> str:
        shown = self.shown(scene)
        return f"scene {scene + 1} of {len(self)}, frames {shown.start + 1} to {shown.stop}: {self.captions[scene]}"

    def _write_beside(
        self, path: Path, rows: list[int], pictured: list[tuple[str, Tensor]], format: str | None
    ) -> Path:
        sheet, scenes = path.with_suffix(".png"), path.with_suffix(".txt")
        make_titled_strips(pictured).save(sheet)
        write_atomic(scenes, "\n".join(self.captions) + "\n")
        write_json(path.with_suffix(".json"), self._sidecar(path, sheet, scenes, rows, format))
        return sheet

    def _sidecar(self, path: Path, sheet: Path, scenes: Path, rows: list[int], format: str | None) -> dict[str, Any]:
        origin = asdict(self.origin)
        for name in ("captions", "count", "size", "frames"):
            del origin[name]
        changed = origin.pop("changed")
        sampler = self._sampler
        return {
            "file": path.name,
            "command": self._command(scenes, path.parent, format),
            "overlap": self.overlap,
            "frames": self.frames,  # drawn a scene
            "scenes": [self._scene(scene) for scene in range(len(self))],
            "sheet": {"file": sheet.name, "scenes": [row + 1 for row in rows]},
            **origin,
            "changed_options": changed,
            "drawn": {
                "frames": self.total,
                "size": [sampler.shape.height, sampler.shape.width],
                "channels": sampler.shape.channels,
                "fps": self.fps,
            },
            "versions": versions(),
        }

    def _scene(self, scene: int) -> dict[str, Any]:
        """The captions track: frames count from 1, both ends included; seconds from 0."""
        shown = self.shown(scene)
        return {
            "caption": self.captions[scene],
            "frames": [shown.start + 1, shown.stop],
            "seconds": [round(shown.start / self.fps, 3), round(shown.stop / self.fps, 3)],
        }

    def _command(self, scenes: Path, out: Path, format: str | None) -> str:
        own = {key: value for key, value in self.origin.changed.items() if key != "overlap"}
        words = ["kineo", "story", self.origin.run, str(scenes), "--overlap", str(self.overlap)]
        return shlex.join([*words, *option_words(replace(self.origin, changed=own), out, format)])


# What goes in ----------------------------------------------------------------------------------------------------


def check_story_format(format: str | None) -> None:
    """Before anything is drawn."""
    if format is not None and format not in FORMATS:
        raise InputError(f"--format {format} is not written for a story: use {' or '.join(FORMATS)}")


def read_scenes(path: str | Path) -> list[str]:
    """A scene a line, UTF-8; blank lines and lines that begin with # are skipped."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: give a text file with a scene a line") from None
    except UnicodeDecodeError:
        text = "\0"
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): give a text file with a scene a line") from None
    if "\0" in text:
        raise InputError(f"{path} is not UTF-8 text: give a text file with a scene a line")
    scenes = [line.strip() for line in lines_of(text)]
    scenes = [scene for scene in scenes if scene and not scene.startswith("#")]
    if not scenes:
        raise InputError(
            f"{path} holds no scenes: write one a line (blank lines and lines that begin with # are skipped)"
        )
    return scenes


def check_scenes(captions: Sequence[str]) -> list[str]:
    """Scenes as a file of them could hold them, which is how a story is drawn again."""
    if isinstance(captions, str):
        raise InputError("a story is a list of captions, a scene each: give [caption, caption, …]")
    scenes = [caption.strip() if isinstance(caption, str) else caption for caption in captions]
    for number, scene in enumerate(scenes, 1):
        if not isinstance(scene, str) or not scene or scene.startswith("#") or {"\n", "\r"} & set(scene):
            raise InputError(
                f"scene {number}, {scene!r}, is not a scene: give one line of text that does not begin with #"
            )
    return scenes
