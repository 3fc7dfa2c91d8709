"""The decoder's network: a U-Net conditioned on an image embedding, text encodings and a low-resolution image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from kineograph.family.dalle2.config import DecoderConfig
from kineograph.nn.attention import Memory
from kineograph.nn.norms import norm_layer
from kineograph.nn.transformer import init_weights
from kineograph.nn.unet import Unet

NOISE_LEVELS = 1000  # levels in [0, 1] are scaled to the range of timesteps before they are embedded


class Condition(NamedTuple):
    """The conditions of a batch; None for those that the model does not read."""

    image: Tensor | None = None  # B D, of length 1
    no_image: Tensor | None = None  # B, bool: without image embedding
    text: Tensor | None = None  # B L E
    mask: Tensor | None = None  # B L

    def concat(self, other: Condition) -> Condition:
        """Concatenate the rows of both."""
        pairs = zip(self, other, strict=True)
        return Condition(*(None if a is None or b is None else torch.cat([a, b]) for a, b in pairs))


class PreparedCondition(NamedTuple):
    """A condition as the U-Net reads it, the same at every sampling step."""

    added: Tensor | None  # B V
    mask: Tensor | None  # B M
    memory: list[Memory] | None


class DecoderNetwork(nn.Module):
    def __init__(
        self,
        config: DecoderConfig,
        channels: int,  # of x
        channels_out: int,
        image_width: int | None = None,
        text_width: int | None = None,
        low_res: int | None = None,  # channels of the low-resolution image
    ) -> None:
        super().__init__()
        self.config, self.image_width = config, image_width
        width, vector = config.width, 4 * config.width
        reads_tokens = image_width is not None and config.image_embeds in ("tokens", "both")
        reads_vector = image_width is not None and config.image_embeds in ("time", "both")
        self.to_tokens = nn.Linear(image_width or 1, config.image_tokens * vector) if reads_tokens else None
        self.null_tokens = nn.Parameter(torch.randn(config.image_tokens, vector)) if reads_tokens else None
        self.to_vector = nn.Linear(image_width or 1, vector) if reads_vector else None
        self.null_vector = nn.Parameter(torch.randn(vector)) if reads_vector else None
        self.text = nn.Linear(text_width, vector, bias=False) if text_width is not None else None
        self.level = (
            nn.Sequential(nn.Linear(width, vector), nn.SiLU(), nn.Linear(vector, vector))
            if low_res is not None and config.augment.noise
            else None
        )
        init_weights(self, 1)
        has_context = reads_tokens or self.text is not None
        self.norm = norm_layer("layer", vector) if has_context else None
        channels_in = channels * (1 + config.self_conditioning) + (low_res or 0)
        self.unet = Unet(config, channels_in, channels_out, vector if has_context else None)

    def embed_condition(
        self,
        image: Tensor | None,
        no_image: Tensor | None,
        text: Tensor | None,
        mask: Tensor | None,
        level: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """→ vector to add to the time embedding B V, context for cross-attention B M V, and its mask B M"""
        added: list[Tensor] = []
        tokens: list[Tensor] = []
        masks: list[Tensor] = []
        if self.image_width is not None:
            assert image is not None and no_image is not None
            image = image * self.image_width**0.5  # unit variance
            if self.to_vector is not None and self.null_vector is not None:
                vector = self.to_vector(image)
                added.append(torch.where(no_image[:, None], self.null_vector.to(vector.dtype), vector))
            if self.to_tokens is not None and self.null_tokens is not None:
                unfolded = rearrange(self.to_tokens(image), "b (m v) -> b m v", m=self.config.image_tokens)
                tokens.append(torch.where(no_image[:, None, None], self.null_tokens.to(unfolded.dtype), unfolded))
                masks.append(torch.ones_like(unfolded[..., 0], dtype=torch.bool))
        if self.text is not None:
            assert text is not None and mask is not None
            tokens.append(self.text(text.to(self.text.weight.dtype)))
            masks.append(mask)
        if self.level is not None and level is not None:
            added.append(self.level(self.unet.embed_time(level * NOISE_LEVELS)))
        context = None
        if self.norm is not None:
            context = self.norm(torch.cat([part.to(tokens[0].dtype) for part in tokens], dim=1))
        # Without text no token is padding, and attention is faster without a mask.
        context_mask = torch.cat(masks, dim=1) if self.text is not None else None
        return (torch.stack(added).sum(0) if added else None), context, context_mask

    def prepare(self, condition: Condition, level: Tensor | None) -> PreparedCondition:
        """Compute everything that depends on neither x_t nor t, once per sampling call."""
        added, context, mask = self.embed_condition(*condition, level)
        return PreparedCondition(added, mask, self.unet.memory(context) if context is not None else None)

    def forward(
        self,
        x: Tensor,  # B C H W
        t: Tensor,  # B
        image: Tensor | None = None,  # B D
        no_image: Tensor | None = None,  # B
        text: Tensor | None = None,  # B L E
        mask: Tensor | None = None,  # B L
        low_res: Tensor | None = None,  # B C' H W, upsampled
        level: Tensor | None = None,  # B, its noise level
        previous: Tensor | None = None,  # B C H W, the previous step's x̂0
        added: Tensor | None = None,  # of `prepare`, in place of image, text and level
        memory: list[Memory] | None = None,
    ) -> Tensor:
        parts = [part for part in (x, previous, low_res) if part is not None]
        x = torch.cat(parts, dim=1) if len(parts) > 1 else x
        context = None
        if added is None and memory is None:
            added, context, mask = self.embed_condition(image, no_image, text, mask, level)
        return self.unet(x, t, added, context, mask, memory)
