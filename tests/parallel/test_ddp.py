"""Gradients that DDP cannot average, parameters without a gradient, and accumulation under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kineograph.core.errors import ConfigError
from kineograph.train.config import TrainConfig
from kineograph.train.ddp import GradientAverage
from kineograph.train.stepper import Stepper
from tests.train.ranks import run_ranks
from tests.train.test_stepper import batch, duel, toy

SHAPES = {"one": (3, 2), "two": (4,), "three": (2, 2), "four": (1,)}


def parameters(rank: int, missing: dict[int, list[str]]) -> dict[str, nn.Parameter]:
    """Parameters with gradients of `rank` + 1, except those that are missing on this rank."""
    result = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    for name, p in result.items():
        p.grad = None if name in missing.get(rank, []) else torch.full_like(p, rank + 1.0)
    return result


def average(missing: dict[int, list[str]], bucket_mb: float, find_unused: bool = True) -> list[dict[str, Any]]:
    """Each rank's gradients after averaging (None where there is none), and its number of all-reduces."""

    def work(rank: int) -> dict[str, Any]:
        named, calls = parameters(rank, missing), 0
        all_reduce = dist.all_reduce

        def counted(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            return all_reduce(*arguments, **keywords)

        dist.all_reduce = counted
        GradientAverage(named, bucket_mb, find_unused)()
        assert all(p.grad is None or p.grad.shape == p.shape for p in named.values())
        return {name: None if p.grad is None else p.grad.unique().tolist() for name, p in named.items()} | {
            "calls": calls
        }

    return run_ranks(2, work)


@pytest.mark.parametrize(("bucket_mb", "buckets"), [(25.0, (1, 1)), (1e-6, (3, 4))])
def test_a_missing_gradient_counts_as_zero_and_stays_missing_where_no_rank_has_one(
    bucket_mb: float, buckets: tuple[int, int]
) -> None:
    """One all-reduce tells which parameters are used, then there is one for each bucket."""
    some = average({0: ["two", "four"], 1: ["one", "four"]}, bucket_mb)
    assert some == [{"one": [0.5], "two": [1.0], "three": [1.5], "four": None, "calls": 1 + buckets[0]}] * 2
    full = average({}, bucket_mb)
    assert full == [{"one": [1.5], "two": [1.5], "three": [1.5], "four": [1.5], "calls": 1 + buckets[1]}] * 2


def test_a_rank_with_all_gradients_does_not_wait_for_the_device() -> None:
    """Rank 0 lacks no gradient and reads no flag back from the device."""

    def work(rank: int) -> int:
        named, reads = parameters(rank, {1: ["one"]}), 0
        to_list = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> Any:
            nonlocal reads
            reads += 1
            return to_list(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign,assignment]
        GradientAverage(named, 25.0)()
        return reads

    assert run_ranks(2, work) == [0, 1]


def test_without_find_unused_a_missing_gradient_is_an_error() -> None:
    assert average({}, 25.0, find_unused=False)[0] == {**{name: [1.5] for name in SHAPES}, "calls": 1}

    def work(rank: int) -> str:
        named = parameters(0, {0: ["two", "three"]})  # the same on both ranks, so that neither waits for the other
        with pytest.raises(ConfigError) as error:
            GradientAverage(named, 25.0, find_unused=False)()
        return str(error.value)

    first, second = run_ranks(2, work)
    assert "find_unused=false: parameters got no gradient in this step (2, the first is two)" in first
    assert first == second


@pytest.mark.parametrize("find_unused", [True, False])
def test_find_unused_applies_to_tasks_with_two_players(find_unused: bool) -> None:
    """One parameter of the generator is not part of its loss."""

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

    first, second = run_ranks(2, work)
    assert first == second
    assert first == "" if find_unused else "the first is generator.spare" in first


def test_a_static_graph_looks_once_for_parameters_without_a_gradient() -> None:
    """One that begins to be used in a later step is an error; without static_graph it is none."""

    def work(rank: int) -> list[str]:
        answers = []
        for static in (True, False):
            task = toy()
            task.spare = nn.Parameter(torch.zeros(()))
            forward = task.forward

            def add_spare(batch: Any, noise: Any, task: Any = task, forward: Any = forward) -> Any:
                found, *others = forward(batch, noise)
                return found + task.spare if noise.step > 1 else found, *others

            task.forward = add_spare  # type: ignore[method-assign]
            config = TrainConfig.model_validate({"batch_size": 8, "warmup": 0, "parallel": {"static_graph": static}})
            stepper = Stepper(task, config)
            try:
                for step in range(4):
                    stepper.step(step, [batch(step, range(4 * rank, 4 * rank + 4))])
                answers.append("")
            except ConfigError as error:
                answers.append(str(error))
        return answers

    for static, searching in run_ranks(2, work):
        assert "static_graph=true: this step used other parameters" in static and searching == ""


def test_ddp_reduces_once_a_step() -> None:
    """Not after each micro-batch."""
    config = TrainConfig.model_validate({"batch_size": 8, "accumulate": 2, "warmup": 0})

    def work(rank: int) -> int:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        stepper = Stepper(toy(), config)
        assert stepper.wrapped is not None
        reduced = 0

        def counted(group, bucket):  # type: ignore[no-untyped-def]  # DDP wants its own annotations or none
            nonlocal reduced
            reduced += 1
            return allreduce_hook(group, bucket)

        stepper.wrapped.module.register_comm_hook(None, counted)
        for step in range(3):
            slots = range(4 * rank, 4 * rank + 4)
            stepper.step(step, [batch(step, slots[:2]), batch(step, slots[2:])])
        return reduced

    assert run_ranks(2, work) == [3, 3]
