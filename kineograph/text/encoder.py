"""The null text of classifier-free guidance: one learned token, the same in training and in sampling."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.core.protocols import TextEncoder


class NullText(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(width) * width**-0.5)

    def forward(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        """Rows where `dropped` (B) become the null token alone; so do rows without any real token. Embeddings are B L D, mask is B L."""
        dropped = dropped | ~mask.any(dim=1)
        first = torch.zeros_like(mask)
        first[:, 0] = True
        null = self.token.to(embeddings.dtype).expand_as(embeddings)
        return torch.where(dropped[:, None, None], null, embeddings), torch.where(dropped[:, None], first, mask)


class GivenText(TextEncoder):
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
