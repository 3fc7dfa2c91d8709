"""A folder in the form of diffusers' pipelines: what is in it, as plain data and weights that are read when asked for.

model_index.json                      which components there are, of which library and class
transformer/ vae/                     config.json, diffusion_pytorch_model[-0000n-of-0000N].safetensors
text_encoder/                         config.json, model[-…].safetensors, as transformers writes them
scheduler/scheduler_config.json · tokenizer/
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kineograph.core.config import load_file
from kineograph.core.errors import InputError
from kineograph.core.weight_files import DIFFUSERS_STEM, TRANSFORMERS_STEM, WeightFiles, open_weights

INDEX = "model_index.json"
_CONFIGS = ("config.json", "scheduler_config.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Component:
    """One part of a pipeline."""

    path: Path
    library: str
    kind: str
    """Name of its class there."""
    config: dict[str, Any]

    def weights(self) -> WeightFiles:
        """Lazily: headers now, tensors when asked for."""
        return open_weights(self.path, TRANSFORMERS_STEM if self.library == "transformers" else DIFFUSERS_STEM)

    @property
    def config_file(self) -> Path:
        return next((self.path / name for name in _CONFIGS if (self.path / name).is_file()), self.path / _CONFIGS[0])


@dataclass(frozen=True)
class DiffusersFolder:
    path: Path
    pipeline: str
    """Name of the pipeline's class."""
    components: dict[str, Component]

    def component(self, name: str) -> Component:
        if name not in self.components:
            raise InputError(
                f"{self.path / INDEX} names no {name}: it has {', '.join(self.components) or 'no components'}"
            )
        return self.components[name]

    def config(self, name: str, kind: str) -> dict[str, Any]:
        """The config of a component that must be of one class."""
        found = self.component(name)
        if found.kind != kind:
            raise InputError(f"{found.path}: {name} is a {found.kind}, and {kind} is what can be read here")
        return found.config


def read_folder(path: str | Path) -> DiffusersFolder:
    """What is in a folder. Weights stay on disk until they are asked for."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder of a diffusers pipeline, with {INDEX} in it")
    if not (folder / INDEX).is_file():
        raise InputError(f"{folder} has no {INDEX}: it is not the folder of a diffusers pipeline")
    index = load_file(folder / INDEX)
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise InputError(f"{folder / INDEX} has no _class_name: it does not say which pipeline this is")
    components = {}
    for name, value in index.items():
        pair = isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
        if name.startswith("_") or not pair:  # options of the pipeline, and parts that were left out ([null, null])
            continue
        components[name] = _component(folder / name, *value)
    return DiffusersFolder(folder, pipeline, components)


def _component(path: Path, library: str, kind: str) -> Component:
    if not path.is_dir():
        raise InputError(f"{path} is missing, though {path.parent / INDEX} names it as a {kind}")
    config = next((path / name for name in _CONFIGS if (path / name).is_file()), None)
    if config is None and "Tokenizer" not in kind:
        raise InputError(f"{path} has no config.json: it cannot be told what its weights are")
    return Component(path, library, kind, load_file(config) if config else {})
