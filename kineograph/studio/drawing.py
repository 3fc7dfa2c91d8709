"""Drawing from the page: a form, checked; one job at a time in a process of its own; what became of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from pydantic import Field

from kineograph.core.config import Config
from kineograph.core.errors import InputError, Unreadable, explain_oversized_image
from kineograph.core.safe_media import MediaLimits, Meter, check_bytes, open_image
from kineograph.core.text_file import parse_json
from kineograph.studio.dataset import DatasetItem
from kineograph.studio.live import Event
from kineograph.studio.run_files import MEDIA, OutsideRun, find_file, read_text
from kineograph.studio.runs import Run

FOLDER = "studio"  # below a run: the only place that the page writes to
UPLOADS = "uploads"
RECONSTRUCTIONS = "reconstructions"
UPLOAD_LIMITS = MediaLimits(bytes=32 * 2**20, pixels=2**26, frames=1, seconds=20)
BODY_BYTES = 2**18  # of a form
DRAWINGS = 24  # shown

State = Literal["idle", "loading", "drawing", "done", "failed", "cancelled"]


class DrawForm(Config):
    """What the page asks for: fields of `kineo sample` and `kineo story`, within bounds."""

    prompts: list[str] = Field(default_factory=list, max_length=64)
    story: bool = False
    stage: str | None = Field(None, max_length=100)
    checkpoint: Literal["last", "best"] = "last"
    ema: bool = True
    seed: int = Field(0, ge=0, lt=2**62)
    count: int = Field(1, ge=1, le=16)
    negative: str | None = Field(None, max_length=2_000)
    guidance: float | None = Field(None, ge=0, le=1_000)
    steps: int | None = Field(None, ge=1, le=10_000)
    frames: int | None = Field(None, ge=1, le=10_000)
    size: str | None = Field(None, max_length=20)
    overlap: int | None = Field(None, ge=1, le=10_000)
    prime: str | None = Field(None, max_length=100)
    """The name of an upload."""


@dataclass(frozen=True)
class Status:
    """What the page shows of the drawing."""

    state: State = "idle"
    run: str = ""  # id
    label: str = ""
    text: str = ""  # an error, or what is being done
    passes: int = 0  # through the network, so far
    expected: int | None = None  # as many as the same drawing took before
    began: float = 0.0
    seconds: float | None = None
    model: str = ""  # what is loaded; empty: nothing
    device: str = ""
    memory: int = 0  # bytes that it holds
    number: int = 0  # of the job
    files: tuple[str, ...] = ()  # that it made, below RUN/studio

    @property
    def is_busy(self) -> bool:
        return self.state in ("loading", "drawing")


def worker_command(trust: bool = False) -> list[str]:
    """The process that draws (draw_worker.py); with `trust` it may run code that a run from elsewhere names."""
    # -P: no module of the current folder, which may be a stranger's, is imported.
    return [sys.executable, "-P", "-m", "kineograph.studio.draw_worker", *(["--trust"] if trust else [])]


class Busy(Exception):
    """One drawing at a time."""


class Drawer:
    """Owns the process that draws. Thread-safe."""

    def __init__(self, command: Sequence[str]) -> None:
        self.status = Status()
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.RLock()
        self._passes: dict[str, int] = {}  # of earlier drawings with the same settings
        self._settings = ""

    def draw(self, run: Run, form: DrawForm) -> None:
        """Begin a drawing. Raises Busy during another one, and InputError for a form that cannot be drawn."""
        out = prepare_folder(run.path)
        tree = form.model_dump()
        if form.prime is not None:
            tree["prime"] = str(find_upload(run.path, form.prime))
        if not form.story:
            tree.pop("overlap")
            tree["prompts"] = [prompt for prompt in form.prompts if prompt.strip()]
        else:
            for name in ("count", "size"):
                tree.pop(name)
            tree["prompts"] = [prompt.strip() for prompt in form.prompts if prompt.strip()]
            if not tree["prompts"]:
                raise InputError("a story needs scenes: write one a line")
        if any(len(prompt) > 2_000 for prompt in form.prompts):
            raise InputError("a prompt has more than 2,000 characters: shorten it")
        shown = {key: value for key, value in tree.items() if key not in ("seed", "prompts", "negative", "prime")}
        settings = json.dumps([run.id, len(tree["prompts"]), shown])
        self._begin(run, {"do": "draw", "run": str(run.path), "out": str(out), "form": tree}, settings)

    def reconstruct(self, run: Run, stage: str, folder: Path, item: DatasetItem) -> int:
        """Show what a codec makes of an item of a dataset. → the number of the job. Raises as `draw` does."""
        out = prepare_folder(run.path) / RECONSTRUCTIONS
        job: dict[str, Any] = {"do": "reconstruct", "run": str(run.path), "out": str(out), "stage": stage}
        job |= {"folder": str(folder), "item": asdict(item)}
        return self._begin(run, job, json.dumps([run.id, stage, "reconstruct"]))

    def _begin(self, run: Run, job: dict[str, Any], settings: str) -> int:
        with self._lock:
            if self.status.is_busy:
                raise Busy
            process = self._start()
            self._settings = settings
            self._set(
                state="loading", run=run.id, label=run.label, text="", passes=0, began=time.time(), seconds=None,
                expected=self._passes.get(settings), number=self.status.number + 1, files=(),
            )  # fmt: skip
            self._send(process, job)
            return self.status.number

    def cancel(self) -> None:
        """End the drawing at the next pass through the network; while a model is loaded, end the process."""
        with self._lock:
            if self._process is None or not self.status.is_busy:
                return
            if self.status.state == "loading":
                self._stop()
                self._set(state="cancelled")
            else:
                self._send(self._process, {"do": "cancel"})
                self._set(text="cancelling")

    def free(self) -> None:
        """End the process, and with it the model that it holds."""
        with self._lock:
            was_busy = self.status.is_busy
            self._stop()
            self._set(state="cancelled" if was_busy else self.status.state)

    def _start(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._process = process
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        self._set(model="", device="", memory=0)
        if process is not None:
            process.kill()
            process.wait(10)

    @staticmethod
    def _send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
        assert process.stdin is not None
        with suppress(OSError):  # it has ended: _read tells
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Follow what the process says, until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError, KeyError):
                message = parse_json(line)
                with self._lock:
                    if process is self._process:
                        self._follow(message.pop("event"), message)
        with self._lock:
            if process is self._process:
                code = process.wait(10)
                self._process = None
                how = f"signal {-code}; was there enough memory?" if code < 0 else f"exit code {code}"
                state: State = "failed" if self.status.is_busy else self.status.state
                text = f"the process that draws has ended ({how})" if self.status.is_busy else self.status.text
                self._set(state=state, text=text, model="", device="", memory=0)

    def _follow(self, event: str, values: dict[str, Any]) -> None:
        loaded = {key: values[key] for key in ("model", "device", "memory") if key in values}
        if event == "loading":
            self._set(state="loading", text=f"loading {values['model']}", model="", device="", memory=0)
        elif event == "drawing":
            self._set(state="drawing", text="", **loaded)
        elif event == "progress":
            self._set(passes=values["passes"])
        elif event == "note":
            self._set(text=values["text"])
        elif event == "done":
            self._passes[self._settings] = values["passes"]
            files, text = tuple(values.get("files", ())), values.get("text", "")
            self._set(
                state="done", text=text, passes=values["passes"], seconds=values["seconds"], files=files, **loaded
            )
        elif event == "failed":
            self._set(state="failed", text=values["error"])
        elif event == "cancelled":
            self._set(state="cancelled", text="")

    def _set(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)

    async def watch(self, interval: float = 0.25) -> AsyncIterator[Event | None]:
        """`drawing` with the status whenever it changes."""
        shown = None
        while True:
            status = self.status
            if status != shown:
                yield "drawing", asdict(status)
                shown = status
            yield None
            await asyncio.sleep(interval)


# Files -----------------------------------------------------------------------------------------------------------


def prepare_folder(run: Path) -> Path:
    """RUN/studio, made if it does not exist. A link there, which would lead out of the run, is refused."""
    folder = run / FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error.strerror}): fix the permissions of the run folder") from None
    if folder.resolve() != run.resolve() / FOLDER:
        raise InputError(f"{folder} is a link: remove it to draw here")
    return folder


def save_upload(run: Path, data: bytes) -> dict[str, Any]:
    """Check and keep a picture to start from. → its name and size"""
    try:
        check_bytes(len(data), UPLOAD_LIMITS)
        with open_image(data) as image:
            Meter(UPLOAD_LIMITS).count_frame(*image.size)
            image.convert("RGB")  # decodes it: a damaged one is refused here
            kind, size = image.format or "", image.size
    except Unreadable as error:
        raise InputError(f"the picture cannot be used: {error.reason}") from None
    except Image.DecompressionBombError as error:
        raise InputError(f"the picture cannot be used: {explain_oversized_image(error)}") from None
    except Exception:  # decoders raise almost anything on damaged files
        raise InputError("the picture cannot be read: give a PNG, JPEG, WebP or GIF") from None
    folder = prepare_folder(run) / UPLOADS
    folder.mkdir(exist_ok=True)
    if folder.resolve() != run.resolve() / FOLDER / UPLOADS:
        raise InputError(f"{folder} is a link: remove it to draw here")
    path = folder / f"{hashlib.sha256(data).hexdigest()[:20]}.{_SUFFIXES.get(kind, 'img')}"
    if not path.exists():
        with open(path, "xb") as file:
            file.write(data)
    return {"name": path.name, "width": size[0], "height": size[1]}


_SUFFIXES = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "AVIF": "avif"}


def find_upload(run: Path, name: str) -> Path:
    if not re.fullmatch(r"[0-9a-f]{20}\.[a-z]{3,4}", name):
        raise InputError(f"{name!r} is not the name of an upload: choose the picture again")
    try:
        return find_file(run, f"{FOLDER}/{UPLOADS}/{name}")
    except OutsideRun:
        raise InputError("the uploaded picture is gone: choose it again") from None


@dataclass(frozen=True)
class Drawing:
    """A picture or clip that was drawn, with the command that repeats it."""

    file: str  # below the run folder
    caption: str
    command: str
    step: int
    seed: int
    is_story: bool


def list_drawings(run: Path, most: int = DRAWINGS) -> list[Drawing]:
    """The newest drawings of a run."""
    try:
        found = [path for path in (run / FOLDER).iterdir() if path.suffix in MEDIA]
        times = {path: path.stat().st_mtime for path in found}
    except OSError:
        return []
    drawings: list[Drawing] = []
    for path in sorted(found, key=lambda path: (times[path], path.name), reverse=True):
        relative = f"{FOLDER}/{path.name}"
        sidecar = _read_sidecar(run, relative)
        if sidecar.get("file") == path.name and len(drawings) < most:  # sheets have none of their own
            scenes = sidecar.get("scenes")
            captions = [str(scene.get("caption", "")) for scene in _dicts(scenes)] if isinstance(scenes, list) else None
            caption = " / ".join(captions) if captions is not None else str(sidecar.get("caption") or "")
            step, seed = (sidecar.get(key) if isinstance(sidecar.get(key), int) else 0 for key in ("step", "seed"))
            command = str(sidecar.get("command", ""))
            drawings.append(Drawing(relative, caption, command, step or 0, seed or 0, captions is not None))
    return drawings


def _dicts(values: list[Any]) -> list[dict[str, Any]]:
    """Those of some values that are dicts: a stranger's file may hold anything."""
    return [value for value in values if isinstance(value, dict)]


