"""From a config's `data` to a source: ours by name, a user's source or Dataset by dotted path or as an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from kineograph.core.config import parse
from kineograph.core.protocols import Source
from kineograph.core.registry import find_source
from kineograph.data.config import DataConfig, Split
from kineograph.data.dataset import DatasetSource


def data_config(tree: Mapping[str, Any], dataset: Dataset | None = None, where: str = "data") -> DataConfig:
    """The config of the source that `tree["source"]` names."""
    return parse(_class_of(tree.get("source", DataConfig.model_fields["source"].default), dataset).Config, tree, where)


def open_source(config: DataConfig, split: Split, seed: int, dataset: Dataset | None = None) -> Source:
    """One split. `dataset` is a user's own object, used in place of what `config.source` names."""
    if dataset is not None:
        return DatasetSource.wrap(dataset, config, split, seed)
    return _class_of(config.source, None).open(config, split, seed)


def _class_of(name: str, dataset: Dataset | None) -> Any:
    if dataset is not None:
        return DatasetSource
    found = find_source(name)
    return found if hasattr(found, "open") and hasattr(found, "Config") else DatasetSource
