"""The process that draws for the page: reads jobs from stdin, writes what happens to stdout, one JSON object a line.

It is the only part of the page that imports torch. A model stays loaded until another one is asked for, or the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

REPORT_EVERY = 0.25  # seconds between reports of progress


class Cancelled(Exception):
    """The page asked for an end of the drawing."""


class Worker:
    """Draws one job after another."""

    def __init__(self, out: IO[str]) -> None:
        self.out = out
        self.cancel = threading.Event()
        self._lock = threading.Lock()
        self._sampler: Any = None
        self._key: Any = None
        self._passes = 0
        self._reported = 0.0

    def say(self, event: str, **values: Any) -> None:
        with self._lock:
            self.out.write(json.dumps({"event": event, **values}) + "\n")
            self.out.flush()

    def run(self, job: dict[str, Any]) -> None:
        """Draw a job and say how it ended. The model stays loaded, also when the drawing failed or was cancelled."""
        from kineograph.core.errors import KineoError

        begin, text = time.monotonic(), ""
        try:
            if job.get("do") == "reconstruct":
                files, text = self._reconstruct(job)
            else:
                files = self._draw(job)
        except Cancelled:
            self.say("cancelled")
        except KineoError as error:
            self.say("failed", error=str(error))
        except MemoryError:
            self.say("failed", error=_OUT_OF_MEMORY)
        except Exception as error:  # the page shows it; the next drawing may work
            is_memory = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
            self.say("failed", error=_OUT_OF_MEMORY if is_memory else f"unexpected {type(error).__name__}: {error}")
        else:
            seconds = time.monotonic() - begin
            self.say("done", files=files, text=text, passes=self._passes, seconds=seconds, **self._describe())

    def _draw(self, job: dict[str, Any]) -> list[str]:
        from kineograph.sample.request import SampleRequest

        self._passes = 0
        form = dict(job["form"])
        is_story, prompts = form.pop("story"), form.pop("prompts")
        request = SampleRequest.from_flags(job["run"], prompts, **form)
        sampler = self._open(request)
        self.say("drawing", **self._describe())
        out = Path(job["out"])
        with self._watch(sampler.task):
            if is_story:
                from kineograph.sample.story import check_scenes

                check_scenes(prompts)
                paths = sampler.plan_story(request).save(out, note=lambda line: self.say("note", text=line))
            else:
                paths = sampler.draw(request).save(out)
        return [path.name for path in paths]

    def _open(self, request: Any) -> Any:
        """Load the model, unless it is loaded already."""
        from kineograph.core.run_folder import RunFolder
        from kineograph.sample.sampler import Sampler
        from kineograph.stage.load import StageLoader, choose_sampling_stage
        from kineograph.train import checkpoint

        folder = RunFolder.existing(request.run)
        stage = choose_sampling_stage(folder, request.stage)
        saved = checkpoint.select(folder.checkpoints(stage), request.checkpoint)
        # The digests: a run may be removed and trained again under its name, or its codec trained further.
        digests = (saved.digest(), *sorted(StageLoader(folder).needed_digests(stage).items()))
        key = (request.run, stage, saved.step, request.ema, digests)
        return self._load(key, lambda: Sampler.open(folder, saved.step, stage, ema=request.ema))

    def _load(self, key: tuple[Any, str, int, bool | None, Any], load: Callable[[], Any]) -> Any:
        """What `load` returns, kept until another key is asked for."""
        if key != self._key:
            self.say("loading", model=f"{key[1]}, step {key[2]:,}")
            self._sampler = self._key = None  # free it before the next one is loaded
            _release_memory()
            self._sampler, self._key = load(), key
        return self._sampler

    def _reconstruct(self, job: dict[str, Any]) -> tuple[list[str], str]:
        """A picture or clip as the codec reads it, beside what its decoder makes of it. → the file below RUN/studio, and a sentence"""
        from kineograph.core import distributed
        from kineograph.core.run_folder import RunFolder
        from kineograph.stage.load import StageLoader
        from kineograph.studio.dataset import DatasetItem
        from kineograph.studio.reconstruction import reconstruct_item
        from kineograph.train import checkpoint

        self._passes = 0
        folder, stage = RunFolder.existing(job["run"]), job["stage"]
        saved = checkpoint.select(folder.checkpoints(stage))

        def load() -> Any:
            return StageLoader(folder, distributed.resolve_device("auto")).load(stage, saved.step)

        task = self._load((job["run"], stage, saved.step, None, saved.digest()), load)
        self.say("drawing", **self._describe())
        with self._watch(task):
            item = DatasetItem(**job["item"])
            path, text = reconstruct_item(task, folder, stage, saved.step, Path(job["folder"]), item, Path(job["out"]))
        return [path.relative_to(Path(job["out"]).parent).as_posix()], text

    def _describe(self) -> dict[str, Any]:
        """What is loaded, and how much memory the process holds."""
        _, stage, step, ema, _ = self._key
        device = self._sampler.device if hasattr(self._sampler, "device") else next(self._sampler.parameters()).device
        weights = "" if ema or ema is None else ", online weights"
        return {"model": f"{stage}, step {step:,}{weights}", "device": str(device), "memory": _held_memory(device)}

    def _watch(self, task: Any) -> Any:
        """Count the passes through the network, and stop at one when the page asks for it."""
        from contextlib import ExitStack

        from torch import nn

        stack = ExitStack()
        blocks = task.blocks()
        if blocks:
            stack.callback(blocks[0].register_forward_pre_hook(lambda module, inputs: self._count()).remove)

        def check(module: nn.Module, inputs: Any) -> None:
            if self.cancel.is_set():
                raise Cancelled

        stack.callback(nn.modules.module.register_module_forward_pre_hook(check).remove)
        return stack

    def _count(self) -> None:
        self._passes += 1
        if time.monotonic() - self._reported > REPORT_EVERY:
            self._reported = time.monotonic()
            self.say("progress", passes=self._passes)


_OUT_OF_MEMORY = "there is not enough memory: draw fewer, shorter or smaller clips, or free memory on this machine"


def _release_memory() -> None:
    import gc

    from kineograph.doctor.machine import release_memory

    gc.collect()
    release_memory()


def _held_memory(device: Any) -> int:
    """Bytes of the GPU; without one, of main memory."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_reserved(device)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the lines
    if "--trust" in sys.argv:
        from kineograph.core.trust import trust_all

        trust_all()
    worker = Worker(out)
    jobs: list[dict[str, Any]] = []
    waiting = threading.Condition()

    def read() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if message["do"] == "cancel":
                worker.cancel.set()
                continue
            with waiting:
                jobs.append(message)
                waiting.notify()
        os._exit(0)  # the page has ended, or freed the model

    threading.Thread(target=read, daemon=True).start()
    worker.say("ready")
    while True:
        with waiting:
            waiting.wait_for(lambda: bool(jobs))
            job = jobs.pop(0)
        worker.cancel.clear()
        worker.run(job)


if __name__ == "__main__":
    main()
