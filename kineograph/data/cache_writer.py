"""Filling a cache block by block. The header says how many items are done and is written last, so that a killed run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from kineograph.core.errors import InputError
from kineograph.core.run_folder import write_atomic
from kineograph.data.cache import BF16, FIELDS, HEADER, Header, read_header, smallest_integer
from kineograph.data.config import Split


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
    ) -> None:
        """One block: B × shape, and what belongs to it. On disk, and counted, when this returns."""
        size, start = len(identities), self.done
        if start + size > self.header.count:
            raise InputError(f"{self.folder} is made for {self.header.count} items, and {start + size} would be in it")
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
                array[start : start + size] = fps.cpu().numpy() if isinstance(fps, Tensor) else fps
                continue
            value = given[name]
            if value is None or tuple(value.shape) != (size, *array.shape[1:]):
                raise InputError(
                    f"{self.folder}: {name} has the shape {None if value is None else tuple(value.shape)}, and {(size, *array.shape[1:])} is needed"
                )
            array[start : start + size] = self._checked(name, value.detach().cpu())
        for array in self._arrays.values():
            array.flush()
        texts = captions or [None] * size
        for identity, caption in zip(identities, texts, strict=True):
            self._captions.write((json.dumps({"identity": identity, "caption": caption}) + "\n").encode())
        self._captions.flush()
        os.fsync(self._captions.fileno())
        self.header = self.header.model_copy(update={"done": start + size})
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
