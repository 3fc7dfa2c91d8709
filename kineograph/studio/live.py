"""Server-sent events: what changed since the page was loaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool

from kineograph.studio.runs import Run, RunIndex, make_mark

INTERVAL = 1.0  # seconds between looks at the files
KEEP_ALIVE = 20.0  # seconds after which a silent connection says that it lives

Event = tuple[str, Any]


def encode_event(event: Event) -> str:
    return f"event: {event[0]}\ndata: {json.dumps(event[1], ensure_ascii=False)}\n\n"


async def stream(events: AsyncIterator[Event | None]) -> AsyncIterator[str]:
    """Encode events; None, which says that nothing happened, becomes a comment now and then."""
    yield "retry: 2000\n\n"
    silent = 0.0
    async for event in events:
        if event is not None:
            yield encode_event(event)
        silent = 0.0 if event is not None else silent + INTERVAL
        if silent >= KEEP_ALIVE:
            yield ": alive\n\n"
            silent = 0.0


async def watch_runs(
    index: RunIndex, render: Callable[[Run], str], interval: float = INTERVAL
) -> AsyncIterator[Event | None]:
    """`run` with the new row of a run that appeared or changed, `gone` with the id of one that left."""
    shown: dict[str, str] | None = None
    while True:
        runs = await run_in_threadpool(index.refresh, interval / 2)
        rows = {run.id: render(run) for run in runs}
        for run_id in (shown or {}).keys() - rows.keys():
            yield "gone", {"id": run_id}
        # The first look too: something may have changed since the page was rendered.
        for run_id, row in rows.items():
            if shown is None or shown.get(run_id) != row:
                yield "run", {"id": run_id, "html": row}
        shown = rows
        yield None
        await asyncio.sleep(interval)


async def watch_run(
    index: RunIndex, run_id: str, render: Callable[[Run], str], interval: float = INTERVAL
) -> AsyncIterator[Event | None]:
    """`change` with the new head of a run's page, and a mark of its files, whenever they change; `gone` when it is removed."""
    shown, seen = None, None
    while True:
        run = await run_in_threadpool(index.find, run_id)
        if run is None:
            yield "gone", {"id": run_id}
            return
        head, mark = render(run), await run_in_threadpool(make_mark, run.path)
        if shown is None or (head, mark) != (shown, seen):
            yield "change", {"id": run_id, "html": head, "mark": mark}
        shown, seen = head, mark
        yield None
        await asyncio.sleep(interval)
