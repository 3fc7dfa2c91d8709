"""Writes tar shards in webdataset's format, with embeddings beside them if an embedder is given.

shard-000000.tar …              00000SSSS.jpg, .txt, .json: five digits of the shard, then the row in it; the same items give the same bytes
img_emb/img_emb_000000.npy …    one row per item, N D; likewise text_emb/ (N D) and txt_enc/ (N L E, zero for padding)
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Sample
from kineograph.core.capabilities import SupportsEmbedding

INDEX_WIDTH = 4
LARGEST = 10**INDEX_WIDTH  # items per shard
_BATCH = 64  # items per embedder call


class ShardWriter:
    """Writes `per_shard` items to each tar. The shards are complete when the `with` block ends without an error."""

    def __init__(self, folder: Path, per_shard: int, embedder: SupportsEmbedding | None = None) -> None:
        self.folder, self.per_shard, self.embedder = folder, per_shard, embedder
        self.count = 0
        self._tar: tarfile.TarFile | None = None
        self._pending: list[Sample] = []  # items to embed
        self._embeddings: dict[str, list[np.ndarray]] = {}
        weights: list[nn.Parameter] = list(embedder.parameters()) if isinstance(embedder, nn.Module) else []
        self._device = weights[0].device if weights else torch.device("cpu")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._end_shard()
        elif self._tar is not None:
            self._tar.close()

    def add(
        self,
        media: bytes,
        suffix: str,
        caption: str,
        facts: Mapping[str, Any],
        pixels: Tensor | None = None,
        frame_mask: Tensor | None = None,
    ) -> str:
        """`media` is an encoded file; the embedder sees `pixels` (T C H W, uint8). → the key."""
        shard, row = divmod(self.count, self.per_shard)
        if row == 0:
            self._end_shard()
            self._tar = tarfile.open(self.folder / f"shard-{shard:06d}.tar", "w")  # noqa: SIM115
        key = f"{shard:05d}{row:0{INDEX_WIDTH}d}"
        self._add_file(f"{key}.{suffix}", media)
        self._add_file(f"{key}.txt", caption.encode())
        self._add_file(f"{key}.json", json.dumps({"caption": caption, **facts}, ensure_ascii=False).encode())
        self.count += 1
        if self.embedder is not None:
            assert pixels is not None
            self._pending.append(Sample(pixels, frame_mask, caption=caption))
            if len(self._pending) >= _BATCH:
                self._embed()
        return key

    def _add_file(self, name: str, content: bytes) -> None:
        assert self._tar is not None
        info = tarfile.TarInfo(name)  # without time and owner: the same items give the same bytes
        info.size = len(content)
        self._tar.addfile(info, io.BytesIO(content))

    @torch.no_grad()
    def _embed(self) -> None:
        if self.embedder is None or not self._pending:
            return
        batch = Batch.collate(self._pending, range(len(self._pending))).to(self._device)
        captions = [str(sample.caption) for sample in self._pending]
        images = self.embedder.embed_images(batch.video, batch.frame_mask)
        texts, encodings, mask = self.embedder.embed_texts(captions)
        for name, values in (("img_emb", images), ("text_emb", texts), ("txt_enc", encodings * mask[..., None])):
            self._embeddings.setdefault(name, []).append(values.float().cpu().numpy())
        self._pending = []

    def _end_shard(self) -> None:
        if self._tar is None:
            return
        self._tar.close()
        self._embed()
        for name, parts in self._embeddings.items():
            (self.folder / name).mkdir(exist_ok=True)
            shard = (self.count - 1) // self.per_shard
            np.save(self.folder / name / f"{name}_{shard:06d}.npy", np.concatenate(parts))
        self._tar, self._embeddings = None, {}
