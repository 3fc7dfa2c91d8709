"""Where numbers and pictures go while a run trains: metrics.jsonl always, TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kineograph.core import distributed
from kineograph.core.errors import InputError, RunFailed
from kineograph.core.run_folder import sync_folder
from kineograph.train.config import WandbConfig
from kineograph.train.phases import Cursor, Phase, phase_of

Record = dict[str, Any]


class Tracker(Protocol):
    """Somewhere people look. A record has `stage`, `split`, `step` and numbers."""

    def begin(self, stage: str, step: int) -> None:
        """A stage starts, or goes on from a checkpoint at `step`: what was told beyond that no longer counts."""

    def log(self, record: Record) -> None: ...

    def media(self, step: int, name: str, path: Path, caption: str = "") -> None:
        """A picture or clip that was written; `name` is `<stage>/<what>`."""

    def checkpoint(self, stage: str, step: int, path: Path, best: bool) -> None:
        """A complete checkpoint, to be kept where the tracker keeps files."""

    def close(self) -> None: ...


class OneAtATime:
    """A tracker that is told of numbers by the thread that trains, and of pictures by the one that writes."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self._lock = tracker, threading.Lock()

    def begin(self, stage: str, step: int) -> None:
        with self._lock:
            self._tracker.begin(stage, step)

    def log(self, record: Record) -> None:
        with self._lock:
            self._tracker.log(record)

    def media(self, step: int, name: str, path: Path, caption: str = "") -> None:
        with self._lock:
            self._tracker.media(step, name, path, caption)

    def checkpoint(self, stage: str, step: int, path: Path, best: bool) -> None:
        with self._lock:
            self._tracker.checkpoint(stage, step, path, best)

    def close(self) -> None:
        with self._lock:
            self._tracker.close()


def open_trackers(
    names: Sequence[str], folder: Path, name: str, config: Mapping[str, Any], wandb: WandbConfig | None = None
) -> list[Tracker]:
    """Trackers by name for the run `name` in `folder`. Only the first process has any."""
    check_trackers(names)
    if not distributed.is_first():
        return []
    made: list[Tracker] = []
    for wanted in dict.fromkeys(names):
        board = wanted == "tensorboard"
        tracker = TensorBoard(folder / "tensorboard") if board else WeightsAndBiases(folder, name, config, wandb)
        made.append(OneAtATime(tracker))
    return made


def check_trackers(names: Collection[str]) -> None:
    """Whether they can be opened, before anything is written."""
    if "wandb" in names:
        _wandb()
    if "tensorboard" in names:
        _tensorboard()


# metrics.jsonl ---------------------------------------------------------------------------------------------------


class MetricsFile:
    """One JSON object a line. Every process may call; the first one writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, record: Record) -> None:
        """Append: stage, split and step first; what is not finite becomes null."""
        if not distributed.is_first():
            return
        first = {key: record[key] for key in ("stage", "split", "step") if key in record}
        line = json.dumps(
            {key: _plain(value) for key, value in (first | record).items()}, ensure_ascii=False, allow_nan=False
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:  # reopened each time: a rewrite may have put another file there
                file.write((b"" if self._ends_in_newline() else b"\n") + line.encode() + b"\n")
        except OSError as error:
            raise RunFailed(
                f"cannot write {self.path}: {error}; make room or permission and run the same command to go on from the last checkpoint"
            ) from error

    def read(self) -> list[Record]:
        """All whole records."""
        return [record for _, record in self._lines()]

    def truncate(
        self, stage: str, step: int, stages: Collection[str] | None = None, phase: Phase = "train"
    ) -> list[Record]:
        """Drop what lies beyond a checkpoint: later steps of this stage, stages that the run does not have, and torn lines.
        Of `step` itself, what `phase` and the phases after it have written, since they will write it again. → what stays of `step`.

        Other stages keep theirs: each is cut to its own checkpoint when its turn comes.
        """
        cursor = Cursor(step, phase)
        kept: list[Record] = []
        if not distributed.is_first() or not self.path.exists():
            return kept
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            for line, record in self._lines():
                name = record["stage"]
                if cursor.covers(record) if name == stage else stages is None or name in stages:
                    file.write(line)
                    kept += [record] if name == stage and record["step"] == step else []
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        sync_folder(self.path.parent)
        return kept

    def _lines(self) -> Iterator[tuple[bytes, Record]]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:  # torn, or not text
                    continue
                whole = (
                    isinstance(record, dict)
                    and isinstance(record.get("stage"), str)
                    and isinstance(record.get("step"), int)
                )
                if whole and line.endswith(b"\n"):
                    yield line, record

    def _ends_in_newline(self) -> bool:
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return True
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    """JSON without NaN: torch and numpy scalars become numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = value.item() if hasattr(value, "item") else value
    return number if not isinstance(number, float) or math.isfinite(number) else None


def _numbers(record: Record) -> Iterator[tuple[str, float]]:
    """What can be drawn over steps."""
    for name, value in record.items():
        value = value.item() if hasattr(value, "item") else value
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


# TensorBoard -----------------------------------------------------------------------------------------------------


def _tensorboard() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise InputError(
            f"train.trackers names tensorboard, which cannot be imported ({error}): pip install tensorboard"
        ) from None


