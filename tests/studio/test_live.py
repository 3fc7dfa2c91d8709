"""What changes while a page is open reaches it."""

from __future__ import annotations

import asyncio
import http.client
import re
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn

from kineograph.studio.app import create_app
from kineograph.studio.live import Event, stream, watch_run, watch_runs
from kineograph.studio.pages import render_head, render_row
from kineograph.studio.runs import RunIndex, make_id
from kineograph.studio.server import allowed_hosts
from tests.studio.conftest import TOKEN
from tests.studio.run_folders import write_run


async def next_events(events: AsyncIterator[Event | None]) -> list[Event]:
    """The events of one look at the files."""
    found = []
    async for event in events:
        if event is None:
            break
        found.append(event)
    return found


def test_the_list_follows_runs_that_appear_change_and_go(tmp_path: Path) -> None:
    write_run(tmp_path / "one", steps=500)

    async def follow() -> None:
        events = watch_runs(RunIndex([tmp_path]), render_row, interval=0.01)
        assert [name for name, _ in await next_events(events)] == ["run"]
        assert await next_events(events) == []
        write_run(tmp_path / "two")
        ((name, data),) = await next_events(events)
        assert name == "run" and data["id"] == make_id(tmp_path / "two") and "100 of 100" in data["html"]
        (tmp_path / "one" / "stopped").touch()
        ((_, data),) = await next_events(events)
        assert "stopped" in data["html"]
        shutil.rmtree(tmp_path / "two")
        assert await next_events(events) == [("gone", {"id": make_id(tmp_path / "two")})]

    asyncio.run(follow())


def test_a_run_s_page_hears_of_new_records_and_of_its_end(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one", steps=500)
    index = RunIndex([tmp_path])
    index.refresh()

    async def follow() -> None:
        events = watch_run(index, make_id(path), render_head, interval=0.01)
        ((_, before),) = await next_events(events)
        assert await next_events(events) == []
        with open(path / "metrics.jsonl", "a") as file:
            file.write("\n")
        ((name, data),) = await next_events(events)
        assert name == "change" and data["mark"] != before["mark"]
        shutil.rmtree(path)
        assert await next_events(events) == [("gone", {"id": make_id(path)})]

    asyncio.run(follow())


def test_a_silent_connection_says_now_and_then_that_it_lives() -> None:
    async def nothing() -> AsyncIterator[Event | None]:
        for _ in range(45):
            yield None

    async def read() -> list[str]:
        return [text async for text in stream(nothing())]

    assert asyncio.run(read()) == ["retry: 2000\n\n", ": alive\n\n", ": alive\n\n"]


def test_a_real_server_streams_a_run_that_begins(tmp_path: Path) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    app = create_app([tmp_path], TOKEN, allowed_hosts("127.0.0.1"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/live", headers={"cookie": f"kineo-studio={TOKEN}"})
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.readline() == b"retry: 2000\n"
        write_run(tmp_path / "begun")
        text = b""
        end = time.monotonic() + 20
        while b"</tr>" not in text and time.monotonic() < end:
            text += answer.readline()
        assert re.search(rb'event: run\ndata: .*"id": "begun-', text)
        answer.close()
        connection.close()
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()
