"""Looks at the first items of a stage: data that are all the same teach nothing (docs/health.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kineograph.core.batch import Batch
from kineograph.core.health import Finding
from kineograph.train.health import make_finding

PROBE_ITEMS = 32  # items that are looked at before data count as all the same


class DataProbe:
    """Looks at the first items of a stage until two of them differ. Every process looks at its own; `check` joins them."""

    def __init__(self, reads_captions: bool) -> None:
        self.reads_captions = reads_captions
        self._items = 0
        self._kind = ""
        self._first: Tensor | None = None
        self._differ = False
        self._captions: set[str] = set()
        self._all_have_captions = True

    def add(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            fields = {"pixels": batch.pixels, "tokens": batch.tokens, "latents": batch.latents}
            kind, values = next(((kind, value) for kind, value in fields.items() if value is not None), ("", None))
            self._items += len(batch)
            self._captions |= set(batch.captions or ())
            self._all_have_captions &= batch.captions is not None
            if values is None:
                self._differ = True
                continue
            if self._first is None:
                self._kind, self._first = kind, values[0]
            first = self._first
            self._differ = self._differ or any(not torch.equal(value, first) for value in values)

    def summary(self) -> dict[str, Any]:
        """The facts that `check` joins over processes, as JSON."""
        part: dict[str, Any] = {"items": self._items, "kind": self._kind, "differ": self._differ or self._first is None}
        # Captions that are embedded already are not known.
        part["captions"] = sorted(self._captions)[:2] if self._all_have_captions else []
        if not part["differ"] and self._first is not None:
            values = self._first.contiguous().flatten()
            part["blank"] = bool(values.min() == values.max())
            part["value"] = float(values[0])
            part["digest"] = hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
        return part

    def check(self, summaries: Sequence[dict[str, Any]]) -> list[Finding] | None:
        """Findings of all processes' items; None: look at more of them."""
        items = sum(part["items"] for part in summaries)
        captions = {caption for part in summaries for caption in part["captions"]}
        differ = any(part["differ"] for part in summaries) or len({part["digest"] for part in summaries}) > 1
        one_caption = self.reads_captions and len(captions) == 1 and all(part["captions"] for part in summaries)
        if items < PROBE_ITEMS and (not differ or one_caption):
            return None
        first, found = summaries[0], []
        if not differ:
            what = {"pixels": "pictures", "tokens": "token grids"}.get(first["kind"], "items")
            same = f"the first {items} {what} are all the same"
            if first["blank"]:
                evidence = f"{same}, and every value in them is {first['value']:g}"
                found.append(make_finding("blank_data", evidence, first["value"]))
            else:
                found.append(make_finding("identical_data", same))
        if one_caption:
            caption = next(iter(captions))
            text = caption if len(caption) <= 60 else f"{caption[:57]}…"
            evidence = f"the first {items} items have the same caption, {text!r}"
            found.append(make_finding("one_caption", evidence, 1.0))
        return found