class TensorBoard:
    """Event files in `folder/<stage>`, tags `<stage>/<split>/<name>`.

    A stage has its own folder because TensorBoard forgets by step: stages that share one would forget each other's points.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[str, Any] = {}

    def begin(self, stage: str, step: int) -> None:
        if stage in self._writers:
            self._writers.pop(stage).close()
        known = any((self.folder / stage).glob("events.*"))
        purge = step + 1 if known else None
        self._writers[stage] = _tensorboard().SummaryWriter(str(self.folder / stage), purge_step=purge)

    def log(self, record: Record) -> None:
        writer = self._writer(record["stage"], record["step"])
        for name, value in _numbers(record):
            writer.add_scalar(f"{record['stage']}/{record['split']}/{name}", value, record["step"])

    def media(self, step: int, name: str, path: Path, caption: str = "") -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        encoded, width, height = _for_browser(Path(path))
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
        writer = self._writer(name.partition("/")[0], step)
        writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)
        if caption:
            writer.add_text(f"{name}/caption", caption, step)

    def checkpoint(self, stage: str, step: int, path: Path, best: bool) -> None:
        """Event files hold numbers and pictures, no files."""

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, stage: str, step: int) -> Any:
        if stage not in self._writers:
            self.begin(stage, step - 1)
        return self._writers[stage]


def _for_browser(path: Path) -> tuple[bytes, int, int]:
    """What TensorBoard's page shows and plays: pictures and GIFs as they are, a film as a GIF."""
    from PIL import Image

    if path.suffix.lower() in (".png", ".gif", ".jpg", ".jpeg", ".webp"):
        with Image.open(path) as image:
            return path.read_bytes(), image.width, image.height
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        fps = float(stream.average_rate or 8)
        first, *rest = [frame.to_image() for frame in container.decode(stream)]
    buffer = io.BytesIO()
    first.save(buffer, format="GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)
    return buffer.getvalue(), first.width, first.height


# Weights & Biases ------------------------------------------------------------------------------------------------


def _wandb() -> Any:
    return import_wandb("train.trackers names wandb", ", or leave it out of train.trackers")


def import_wandb(why: str, otherwise: str = "") -> Any:
    """The package, which only some have; `why` it is needed is for the message."""
    try:
        module = importlib.import_module("wandb")
    except ImportError:
        module = None
    if not hasattr(module, "init"):  # a run's own folder `wandb` imports too, as an empty package
        raise InputError(f"{why}, which is not installed: pip install kineograph[wandb]{otherwise}")
    return module


class WeightsAndBiases:
    """One W&B run for one run folder, over all its stages and resumes. Offline with WANDB_MODE=offline.

    W&B takes nothing back, so what a resumed run tells for the second time is left out: `wandb/kineograph.json` remembers the run's id
    and how far it got.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], where: WandbConfig | None = None) -> None:
        self._module = _wandb()
        where = where or WandbConfig()
        self._name = name
        self._memory = folder / "wandb" / "kineograph.json"
        known = read_json(self._memory)
        self._id: str = known.get("id") or where.id or secrets.token_hex(4)
        self._reached: dict[str, int] = known.get("reached", {})
        self._begun: set[str] = set()
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._module.init(
                project=where.project or os.environ.get("WANDB_PROJECT") or "kineograph",
                entity=where.entity,
                name=name,
                id=self._id,
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=self._module.Settings(console="off", silent=True),
            )
        except self._module.errors.Error as error:
            raise InputError(
                f"train.trackers names wandb, which refused to start ({error}): log in with `wandb login`, or set WANDB_MODE=offline"
            ) from None
        self._remember()  # before anything is told: a run that dies young is taken up under the same id

    def begin(self, stage: str, step: int) -> None:
        self._begun.add(stage)
        self._run.define_metric(f"{stage}/step")
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def log(self, record: Record) -> None:
        stage, split, step = record["stage"], record["split"], record["step"]
        if self._is_new(f"{stage}/{split}/{phase_of(record)}", step):
            numbers = {f"{stage}/{split}/{name}": value for name, value in _numbers(record)}
            self._tell(stage, step, numbers)

    def media(self, step: int, name: str, path: Path, caption: str = "") -> None:
        stage = name.partition("/")[0]
        moving = Path(path).suffix.lower() in (".gif", ".mp4", ".webm")
        shown = (self._module.Video if moving else self._module.Image)(str(path), caption=caption or None)
        if self._is_new(name, step):
            self._tell(stage, step, {name: shown})

    def checkpoint(self, stage: str, step: int, path: Path, best: bool) -> None:
        """An artifact `<run>-<stage>`, a version a checkpoint: `init` and `--resume-from` take it up again as wandb:ENTITY/PROJECT/NAME:latest."""
        if not self._is_new(f"{stage}/checkpoint", step):
            return
        name = re.sub(r"[^\w.-]+", "-", f"{self._name}-{stage}")
        artifact = self._module.Artifact(name, type="model", metadata={"stage": stage, "step": step})
        artifact.add_dir(str(path))
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}", *(["best"] if best else [])])

    def close(self) -> None:
        self._run.finish()

    def _tell(self, stage: str, step: int, values: dict[str, Any]) -> None:
        if stage not in self._begun:
            self.begin(stage, step - 1)
        self._run.log({**values, f"{stage}/step": step})

    def _is_new(self, series: str, step: int) -> bool:
        if step <= self._reached.get(series, -1):
            return False
        self._reached[series] = step
        self._remember()
        return True

    def _remember(self) -> None:
        temporary = self._memory.with_suffix(".part")  # not flushed to disk: a power cut costs a point told twice
        temporary.write_text(json.dumps({"id": self._id, "reached": self._reached}), encoding="utf-8")
        os.replace(temporary, self._memory)


def read_json(path: Path) -> dict[str, Any]:
    """A small file of ours; empty where it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
