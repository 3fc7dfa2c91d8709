"""Trackers: TensorBoard, Weights & Biases and the Hugging Face hub, fed with the records of metrics.jsonl, samples and checkpoints."""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import shutil
import textwrap
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor

from kineograph.core import distributed
from kineograph.core.config_file import dump_yaml
from kineograph.core.errors import InputError
from kineograph.core.health import Finding
from kineograph.core.run_folder import read_json
from kineograph.train.config import HubConfig, WandbConfig
from kineograph.train.metrics_file import Record
from kineograph.train.phases import phase_of


class Tracker:
    """Receives records, media and checkpoints of training; a tracker overrides the methods for those that it can show.

    The training thread calls `begin`, `log` and `close`, the saver's thread the others.
    """

    def begin(self, stage: str, step: int) -> None:
        """Begin a stage, or resume it at `step`: later points no longer count."""

    def log(self, record: Record) -> None:
        """Log a record of metrics.jsonl."""

    def log_media(self, step: int, name: str, path: Path, caption: str = "") -> None:
        """Log a PNG or a GIF; `name` is `<stage>/<what>`."""

    def log_clips(self, step: int, name: str, clips: list[tuple[Path, str]]) -> None:
        """Log samples one by one with their captions: PNG, GIF or MP4, which has a film strip (.strip.png) beside it."""

    def log_checkpoint(self, stage: str, step: int, path: Path, best: bool) -> None:
        """Upload a complete checkpoint."""

    def close(self) -> None:
        """The run ends."""


def open_trackers(
    names: Sequence[str],
    folder: Path,
    name: str,
    config: Mapping[str, Any],
    wandb: WandbConfig | None = None,
    hub: HubConfig | None = None,
) -> dict[str, Tracker]:
    """Open the trackers of run `name` in `folder`, on rank 0 only."""
    if not distributed.is_first():
        return {}
    opened: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", config),
        "wandb": lambda: WeightsAndBiases(folder, name, config, wandb),
        "hub": lambda: HubFolder(folder, name, config, hub),
    }
    return {tracker: opened[tracker]() for tracker in dict.fromkeys(names)}


def check_trackers(names: Collection[str], hub: HubConfig | None = None) -> None:
    """Check that optional packages of trackers can be imported, before anything is written."""
    if "wandb" in names:
        _import_wandb()
    if "hub" in names and hub is not None and hub.repo is not None:
        import_hub()


def _iterate_numbers(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record by name, without `step`."""
    for name, value in record.items():
        if name != "step" and isinstance(value, (Real, Tensor)) and not isinstance(value, bool):
            yield name, float(value)


# TensorBoard ---------------------------------------------------------------------------------------------------------


class TensorBoard(Tracker):
    """Event files in `folder/<stage>`, tags `<stage>/<split>/<name>`.

    Each stage has its own folder, because TensorBoard purges by step: stages in one folder would purge each other.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any] | None = None) -> None:
        self.folder, self.config = folder, config
        self._writers: dict[str, Any] = {}

    def begin(self, stage: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if stage in self._writers:
            self._writers.pop(stage).close()
        is_resumed = any((self.folder / stage).glob("events.*"))
        self._writers[stage] = SummaryWriter(str(self.folder / stage), purge_step=step + 1 if is_resumed else None)
        if self.config and not is_resumed:
            # Four spaces make it a block of code in the tab Text.
            self._writers[stage].add_text("config", textwrap.indent(dump_yaml(self.config), "    "), 0)

    def log(self, record: Record) -> None:
        writer = self._get_writer(record["stage"], record["step"])
        for name, value in _iterate_numbers(record):
            writer.add_scalar(f"{record['stage']}/{record['split']}/{name}", value, record["step"])
        if "finding" in record:
            finding = Finding.from_json(record["finding"])
            writer.add_text(f"{record['stage']}/health", f"{finding.severity}: {finding}", record["step"])

    def log_media(self, step: int, name: str, path: Path, caption: str = "") -> None:
        from PIL import Image
        from tensorboard.compat.proto.summary_pb2 import Summary

        with Image.open(path) as opened:
            width, height = opened.size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes())
        writer = self._get_writer(name.partition("/")[0], step)
        writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)
        if caption:
            writer.add_text(f"{name}/caption", caption, step)

    def log_clips(self, step: int, name: str, clips: list[tuple[Path, str]]) -> None:
        for number, (path, caption) in enumerate(clips):
            shown = path.with_suffix(".strip.png") if path.suffix == ".mp4" else path  # it plays GIFs, not MP4
            self.log_media(step, f"{name}/{number:02d}", shown, caption)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _get_writer(self, stage: str, step: int) -> Any:
        if stage not in self._writers:
            self.begin(stage, step - 1)
        return self._writers[stage]


