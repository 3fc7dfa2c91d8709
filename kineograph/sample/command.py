"""`kineo sample` and `kineo story`: open a run, draw, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kineograph.core import distributed
from kineograph.core.notes import discard
from kineograph.core.prompt import Prompt
from kineograph.core.run_folder import RunFolder
from kineograph.media.filenames import check_writable
from kineograph.sample.output import SampleWriter
from kineograph.sample.prompt_file import read_prompts, split_stories
from kineograph.sample.request import STORY_FORMATS, SampleRequest, check_format
from kineograph.sample.sampler import Sampler

TELL_EVERY = 5.0  # seconds between lines of progress


def write_samples(
    run: str | Path,
    prompts: Sequence[str] | None,
    *,
    out: Path | None = None,
    format: str | None = None,
    note: Callable[[str], None] | None = None,
    **flags: Any,
) -> list[Path]:
    """Draw prompts, or those of a file. → the media files. Writes nothing when the call has a mistake.

    Each file is written as soon as it is drawn. Several ranks share the rows; rank 0 writes them all, under the names that a
    single process would choose. Scenes of a prompts file become stories, which rank 0 draws alone.
    """
    check_format(format, flags.get("fps"))
    note = distributed.on_first_rank(note or discard)
    request = SampleRequest.from_flags(run, prompts, **flags)
    folder = out or RunFolder.existing(run).path / "drawn"
    check_writable(folder)
    clips, scenes = split_stories([prompt for prompt in request.prompts or () if isinstance(prompt, Prompt)])
    if scenes:
        check_format(format, flags.get("fps"), STORY_FORMATS)
    sampler = Sampler.for_request(request)
    stories = [sampler.plan_story(replace(request, prompts=story)) for story in scenes]
    written: list[Path] = []
    if clips or not scenes:
        drawing = sampler.plan(replace(request, prompts=clips) if scenes else request)
        writer = SampleWriter(drawing, folder, format)
        total, told = len(drawing.rows), time.monotonic()
        note(f"drawing {total:,} sample{'' if total == 1 else 's'} on {sampler.device}")
        for number, (row, clip, sound) in enumerate(sampler.draw_clips(drawing, across_ranks=True), 1):
            writer.write(row, clip, sound)
            if time.monotonic() - told > TELL_EVERY:
                note(f"{number:,} of {total:,} samples are drawn")
                told = time.monotonic()
        written += writer.finish()
    for story in stories if distributed.is_first() else ():
        written += story.save(folder, format, note)
    return written


def write_story(
    run: str | Path,
    scenes: Path,
    *,
    out: Path | None = None,
    format: str | None = None,
    note: Callable[[str], None] | None = None,
    **flags: Any,
) -> list[Path]:
    """Draw one long clip from a file of scenes. → the video and its sheet. `note` gets a line per scene."""
    check_format(format, flags.get("fps"), STORY_FORMATS)
    folder = out or RunFolder.existing(run).path / "drawn"
    request = SampleRequest.from_flags(run, read_prompts(scenes, "scene"), **flags)
    return Sampler.for_request(request).plan_story(request).save(folder, format, note)
