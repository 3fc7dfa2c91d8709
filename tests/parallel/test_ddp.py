"""Gradients that DDP does not join: parameters that take no part, and what processes need to say about that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kineograph.core.errors import ConfigError
from kineograph.train.config import TrainConfig
from kineograph.train.ddp import Reduction
from kineograph.train.stepper import Stepper
from tests.train.test_stepper import batch, duel, toy
from tests.train.together import together

SHAPES = {"one": (3, 2), "two": (4,), "three": (2, 2), "four": (1,)}


def parameters(rank: int, absent: dict[int, list[str]]) -> dict[str, nn.Parameter]:
    """With gradients of `rank` + 1 everywhere but in those that are absent in this process."""
    found = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    for name, p in found.items():
        p.grad = None if name in absent.get(rank, []) else torch.full_like(p, rank + 1.0)
    return found


def joined(absent: dict[int, list[str]], bucket_mb: float, find_unused: bool = True) -> list[dict[str, Any]]:
    """Of two processes: each gradient (None where there is none), and how often each spoke."""

    def work(rank: int) -> dict[str, Any]:
        found, spoken = parameters(rank, absent), 0
        reduce = dist.all_reduce

        def counted(*given: Any, **named: Any) -> Any:
            nonlocal spoken
            spoken += 1
            return reduce(*given, **named)

        dist.all_reduce = counted
        Reduction(found, bucket_mb, find_unused)()
        gradients = {name: None if p.grad is None else p.grad.unique().tolist() for name, p in found.items()}
        assert all(p.grad is None or p.grad.shape == p.shape for p in found.values())
        return {**gradients, "spoken": spoken}

    return together(2, work)


@pytest.mark.parametrize(("bucket_mb", "buckets"), [(25.0, 1), (1e-6, 4)])
def test_a_gradient_is_the_mean_of_those_that_have_one(bucket_mb: float, buckets: int) -> None:
    """And of nobody's there is none. Nothing is said beside the gradients."""
    both = joined({0: ["two", "four"], 1: ["one", "four"]}, bucket_mb)
    assert both == [{"one": [0.5], "two": [1.0], "three": [1.5], "four": None, "spoken": buckets}] * 2
    all_there = joined({}, bucket_mb)
    assert all_there == [{"one": [1.5], "two": [1.5], "three": [1.5], "four": [1.5], "spoken": buckets}] * 2


def test_whoever_has_all_gradients_waits_for_no_answer() -> None:
    """The first one lacks nothing, and reads no number back from the device."""

    def work(rank: int) -> int:
        found, read = parameters(rank, {1: ["one"]}), 0
        as_list = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> Any:
            nonlocal read
            read += 1
            return as_list(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign,assignment]
        Reduction(found, 25.0)()
        return read

    assert together(2, work) == [0, 1]


def test_where_all_must_take_part_nothing_is_asked_and_an_absence_is_named() -> None:
    assert joined({}, 25.0, find_unused=False)[0]["three"] == [1.5]

    def work(rank: int) -> str:
        found = parameters(0, {0: ["two", "three"]})  # the same in both, so that neither waits for the other
        with pytest.raises(ConfigError) as error:
            Reduction(found, 25.0, find_unused=False)()
        return str(error.value)

    first, second = together(2, work)
    assert "find_unused=false: two took no part" in first and "nor did 1 other" in first and first == second


@pytest.mark.parametrize("find_unused", [True, False])
def test_the_key_reaches_tasks_of_two_players(find_unused: bool) -> None:
    """A parameter of the generator that its loss never sees."""

    def work(rank: int) -> str:
        task = duel()
        task.generator.spare = nn.Parameter(torch.zeros(2))
        config = TrainConfig.model_validate({"batch_size": 8, "warmup": 0, "parallel": {"find_unused": find_unused}})
        stepper = Stepper(task, config)
        try:
            stepper.step(0, [batch(0, range(4 * rank, 4 * rank + 4))])
        except ConfigError as error:
            return str(error)
        return "" if bool((task.generator.spare == 0).all()) else "moved"

    first, second = together(2, work)
    assert first == second
    assert first == "" if find_unused else "generator.spare took no part" in first


def test_micro_batches_are_joined_once_a_step() -> None:
    """DDP would reduce after each of them."""
    config = TrainConfig.model_validate({"batch_size": 8, "accumulate": 2, "warmup": 0})

    def work(rank: int) -> int:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        stepper = Stepper(toy(), config)
        assert stepper.whole_way is not None
        reduced = 0

        def counted(group, bucket):  # type: ignore[no-untyped-def]  # DDP wants its own annotations or none
            nonlocal reduced
            reduced += 1
            return allreduce_hook(group, bucket)

        stepper.whole_way.module.register_comm_hook(None, counted)
        for step in range(3):
            slots = range(4 * rank, 4 * rank + 4)
            stepper.step(step, [batch(step, slots[:2]), batch(step, slots[2:])])
        return reduced

    assert together(2, work) == [3, 3]
