"""The page's addresses. Runs are named by ids, files by their path inside a run; everything is read when it is asked for."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kineograph.core.config import parse
from kineograph.core.errors import InputError, KineoError
from kineograph.core.text_file import parse_json
from kineograph.studio import live, pages
from kineograph.studio.clips import make_sheet, make_thumbnail
from kineograph.studio.comparison import COMPARED, compare_runs
from kineograph.studio.curves import read_curves, to_json
from kineograph.studio.data_pages import DataPages
from kineograph.studio.drawing import (
    BODY_BYTES,
    UPLOAD_LIMITS,
    Busy,
    Drawer,
    DrawForm,
    describe_form,
    list_drawings,
    save_upload,
    worker_command,
)
from kineograph.studio.guard import Guard
from kineograph.studio.plan_pages import PlanPages
from kineograph.studio.preset_config import resolve_preset
from kineograph.studio.requests import read_body, send_sheet, stream_events
from kineograph.studio.run_details import (
    list_settings,
    read_config,
    read_evaluation,
    read_skipped,
    stage_names,
    stage_task,
)
from kineograph.studio.run_files import MEDIA, OutsideRun, find_file, read_last_lines
from kineograph.studio.runs import Run, RunIndex, make_mark
from kineograph.studio.wall import read_wall
from kineograph.studio.workers import stop_workers

LOG_LINES = 400
TABS = ("curves", "wall", "evaluation", "config", "log", "draw")
KEEP = "private, max-age=31536000, immutable"


def create_app(
    roots: Sequence[Path],
    token: str,
    hosts: Collection[str],
    cookie: str = "kineo-studio",
    trust: bool = False,
    data: Sequence[Path] = (),
) -> Starlette:
    """The page over the runs below some folders, and over some folders of data."""
    studio = Studio(RunIndex(roots), Drawer(worker_command(trust)))
    routes = [
        Route("/", studio.show_runs),
        Route("/live", studio.watch_runs),
        Route("/compare", studio.compare),
        Route("/static/{name}", studio.send_static),
        Route("/run/{run_id}", studio.show_run),
        Route("/run/{run_id}/live", studio.watch_run),
        Route("/run/{run_id}/curves.json", studio.send_curves),
        Route("/run/{run_id}/thumbnail", studio.send_thumbnail),
        Route("/run/{run_id}/differences", studio.show_differences),
        Route("/run/{run_id}/sheet/{path:path}", studio.send_sheet),
        Route("/run/{run_id}/file/{path:path}", studio.send_file),
        Route("/run/{run_id}/draw", studio.begin_drawing, methods=["POST"]),
        Route("/run/{run_id}/upload", studio.take_upload, methods=["POST"]),
        Route("/run/{run_id}/drawings", studio.show_drawings),
        Route("/run/{run_id}/{tab}", studio.show_run),
        Route("/draw/live", studio.watch_drawing),
        Route("/draw/cancel", studio.cancel_drawing, methods=["POST"]),
        Route("/draw/free", studio.free_model, methods=["POST"]),
        *DataPages(data, studio.index, studio.drawer).routes(),
        *PlanPages().routes(),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        stop_workers()
        await run_in_threadpool(studio.drawer.free)

    handlers: dict[Any, Callable[..., Any]] = {HTTPException: show_error}
    guard = Middleware(Guard, token=token, cookie=cookie, hosts=hosts)
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=lifespan)


async def show_error(request: Request, error: Exception) -> Response:
    """An error in words."""
    assert isinstance(error, HTTPException)
    words = {404: "There is no such page or file in these runs.", 405: "This address does not take such a request."}
    text = words.get(error.status_code, error.detail)
    return HTMLResponse(pages.render("error.html", code=error.status_code, text=text), error.status_code)


class Studio:
    """Answers requests. Functions that read files are plain ones: Starlette runs them in threads."""

    def __init__(self, index: RunIndex, drawer: Drawer) -> None:
        self.index, self.drawer = index, drawer
        self._curves: dict[str, tuple[Any, list[dict[str, Any]]]] = {}
        self._lock, self._resolving = threading.Lock(), threading.Lock()

    # Runs ------------------------------------------------------------------------------------------------------------

    def show_runs(self, request: Request) -> Response:
        runs = self.index.refresh()
        return HTMLResponse(pages.render("runs.html", runs=runs, roots=self.index.roots))

    async def watch_runs(self, request: Request) -> Response:
        return stream_events(live.watch_runs(self.index, pages.render_row))

    def send_thumbnail(self, request: Request) -> Response:
        run = self._find(request)
        data = make_thumbnail(run.path, run.preview)
        return Response(data, media_type="image/webp", headers={"cache-control": KEEP})

    # One run ---------------------------------------------------------------------------------------------------------

    def show_run(self, request: Request) -> Response:
        run, tab = self._find(request), request.path_params.get("tab", "curves")
        if tab not in TABS:
            raise HTTPException(404)
        mark = make_mark(run.path)  # first, so that what changes while the rest is read counts as a change
        tree = read_config(run.path)
        stages = stage_names(tree)
        asked = request.query_params.get("stage")
        stage = asked if asked in stages else run.row.stage if run.row.stage in stages else (stages or [""])[-1]
        values: dict[str, Any] = {"run": run, "mark": mark, "tab": tab, "tree": tree, "stages": stages, "stage": stage}
        values["tasks"] = {name: stage_task(tree, name) for name in stages}
        if tab == "wall":
            online = request.query_params.get("weights") == "online"
            walls = {name: read_wall(run.path, name, online=online) for name in stages}
            drawn = [name for name in stages if walls[name].rows]
            values["stage"] = stage if stage in drawn or asked or not drawn else drawn[-1]
            values["wall"], values["online"] = walls.get(values["stage"]), online
        elif tab == "evaluation":
            values["results"] = read_evaluation(run.path)
            values["skipped"], values["more_skipped"] = read_skipped(run.path)
        elif tab == "config":
            values["settings"] = list_settings(tree)
            values["preset"] = tree.get("preset") if isinstance(tree.get("preset"), str) else None
        elif tab == "log":
            values["lines"] = read_last_lines(run.path, "logs/rank-0.log", LOG_LINES)
        elif tab == "draw":
            newest = [read_wall(run.path, name, most=1) for name in stages]
            prompts = [row.title for wall in newest for row in wall.rows if not row.is_sheet and row.title]
            values["facts"] = describe_form(tree, prompts)
            values["drawings"] = list_drawings(run.path)
        return HTMLResponse(pages.render(f"{tab}.html", **values))

    async def watch_run(self, request: Request) -> Response:
        return stream_events(live.watch_run(self.index, request.path_params["run_id"], pages.render_head))

    def show_differences(self, request: Request) -> Response:
        """The keys in which a run differs from its preset: a part of the config's page that takes seconds the first time."""
        run = self._find(request)
        tree = read_config(run.path)
        preset = tree.get("preset")
        with self._resolving:  # one process at a time
            base = resolve_preset(preset) if isinstance(preset, str) else None
        # A run of an earlier version has fewer keys: those it does not have are no difference.
        settings = list_settings(tree, base) if base is not None else []
        changed = [setting for setting in settings if setting.differs and setting.values[0] is not None]
        return HTMLResponse(pages.render("_differences.html", preset=preset, base=base, settings=changed))

    def send_curves(self, request: Request) -> Response:
        text = json.dumps(
            self._read_curves(self._find(request)), allow_nan=False
        )  # ASCII: texts may hold half characters
        return Response(text, media_type="application/json")

    def _read_curves(self, run: Run) -> list[dict[str, Any]]:
        """Curves of a run, read again when metrics.jsonl, the log or the checkpoints have changed."""
        mark = [_stat(run.path / name) for name in ("metrics.jsonl", "logs/rank-0.log", f"{run.row.stage}/checkpoints")]
        with self._lock:
            known = self._curves.get(run.id)
        if known is None or known[0] != mark:
            known = mark, to_json(read_curves(run.path, stage_names(read_config(run.path))))
            with self._lock:
                while len(self._curves) >= 32:
                    self._curves.pop(next(iter(self._curves)))
                self._curves[run.id] = known
        return known[1]

    # Comparing -------------------------------------------------------------------------------------------------------

    def compare(self, request: Request) -> Response:
        """Two to four runs side by side."""
        self.index.refresh(age=5.0)
        ids = list(dict.fromkeys(request.query_params.getlist("run")))[:COMPARED]
        runs = [run for run_id in ids if (run := self.index.find(run_id)) is not None]
        return HTMLResponse(pages.render("compare.html", **compare_runs(runs), others=self.index.refresh(age=5.0)))

    # Drawing ---------------------------------------------------------------------------------------------------------

    async def begin_drawing(self, request: Request) -> Response:
        """Draw what the form asks for, in the process that draws."""
        run = await run_in_threadpool(self._find, request)
        try:
            tree = parse_json(await read_body(request, BODY_BYTES))
            if not isinstance(tree, dict):
                raise ValueError("it is no object")
            await run_in_threadpool(self.drawer.draw, run, parse(DrawForm, tree))
        except Busy:
            return JSONResponse({"error": "one drawing at a time: wait for it, or cancel it"}, 409)
        except (KineoError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 422)
        return JSONResponse({"number": self.drawer.status.number}, 202)

    async def take_upload(self, request: Request) -> Response:
        """Keep a picture to start from."""
        run = await run_in_threadpool(self._find, request)
        data = await read_body(request, UPLOAD_LIMITS.bytes)
        try:
            return JSONResponse(await run_in_threadpool(save_upload, run.path, data))
        except InputError as error:
            return JSONResponse({"error": str(error)}, 422)

    def show_drawings(self, request: Request) -> Response:
        run = self._find(request)
        return HTMLResponse(pages.render("_drawings.html", run=run, drawings=list_drawings(run.path)))

    async def watch_drawing(self, request: Request) -> Response:
        return stream_events(self.drawer.watch())

    def cancel_drawing(self, request: Request) -> Response:
        self.drawer.cancel()
        return JSONResponse({})

    def free_model(self, request: Request) -> Response:
        self.drawer.free()
        return JSONResponse({})

    # Files -----------------------------------------------------------------------------------------------------------

    def send_file(self, request: Request) -> Response:
        """A picture or clip of a run as it is."""
        path = self._find_media(request)
        return FileResponse(path, media_type=MEDIA[path.suffix])

    def send_sheet(self, request: Request) -> Response:
        """A picture or clip of a run as a sheet of frames; the answer's headers say how to play it."""
        run, path = self._find(request), self._find_media(request)
        return send_sheet(lambda: make_sheet(run.path, path.relative_to(run.path.resolve()).as_posix()))

    def send_static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in pages.read_static():
            raise HTTPException(404)
        kind = pages.STATIC_TYPES[Path(name).suffix]
        return Response(pages.read_static()[name], media_type=kind, headers={"cache-control": KEEP})

    def _find(self, request: Request) -> Run:
        run_id = request.path_params["run_id"]
        run = self.index.find(run_id)
        if run is None:
            self.index.refresh()  # a page may name a run that has just appeared
            run = self.index.find(run_id)
        if run is None:
            raise HTTPException(404)
        return run

    def _find_media(self, request: Request) -> Path:
        try:
            path = find_file(self._find(request).path, request.path_params["path"])
        except OutsideRun:
            raise HTTPException(404) from None
        if path.suffix not in MEDIA:
            raise HTTPException(404)
        return path


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
