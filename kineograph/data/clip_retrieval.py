"""`data.source=clip_retrieval`: embeddings in numbered .npy files with captions in .parquet files beside them, as clip-retrieval writes them.

    img_emb/img_emb_0.npy   text_emb/text_emb_0.npy   metadata/metadata_0.parquet

There are no pixels: a prior trains on embeddings alone. Row r of file n is one item in every folder.
"""

from __future__ import annotations

import bisect
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from pydantic import Field

from kineograph.core.batch import Sample
from kineograph.core.config import LocalPath
from kineograph.core.errors import InputError, NoData, Unreadable
from kineograph.core.protocols import Source
from kineograph.core.remote_files import is_url
from kineograph.data.arrays import Array
from kineograph.data.captions import TEXT_KEYS, read_parquet_column
from kineograph.data.embeddings import find_numbered_arrays
from kineograph.data.open_source import DataConfig, Split, select_split
from kineograph.data.remote_arrays import RemoteArray, RemoteFolder
from kineograph.data.shards import last_number

Arrays = dict[int, Array | RemoteArray]


class ClipRetrievalConfig(DataConfig):
    source: str = "clip_retrieval"
    image_embeddings: LocalPath
    """Folder, or URL of one, of image embeddings: numbered .npy files, N × width each."""
    text_embeddings: LocalPath | None = None
    """Folder, or URL of one, of text embeddings: the same numbers and rows. Null: a CLIP embeds the captions."""
    metadata: LocalPath | None = None
    """Folder, or URL of one, of .parquet files with the captions: the same numbers and rows."""
    caption_column: str | None = Field(None, min_length=1)
    """Column of the captions; null: text, caption or prompt."""


class ClipRetrieval(Source):
    Config = ClipRetrievalConfig
    caption_help = "set data.metadata to the folder of .parquet files, and data.caption_column to their column"

    def __init__(self, config: ClipRetrievalConfig, split: Split) -> None:
        self.config = config
        self._images = find_numbered_arrays(config.image_embeddings, "data.image_embeddings")
        if not self._images:
            raise InputError(f"data.image_embeddings={config.image_embeddings} holds no numbered .npy files")
        self._texts = (
            find_numbered_arrays(config.text_embeddings, "data.text_embeddings") if config.text_embeddings else None
        )
        self._numbers = sorted(self._images)
        counts = [self._images[number].shape[0] for number in self._numbers]
        self._ends = list(accumulate(counts))
        self._check_rows(self._texts)
        self._captions = self._read_captions()
        names = [f"{number}:{row}" for number, count in zip(self._numbers, counts) for row in range(count)]
        part = select_split(names, split, config)
        self.indices, self.note = part.indices, part.note
        self.fields = frozenset({"image_embed"} | ({"text_embed"} if self._texts else set()))

    @classmethod
    def open(cls, config: ClipRetrievalConfig, split: Split, seed: int) -> ClipRetrieval:
        return cls(config, split)

    def _check_rows(self, others: Arrays | None) -> None:
        """Refuse folders that do not name the same items: an embedding without its picture's would be another one's."""
        widths = {array.shape[1:] for array in self._images.values()}
        if len(widths) > 1 or any(len(width) != 1 for width in widths):
            raise InputError(
                f"data.image_embeddings={self.config.image_embeddings} holds arrays of items × {', '.join(map(str, sorted(widths)))}: "
                "all must be items × width, of one width"
            )
        for number in self._numbers if others is not None else ():
            assert others is not None
            count, found = self._images[number].shape[0], others[number].shape[0] if number in others else None
            if found != count:
                raise InputError(
                    f"data.text_embeddings: file {number} has {'no rows' if found is None else f'{found} rows'} for {count} image "
                    "embeddings: each row is one item in every folder"
                )

    def _read_captions(self) -> dict[int, list[str]] | None:
        if self.config.metadata is None:
            return None
        root = Path(self.config.metadata)
        remote = (
            RemoteFolder(self.config.metadata, "data.metadata", ".parquet") if is_url(self.config.metadata) else None
        )
        if remote is None and not root.is_dir():
            raise NoData(f"data.metadata={self.config.metadata} is not a folder")
        names = remote.files if remote else [path.name for path in root.glob("*.parquet")]
        files = {last_number(name): name for name in sorted(names)}
        captions: dict[int, list[str]] = {}
        for number in self._numbers:
            if number not in files:
                raise InputError(
                    f"data.metadata={self.config.metadata} has no .parquet file of number {number}: add it, or move its embeddings"
                )
            path = remote.fetch(files[number]) if remote else root / files[number]
            columns = (self.config.caption_column,) if self.config.caption_column else TEXT_KEYS
            captions[number] = read_parquet_column(path, columns, "data.caption_column")
            count = self._images[number].shape[0]
            if len(captions[number]) != count:
                raise InputError(
                    f"{path} has {len(captions[number])} rows for {count} image embeddings: each row is one item in every folder"
                )
        return captions

    def _locate(self, index: int) -> tuple[int, int]:
        """→ the number of the file, and the row"""
        item = int(self.indices[index])
        place = bisect.bisect_right(self._ends, item)
        return self._numbers[place], item - (self._ends[place - 1] if place else 0)

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        number, row = self._locate(index)
        sample = Sample(caption=self.caption(index))
        for field, arrays in (("image_embed", self._images), ("text_embed", self._texts)):
            if arrays is not None:
                values = np.array(arrays[number].values[row], np.float32)
                if not np.isfinite(values).all() or not values.any():
                    raise Unreadable(
                        self.identity(index), f"its {field} is {'zero' if not values.any() else 'not finite'}"
                    )
                sample.extra[field] = torch.from_numpy(values)
        return sample

    def caption(self, index: int) -> str | None:
        if self._captions is None:
            return None
        number, row = self._locate(index)
        return self._captions[number][row] or None

    def identity(self, index: int) -> str:
        number, row = self._locate(index)
        return f"{number}:{row}"

    def list_missing_captions(self) -> list[str]:
        return [self.identity(index) for index in range(len(self)) if self.caption(index) is None]


SOURCE = ClipRetrieval
