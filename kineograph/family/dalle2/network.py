"""The decoder's network: a U-Net that reads an image embedding, text encodings and a smaller picture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn

from kineograph.family.dalle2.config import DecoderConfig
from kineograph.nn.attention import Memory
from kineograph.nn.norms import norm_layer
from kineograph.nn.transformer import init_weights
from kineograph.nn.unet import Unet
from kineograph.text.conditioning import TextEmbeddings

LEVELS = 1000  # noise levels of the smaller picture, 0 … 1, are told apart as finely as times


@dataclass
class Condition:
    """What a batch of pictures is drawn from. A part that the model does not have is None."""

    image: Tensor | None = None  # B D, of length 1
    missing: Tensor | None = None  # B, bool: no image embedding
    text: Tensor | None = None  # B L E
    mask: Tensor | None = None  # B L

    def join(self, other: Condition) -> Condition:
        """The rows of both."""

        def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
            return None if a is None or b is None else torch.cat([a, b])

        words = TextEmbeddings(self.text, self.mask).join(TextEmbeddings(other.text, other.mask))
        return Condition(both(self.image, other.image), both(self.missing, other.missing), *words)


@dataclass
class Prepared:
    """A condition as the U-Net reads it: the same at every step of a sampling call."""

    added: Tensor | None  # B V
    mask: Tensor | None  # B M
    memory: list[Memory] | None


class DecoderNetwork(nn.Module):
    def __init__(
        self,
        config: DecoderConfig,
        channels: int,  # of what is denoised
        channels_out: int,
        image_width: int | None = None,
        text_width: int | None = None,
        low_res: int | None = None,  # channels of the smaller picture
    ) -> None:
        super().__init__()
        self.config = config
        width, vector = config.width, 4 * config.width
        reads_tokens = image_width is not None and config.image_embeds in ("tokens", "both")
        reads_vector = image_width is not None and config.image_embeds in ("time", "both")
        self.image_width = image_width
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
        tokens = self.to_tokens is not None or self.text is not None
        self.norm = norm_layer("layer", vector) if tokens else None
        reads = channels * (1 + config.self_conditioning) + (low_res or 0)
        self.unet = Unet(config, reads, channels_out, vector if tokens else None)

    def read(
        self,
        image: Tensor | None,
        missing: Tensor | None,
        text: Tensor | None,
        mask: Tensor | None,
        level: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What is added to the time's vector, B V; the tokens to attend to, B M V; and which of them are real, B M."""
        added: list[Tensor] = []
        tokens: list[Tensor] = []
        masks: list[Tensor] = []
        if self.image_width is not None:
            assert image is not None and missing is not None
            image = image * self.image_width**0.5  # numbers of about 1
            if self.to_vector is not None and self.null_vector is not None:
                found = self.to_vector(image)
                added.append(torch.where(missing[:, None], self.null_vector.to(found.dtype), found))
            if self.to_tokens is not None and self.null_tokens is not None:
                found = rearrange(self.to_tokens(image), "b (m v) -> b m v", m=self.config.image_tokens)
                tokens.append(torch.where(missing[:, None, None], self.null_tokens.to(found.dtype), found))
                masks.append(torch.ones_like(tokens[-1][..., 0], dtype=torch.bool))
        if self.text is not None:
            assert text is not None and mask is not None
            tokens.append(self.text(text.to(self.text.weight.dtype)))
            masks.append(mask)
        if self.level is not None and level is not None:
            added.append(self.level(self.unet.embed_time(level * LEVELS)))
        context = None
        if tokens and self.norm is not None:
            context = self.norm(torch.cat([part.to(tokens[0].dtype) for part in tokens], dim=1))
        # Without text every token is real, and attention without a mask is faster.
        seen = torch.cat(masks, dim=1) if self.text is not None else None
        return (torch.stack(added).sum(0) if added else None), context, seen

    def prepare(self, condition: Condition, level: Tensor | None) -> Prepared:
        """Everything that depends neither on x_t nor on t, made once a sampling call."""
        added, context, mask = self.read(condition.image, condition.missing, condition.text, condition.mask, level)
        return Prepared(added, mask, self.unet.memory(context) if context is not None else None)

    def forward(
        self,
        x: Tensor,  # B C H W
        t: Tensor,  # B
        image: Tensor | None = None,  # B D
        missing: Tensor | None = None,  # B
        text: Tensor | None = None,  # B L E
        mask: Tensor | None = None,  # B L
        low_res: Tensor | None = None,  # B C' H W: enlarged
        level: Tensor | None = None,  # B: noise in it
        previous: Tensor | None = None,  # B C H W: the picture that the last step predicted
        added: Tensor | None = None,  # prepared, instead of image, text and level
        memory: list[Memory] | None = None,
    ) -> Tensor:
        parts = [part for part in (x, previous, low_res) if part is not None]
        x = torch.cat(parts, dim=1) if len(parts) > 1 else x
        context = None
        if added is None and memory is None:
            added, context, mask = self.read(image, missing, text, mask, level)
        return self.unet(x, t, added, context, mask, memory)
