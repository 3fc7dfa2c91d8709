"""The sheet of a race: the same prompts down, real items and families across."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kineograph.core.run_folder import read_json
from kineograph.media.clips import read_frames
from kineograph.media.frames import save_picture, to_pixels
from kineograph.media.grids import make_comparison


def write_sheet(path: Path, prompts: Sequence[str], real: Sequence[Tensor], drawn: dict[str, Path]) -> Path | None:
    """`drawn`: title of a column → the folder of its samples. Columns without a sample of every prompt are left out."""
    columns: dict[str, list[Tensor]] = {"real": list(real)}
    for title, folder in drawn.items():
        found = read_samples(folder)
        if all(prompt in found for prompt in prompts):
            columns[title] = [found[prompt] for prompt in prompts]
    if len(columns) == 1 or not prompts:
        return None
    rows = [(prompt, [clips[row] for clips in columns.values()]) for row, prompt in enumerate(prompts)]
    save_picture(make_comparison(rows, list(columns)), path)
    return path


def read_samples(folder: Path) -> dict[str, Tensor]:
    """Prompt → its sample, T C H W, of the files that `kineo sample` wrote."""
    samples: dict[str, Tensor] = {}
    for sidecar in sorted(folder.glob("*.json")):
        facts = read_json(sidecar)
        prompt, file = facts.get("prompt"), facts.get("file")
        caption = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(caption, str) and isinstance(file, str) and (folder / Path(file).name).is_file():
            samples[caption] = _read_frames(folder / Path(file).name)
    return samples


def _read_frames(path: Path) -> torch.Tensor:
    return to_pixels([frame.image.convert("RGB") for frame in read_frames(path)])
