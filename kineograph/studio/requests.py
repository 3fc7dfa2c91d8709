"""What the page's addresses share: bodies up to a limit, sheets of frames, server-sent events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from kineograph.core.errors import Unreadable
from kineograph.studio import live
from kineograph.studio.clips import Sheet
from kineograph.studio.run_files import OutsideRun


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request; a larger one is refused before it is read."""
    told = request.headers.get("content-length", "")
    data = bytearray()
    if not told.isdecimal() or int(told) <= most:
        async for chunk in request.stream():
            data += chunk
            if len(data) > most:
                break
        else:
            return bytes(data)
    raise HTTPException(413, f"This is larger than {most // 2**20 or 1} MiB, which is the limit.")


def send_sheet(make: Callable[[], Sheet]) -> Response:
    """A picture or clip as a sheet of frames; the answer's headers say how to play it."""
    try:
        sheet = make()
    except OutsideRun:
        raise HTTPException(404) from None
    except Unreadable as error:
        return PlainTextResponse(error.reason, 422)
    numbers = {"frames": sheet.frames, "columns": sheet.columns, "width": sheet.width, "height": sheet.height}
    headers = {f"x-{name}": str(value) for name, value in numbers.items()} | {"x-fps": f"{sheet.fps:.3f}"}
    return Response(sheet.data, media_type="image/webp", headers=headers)


def stream_events(events: Any) -> Response:
    return StreamingResponse(live.stream(events), media_type="text/event-stream")
