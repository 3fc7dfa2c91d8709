"""Train, validation and test by a hash of each item's identity: stable when items come, go or change places."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kineograph.core.errors import InputError
from kineograph.data.config import DataConfig, Split


class Part(NamedTuple):
    """The items of one split, in the order of the whole set."""

    indices: np.ndarray
    note: str | None = None  # a line for the log, where the split is not what its name says


def place_of(identity: str) -> float:
    """A number in [0, 1) that depends on the identity alone. Validation lies below test, and test below training."""
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def assign(identities: Sequence[str], validation: float, test: float) -> dict[Split, np.ndarray]:
    """Indices of each split. A share above 0 gets at least one item, as far as there are items to give."""
    places = np.array([place_of(identity) for identity in identities])
    parts: dict[Split, np.ndarray] = {
        "validation": places < validation,
        "test": (places >= validation) & (places < validation + test),
        "train": places >= validation + test,
    }
    shares: dict[Split, float] = {"train": 1.0, "validation": validation, "test": test}
    wanted = [name for name, share in shares.items() if share > 0]
    for name in wanted[: len(places)]:
        if parts[name].any():
            continue
        # From the fullest split, the item that lies nearest: the lowest for validation, the highest for training.
        giver = max(wanted, key=lambda other: int(parts[other].sum()))
        candidates = sorted(np.flatnonzero(parts[giver]).tolist(), key=lambda index: (places[index], identities[index]))
        moved = candidates[-1] if name == "train" else candidates[0]
        parts[giver][moved], parts[name][moved] = False, True
    return {name: np.flatnonzero(chosen) for name, chosen in parts.items()}


def select(identities: Sequence[str], split: Split, config: DataConfig) -> Part:
    """The items of `split`. Validation falls back to the training data where nothing is held out, and says so."""
    parts = assign(identities, config.validation, config.test)
    chosen = parts[split]
    if len(chosen):
        return Part(chosen)
    if split == "validation":
        why = "data.validation=0" if config.validation == 0 else f"{len(identities)} item is too few to hold one out"
        return Part(parts["train"], f"validating on training data: {why}")
    if config.test == 0:
        raise InputError("there is no test split: data.test is 0; set data.test=0.1, for one")
    raise InputError(
        f"no item is left for the {split} split: {len(identities)} items, data.validation={config.validation}, data.test={config.test}"
    )
