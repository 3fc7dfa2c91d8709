"""Text embeddings that come with the data; no encoder."""

from __future__ import annotations

from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.text.null import NullText


class GivenText(nn.Module):
    trained = False
    reads_captions = False

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.width, self.length = width, length
        self.null = NullText(width)

    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        raise InputError(
            "text.kind=given has no encoder for captions: give embeddings with the data, or set text.kind to learned, t5 or clip"
        )

    def drop(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        return self.null(embeddings, mask, dropped)

    def assets(self) -> dict[str, str]:
        return {}
