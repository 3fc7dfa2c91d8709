"""`kineo sample` and `kineo story`: open a run, draw, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kineograph.core import distributed
from kineograph.core.run_folder import RunFolder
from kineograph.media.filenames import check_writable
from kineograph.sample.request import STORY_FORMATS, SampleRequest, check_format
from kineograph.sample.sampler import Sampler
from kineograph.sample.story import read_scenes


def write_samples(
    run: str | Path,
    prompts: Sequence[str] | None,
    *,
    out: Path | None = None,
    format: str | None = None,
    **flags: Any,
) -> list[Path]:
    """Draw prompts. → the media files. Writes nothing when the call has a mistake.

    Several ranks share the rows; rank 0 writes them all, under the names that a single process would choose.
    """
    check_format(format, flags.get("fps"))
    request = SampleRequest.from_flags(run, prompts, **flags)
    folder = out or RunFolder.existing(run).path / "drawn"
    check_writable(folder)
    samples = Sampler.for_request(request).draw(request, across_ranks=True)
    return samples.save(folder, format) if distributed.is_first() else []


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
    request = SampleRequest.from_flags(run, read_scenes(scenes), **flags)
    return Sampler.for_request(request).plan_story(request).save(folder, format, note)
