"""Text conditioning: embeddings of captions and the null condition, the same in training and sampling.

There is no mask: padding is zero, or with text.padding=read the encoder's output for padding, as in the released models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts
from kineograph.core.errors import InputError
from kineograph.core.task import BuildContext, freeze, is_fake_or_meta
from kineograph.family.cogvideox.config import CogVideoXConfig
from kineograph.text import build_text
from kineograph.text.conditioning import compute_cached_text, find_blank


class TextConditioning(nn.Module):
    def __init__(self, config: CogVideoXConfig, context: BuildContext) -> None:
        super().__init__()
        self.null_text = config.null_text
        self.encoder = build_text(config.text, context)
        encoder = self.encoder
        self.width, self.length = (encoder.width, encoder.length) if encoder is not None else (2, 1)
        self.trained = encoder is not None and (encoder.trained or config.null_text == "learned")
        if encoder is not None and not self.trained:
            freeze(encoder)
        self._empty: dict[torch.device, Tensor] = {}  # a frozen encoder's embedding of the empty caption
        self._cached = False  # training reads cached embeddings: the encoder is rarely needed

    def encode_batch(self, batch: Batch, dropped: Tensor | None = None) -> Tensor:
        """B L E, from a cache or from captions; rows where `dropped` (B) get the null condition."""
        encoder = self.encoder
        if encoder is None:
            return torch.zeros(len(batch), 1, self.width, device=batch.slots.device)
        if batch.text_embeds is not None and not encoder.trained:
            embeddings = self._use_precomputed(batch)
        elif batch.captions is not None and dropped is not None and encoder.trained and self.null_text == "empty":
            # One call for both: the empty caption alone would need a second compiled graph.
            embeddings = self._encode_captions([*batch.captions, ""])
            return torch.where(dropped[:, None, None], embeddings[-1:], embeddings[:-1])
        else:
            embeddings = self._encode_captions(batch.captions)
        return embeddings if dropped is None else self.drop(embeddings, dropped)

    def encode_prompts(self, prompts: Prompts) -> tuple[Tensor, Tensor | None]:
        """Embeddings of the prompts, and of the negative or null prompts (None: unconditional)."""
        encoder, rows, device = self.encoder, len(prompts), prompts.noise.device
        given = prompts.batch if prompts.batch is not None and prompts.batch.text_embeds is not None else None
        if encoder is None:
            return torch.zeros(rows, 1, self.width, device=device), None
        if prompts.captions is not None and (given is None or encoder.reads_captions):
            wanted = self._encode_captions(prompts.captions)
        elif given is not None and not encoder.trained:
            wanted = self._use_precomputed(given)
        else:
            return self.null(device).expand(rows, -1, -1), None
        if prompts.negative is not None:
            other = self._encode_captions(prompts.negative)
        else:
            other = self._match_length(self.null(device), wanted).expand_as(wanted)
        self._release()
        return wanted, other

    def drop(self, found: Tensor, dropped: Tensor) -> Tensor:
        null = self._match_length(self.null(found.device), found)
        return torch.where(dropped[:, None, None], null.to(found.dtype), found)

    def null(self, device: torch.device) -> Tensor:
        """1 L E"""
        encoder = self.encoder
        if encoder is None or self.null_text == "zeros" or (not encoder.trained and is_fake_or_meta()):
            return torch.zeros(1, self.length, self.width, device=device)
        if self.null_text == "learned":
            embeddings = torch.zeros(1, self.length, self.width, device=device)
            mask = torch.zeros(1, self.length, dtype=torch.bool, device=device)
            return _zero_padding(*encoder.drop(embeddings, mask, ~mask[:, 0]))
        if encoder.trained:
            return _zero_padding(*encoder.encode([""]))
        if device not in self._empty:
            self._empty[device] = _zero_padding(*encoder.encode([""])).to(device)
            self._release()
        return self._empty[device]

    def _use_precomputed(self, batch: Batch) -> Tensor:
        assert batch.text_embeds is not None
        found, self._cached = batch.text_embeds.float(), True
        if found.shape[2] != self.width:
            raise InputError(
                f"text embeddings have {found.shape[2]} channels and text.width={self.width}: set text.width={found.shape[2]}"
            )
        if batch.text_mask is None:
            return found
        found = _zero_padding(found, batch.text_mask)
        return found if self.null_text == "empty" else self.drop(found, ~batch.text_mask.any(dim=1))

    def _encode_captions(self, captions: list[str] | None) -> Tensor:
        encoder = self.encoder
        if captions is None or encoder is None:
            raise InputError("these samples have no captions: add captions, or set text.kind=none")
        found = _zero_padding(*encoder.encode(captions))
        if self.null_text == "empty":
            return found
        return self.drop(found, find_blank(captions, found.device))

    @staticmethod
    def _match_length(null: Tensor, like: Tensor) -> Tensor:
        """Cut or zero-pad to the length of `like`."""
        missing = like.shape[1] - null.shape[1]
        return nn.functional.pad(null, (0, 0, 0, missing)) if missing > 0 else null[:, : like.shape[1]]

    def precompute(self, batch: Batch) -> dict[str, Tensor]:
        """Embeddings for a cache, if the encoder is frozen."""
        return compute_cached_text(self.encoder, batch, blank_is_null=self.null_text != "empty")

    def _release(self) -> None:
        """Free the memory of an encoder that training does not use."""
        if self._cached and self.encoder is not None:
            self.encoder.release()

    def assets(self) -> dict[str, str]:
        return self.encoder.assets() if self.encoder is not None else {}


def _zero_padding(embeddings: Tensor, mask: Tensor) -> Tensor:
    """Embeddings with zeros at padding."""
    return embeddings * mask[..., None]