def _read_sidecar(run: Path, relative: str) -> dict[str, Any]:
    try:
        tree = parse_json(read_text(run, Path(relative).with_suffix(".json")))
    except ValueError:
        return {}
    return tree if isinstance(tree, dict) else {}


# The form --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FormFacts:
    """What the form offers for a run: the stages that draw, and the values that apply where a field is empty."""

    stages: Sequence[str]
    frames: int
    size: str
    guidance: str
    steps: str
    prompts: Sequence[str]


def describe_form(tree: dict[str, Any], drawn: Sequence[str]) -> FormFacts:
    """From the saved config. A stage with a `sample` section draws; the last one does by default."""
    stages = {name: keys for name, keys in (tree.get("stages") or {}).items() if isinstance(keys, dict)}
    drawing = [name for name, keys in stages.items() if isinstance(keys.get("sample"), dict)]
    keys = stages.get(drawing[-1], {}) if drawing else {}
    sample = keys.get("sample") or {}
    data: dict[str, Any] = {}
    for part in _dicts([tree.get("data"), keys.get("data")]):
        data |= part
    size = data.get("size")
    frames = data.get("frames")
    return FormFacts(
        drawing,
        frames if isinstance(frames, int) else 1,
        "x".join(map(str, size)) if isinstance(size, list) else str(size or ""),
        str(sample.get("guidance", "")),
        str(sample.get("steps", "")),
        drawn,
    )
