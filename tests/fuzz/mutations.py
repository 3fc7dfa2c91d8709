"""Hostile values, and damage to bytes, trees and text. Everything follows from the random generator that is given."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

STRINGS = [
    "", " ", ".", "..", "/", "~", "-", "--", "x" * 300, "a\nb", "a\tb", "😀", "\u202e", "null", "true", "{}", "[]", "a.b.c", "os.system",
    "subprocess.Popen", "pipe:touch PWNED", "../../PWNED", "/dev/null", "/dev/zero", "file:///etc/passwd", "http://127.0.0.1:9/x", "%s%n",
    "$(touch PWNED)", "`touch PWNED`", "; touch PWNED", "{0..99999999}", "*", "[", "&a *a", "!!python/name:os.system", "1e400", "0x10", "nan",
]  # fmt: skip
NUMBERS: list[Any] = [
    0, -1, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30, 0.0, -0.0, 0.5, -0.5, 1e-9, 1e-320, 1e9, 1e308, math.inf, -math.inf,
    math.nan,
]  # fmt: skip


def value(rng: random.Random) -> Any:
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(STRINGS)
    return rng.choice(
        [None, True, False, [], {}, [rng.choice(NUMBERS)], [[[]]], {"a": rng.choice(NUMBERS)}, [None] * 3, {"": {}}]
    )


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    result = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(len(result) + 1)
        kind = rng.randrange(7)
        if kind == 0 and result:
            result[min(at, len(result) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            result[at : at + rng.choice([1, 2, 4, 8])] = rng.choice([b"\0", b"\xff", b"\x7f"]) * rng.choice(
                [1, 2, 4, 8]
            )
        elif kind == 2:
            del result[at : at + rng.randrange(1, 64)]
        elif kind == 3:
            result[at:at] = rng.randbytes(rng.randrange(1, 32))
        elif kind == 4:
            del result[at:]
        elif kind == 5:
            result[at:at] = result[: rng.randrange(1, 256)]
        else:
            result[at:at] = rng.choice(
                [b"-", b"9" * 20, b"{", b"[" * 2000, b'"', b"\\ud83d", b"\xc3\x28", b": ", b"\n"]
            )
    return bytes(result)


def damage_tree(rng: random.Random, tree: Any) -> Any:
    """Replace, remove, rename or move some nodes."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 2, 3])):
        holders = _holders(tree)
        if not holders:
            return value(rng)
        holder = rng.choice(holders)
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        kind = rng.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[str(value(rng))] = holder.pop(key)
        elif kind == 2:
            holder[key] = [copy.deepcopy(holder[key])]
        else:
            holder[key] = value(rng)
    return tree


def _holders(tree: Any) -> list[Any]:
    if not isinstance(tree, dict | list):
        return []
    parts = list(tree.values()) if isinstance(tree, dict) else tree
    return ([tree] if tree else []) + [holder for part in parts for holder in _holders(part)]
