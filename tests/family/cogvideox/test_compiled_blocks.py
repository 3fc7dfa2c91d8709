"""Blocks compiled one by one: one graph serves all that are alike, and nothing else changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from kineograph.train import compile as compile_policy
from kineograph.train.config import EmaConfig, TrainConfig
from kineograph.train.stepper import Stepper

from .conftest import Make, clips

BLOCKS = {
    "depth": 4,
    "text": {"kind": "none"},
    "null_text": "zeros",
    "sample": {"steps": 2, "guidance": 1.0},
}  # nothing else is compiled
STEP = {"lr": 1e-3, "batch_size": 4, "warmup": 0, "steps": 4, "ema": EmaConfig(decay=0)}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """What torch.compile compiles, by way of a backend that needs no C++."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    return counter


def losses(task: Any, **keys: Any) -> list[float]:
    stepper = Stepper(task, TrainConfig(**STEP, **keys))
    batch = clips(captions=False)
    return [float(stepper.step(step, [batch])["loss"]) for step in range(3)]


@pytest.mark.parametrize("checkpointing", [False, pytest.param("light", marks=pytest.mark.slow), "selective"])
def test_one_graph_serves_all_blocks(make: Make, counter: CompileCounterWithBackend, checkpointing: bool | str) -> None:
    expected = losses(make(**BLOCKS), compile=False)
    assert losses(make(**BLOCKS), compile="blocks", checkpointing=checkpointing) == pytest.approx(expected, rel=1e-5)
    assert counter.frame_count == 1


def test_adapters_take_no_second_graph(make: Make, counter: CompileCounterWithBackend) -> None:
    """Though what the first block reads comes from frozen layers."""
    lora = {"tune": "lora", "init": "another", "lora": {"rank": 2}}
    expected = losses(make(**BLOCKS, **lora), compile=False)
    assert losses(make(**BLOCKS, **lora), compile="blocks") == pytest.approx(expected, rel=1e-5)
    assert counter.frame_count == 1


def test_blocks_before_the_first_that_trains_are_not_walked_back(make: Make) -> None:
    task = make(**BLOCKS, tune=["blocks.2.*"], init="another")
    seen = {}
    for number, block in enumerate(task.network.blocks):
        block.register_forward_hook(lambda _, given, __, number=number: seen.update({number: given[0].requires_grad}))
    losses(task, compile=False)
    assert seen == {0: False, 1: False, 2: False, 3: True}


def test_auto_goes_by_the_weights(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(depth=2)
    weights = sum(p.numel() for p in task.network.blocks.parameters())
    assert not compile_policy.is_large(task)
    monkeypatch.setattr(compile_policy, "LARGE", weights)
    assert compile_policy.is_large(task)
    monkeypatch.setattr(compile_policy, "LARGE", weights + 1)
    assert not compile_policy.is_large(task)
