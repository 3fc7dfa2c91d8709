"""What every stage that is conditioned on text does with it: captions or given embeddings in training, prompts in sampling, and the
null text where there are none. `text` is None throughout for a model without text."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kineograph.core.batch import Batch, Prompts
from kineograph.core.device_copy import copy_to_device
from kineograph.core.errors import InputError
from kineograph.core.protocols import TextEncoder


class TextEmbeddings(NamedTuple):
    """A batch of texts as the network reads them; None and None for a model without text."""

    embeddings: Tensor | None = None  # B L D
    mask: Tensor | None = None  # B L, True = a real token

    def join(self, other: TextEmbeddings) -> TextEmbeddings:
        """The rows of both."""
        return TextEmbeddings(
            *(None if a is None or b is None else torch.cat([a, b]) for a, b in zip(self, other, strict=True))
        )

    def detach(self) -> TextEmbeddings:
        """What reads them without teaching their encoder."""
        return TextEmbeddings(*(None if part is None else part.detach() for part in self))


def encode_captions(text: TextEncoder | None, captions: list[str] | None) -> TextEmbeddings:
    """Empty captions are the null text."""
    if text is None:
        return TextEmbeddings()
    if captions is None:
        raise InputError("these samples have no captions: add them, or set text.kind=none to train without text")
    embeddings, mask = text.encode(captions)
    empty = copy_to_device(torch.tensor([not caption.strip() for caption in captions]), mask.device)
    return TextEmbeddings(*text.drop(embeddings, mask, empty))


def encode_batch(text: TextEncoder | None, batch: Batch, dropped: Tensor | None = None) -> TextEmbeddings:
    """The embeddings that come with a batch, or those of its captions; rows where `dropped` (B) become the null text."""
    words = get_precomputed(text, batch) or encode_captions(text, batch.captions)
    if text is None or dropped is None or words.embeddings is None or words.mask is None:
        return words
    return TextEmbeddings(*text.drop(words.embeddings, words.mask, dropped))


def get_precomputed(text: TextEncoder | None, batch: Batch) -> TextEmbeddings | None:
    """The embeddings that come with a batch; None where it has none, or where the encoder is still learning."""
    if text is None or text.trained or batch.text_embeds is None:
        return None
    embeddings, mask = batch.text_embeds, _mask(batch)
    if embeddings.shape[2] != text.width:
        raise InputError(
            f"text embeddings have {embeddings.shape[2]} channels and text.width={text.width}: make them alike"
        )
    return TextEmbeddings(*text.drop(embeddings, mask, torch.zeros_like(mask[:, 0])))


def _mask(batch: Batch) -> Tensor:
    """B L: given with the embeddings, or where they are not 0."""
    assert batch.text_embeds is not None
    return (batch.text_embeds != 0).any(dim=-1) if batch.text_mask is None else batch.text_mask


def encode_null(text: TextEncoder | None, rows: int, device: torch.device, length: int | None = None) -> TextEmbeddings:
    """The null text for every row, as long as the encoder's texts or those beside it."""
    if text is None:
        return TextEmbeddings()
    length = length or text.length
    embeddings = torch.zeros(rows, length, text.width, device=device)
    mask = torch.zeros(rows, length, dtype=torch.bool, device=device)
    return TextEmbeddings(*text.drop(embeddings, mask, torch.ones(rows, dtype=torch.bool, device=device)))


def encode_prompts(text: TextEncoder | None, prompts: Prompts) -> tuple[TextEmbeddings, TextEmbeddings | None]:
    """What is asked for, and what to be guided away from (None: nothing was asked for)."""
    alone = prompts.captions is None or (text is not None and not text.reads_captions)
    given = get_precomputed(text, prompts.batch) if prompts.batch is not None and alone else None
    length = given.embeddings.shape[1] if given is not None and given.embeddings is not None else None
    null = encode_null(text, len(prompts), prompts.noise.device, length)
    if given is None and (text is None or prompts.captions is None):
        return null, None
    wanted = given or encode_captions(text, prompts.captions)
    return wanted, null if prompts.negative is None else encode_captions(text, prompts.negative)


def compute_cached_text(text: TextEncoder | None, batch: Batch) -> dict[str, Tensor]:
    """`text_embeds` and `text_mask` for a cache, where the encoder is frozen."""
    if text is None or text.trained:
        return {}
    if batch.text_embeds is not None:
        return {"text_embeds": batch.text_embeds, "text_mask": _mask(batch)}
    if batch.captions is None:
        return {}
    embeddings, mask = text.encode(batch.captions)
    return {"text_embeds": embeddings, "text_mask": mask}
