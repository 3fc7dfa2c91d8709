"""The tracker `hub`: checkpoints in `RUN/hub`, laid out as a model repository, and uploaded to the Hugging Face hub if a repository is named.

    README.md  config.yaml  <stage>/latest/  <stage>/best/

`init` and `--resume-from` take file://RUN/hub/<stage>/latest, and hf://REPO/<stage>/latest.
"""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kineograph.core.config_file import dump_yaml
from kineograph.core.errors import InputError
from kineograph.train.config import HubConfig
from kineograph.train.metrics_file import Record


def import_hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise InputError(
            "train.hub.repo needs huggingface_hub, which is not installed: pip install huggingface_hub, or leave it out and upload RUN/hub"
        ) from None


class HubFolder:
    """Keeps the newest and the best checkpoint of each stage. An upload that fails is a warning: training goes on."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], target: HubConfig | None = None) -> None:
        self.folder, self.name = folder / "hub", name
        self.target = target or HubConfig()
        self._api = import_hub().HfApi() if self.target.repo is not None else None
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        if not (self.folder / "README.md").exists():  # yours to edit
            (self.folder / "README.md").write_text(_describe(name, list(config.get("stages", {}))), encoding="utf-8")

    def begin(self, stage: str, step: int) -> None:
        """Numbers go to the other trackers."""

    def log(self, record: Record) -> None: ...

    def log_media(self, step: int, name: str, path: Path, caption: str = "") -> None: ...

    def log_clips(self, step: int, name: str, clips: list[tuple[Path, str]]) -> None: ...

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

    def close(self) -> None: ...


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
