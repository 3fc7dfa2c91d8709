"""Process groups of several CPU processes on this machine; each runs a function of the tests and returns its result as JSON."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.subprocesses import free_port

PATIENCE = 280.0  # seconds for a whole world; a hang ends here


def run(world: int, function: str, out: Path, *arguments: Any) -> list[Any]:
    """Call `function` ("module:name") on every rank with JSON arguments. → each rank's result, or {"exit": code} after a SystemExit.

    The output of a rank is in `out`/rank-N.txt.
    """
    out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kineograph.run.train", "kineograph.family.cogvideox", "kineograph.codec.vqgan"])
    port = free_port()
    # multiprocessing would import __main__ again in each child, and pytest's with it.
    main, sys.modules["__main__"] = sys.modules["__main__"], type(sys)("__main__")
    try:
        processes = [
            context.Process(target=_rank, args=(rank, world, port, function, str(out), json.dumps(arguments)))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
    finally:
        sys.modules["__main__"] = main
    for process in processes:
        process.join(PATIENCE)
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
    output = "\n".join(f"rank {rank}: {output_of(out, rank)}" for rank in range(world))
    assert not stuck, f"ranks {stuck} hang\n{output}"
    files = [out / f"rank-{rank}.json" for rank in range(world)]
    assert all(file.exists() for file in files), output
    return [json.loads(file.read_text()) for file in files]


def output_of(out: Path, rank: int) -> str:
    """The output of a rank, without the warnings of torch that `kineo` turns off before it imports torch."""
    file = out / f"rank-{rank}.txt"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return "".join(line for line in lines if not line.startswith(f"[rank{rank}]:[W"))


def _rank(rank: int, world: int, port: int, function: str, out: str, arguments: str) -> None:
    import torch

    sys.stdout = sys.stderr = open(Path(out) / f"rank-{rank}.txt", "w", buffering=1)  # noqa: SIM115  open until the process ends
    os.dup2(sys.stderr.fileno(), 2)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    except SystemExit as end:
        result = {"exit": end.code}
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # a regular exit would wait for the other ranks
    (Path(out) / f"rank-{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)
