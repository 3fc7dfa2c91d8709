"""Filling a cache block by block. The header says how many items are done and is written last, so that a killed run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_atomic
from kineograph.data.cache import BF16, FIELDS, HEADER, Block, Header, read_header, smallest_integer
from kineograph.data.config import Split

STAND_IN = "stand_in"  # in a line of captions.jsonl: the row holds another item, since this one cannot be read


class StoredRow(NamedTuple):
    """An item as it lies in another cache."""

    block: Block
    row: int
    line: bytes  # of captions.jsonl


class CacheWriter:
    """Opens a new cache, or an unfinished one of the same key at `done`."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        count: int,
        shape: tuple[int, ...],
        vocabulary: int | None = None,
        key: str = "",
        codec: str = "",
        split: Split | None = None,
        latents_dtype: str = "float16",
        text: tuple[int, int] | None = None,
        text_dtype: str = "float16",
        frames: int | None = None,
        text_embed: int | None = None,
        first_frame: tuple[int, ...] | None = None,
    ) -> None:
        """`text`: length and width of text embeddings to keep; `text_embed`: width of the one embedding of a whole text; `frames`: length of
        frame masks to keep; `first_frame`: channels, height and width of clips' first frames to keep as they are."""
        if kind == "tokens" and not vocabulary:
            raise InputError("a cache of tokens needs the codec's vocabulary")
        self.folder = Path(folder)
        main = smallest_integer(vocabulary or 0) if kind == "tokens" else latents_dtype
        shapes = {kind: (main, tuple(shape)), "fps": ("float32", ())}
        if text:
            shapes |= {"text_embeds": (text_dtype, text), "text_mask": ("bool", text[:1])}
        if text_embed:
            shapes["text_embed"] = (text_dtype, (text_embed,))
        if first_frame:
            shapes["first_frame"] = ("uint8", first_frame)
        if frames:
            shapes["frame_mask"] = ("bool", (frames,))
        fresh = Header.model_validate({
            "kind": kind, "count": count, "shape": tuple(shape), "vocabulary": vocabulary, "key": key, "codec": codec, "split": split,
            "arrays": {name: shapes[name][0] for name in FIELDS if name in shapes},
        })  # fmt: skip
        found = read_header(self.folder)
        # One that was begun before headers named the codec is told apart by its key alone.
        if found is not None and found.model_copy(update={"done": 0, "codec": found.codec or codec}) != fresh:
            changed = [
                name for name in Header.model_fields if name != "done" and getattr(found, name) != getattr(fresh, name)
            ]
            raise InputError(
                f"{self.folder} holds another cache ({', '.join(changed)} differ): choose another folder or remove it"
            )
        self.header = found or fresh
        self.folder.mkdir(parents=True, exist_ok=True)
        self._arrays = {}
        for name, (dtype, inner) in shapes.items():
            path = self.folder / f"{name}.npy"
            mode = "r+" if found is not None and path.exists() else "w+"
            stored = "uint16" if dtype == BF16 else dtype
            self._arrays[name] = np.lib.format.open_memmap(path, mode=mode, dtype=stored, shape=(count, *inner))
        rows = self.folder / "captions.jsonl"
        kept = rows.read_bytes().splitlines(keepends=True)[: self.done] if found is not None and rows.exists() else []
        if len(kept) < self.done:
            raise InputError(
                f"{rows} has {len(kept)} lines and {self.folder / HEADER} says {self.done}: remove {self.folder} to build it anew"
            )
        self._captions = open(rows, "wb")  # noqa: SIM115 (closed by close)
        self._captions.writelines(kept)  # lines beyond the header belong to a block that was not finished
        self._save()

    @classmethod
    def like(cls, folder: Path, block: Block, count: int, key: str, codec: str) -> CacheWriter:
        """One whose items are kept as those of another cache are."""
        header, inner = block.header, {name: array.shape[1:] for name, array in block.arrays.items()}
        text = next((header.arrays[name] for name in ("text_embeds", "text_embed") if name in inner), "float16")
        return cls(
            folder, header.kind, count, header.shape, header.vocabulary, key, codec, header.split,
            latents_dtype=header.arrays[header.kind],
            text=inner.get("text_embeds"),  # type: ignore[arg-type]
            text_dtype=text,
            frames=inner["frame_mask"][0] if "frame_mask" in inner else None,
            text_embed=inner["text_embed"][0] if "text_embed" in inner else None,
            first_frame=inner.get("first_frame"),
        )  # fmt: skip

    @property
    def done(self) -> int:
        return self.header.done

    @property
    def complete(self) -> bool:
        return self.header.complete

    def append(
        self,
        values: Tensor,
        identities: Sequence[str],
        captions: Sequence[str | None] | None = None,
        text_embeds: Tensor | None = None,
        text_mask: Tensor | None = None,
        frame_mask: Tensor | None = None,
        fps: Tensor | float = 8.0,
        text_embed: Tensor | None = None,
        first_frame: Tensor | None = None,
        stand_ins: Collection[int] = (),
        among: Sequence[StoredRow | None] | None = None,
    ) -> None:
        """One block: B × shape, and what belongs to it. On disk, and counted, when this returns.

        `stand_ins`: which of the rows hold another item, since their own cannot be read. `among`: the rows of the block in their order where
        some are copied from elsewhere; None is each that is given.
        """
        size, start = len(identities), self.done
        rows: Sequence[StoredRow | None] = among if among is not None else [None] * size
        self._expect_room(len(rows))
        given_at = start + np.flatnonzero([row is None for row in rows])
        assert len(given_at) == size
        given = {
            self.header.kind: values,
            "text_embed": text_embed,
            "text_embeds": text_embeds,
            "text_mask": text_mask,
            "first_frame": first_frame,
            "frame_mask": frame_mask,
        }
        for name, array in self._arrays.items():
            if name == "fps":
                array[given_at] = fps.cpu().numpy() if isinstance(fps, Tensor) else fps
                continue
            value = given[name]
            if value is None or tuple(value.shape) != (size, *array.shape[1:]):
                raise InputError(
                    f"{self.folder}: {name} has the shape {None if value is None else tuple(value.shape)}, and {(size, *array.shape[1:])} is needed"
                )
            array[given_at] = self._checked(name, value.detach().cpu())
        texts = captions or [None] * size
        own = iter(
            _line(identity, caption, place in stand_ins)
            for place, (identity, caption) in enumerate(zip(identities, texts, strict=True))
        )
        self._commit([self._copied(start + place, row) if row else next(own) for place, row in enumerate(rows)])

    def take(self, rows: Sequence[StoredRow]) -> None:
        """One block that is copied from elsewhere, bit for bit. On disk, and counted, when this returns."""
        self._expect_room(len(rows))
        self._commit([self._copied(self.done + place, row) for place, row in enumerate(rows)])

    def _expect_room(self, size: int) -> None:
        if self.done + size > self.header.count:
            raise InputError(
                f"{self.folder} is made for {self.header.count} items, and {self.done + size} would be in it"
            )

    def _copied(self, place: int, row: StoredRow) -> bytes:
        """Its line of captions.jsonl."""
        for name, array in self._arrays.items():
            there = row.block.arrays.get(name)
            if there is None or there.dtype != array.dtype or there.shape[1:] != array.shape[1:]:
                raise InputError(
                    f"{self.folder} keeps {name} of another type or shape than {next(iter(row.block.arrays.values())).path.parent}: "
                    "remove that folder, and nothing is taken from it"
                )
            array[place] = there.values[row.row]
        return row.line

    def _commit(self, lines: Sequence[bytes]) -> None:
        for array in self._arrays.values():
            array.flush()
        self._captions.writelines(lines)
        self._captions.flush()
        os.fsync(self._captions.fileno())
        self.header = self.header.model_copy(update={"done": self.done + len(lines)})
        self._save()

    def _checked(self, name: str, value: Tensor) -> np.ndarray:
        if name == "tokens":
            low, high = int(value.min()), int(value.max())
            if low < 0 or high >= (self.header.vocabulary or 0):
                raise InputError(f"{self.folder}: ids from {low} to {high} in a vocabulary of {self.header.vocabulary}")
        if self.header.arrays[name] == BF16:
            return value.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return (value.float() if value.dtype.is_floating_point else value).numpy()

    def _save(self) -> None:
        tree = self.header.model_dump(mode="json") | {"complete": self.header.complete}
        write_atomic(self.folder / HEADER, json.dumps(tree, indent=1))

    def close(self) -> None:
        self._captions.close()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(identity: str, caption: str | None, stands_in: bool) -> bytes:
    tree = {"identity": identity, "caption": caption} | ({STAND_IN: True} if stands_in else {})
    return (json.dumps(tree) + "\n").encode()
