"""train.deterministic: what it sets, restores and refuses. tests/run/test_determinism.py trains with it."""

from __future__ import annotations

import os

import pytest
import torch

from kineograph.core import distributed
from kineograph.core.errors import ConfigError, InputError, RunFailed
from kineograph.train.determinism import (
    allow_all_algorithms,
    check_deterministic_device,
    deterministic_algorithms,
    set_deterministic_environment,
)

CPU = torch.device("cpu")


def flags() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
        torch._inductor.config.deterministic,
    )


@pytest.fixture
def refusing():
    """An operation that has no deterministic implementation, not even on the CPU."""

    def refuse() -> None:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))

    return refuse


def test_the_flags_are_set_inside_and_restored_after():
    before = flags()
    with deterministic_algorithms(CPU):
        assert flags() == (True, False, True, False, False, True)
        with allow_all_algorithms():
            assert flags()[:2] == (True, True)
        assert flags()[:2] == (True, False)
    assert flags() == before


def test_the_flags_are_restored_after_an_error():
    before = flags()
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(CPU), allow_all_algorithms():
        raise ZeroDivisionError
    assert flags() == before


def test_drawing_changes_no_flag_without_the_key():
    before = flags()
    with allow_all_algorithms():
        assert flags() == before


def test_an_operation_that_cannot_be_is_refused_by_name(refusing):
    message = r"no deterministic implementation of put_ on cpu.*train\.deterministic=false"
    with pytest.raises(RunFailed, match=message), deterministic_algorithms(CPU):
        refusing()


def test_other_errors_pass_through():
    with pytest.raises(RuntimeError, match="must match"), deterministic_algorithms(CPU):
        torch.zeros(2) + torch.zeros(3)


def test_drawing_may_use_it_without_a_warning(refusing, recwarn):
    with deterministic_algorithms(CPU), allow_all_algorithms():
        refusing()
    assert not recwarn.list


def test_devices_without_a_promise_are_refused():
    check_deterministic_device(torch.device("cuda:1"))
    with pytest.raises(ConfigError, match=r"train\.deterministic=true works on cpu and cuda, and train\.device=mps"):
        check_deterministic_device(torch.device("mps"))


def test_the_variables_of_cublas_and_nccl(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    set_deterministic_environment()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and "NCCL_NVLS_ENABLE" not in os.environ
    monkeypatch.setattr(distributed, "is_active", lambda: True)
    set_deterministic_environment()
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_deterministic_environment()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    with pytest.raises(
        InputError, match=r"needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8, and it is :4096:2: unset it"
    ):
        set_deterministic_environment()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    with pytest.raises(InputError, match="needs NCCL_NVLS_ENABLE=0, and it is 1"):
        set_deterministic_environment()
