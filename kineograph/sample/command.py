"""`kineo sample` and `kineo story`: open a run, draw, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kineograph.core import distributed
from kineograph.core.config import parse_override
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.run_folder import RunFolder
from kineograph.media.filenames import check_writable
from kineograph.media.gif import MAX_FPS
from kineograph.sample.sampler import Sampler
from kineograph.sample.story import check_story_format, read_scenes
from kineograph.sample.write import check_format, write


def draw_and_write(
    run: str | Path,
    prompts: Sequence[str] | None,
    *,
    out: Path | None = None,
    count: int = 1,
    seed: int = 0,
    guidance: float | None = None,
    steps: int | None = None,
    frames: int | None = None,
    size: str | None = None,
    fps: float | None = None,
    prime: Path | None = None,
    sketch: Path | None = None,
    mask: Path | None = None,
    negative: str | None = None,
    checkpoint: str | int = "last",
    format: str | None = None,
    stage: str | None = None,
    settings: Sequence[str] = (),
    device: str = "auto",
    ema: bool = True,
    compile: bool = False,
) -> list[Path]:
    """→ the files, media first. Nothing is written when anything about the call is wrong.

    Several processes draw a part of the rows each; the first one writes them, under the names that one process would give them.
    """
    check_format(format)
    _check_gif(fps, format)
    if format == "png" and fps is not None:
        raise InputError(f"--fps {fps:g} is the speed of a clip, and --format png stands still: leave one out")
    folder = RunFolder.existing(run)
    if out is not None:
        check_writable(out)
    height_width = _size(size)
    options = dict(_setting(text) for text in settings)
    sampler = Sampler.open(folder, checkpoint, stage, device, ema, compile)
    drawn = sampler.sample(
        prompts,
        count=count,
        seed=seed,
        guidance=guidance,
        steps=steps,
        frames=frames,
        size=height_width,
        fps=fps,
        prime=prime,
        sketch=sketch,
        mask=mask,
        negative=negative,
        options=options,
        together=True,
    )
    if not distributed.is_first():
        return []
    return write(drawn, out if out is not None else folder.path / "drawn", format)


def tell_and_write(
    run: str | Path,
    scenes: Path,
    *,
    overlap: int | None = None,
    out: Path | None = None,
    seed: int = 0,
    guidance: float | None = None,
    steps: int | None = None,
    frames: int | None = None,
    fps: float | None = None,
    prime: Path | None = None,
    sketch: Path | None = None,
    negative: str | None = None,
    checkpoint: str | int = "last",
    format: str | None = None,
    stage: str | None = None,
    settings: Sequence[str] = (),
    device: str = "auto",
    ema: bool = True,
    compile: bool = False,
    note: Callable[[str], None] | None = None,
) -> list[Path]:
    """→ the video and its sheet. `note` hears of every scene."""
    check_story_format(format)
    _check_gif(fps, format)
    folder = RunFolder.existing(run)
    captions = read_scenes(scenes)
    options = dict(_setting(text) for text in settings)
    sampler = Sampler.open(folder, checkpoint, stage, device, ema, compile)
    story = sampler.story(
        captions,
        overlap=overlap,
        seed=seed,
        guidance=guidance,
        steps=steps,
        frames=frames,
        fps=fps,
        prime=prime,
        sketch=sketch,
        negative=negative,
        options=options,
    )
    return story.save(out if out is not None else folder.path / "drawn", format, note)


def _check_gif(fps: float | None, format: str | None) -> None:
    """Clips are GIFs unless told otherwise."""
    if fps is not None and fps > MAX_FPS and format in (None, "gif"):
        raise InputError(
            f"--fps {fps:g} is faster than a GIF can be, {MAX_FPS} frames a second: add --format mp4, or lower it"
        )


def _setting(text: str) -> tuple[str, object]:
    key, value = parse_override(text)
    if not key.startswith("sample."):
        raise ConfigError(f"--set {text}: only sampling options can be set here; they look like sample.guidance=3")
    return key, value


def _size(text: str | None) -> tuple[int, int] | None:
    """`64` or `48x64` (height × width)."""
    if text is None:
        return None
    try:
        parts = [int(part) for part in text.lower().split("x")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2):
        raise InputError(f"--size {text} is not a size: use 64, or height x width as in 48x64")
    return parts[0], parts[-1]
