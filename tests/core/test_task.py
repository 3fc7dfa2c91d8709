"""The Task seam: who owns which parameter, what is frozen, what is saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kineograph.core.batch import Shape
from kineograph.core.capabilities import SupportsSampling
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.registry import find_source, find_task
from kineograph.core.task import (
    BuildContext,
    Mean,
    Task,
    freeze,
    frozen_parts,
    is_frozen,
    load_weights,
    player_parameters,
    task_state_dict,
)
from tests.train.toy_tasks import Duel, Toy, ToyConfig

CONFIG = ToyConfig(task="toy")


def test_players_share_no_parameter_and_leave_none_out() -> None:
    task = Duel(6, CONFIG)
    generator, critic = player_parameters(task, "generator"), player_parameters(task, "critic")
    assert not generator.keys() & critic.keys()
    assert generator.keys() | critic.keys() == dict(task.named_parameters()).keys()


def test_frozen_parts_are_in_no_optimizer_and_no_checkpoint() -> None:
    task = Toy(6, CONFIG)
    assert list(frozen_parts(task)) == ["helper"]
    assert not any(name.startswith("helper") for name in player_parameters(task, "model"))
    assert not any(name.startswith("helper") for name in task_state_dict(task))
    assert {"first.weight", "body.0.weight", "seen"} <= task_state_dict(task).keys()


def test_a_frozen_module_stays_asleep() -> None:
    task = Toy(6, CONFIG)
    helper = freeze(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)))
    task.deep = nn.ModuleDict({"frozen": helper, "awake": nn.Dropout(0.5)})
    task.train()
    assert task.deep["awake"].training
    assert not any(part.training for part in helper.modules())
    assert not any(p.requires_grad for p in helper.parameters())
    assert is_frozen(helper) and not is_frozen(task.deep["awake"])
    assert not any(name.startswith("deep.frozen") for name in task_state_dict(task))


def test_a_frozen_task_stays_in_eval_mode() -> None:
    task = freeze(Toy(6, CONFIG))
    task.train()
    assert not any(part.training for part in task.modules())


def test_earlier_stages_are_neither_parameters_nor_saved() -> None:
    codec = freeze(Duel(6, CONFIG))
    task = Toy.build(
        ToyConfig(task="toy", codec="first"), BuildContext(Shape(1, 1, 2, 3, 8.0), stage=lambda name: codec)
    )
    assert task.stages["codec"] is codec
    assert not any("generator" in name for name in [*task_state_dict(task), *player_parameters(task, "model")])


def test_weights_load_strictly() -> None:
    one, two = Toy(6, CONFIG), Toy(6, CONFIG)
    load_weights(two, task_state_dict(one))
    assert all(torch.equal(a, b) for a, b in zip(task_state_dict(one).values(), task_state_dict(two).values()))
    short = {name: value for name, value in task_state_dict(one).items() if name != "last.bias"}
    with pytest.raises(InputError, match=r"missing \['last.bias'\]"):
        load_weights(two, short)
    with pytest.raises(InputError, match=r"unexpected \['more'\]"):
        load_weights(two, task_state_dict(one) | {"more": torch.ones(1)})


def test_means_join_by_sum_and_count() -> None:
    parts = [Mean(torch.tensor(6.0), 3.0), Mean(torch.tensor(2.0), 1.0)]
    assert Mean(sum(p.sum for p in parts), sum(p.count for p in parts)).value() == 2.0


def test_a_capability_is_known_from_the_class() -> None:
    class Drawer(Toy, SupportsSampling):
        def sample(self, prompts, options):
            return torch.zeros(1)

    assert isinstance(Drawer(6, CONFIG), SupportsSampling) and issubclass(Drawer, SupportsSampling)
    assert not isinstance(Toy(6, CONFIG), SupportsSampling) and not issubclass(Toy, SupportsSampling)


def test_a_context_without_stages_says_so() -> None:
    with pytest.raises(KeyError, match="tokenizer"):
        BuildContext(Shape(1, 4, 4, 3, 8.0)).stage("tokenizer")


# Finding by name -------------------------------------------------------------------------------------------------


def test_tasks_and_sources_are_found_by_importing() -> None:
    assert find_task("tests.train.toy_tasks.Duel") is Duel
    assert find_task("tests.train.toy_tasks:Duel") is Duel
    assert find_source("moving-digits") is find_source("moving_digits")
    assert issubclass(find_task("vqgan"), Task)


@pytest.mark.parametrize("name", ["vqgam", "tests.train.toy_tasks.Nobody", "no.such.module.Class"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="dotted path"):
        find_task(name)


def test_the_closest_name_is_told() -> None:
    with pytest.raises(ConfigError, match="did you mean vqgan"):
        find_task("vqgam", "stages.tokenizer.task")
    with pytest.raises(ConfigError, match="did you mean folder"):
        find_source("foldr")
