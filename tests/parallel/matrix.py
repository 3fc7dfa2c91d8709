"""Compares the losses of every family under every layout with those of one process; writes the table of docs/parallel.md.

python -m tests.parallel.matrix
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from kineograph.core.errors import ConfigError
from kineograph.run import launch, layers
from kineograph.run.open_data import open_data
from kineograph.run.plan import make_plan
from kineograph.stage.build import PlanBuilder
from kineograph.train.stepper import Stepper
from tests.parallel.worlds import run

STEPS = 5
SHARED = "train.batch_size=8 train.workers=0 train.warmup=0 train.clip=0.1 train.timeout=100 data.count=64 data.validation=0.1"
NARROW = "depth=2 width=32 text.depth=1 text.width=32 text.dropout=0"
GAME = "adversarial={width: 8, levels: 2, start: 1, adaptive: true}"
FAMILIES: dict[str, tuple[str, str, str]] = {  # row → preset, stage, keys of the stage
    "VQGAN, two players": ("vqgan-tiny", "tokenizer", f"width=16 {GAME}"),
    "C-ViViT": ("phenaki-tiny", "tokenizer", "width=32"),
    "causal VAE, two players": ("cogvideox-tiny", "vae", GAME),
    "Muse": ("muse-tiny", "generator", NARROW),
    "Phenaki": ("phenaki-tiny", "generator", NARROW),
    "NUWA": ("nuwa-tiny", "generator", NARROW),
    "CLIP": ("dalle2-tiny", "clip", NARROW),
    "DALL-E 2, prior": ("dalle2-tiny", "prior", "depth=2 width=32 text_encodings=true"),
    "DALL-E 2, decoder": ("dalle2-tiny", "decoder", "width=16"),
    "CogVideoX": ("cogvideox-tiny", "generator", "depth=2 head_width=16 time_width=32 text.width=32 text.dropout=0"),
}
LAYOUTS: dict[str, tuple[int, Any]] = {  # heading → processes, train.parallel
    "replicate, 2": (2, "replicate"),
    "replicate, 4": (4, "replicate"),
    "shard, 2": (2, "shard"),
    "shard, 4": (4, "shard"),
    "shard, kept, 2": (2, {"layout": "shard", "reshard": False}),
    "hybrid, 2 × 2": (4, {"layout": "hybrid", "shard": 2}),
    "tensor, 2": (2, {"tensor": 2}),
    "tensor, 2 × 2": (4, {"tensor": 2}),
    "sequence, 2": (2, {"sequence": 2}),
    "sequence, 4": (4, {"sequence": 4}),
    "shard × sequence, 2 × 2": (4, {"layout": "shard", "sequence": 2}),
}


def train_losses(family: str, parallel: Any = "replicate") -> list[float] | str:
    """The loss of each step, or the error that refuses the layout."""
    preset, name, keys = FAMILIES[family]
    words = [preset, *SHARED.split(), *(f"stages.{name}.{key}" for key in re.split(r" (?=[\w.]+=)", keys))]
    plan = make_plan(layers.read_config(words, {f"stages.{name}.train.parallel": parallel}))
    data = {stage.name: open_data(stage, plan.seed, None, lambda line: None) for stage in plan.stages}
    stage = next(stage for stage in plan.stages if stage.name == name)
    torch.manual_seed(0)
    task = PlanBuilder(plan, data, lambda line: None).build(name, torch.device("cpu"))
    try:
        stepper = Stepper(task.train(), stage.train, stage.players, seed=1)
    except ConfigError as error:
        return str(error)
    batches = data[name].loader().steps(0, STEPS)
    return [float(stepper.step(step, micro)["loss"]) for step, micro in enumerate(batches)]


def train_layouts(layouts: list[Any], families: list[str]) -> list[dict[str, Any]]:
    with launch.process_group():
        return [{family: train_losses(family, parallel) for family in families} for parallel in layouts]


def largest_difference(one: list[float], many: list[float] | str) -> float | None:
    """Relative; None where the layout is refused."""
    if isinstance(many, str):
        return None
    return max(abs(a - b) / abs(a) for a, b in zip(one, many, strict=True))


def compare_layouts(families: list[str], out: Path) -> dict[str, dict[str, float | None]]:
    """family → layout → the largest relative difference."""
    references = {family: train_losses(family) for family in families}
    result: dict[str, dict[str, float | None]] = {family: {} for family in families}
    for world in (2, 4):
        names = [name for name, (processes, _) in LAYOUTS.items() if processes == world]
        layouts = [LAYOUTS[name][1] for name in names]
        columns = run(world, "tests.parallel.matrix:train_layouts", out / str(world), layouts, families)[0]
        for name, column in zip(names, columns, strict=True):
            for family, losses in column.items():
                result[family][name] = largest_difference(references[family], losses)  # type: ignore[arg-type]
    return result


def format_table(rows: dict[str, dict[str, float | None]]) -> str:
    heads = list(LAYOUTS)
    lines = [f"| stage | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for family, row in rows.items():
        cells = ["–" if row[name] is None else f"{row[name]:.0e}" if row[name] else "0" for name in heads]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


BEGIN, END = "<!-- matrix: written by python -m tests.parallel.matrix -->", "<!-- end of matrix -->"


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        table = format_table(compare_layouts(list(FAMILIES), Path(folder)))
    print(table)
    page = Path(__file__).parents[2] / "docs" / "parallel.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    if not rest:
        sys.exit(f"{page} has no place for the table: put {BEGIN} and {END} there")
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
