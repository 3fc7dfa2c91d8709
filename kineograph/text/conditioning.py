"""Text conditioning of all families: embeddings of captions and prompts, and the null text. `text` is None for models without text."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kineograph.core.batch import Batch, Prompts
from kineograph.core.device_copy import copy_to_device
from kineograph.core.errors import InputError
from kineograph.core.protocols import TextEncoder


class TextEmbeddings(NamedTuple):
    """Embeddings of a batch of texts; None and None for a model without text."""

    embeddings: Tensor | None = None  # B L D
    mask: Tensor | None = None  # B L, True = a real token

    def join(self, other: TextEmbeddings) -> TextEmbeddings:
        """Concatenate the rows of both."""
        return TextEmbeddings(
            *(None if a is None or b is None else torch.cat([a, b]) for a, b in zip(self, other, strict=True))
        )

    def detach(self) -> TextEmbeddings:
        return TextEmbeddings(*(None if part is None else part.detach() for part in self))


def encode_captions(text: TextEncoder | None, captions: list[str] | None) -> TextEmbeddings:
    """Encode captions; blank ones become the null text."""
    if text is None:
        return TextEmbeddings()
    if captions is None:
        raise InputError("these samples have no captions: add captions, or set text.kind=none")
    embeddings, mask = text.encode(captions)
    return TextEmbeddings(*text.drop(embeddings, mask, find_blank(captions, mask.device)))


def find_blank(captions: list[str], device: torch.device) -> Tensor:
    """B, bool: which captions are empty."""
    return copy_to_device(torch.tensor([not caption.strip() for caption in captions]), device)


def encode_batch(text: TextEncoder | None, batch: Batch, dropped: Tensor | None = None) -> TextEmbeddings:
    """The precomputed embeddings of a batch, or those of its captions; rows where `dropped` (B) become the null text."""
    texts = get_precomputed(text, batch) or encode_captions(text, batch.captions)
    if text is None or dropped is None or texts.embeddings is None or texts.mask is None:
        return texts
    return TextEmbeddings(*text.drop(texts.embeddings, texts.mask, dropped))


def get_precomputed(text: TextEncoder | None, batch: Batch) -> TextEmbeddings | None:
    """The precomputed embeddings of a batch; None if it has none, or the encoder is trained."""
    if text is None or text.trained or batch.text_embeds is None:
        return None
    embeddings, mask = batch.text_embeds, _get_mask(batch)
    if embeddings.shape[2] != text.width:
        raise InputError(
            f"text embeddings have {embeddings.shape[2]} channels and text.width={text.width}: set it to {embeddings.shape[2]}"
        )
    return TextEmbeddings(*text.drop(embeddings, mask, torch.zeros_like(mask[:, 0])))


def _get_mask(batch: Batch) -> Tensor:
    """B L: the batch's mask, or True where embeddings are not 0."""
    assert batch.text_embeds is not None
    return (batch.text_embeds != 0).any(dim=-1) if batch.text_mask is None else batch.text_mask


def encode_null(text: TextEncoder | None, rows: int, device: torch.device, length: int | None = None) -> TextEmbeddings:
    """The null text for every row, of `length` or the encoder's length."""
    if text is None:
        return TextEmbeddings()
    length = length or text.length
    embeddings = torch.zeros(rows, length, text.width, device=device)
    mask = torch.zeros(rows, length, dtype=torch.bool, device=device)
    return TextEmbeddings(*text.drop(embeddings, mask, torch.ones(rows, dtype=torch.bool, device=device)))


def encode_prompts(text: TextEncoder | None, prompts: Prompts) -> tuple[TextEmbeddings, TextEmbeddings | None]:
    """→ embeddings of the prompts, and of the negative prompts or null text (None: the prompts are the null text)"""
    use_batch = prompts.captions is None or (text is not None and not text.reads_captions)
    precomputed = get_precomputed(text, prompts.batch) if prompts.batch is not None and use_batch else None
    length = precomputed.embeddings.shape[1] if precomputed and precomputed.embeddings is not None else None
    null = encode_null(text, len(prompts), prompts.noise.device, length)
    if precomputed is None and (text is None or prompts.captions is None):
        return null, None
    positive = precomputed or encode_captions(text, prompts.captions)
    return positive, null if prompts.negative is None else encode_captions(text, prompts.negative)


def compute_cached_text(text: TextEncoder | None, batch: Batch, blank_is_null: bool = True) -> dict[str, Tensor]:
    """`text_embeds` and `text_mask` for a cache, if the encoder is frozen. With `blank_is_null`, blank captions have no real token."""
    if text is None or text.trained:
        return {}
    if batch.text_embeds is not None:
        return {"text_embeds": batch.text_embeds, "text_mask": _get_mask(batch)}
    if batch.captions is None:
        return {}
    embeddings, mask = text.encode(batch.captions)
    if blank_is_null:
        mask = mask & ~find_blank(batch.captions, mask.device)[:, None]
    return {"text_embeds": embeddings, "text_mask": mask}
