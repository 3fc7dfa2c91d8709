"""A diffusers pipeline folder: configs as plain data, weights read on demand.

model_index.json                      the components, each with its library and class
transformer/ vae/                     config.json, diffusion_pytorch_model[-0000n-of-0000N].safetensors
text_encoder/                         config.json, model[-…].safetensors, as transformers writes them
scheduler/scheduler_config.json · tokenizer/
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kineograph.core.config_file import load_file
from kineograph.core.errors import InputError
from kineograph.core.weight_files import DIFFUSERS_STEM, TRANSFORMERS_STEM, WeightFiles, open_weights

INDEX = "model_index.json"
_CONFIGS = ("config.json", "scheduler_config.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Component:
    """A component of a pipeline."""

    path: Path
    library: str
    kind: str
    """Name of its class."""
    config: dict[str, Any]

    def weights(self) -> WeightFiles:
        """Lazy: headers now, tensors on demand."""
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
            raise InputError(f"{self.path / INDEX} has no {name}, only {', '.join(self.components) or 'no components'}")
        return self.components[name]

    def config(self, name: str, kind: str) -> dict[str, Any]:
        """The config of a component, which must be of class `kind`."""
        component = self.component(name)
        if component.kind != kind:
            raise InputError(f"{component.path}: {name} is a {component.kind}; only {kind} can be read")
        return component.config


def read_folder(path: str | Path) -> DiffusersFolder:
    """Read the index and the configs of a folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder of a diffusers pipeline, with {INDEX} in it")
    if not (folder / INDEX).is_file():
        raise InputError(f"{folder} has no {INDEX}: it is not the folder of a diffusers pipeline")
    index = load_file(folder / INDEX)
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise InputError(f"{folder / INDEX} has no _class_name: the pipeline is unknown")
    components = {}
    for name, value in index.items():
        pair = isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
        if name.startswith("_") or not pair:  # pipeline options, and omitted components ([null, null])
            continue
        components[name] = _read_component(folder / name, *value)
    return DiffusersFolder(folder, pipeline, components)


def _read_component(path: Path, library: str, kind: str) -> Component:
    if not path.is_dir():
        raise InputError(f"{path} is missing, though {path.parent / INDEX} lists it as a {kind}")
    config = next((path / name for name in _CONFIGS if (path / name).is_file()), None)
    if config is None and "Tokenizer" not in kind:
        raise InputError(f"{path} has no config.json: its weights cannot be identified")
    return Component(path, library, kind, load_file(config) if config else {})
