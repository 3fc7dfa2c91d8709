"""The prior's network: a causal transformer over what the caption says and a noised image embedding."""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor, nn

from kineograph.nn.positions import LearnedPositions, sincos_embedding
from kineograph.nn.transformer import Transformer, TransformerConfig, init_weights


class PriorNetwork(nn.Module):
    """[encodings of the caption's tokens · its embedding · time · noised image embedding · a learned query] → the answer, at the query.

    Each place sees itself and those before it. Where there is no token (padding, or no text at all) stands a learned vector of its own:
    so nothing need be masked beside causality, and text that is dropped in training is the same as none in sampling.
    """

    def __init__(self, config: TransformerConfig, embed_width: int, text_width: int | None, length: int | None) -> None:
        super().__init__()
        self.width = config.width
        self.encoding = nn.Linear(text_width, config.width, bias=False) if text_width is not None else None
        self.text = nn.Linear(embed_width, config.width, bias=False)
        self.image = nn.Linear(embed_width, config.width, bias=False)
        self.time = nn.Sequential(
            nn.Linear(config.width, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        self.answer = nn.Linear(config.width, embed_width, bias=False)
        init_weights(self, 1)
        self.length = 4 + (length or 0 if text_width is not None else 0)
        self.positions = LearnedPositions((self.length,), config.width)
        self.no_token = _vector(config.width) if self.encoding is not None else None
        self.no_text, self.query = _vector(config.width), _vector(config.width)
        self.transformer = Transformer(config, causal=True)

    def forward(
        self,
        x: Tensor,  # B D, the noised embedding, values of about 1
        t: Tensor,  # B, int64
        text: Tensor,  # B D, of length 1
        absent: Tensor,  # B: no text
        encodings: Tensor | None = None,  # B L E
        mask: Tensor | None = None,  # B L
    ) -> Tensor:
        """B D"""
        dtype = self.query.dtype
        said = self.text(text.to(dtype) * text.shape[1] ** 0.5)  # B W
        said = torch.where(absent[:, None], self.no_text.to(said.dtype), said)
        moment = self.time(sincos_embedding(t[:, None], self.width).to(dtype) * self.width**0.5)
        query = repeat(self.query.to(said.dtype), "d -> b d", b=len(x))
        tokens = torch.stack([said, moment, self.image(x.to(dtype)), query], dim=1)  # B 4 W
        if self.encoding is not None:
            assert encodings is not None
            assert mask is not None
            assert self.no_token is not None
            read = self.encoding(encodings.to(dtype))  # B L W
            real = (mask & ~absent[:, None])[..., None]
            tokens = torch.cat([torch.where(real, read, self.no_token.to(read.dtype)), tokens], dim=1)
        hidden = self.transformer(tokens + self.positions())  # B N W
        return self.answer(hidden[:, -1])


def _vector(width: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(width) * width**-0.5)
