"""Given frames to begin a clip with: from a picture, a clip or a tensor, in the run's own size, colours and speed.

A clip is continued from its end: its last frame is the last one given, the others stand 1/fps apart before it. How many are given:
all of a clip that is shorter than what is drawn (as many of them as fit the codec), else the usual overlap.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from kineograph.core.batch import Shape
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import numpy_rng
from kineograph.core.task import Task
from kineograph.data.config import DataConfig
from kineograph.data.decode import MediaConfig, to_channels
from kineograph.data.timing import GIF_TOLERANCE, TOLERANCE
from kineograph.data.transforms import Framing, fit
from kineograph.media.clips import Frame, read_frames


@dataclass(frozen=True)
class Prime:
    frames: Tensor  # K C H W, float in [0, 1]
    told: dict[str, Any]  # what a sidecar says about them
    fps: float | None = (
        None  # of the clip that they end, where the run has no rate of its own: what follows is shown at it
    )


@dataclass(frozen=True)
class Takes:
    """Which clips a Task draws, and how many frames it can begin from."""

    task: Task
    name: str
    shape: Shape  # as trained

    def check(self, frames: int, size: tuple[int, int] | None = None) -> None:
        """Codecs know which clips they can make; their error names the ones that fit."""
        height, width = size or (self.shape.height, self.shape.width)
        for part in (self.task, self.task.stages.get("codec")):
            check = getattr(part, "shape_for", None)
            if check is not None:
                check(frames, height, width)

    def fitting(self, most: int, size: tuple[int, int] | None = None) -> list[int]:
        """Numbers of frames up to `most` that the codec encodes."""
        return [frames for frames in range(1, most + 1) if self._fits(frames, size)]

    def _fits(self, frames: int, size: tuple[int, int] | None) -> bool:
        try:
            self.check(frames, size)
        except ConfigError:
            return False
        return True

    def longest(self, frames: int) -> int:
        """More than this cannot be begun from: something is to be drawn, and it must see what it continues at once."""
        return min(frames, self.shape.frames) - 1

    def usual_overlap(self, frames: int, options: Any) -> int:
        """The stage's own `sample.overlap`; without one, as much as fits in half a clip."""
        own = getattr(options, "overlap", None)
        return own if own is not None else max(self.fitting(max(1, min(frames, self.shape.frames) // 2)), default=1)

    def check_overlap(self, overlap: int, frames: int, key: str) -> None:
        """`key` is what the person set."""
        fitting = self.fitting(self.longest(frames))
        if not fitting:
            raise InputError(f"a story: {self.nothing_left(frames)}")
        if overlap not in fitting:
            raise InputError(
                f"{key}={overlap} does not fit scenes of {frames} frames: use {_listed(fitting)}"
                + ("" if key.startswith("--") else " with --overlap")
            )

    def nothing_left(self, frames: int) -> str:
        """Why so few frames cannot be begun from, and what can be done."""
        count = min(frames, self.shape.frames)
        remedy = (
            "ask for more (--frames)" if count < self.shape.frames else "name a stage trained on longer clips (--stage)"
        )
        return f"{self.name} draws {count} frame{'s' * (count > 1)} at a time and cannot begin from fewer: {remedy}"

    def check_continues(self, what: str) -> None:
        if not self.task.continues:
            raise InputError(
                f"{what} needs a generator that continues from given frames, and {self.name} does not: "
                "name a run (or with --stage a stage) that does, such as one of phenaki"
            )

    @property
    def enlarges(self) -> bool:
        """Super-resolution (or a critic that steers it): a given picture is what it starts from, not what it continues."""
        drawing = (self.task, *self.task.stages.values())
        return not self.task.continues and any(part.enlarges or "low_res" in part.stages for part in drawing)

    def prime_size(self, options: Any) -> tuple[int, int] | None:
        """In which size a picture that is enlarged is given; None: as large as what is drawn."""
        found = (part.prime_size(options) for part in (self.task, *self.task.stages.values()))
        return next((size for size in found if size is not None), None)


def _listed(numbers: list[int]) -> str:
    shown = numbers if len(numbers) <= 8 else [*numbers[:7], "…", numbers[-1]]
    return ", ".join(map(str, shown))


def read_prime(
    prime: str | Path | Tensor,
    takes: Takes,
    data: DataConfig,
    frames: int,
    size: tuple[int, int] | None,
    options: Any,
    note: Callable[[str], None],
    masked: bool = False,
) -> Prime:
    """What a call for `frames` frames begins with; `note` hears what is left out. With `masked`, a picture that is drawn anew in part."""
    if takes.task.inpaints and not masked and not takes.enlarges:
        raise InputError(f"--prime: {takes.name} draws a part of a given picture anew: say which with --mask")
    if not takes.enlarges and not masked:
        takes.check_continues("--prime")
    height_width = size or (takes.shape.height, takes.shape.width)
    if takes.enlarges or masked:
        if not masked:
            height_width = takes.prime_size(options) or height_width
        return _first_picture(prime, data, height_width, note, masked)
    fitting = takes.fitting(takes.longest(frames), size)
    if not fitting:
        raise InputError(f"--prime: {takes.nothing_left(frames)}")
    window = takes.longest(frames) + 1
    fps: float | None = None
    if isinstance(prime, Tensor):
        given, there = checked(prime)[-window:], len(prime)
        clip, told = fitted_tensor(given, data, height_width), {"sha256": digest(prime)}
    else:
        images, there, fps = _last_images(prime, data.fps, window)
        clip, told = fitted(images, data, height_width), {"file": str(prime), "sha256": file_digest(prime)}
    most = takes.usual_overlap(frames, options) if there >= window else there
    used = max((number for number in fitting if number <= most), default=fitting[0])
    if used > there:
        raise InputError(
            f"--prime {prime if not isinstance(prime, Tensor) else ''} holds {there} frames: {takes.name} begins from {_listed(fitting)}"
        )
    if used < there:
        note(f"--prime: the last {used} of {there} frames are continued")
    return Prime(clip[-used:], {**told, "frames": used, "of": there}, fps)


def _first_picture(
    prime: str | Path | Tensor, data: DataConfig, size: tuple[int, int], note: Callable[[str], None], masked: bool
) -> Prime:
    if isinstance(prime, Tensor):
        return Prime(fitted_tensor(checked(prime)[:1], data, size), {"sha256": digest(prime)})
    shown = list(itertools.islice(read_frames(prime), 2))
    if len(shown) > 1:
        note(f"--prime: the first frame is {'drawn anew in part' if masked else 'enlarged'}")
    return Prime(fitted([shown[0].image], data, size), {"file": str(prime), "sha256": file_digest(prime)})


# Which frames ----------------------------------------------------------------------------------------------------


def _last_images(path: str | Path, fps: float | None, most: int) -> tuple[list[Image.Image], int, float | None]:
    """At most `most` frames up to the last one, how many there would be in all, and without a `data.fps` the clip's own rate. Frames are
    taken as training takes them: `fps` a second by timestamps, or without one after another. Memory holds no more than those."""
    kept: deque[Frame] = deque()
    count, first, late = 0, 0.0, TOLERANCE
    span = (most - 1) / fps if fps is not None else 0.0
    for count, shown in enumerate(read_frames(path), 1):
        if count == 1:
            first, late = shown.start, GIF_TOLERANCE if shown.kind == "GIF" else TOLERANCE
        kept.append(shown)
        while len(kept) > most if fps is None else len(kept) > 1 and kept[1].start <= shown.start - span + late:
            kept.popleft()
    if fps is None:
        seconds = kept[-1].start - first
        return [shown.image for shown in kept], count, (count - 1) / seconds if seconds > 0 else None
    last = kept[-1].start
    there = int((last - first + late) * fps) + 1
    times = last - np.arange(min(most, there))[::-1] / fps
    starts = np.array([shown.start for shown in kept])
    places = np.searchsorted(starts, times + late, side="right") - 1
    return [kept[max(0, place)].image for place in places], there, None


# In the run's size and colours -----------------------------------------------------------------------------------


def fitted(images: list[Image.Image], data: DataConfig, size: tuple[int, int]) -> Tensor:
    """Resized, cropped and coloured as training data are. → T C H W."""
    background = getattr(data, "background", "black")
    place = _framing(data, size).place(*images[0].size, numpy_rng(0))  # centred: nothing is drawn from it
    frames = [place.apply(to_channels(image, data.channels, background)) for image in images]
    return rearrange(torch.from_numpy(np.stack(frames)), "t h w c -> t c h w").float() / 255


def fitted_tensor(clip: Tensor, data: DataConfig, size: tuple[int, int]) -> Tensor:
    if clip.shape[1:] == (data.channels, *size):
        return clip
    frames = rearrange(clip.clamp(0, 1) * 255, "t c h w -> t h w c").round().to(torch.uint8).numpy()
    fitted_frames = fit(frames, size, data.channels, _framing(data, size))
    return rearrange(torch.from_numpy(fitted_frames), "t h w c -> t c h w").float() / 255


def _framing(data: DataConfig, size: tuple[int, int]) -> Framing:
    """As validation items are framed; sources that are no files know the plain way only."""
    return replace(data.framing.still, size=size) if isinstance(data, MediaConfig) else Framing(size)


def checked(prime: Tensor, what: str = "prime") -> Tensor:
    if prime.ndim != 4 or not prime.numel() or prime.shape[1] > 4:
        raise InputError(f"{what} has shape {tuple(prime.shape)}: give frames as T C H W, of 1 to 4 channels")
    clip = (prime if prime.is_floating_point() else prime.float() / 255).float().cpu()
    low, high = clip.aminmax()
    if not (low >= 0 and high <= 1):  # also refuses nan
        raise InputError(f"{what} goes from {low:g} to {high:g}: give uint8, or float in [0, 1]")
    return clip


def digest(prime: Tensor) -> str:
    return hashlib.sha256(np.ascontiguousarray(prime.detach().cpu().float().numpy()).tobytes()).hexdigest()


def file_digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
