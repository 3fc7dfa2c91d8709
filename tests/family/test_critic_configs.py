"""What is read with a critic alone is refused where there is none, and the other way round."""

from __future__ import annotations

from typing import Any

import pytest

from kineograph.core.config import parse
from kineograph.core.errors import ConfigError
from kineograph.core.registry import find_task


def read(task: str, sample: dict[str, Any], **keys: Any) -> Any:
    return parse(find_task(task).Config, {"task": task, "codec": "tokenizer", "sample": sample, **keys}, "stages.x")


@pytest.mark.parametrize("task", ["muse", "phenaki"])
@pytest.mark.parametrize(
    ("key", "value"), [("critic_noise", 2.0), ("critic_noise_schedule", "rising"), ("critic", False)]
)
def test_noise_on_a_critics_scores_needs_a_critic(task: str, key: str, value: Any) -> None:
    told = rf"stages\.x: sample\.{key}={str(value).lower()} has no effect without a critic: remove it.*critic=self"
    with pytest.raises(ConfigError, match=told):
        read(task, {key: value})
    assert getattr(read(task, {key: value}, critic="self").sample, key) == value
    read(task, {key: getattr(read(task, {}).sample, key)})  # as it is anyway


def test_a_critic_that_nothing_gives_is_none() -> None:
    keys = {"critic": "network", "only": "generator"}
    with pytest.raises(ConfigError, match="has no effect without a critic"):
        read("phenaki", {"critic_noise": 2.0}, **keys)
    read("phenaki", {"critic_noise": 2.0}, **keys, init="runs/x/generator")


def test_noise_on_the_generators_confidence_needs_it_to_decide() -> None:
    with pytest.raises(ConfigError, match=r"sample\.noise=2 .*critic=self decides in its place.*sample\.critic_noise"):
        read("muse", {"noise": 2.0}, critic="self")
    read("muse", {"noise": 2.0, "critic": False}, critic="self")
    read("phenaki", {"noise": 2.0}, critic="self")  # sample.critic=false lets it


def test_weights_of_a_critic_and_sizes_of_a_smaller_picture_that_are_not_there() -> None:
    with pytest.raises(
        ConfigError, match="critic_weight has no effect with critic=none: remove it, or set critic=self"
    ):
        read("muse", {}, critic_weight=2.0)
    read("muse", {}, critic_weight=2.0, critic="self")
    with pytest.raises(ConfigError, match="low_res_size needs super-resolution: name a stage with low_res"):
        read("muse", {}, low_res_size=32)
    read("muse", {}, low_res_size=32, low_res="tokenizer")
