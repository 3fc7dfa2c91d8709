"""The null text of classifier-free guidance, and the encoder of precomputed embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.core.protocols import TextEncoder


class NullText(nn.Module):
    """A learned token, the same in training and in sampling."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(width) * width**-0.5)

    def forward(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the rows of B L D where `dropped` (B), and rows without a real token, by the null token alone."""
        dropped = dropped | ~mask.any(dim=1)
        first = torch.zeros_like(mask)
        first[:, 0] = True
        null = self.token.to(embeddings.dtype).expand_as(embeddings)
        return torch.where(dropped[:, None, None], null, embeddings), torch.where(dropped[:, None], first, mask)


class PrecomputedText(TextEncoder):
    """kind=given: embeddings come with the data."""

    trained = False
    reads_captions = False

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.width, self.length = width, length
        self.null = NullText(width)

    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        raise InputError(
            "text.kind=given cannot encode captions: give embeddings with the data, or set text.kind to learned, t5 or clip"
        )

    def drop(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        return self.null(embeddings, mask, dropped)
