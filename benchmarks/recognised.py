"""How many drawings are recognised: `python -m benchmarks.recognised RUN … [--count 64]`

Draws training captions and looks for the training item nearest to each drawing, by the squared error of thumbnails of 12 × 12 pixels. A
drawing is recognised if that item has its caption. For presets of a few hundred items, which learn their data by heart; guessing gives
about 1 / captions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import kineograph as kg
from kineograph.core.noise import numpy_rng
from kineograph.core.protocols import Source
from kineograph.core.run_folder import RunFolder
from kineograph.data.open_source import open_source
from kineograph.run.plan import make_plan


def measure_recognised(run: Path, count: int) -> tuple[int, int, int]:
    """→ drawings that are recognised, drawings, and captions to choose from."""
    config = make_plan(RunFolder(run).config()).stages[-1].spec.data
    source = open_source(config, "train", 0)
    captions = [source.formatted_captions(index)[0] for index in range(len(source))]
    items = torch.stack([make_thumbnail(_read(source, index)) for index in range(len(source))])  # N D
    known = sorted(set(captions))
    prompts = [known[index] for index in np.linspace(0, len(known) - 1, min(count, len(known))).astype(int)]
    drawn = torch.stack([make_thumbnail(clip) for clip in kg.load(run).sample(prompts).pixels.cpu()])  # P D
    nearest = torch.cdist(drawn, items).argmin(1).tolist()
    return (
        sum(captions[item] == prompt for item, prompt in zip(nearest, prompts, strict=True)),
        len(prompts),
        len(known),
    )


def _read(source: Source, index: int) -> Tensor:
    """T C H W in [0, 1]"""
    pixels = source.read(index, numpy_rng(0, index, "recognised")).pixels
    assert pixels is not None
    return pixels.float() / 255


def make_thumbnail(clip: Tensor) -> Tensor:
    """T C H W → its frames at 12 × 12, flat"""
    return F.interpolate(clip.float(), (12, 12), mode="area").flatten()


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recognised", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=64, help="captions to draw")
    options = parser.parse_args(words)
    for run in options.runs:
        right, drawn, known = measure_recognised(run, options.count)
        print(f"{run}: {right} of {drawn} drawings are recognised among {known} captions ({right / drawn:.0%})")


if __name__ == "__main__":
    main(sys.argv[1:])
