"""Which cache is a stage's: a hash of all that its content depends on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kineograph.core.protocols import Source
from kineograph.core.run_folder import RunFolder
from kineograph.stage.load import StageLoader
from kineograph.stage.spec import StagePlan


def cache_facts(stage: StagePlan, stages: StageLoader, source: Source) -> dict[str, Any]:
    """All that a stage's cache depends on: with any other fact it is another cache."""
    config = stage.spec.config
    encoders = {
        key: stages.digest(getattr(config, key)) for key in config.references if isinstance(getattr(config, key), str)
    }
    content = source.fingerprint() if hasattr(source, "fingerprint") else f"{len(source)} items"
    tree = config.model_dump(mode="json")
    facts = {
        "data": stage.spec.data.model_dump(mode="json"),
        "content": content,
        "encoders": encoders,
        "text": tree.get("text"),
    }
    facts |= {name: tree[name] for name in ("clip", "text_encodings") if name in tree}
    return facts | {"own": stage.spec.task.cache_facts(config), "precision": config.cache_precision, "format": 2}


def cache_folder(stage: StagePlan, folder: RunFolder, facts: dict[str, Any]) -> Path:
    """Where a stage's cache lies, whether it is there or not."""
    key = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    return folder.stage(stage.name) / "cache" / key
