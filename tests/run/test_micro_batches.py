"""Losses that compare the samples of a batch, under train.accumulate: micro-batches do not see one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.clip_tasks import train

STAGES = {
    "tokenizer": {
        "task": "vqgan", "width": 8, "multipliers": [1], "patch": 4, "perceptual": {"weight": 0}, "data": {"frames": 1, "stills": 0},
        "quantizer": {"kind": "lfq", "codes": 4096}, "train": {"steps": 1},
    },
    "clip": {
        "task": "clip", "width": 16, "heads": 1, "depth": 1, "embed_width": 8, "data": {"frames": 1, "stills": 0},
        "text": {"width": 16, "depth": 0, "positions": "none", "length": 12}, "train": {"steps": 1},
    },
}  # fmt: skip


@pytest.mark.parametrize(("accumulate", "warned"), [(1, []), (4, ["clip", "tokenizer"])])
def test_training_says_what_a_micro_batch_limits(tmp_path: Path, accumulate: int, warned: list[str]) -> None:
    lines: list[str] = []
    train(tmp_path, lines=lines, stages=STAGES, train__accumulate=accumulate)
    found = {line.split()[1]: line for line in lines if "of a micro-batch" in line}
    assert sorted(found) == warned
    if warned:
        assert "4,096 codes over the 64 tokens" in found["tokenizer"] and "lower train.accumulate" in found["tokenizer"]
        assert "the 4 captions of a micro-batch" in found["clip"] and "train.accumulate=1" in found["clip"]
