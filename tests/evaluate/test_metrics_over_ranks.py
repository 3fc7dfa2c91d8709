"""Metrics on two processes answer what one would: what they saw is joined, not their scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kineograph.core import distributed
from kineograph.core.registry import find_metric
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import Mean
from kineograph.data.digit_captions import Facts
from kineograph.data.moving_digits import MovingDigits
from kineograph.evaluate.extractor.registry import Extractors
from kineograph.evaluate.metric.caption_accuracy import CaptionAccuracy, parse_prompt
from kineograph.evaluate.metric.codebook import Codebook
from kineograph.evaluate.metric.loss import HeldOutLoss
from kineograph.evaluate.metric.reconstruction import Similarity
from kineograph.evaluate.metric_api import EvalBatch, MetricSkipped
from kineograph.evaluate.stage_evaluator import StageEvaluator
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import read_stage
from tests.sample.tiny_task import make_run

CPU = torch.device("cpu")
CAPTIONS = [
    "a red 3 at the top",
    "a blue 7 at the left",
    "a red 5 at the top",
    "a green 1 at the left",
    "a red 0 at the top",
]
ROWS = [range(1), range(1, 5)]  # which of five samples each process sees: means of means would differ


class _Echo:
    """Reads what a picture's first number says: the caption of that place, or another colour for odd ones."""

    def read(self, pixels: torch.Tensor) -> list[Facts]:
        numbers = pixels.flatten(1)[:, 0].round().int().tolist()
        return [parse_prompt(CAPTIONS[n] if n < 5 else CAPTIONS[n - 5].replace("red", "blue")) for n in numbers]


def _make_batch(rows: range) -> EvalBatch:
    """Captions, codes, losses and reconstructions of some of five samples."""
    places = torch.tensor(list(rows))
    draw = torch.Generator().manual_seed(3)
    real = torch.rand(5, 1, 3, 4, 4, generator=draw)
    again = (real + torch.rand(5, 1, 1, 1, 1, generator=draw) * 0.3)[places]
    real = real[places]
    real[:, 0, 0, 0, 0] = places.float()
    made = real.clone()
    made[:, 0, 0, 0, 0] += 5.0 * (places >= 2)
    tokens = torch.randint(0, 8, (5, 1, 3, 3), generator=draw)[places]
    losses = {"loss": Mean(places.double().sum(), float(len(places)))}
    if 0 not in rows:  # a part that only one of the processes meets
        losses["late"] = Mean(torch.tensor(6.0), 2.0)
    return EvalBatch(
        captions=[CAPTIONS[row] for row in rows],
        real=real,
        generated=made,
        reconstruction=again,
        tokens=tokens,
        losses=losses,
    )


def _results(parts: list[range]) -> dict[str, dict[str, float]]:
    metrics = [
        CaptionAccuracy(_Echo()),
        Codebook(8),
        HeldOutLoss(),
        Similarity("reconstruction", "reconstruction", frozenset(), CPU),
    ]  # type: ignore[arg-type]
    for part in parts:
        for metric in metrics:
            metric.update(_make_batch(part))
    found = [(metric.name, metric.compute()) for metric in metrics]
    numbers = {name: {**result.values, **_numbers(result.labels)} for name, result in found}
    again = {metric.name: metric.compute().values for metric in metrics}
    assert all(numbers[name].items() >= values.items() for name, values in again.items())  # asking changes nothing
    return numbers


def _numbers(labels: dict[str, object]) -> dict[str, float]:
    return {key: value for key, value in labels.items() if isinstance(value, int | float)}


def _judged(run: Path) -> dict[str, dict[str, float]]:
    """What the runner finds of a tiny run's two stages on this process's share."""
    folder = RunFolder(run)
    stages = StageLoader(folder)
    found: dict[str, dict[str, float]] = {}
    for name, metrics in (("tokenizer", ["reconstruction", "codebook", "loss"]), ("generator", ["loss", _BRIGHT])):
        spec = read_stage(folder.config(), name)
        source = MovingDigits.open(spec.data, "validation")
        judge = StageEvaluator(spec, stages.load(name), source, CPU, 11, 3, Extractors(CPU), stages, batch=4)
        chosen = {metric.name: metric for metric in map(find_metric, metrics)}
        reasons: dict[str, list[MetricSkipped]] = {key: [] for key in chosen}
        results, _ = judge.run(chosen, reasons)
        found |= {f"{name} {key}": result.values for key, result in results.items()}
        found |= {f"{name} {key} why": {str(why[0]): 1.0} for key, why in reasons.items() if why}
    return found


class Brightness:
    """Of what is drawn, summed over processes. One of the processes gives up on the way when there are two."""

    name = "brightness"
    needs = frozenset({"generated"})

    def __init__(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)

    @classmethod
    def open(cls, subject) -> Brightness:
        return cls()

    def update(self, batch: EvalBatch) -> None:
        made = batch.generated
        assert made is not None
        self.sums += torch.tensor([float(made.double().mean((1, 2, 3, 4)).sum()), len(made)])

    def compute(self):
        from kineograph.evaluate.metric_api import Result

        total, count = distributed.all_reduce_(self.sums.clone()).tolist()
        return Result({"brightness": total / count, "count": count})


class Quitter(Brightness):
    name = "quitter"

    def update(self, batch: EvalBatch) -> None:
        if distributed.rank() == 1:
            raise MetricSkipped("the second one has had enough")
        super().update(batch)


_BRIGHT = f"{__name__}.Brightness"


def _quit(run: Path) -> tuple[list[str], list[str]]:
    folder = RunFolder(run)
    stages = StageLoader(folder)
    spec = read_stage(folder.config(), "generator")
    source = MovingDigits.open(spec.data, "validation")
    judge = StageEvaluator(spec, stages.load("generator"), source, CPU, 8, 3, Extractors(CPU), stages, batch=4)
    reasons: dict[str, list[MetricSkipped]] = {"quitter": [], "brightness": []}
    results, _ = judge.run({"quitter": Quitter, "brightness": Brightness}, reasons)
    return sorted(results), [str(why) for why in reasons["quitter"]]


def _on_rank(rank: int, folder: str, run: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        told = {"direct": _results([ROWS[rank]]), "judged": _judged(Path(run)), "quit": _quit(Path(run))}
        told["json"] = distributed.data_all_gather_object({"rank": rank, "text": "é\n" * (rank + 1)})
        Path(folder, f"{rank}.json").write_text(json.dumps(told))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_answer_what_one_does(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", coloured=False).path
    mp.spawn(_on_rank, (str(tmp_path), str(run)), nprocs=2)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0] == told[1]
    one = _results(ROWS)
    assert one["caption_accuracy"]["caption_accuracy"] == 0.6 and one["caption_accuracy"]["ceiling"] == 1.0
    assert one["loss"] == {"loss": 2.0, "late": 3.0}
    for name, values in one.items():
        assert told[0]["direct"][name] == pytest.approx(values, rel=1e-9), name
    for name, values in _judged(run).items():
        assert told[0]["judged"][name] == pytest.approx(values, rel=1e-5), name
    assert told[0]["judged"].keys() == _judged(run).keys()
    assert told[0]["quit"] == [["brightness"], ["the second one has had enough"]]  # and nobody waits for the other
    assert told[0]["json"] == [{"rank": 0, "text": "é\n"}, {"rank": 1, "text": "é\né\n"}]


def test_one_process_has_only_itself_to_hear() -> None:
    assert distributed.data_all_gather_object({"a": [1, None]}) == [{"a": [1, None]}]
