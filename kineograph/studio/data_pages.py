"""The addresses of Data: folders that were given with --data, their items, and what a codec makes of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kineograph.core.config import Config, parse
from kineograph.core.errors import KineoError, Unreadable
from kineograph.core.text_file import parse_json
from kineograph.studio import pages
from kineograph.studio.dataset import (
    CheckForm,
    Dataset,
    DatasetItem,
    find_codecs,
    find_data_folders,
    format_command,
    open_datasets,
    select_items,
)
from kineograph.studio.drawing import BODY_BYTES, Busy, Drawer
from kineograph.studio.item_frames import make_item_sheet, read_item
from kineograph.studio.requests import read_body, send_sheet
from kineograph.studio.run_files import OutsideRun, find_file
from kineograph.studio.runs import RunIndex


class ReconstructForm(Config):
    """An item, and the stage that rebuilds it."""

    item: str = Field(max_length=4_096)
    run: str = Field(max_length=100)
    stage: str = Field(max_length=100)


class DataPages:
    """Answers requests below /data."""

    def __init__(self, folders: Sequence[Path], index: RunIndex, drawer: Drawer) -> None:
        self.datasets, self.index, self.drawer = open_datasets(folders), index, drawer

    def routes(self) -> list[Route]:
        return [
            Route("/data", self.show_datasets),
            Route("/data/{dataset_id}", self.show_dataset),
            Route("/data/{dataset_id}/items", self.show_items),
            Route("/data/{dataset_id}/check", self.check_again, methods=["POST"]),
            Route("/data/{dataset_id}/reconstruct", self.reconstruct, methods=["POST"]),
            Route("/data/{dataset_id}/sheet/{path:path}", self.send_sheet),
            Route("/data/{dataset_id}/file/{path:path}", self.send_file),
        ]

    def show_datasets(self, request: Request) -> Response:
        if len(self.datasets) == 1:
            return self._show(next(iter(self.datasets.values())), CheckForm())
        used = find_data_folders(self.index.refresh(age=5.0))
        values = {"datasets": list(self.datasets.values()), "used": used}
        return HTMLResponse(pages.render("datasets.html", **values))

    def show_dataset(self, request: Request) -> Response:
        return self._show(self._find(request), _read_form(request))

    def _show(self, dataset: Dataset, form: CheckForm) -> Response:
        dataset.check(form)  # begins while the page loads
        runs = self.index.refresh(age=5.0)
        trained = [run for folder, own in find_data_folders(runs).items() if folder == dataset.path for run in own]
        values = {"dataset": dataset, "datasets": list(self.datasets.values()), "form": form, "trained": trained}
        codecs = find_codecs(runs)
        return HTMLResponse(
            pages.render("dataset.html", **values, codecs=codecs, command=format_command(dataset, form))
        )

    def show_items(self, request: Request) -> Response:
        """A part of the page: the items that a search finds; 202 while they are read."""
        dataset, form, query = self._find(request), _read_form(request), request.query_params
        check = dataset.check(form)
        page = query.get("page", "1")
        number = int(page) if page.isdecimal() and len(page) < 9 else 1
        show = query.get("show", "")
        chosen = select_items(check, query.get("q", ""), show, number)
        text = pages.render(
            "_items.html", dataset=dataset, check=check, chosen=chosen, show=show, search=query.get("q")
        )
        return HTMLResponse(text, 200 if check.is_done else 202)

    def check_again(self, request: Request) -> Response:
        self._find(request).check(_read_form(request), again=True)
        return JSONResponse({}, 202)

    async def reconstruct(self, request: Request) -> Response:
        """Show what a codec makes of an item, in the process that draws."""
        dataset = self._find(request)
        try:
            tree = parse_json(await read_body(request, BODY_BYTES))
            if not isinstance(tree, dict):
                raise ValueError("it is no object")
            form = parse(ReconstructForm, tree)
            item = self._find_item(dataset, form.item)
            run = await run_in_threadpool(self.index.find, form.run)
            codecs = {codec.stage for codec in find_codecs([run] if run else [])}
            if run is None or form.stage not in codecs:
                raise HTTPException(404)
            number = await run_in_threadpool(self.drawer.reconstruct, run, form.stage, dataset.path, item)
        except Busy:
            return JSONResponse({"error": "one drawing at a time: wait for it, or cancel it"}, 409)
        except (KineoError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 422)
        return JSONResponse({"number": number}, 202)

    def send_sheet(self, request: Request) -> Response:
        dataset = self._find(request)
        item = self._find_item(dataset, request.path_params["path"])
        return send_sheet(lambda: make_item_sheet(dataset.path, item))

    def send_file(self, request: Request) -> Response:
        dataset = self._find(request)
        item = self._find_item(dataset, request.path_params["path"])
        if item.media_type is None:
            raise HTTPException(404)
        try:
            if item.place is None:
                return FileResponse(find_file(dataset.path, item.name), media_type=item.media_type)
            return Response(read_item(dataset.path, item), media_type=item.media_type)
        except OutsideRun:
            raise HTTPException(404) from None
        except Unreadable as error:
            return PlainTextResponse(error.reason, 422)

    def _find(self, request: Request) -> Dataset:
        dataset = self.datasets.get(request.path_params["dataset_id"])
        if dataset is None:
            raise HTTPException(404)
        return dataset

    @staticmethod
    def _find_item(dataset: Dataset, key: str) -> DatasetItem:
        """An item that a check has listed."""
        item = dataset.find_item(key)
        if item is None:
            raise HTTPException(404)
        return item


def _read_form(request: Request) -> CheckForm:
    """The choices in an address; wrong ones are refused."""
    tree: dict[str, Any] = {name: value for name, value in request.query_params.items() if value}
    known = {name: value for name, value in tree.items() if name in CheckForm.model_fields}
    try:
        return CheckForm.model_validate(known)
    except ValueError:
        raise HTTPException(
            422, "These numbers cannot be used: give a size such as 256 or 480x720, and frames."
        ) from None