# Weights & Biases ----------------------------------------------------------------------------------------------------


def _import_wandb() -> Any:
    return import_wandb("train.trackers names wandb", ", or leave it out of train.trackers")


def import_wandb(reason: str, alternative: str = "") -> Any:
    """Import the optional package wandb; `reason` begins the error's message."""
    try:
        module = importlib.import_module("wandb")
    except ImportError:
        module = None
    if not hasattr(module, "init"):  # a run's own folder `wandb` imports too, as an empty package
        raise InputError(f"{reason}, which is not installed: pip install kineograph[wandb]{alternative}")
    return module


class WeightsAndBiases(Tracker):
    """One W&B run per run folder, over all its stages and resumes. Offline with WANDB_MODE=offline.

    W&B deletes no points, so a resumed run leaves out what it logged before: `wandb/kineograph.json` holds the run's id
    and the last step of each series.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], target: WandbConfig | None = None) -> None:
        self._module = _import_wandb()
        target = target or WandbConfig()
        self._name = name
        self._memory_file = folder / "wandb" / "kineograph.json"
        memory = read_json(self._memory_file)
        self._id: str = memory.get("id") or target.id or secrets.token_hex(4)
        self._last_steps: dict[str, int] = memory.get("reached", {})
        self._logged: int = memory.get("logged", 0)
        self._begun: set[str] = set()
        self._lock = threading.RLock()
        self._memory_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._module.init(
                project=target.project or os.environ.get("WANDB_PROJECT") or "kineograph",
                entity=target.entity,
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
        # An offline run counts from 0 again, and its points would replace earlier ones when both are synced.
        self._logged = max(self._logged, int(getattr(self._run, "step", 0)))
        self._write_memory()  # now, so that a run that dies early resumes under the same id

    def begin(self, stage: str, step: int) -> None:
        self._begun.add(stage)
        self._run.define_metric(f"{stage}/step")
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def log(self, record: Record) -> None:
        stage, split, step = record["stage"], record["split"], record["step"]
        numbers = {f"{stage}/{split}/{name}": value for name, value in _iterate_numbers(record)}
        kind = record["finding"]["name"] if "finding" in record else phase_of(record)
        self._log_once(f"{stage}/{split}/{kind}", stage, step, numbers)

    def log_media(self, step: int, name: str, path: Path, caption: str = "") -> None:
        self._log_once(name, name.partition("/")[0], step, {name: self._media(path, caption)})

    def log_clips(self, step: int, name: str, clips: list[tuple[Path, str]]) -> None:
        items = {f"{name}/{number:02d}": self._media(*clip) for number, clip in enumerate(clips)}
        self._log_once(f"{name}/clips", name.partition("/")[0], step, items)

    def _media(self, path: Path, caption: str) -> Any:
        kind = self._module.Video if path.suffix in (".gif", ".mp4") else self._module.Image
        return kind(str(path), caption=caption or None)

    def log_checkpoint(self, stage: str, step: int, path: Path, best: bool) -> None:
        """Upload an artifact `<run>-<stage>`; `init` and `--resume-from` take it as wandb:ENTITY/PROJECT/NAME:latest."""
        with self._lock:
            if not self._is_new(f"{stage}/checkpoint", step):
                return
            name = re.sub(r"[^\w.-]+", "-", f"{self._name}-{stage}")
            artifact = self._module.Artifact(name, type="model", metadata={"stage": stage, "step": step})
            artifact.add_dir(str(path))
            self._run.log_artifact(artifact, aliases=["latest", f"step-{step}", *(["best"] if best else [])])

    def close(self) -> None:
        self._run.finish()

    def _log_once(self, series: str, stage: str, step: int, values: dict[str, Any]) -> None:
        with self._lock:
            if not self._is_new(series, step):
                return
            if stage not in self._begun:
                self.begin(stage, step - 1)
            self._run.log({**values, f"{stage}/step": step}, step=self._logged)
            self._logged += 1

    def _is_new(self, series: str, step: int) -> bool:
        if step <= self._last_steps.get(series, -1):
            return False
        self._last_steps[series] = step
        self._write_memory()
        return True

    def _write_memory(self) -> None:
        temporary = self._memory_file.with_suffix(".part")  # not flushed: a power cut costs a point logged twice
        temporary.write_text(
            json.dumps({"id": self._id, "reached": self._last_steps, "logged": self._logged + 1}), encoding="utf-8"
        )
        os.replace(temporary, self._memory_file)


# Hugging Face hub ------------------------------------------------------------------------------------------------------


def import_hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise InputError(
            "train.hub.repo needs huggingface_hub, which is not installed: pip install huggingface_hub, or leave it out and upload RUN/hub"
        ) from None


class HubFolder(Tracker):
    """Keeps the newest and the best checkpoint of each stage in `RUN/hub`, laid out as a model repository, and uploads it if one is named.

        README.md  config.yaml  <stage>/latest/  <stage>/best/

    `init` and `--resume-from` take file://RUN/hub/<stage>/latest, and hf://REPO/<stage>/latest. An upload that fails is a warning.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], target: HubConfig | None = None) -> None:
        self.folder, self.name = folder / "hub", name
        self.target = target or HubConfig()
        self._api = import_hub().HfApi() if self.target.repo is not None else None
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        if not (self.folder / "README.md").exists():  # yours to edit
            (self.folder / "README.md").write_text(_describe(name, list(config.get("stages", {}))), encoding="utf-8")

    def log_checkpoint(self, stage: str, step: int, path: Path, best: bool) -> None:
        for place in ("latest", *(["best"] if best else [])):
            _replace_folder(path, self.folder / stage / place)
        if self._api is None:
            return
        try:
            self._api.create_repo(self.target.repo, private=self.target.private, exist_ok=True)
            self._api.upload_folder(
                repo_id=self.target.repo,
                folder_path=str(self.folder),
                commit_message=f"{self.name}: {stage}, step {step}",
            )
        except Exception as error:  # the network, the account, the quota
            warnings.warn(
                f"train.hub.repo={self.target.repo}: the checkpoint of {stage}, step {step}, was not uploaded ({error}); "
                f"it is in {self.folder}",
                stacklevel=2,
            )


def _replace_folder(source: Path, target: Path) -> None:
    """Copy a checkpoint, as links where the disk allows it; a reader sees the old folder or the new one."""
    fresh = target.with_name(f"{target.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, fresh, copy_function=_link_or_copy)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(fresh, target)


def _link_or_copy(source: str, target: str) -> None:
    # phase.json and the like are replaced by rename, so a link never changes.
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _describe(name: str, stages: list[str]) -> str:
    first = stages[0] if stages else "STAGE"
    return (
        f"---\nlibrary_name: kineograph\n---\n\n# {name}\n\n"
        f"Checkpoints of the stages {', '.join(stages)}, written by Kineograph; `config.yaml` repeats the run.\n\n"
        f"    kineo train config.yaml stages.{first}.init=hf://REPO/{first}/latest\n"
    )
