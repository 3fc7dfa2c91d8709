"""A few processes with a gloo group, forked from the test: torch is imported there already, so they start at once."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = 120.0


def run_ranks(world: int, work: Callable[[int], Any], deadly: bool = False) -> list[Any]:
    """Run `work(rank)` in `world` processes at once. → what each returns, by rank, through JSON; None where it was killed (`deadly`)."""
    with tempfile.TemporaryDirectory() as place:
        children = [_start(rank, world, work, Path(place)) for rank in range(world)]
        codes = _wait(children)
        answers = [_answer(Path(place) / f"answer-{rank}") for rank in range(world)]
    wrong = [a["failed"] for a in answers if a is not None and "failed" in a]
    assert not wrong, "\n".join(wrong)
    assert deadly or codes == [0] * world, codes
    return [None if a is None else a["value"] for a in answers]


def _start(rank: int, world: int, work: Callable[[int], Any], place: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        import torch.distributed as dist

        store = dist.FileStore(str(place / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE))
        try:
            answer = {"value": work(rank)}
        except BaseException:
            answer = {"failed": f"process {rank}: {traceback.format_exc()}"}
        (place / f"part-{rank}").write_text(json.dumps(answer))
        os.replace(place / f"part-{rank}", place / f"answer-{rank}")
        code = 0
    finally:
        os._exit(code)


def _wait(children: list[int]) -> list[int]:
    deadline = time.monotonic() + PATIENCE
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    codes[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[child] for child in children]


def _answer(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
