"""How well image-to-video follows its picture: `python -m benchmarks.first_frame RUN … --out FOLDER [--count 200]`

Draws held-out items from their captions with and without their first frames, and compares the other frames with the real clips (PSNR). The
average clip is what would be drawn without looking. FOLDER gets the first frames and prompts.jsonl, for `kineo evaluate RUN --prompts`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

import kineograph as kg
from kineograph.core.noise import numpy_rng
from kineograph.core.prompt import Prompt
from kineograph.core.run_folder import RunFolder
from kineograph.data.open_source import open_source
from kineograph.media.clips import write_clip
from kineograph.run.plan import make_plan


def measure_following(run: Path, out: Path, count: int) -> dict[str, float]:
    """→ PSNR of all frames but the first: with it, from the caption alone, and of the average clip."""
    plan = make_plan(RunFolder(run).config())
    source = open_source(plan.stages[-1].spec.data, "validation", plan.seed)
    out.mkdir(parents=True)
    real, prompts = [], []
    for index in range(min(count, len(source))):
        pixels = source.read(index, numpy_rng(0, index, "first frame")).pixels
        assert pixels is not None
        real.append(pixels.float() / 255)
        picture = write_clip(out / f"{index:04d}.png", real[-1][:1], 1)
        prompts.append(Prompt(prompt=source.formatted_captions(index)[0], image=str(picture)))
    rows = [{"prompt": prompt.prompt, "image": Path(prompt.image or "").name} for prompt in prompts]
    (out / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    clips = torch.stack(real)  # N T C H W
    model = kg.load(run)
    drawn = {
        "with its first frame": model.sample(prompts).pixels.cpu(),
        "from its caption alone": model.sample([prompt.prompt for prompt in prompts]).pixels.cpu(),
        "the average clip": clips.mean(0, keepdim=True),
    }
    return {name: measure_psnr(pixels.float(), clips) for name, pixels in drawn.items()}


def measure_psnr(drawn: Tensor, real: Tensor) -> float:
    errors = (drawn - real)[:, 1:].square().flatten(1).mean(1)
    return float((-10 * errors.log10()).mean())


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_frame", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--count", type=int, default=200, help="held-out items")
    options = parser.parse_args(words)
    for run in options.runs:
        found = measure_following(run, options.out / run.name, options.count)
        print(f"{run}: {', '.join(f'{psnr:.1f} dB {name}' for name, psnr in found.items())}")


if __name__ == "__main__":
    main(sys.argv[1:])
