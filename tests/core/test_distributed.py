"""Words that processes say to one another, and to people."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from kineograph.core import distributed
from kineograph.core.errors import InputError, RunInUse
from tests.train.ranks import run_ranks


def test_one_process_hears_itself() -> None:
    assert distributed.all_gather_object({"a": 1}) == distributed.data_all_gather_object({"a": 1}) == [{"a": 1}]
    assert torch.equal(distributed.all_gather_rows(torch.ones(2, 3)), torch.ones(2, 3))


def test_everyone_hears_everyone_in_order() -> None:
    """However long each speaks, and in whatever letters."""

    def work(rank: int) -> Any:
        heard = distributed.all_gather_object({"rank": rank, "text": "é\n" * rank})
        rows = distributed.all_gather_rows(torch.full((rank, 2), float(rank)))
        return [heard, rows.tolist()]

    said = [{"rank": rank, "text": "é\n" * rank} for rank in range(3)]
    assert run_ranks(3, work) == [[said, [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]]] * 3


def test_those_who_see_the_same_data_are_counted_once() -> None:
    def work(rank: int) -> Any:
        groups = [dist.new_group([first, first + 2]) for first in range(2)]  # 0 and 1 see one batch, 2 and 3 another
        distributed.set_data_group(rank // 2, 2, groups[rank % 2])
        return [distributed.data_all_gather_object(rank), distributed.all_gather_object(rank)]

    assert run_ranks(4, work) == [[[rank % 2, rank % 2 + 2], [0, 1, 2, 3]] for rank in range(4)]


@pytest.mark.parametrize(("name", "reason"), [("meta", "not known"), ("tpu", "not known"), ("xpu", "not there")])
def test_a_device_that_torch_knows_and_nobody_has_is_refused(name: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"{name}'? is {reason}: use auto"):
        distributed.resolve_device(name)


def test_several_processes_do_not_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert distributed.resolve_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")], "streams and events belong to the current device"
    monkeypatch.setattr(distributed, "local_world", lambda: 2)
    assert distributed.resolve_device("cuda") == torch.device("cuda")
    with pytest.raises(InputError, match="device cuda:1 is one GPU for 2 processes: use auto"):
        distributed.resolve_device("cuda:1")


def test_an_error_of_the_first_process_is_raised_by_all() -> None:
    def work(rank: int) -> Any:
        def refuse() -> None:
            raise RunInUse("runs/x is in use")

        mine = distributed.run_on_first(lambda: f"by {rank}")
        try:
            distributed.run_on_first(refuse)
        except RunInUse as error:
            return [mine, str(error)]

    assert run_ranks(2, work) == [["by 0", "runs/x is in use"], [None, "runs/x is in use"]]
    assert distributed.run_on_first(lambda: 3) == 3


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1737: Connection reset by peer. This is typically"), "gone"),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:32161. This"), "gone"),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation"), "gone"),
        (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), "gone"),
        (dist.DistBackendError("NCCL error in: x.cpp:77, remote process exited or there was a network error\nncclRemoteError: A call failed"), "gone"),
        (RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (4), got (3))"), "invalid tensor size"),
        (
            dist.DistBackendError(
                "NCCL error in: x.cpp:77, unhandled system error, NCCL version 2.27\nncclSystemError: System call failed\nLast error:\n"
                "Error while creating shared memory segment /dev/shm/nccl-x, error: No space left on device (28)"
            ),
            "No space left on device",
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("gloo"), None),
    ],
)  # fmt: skip
def test_only_lost_connections_are_blamed_on_another_process(error: Exception, said: str | None) -> None:
    text = distributed.describe_group_failure(error)
    if said == "gone":
        assert text is not None and text.startswith("another process of the job is gone or does not answer (")
    elif said is None:
        assert text is None
    else:
        assert text is not None and said in text and "another process" not in text


def test_people_hear_the_first_process_alone() -> None:
    def work(rank: int) -> list[str]:
        heard: list[str] = []
        distributed.on_first_rank(heard.append)("hello")
        return heard

    assert run_ranks(2, work) == [["hello"], []]
