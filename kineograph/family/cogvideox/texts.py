"""Captions as the transformer reads them, and the one thing that stands for no caption, in training and in drawing alike.

There is no mask: what is no token is zero, or with text.padding=read what the encoder makes of padding, as released weights know it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts
from kineograph.core.errors import InputError
from kineograph.core.task import BuildContext, freeze, is_fake_or_meta
from kineograph.core.transfer import to_device
from kineograph.family.cogvideox.config import CogVideoXConfig
from kineograph.text import Text, build_text
from kineograph.text.conditioning import compute_cached_text


class Texts(nn.Module):
    def __init__(self, config: CogVideoXConfig, context: BuildContext) -> None:
        super().__init__()
        self.null_text = config.null_text
        self.encoder = cast("nn.Module | None", build_text(config.text, context))
        reader = self.reader
        self.width, self.length = (reader.width, reader.length) if reader is not None else (2, 1)
        self.trained = reader is not None and (reader.trained or config.null_text == "learned")
        if self.encoder is not None and not self.trained:
            freeze(self.encoder)
        self._empty: dict[torch.device, Tensor] = {}  # a frozen encoder's answer to the empty caption
        self._cached = False  # texts of training come with the data, so that the encoder is needed now and then only

    @property
    def reader(self) -> Text | None:
        return cast("Text | None", self.encoder)

    # reading -------------------------------------------------------------------------------------------------------

    def of_batch(self, batch: Batch, dropped: Tensor | None = None) -> Tensor:
        """B L E: of a cache or of captions; rows where `dropped` (B) are without caption."""
        reader = self.reader
        if reader is None:
            return torch.zeros(len(batch), 1, self.width, device=batch.slots.device)
        if batch.text_embeds is not None and not reader.trained:
            found = self._given(batch)
        elif batch.captions is not None and dropped is not None and reader.trained and self.null_text == "empty":
            # The empty caption is read beside the others: alone it would be a second call, and compiled a second graph.
            found = self._of_captions([*batch.captions, ""])
            return torch.where(dropped[:, None, None], found[-1:], found[:-1])
        else:
            found = self._of_captions(batch.captions)
        return found if dropped is None else self.drop(found, dropped)

    def of_prompts(self, prompts: Prompts) -> tuple[Tensor, Tensor | None]:
        """What is asked for, and what to be guided away from (None: nothing was asked for)."""
        reader, rows, device = self.reader, len(prompts), prompts.noise.device
        given = prompts.batch if prompts.batch is not None and prompts.batch.text_embeds is not None else None
        if reader is None:
            return torch.zeros(rows, 1, self.width, device=device), None
        if prompts.captions is not None and (given is None or reader.reads_captions):
            wanted = self._of_captions(prompts.captions)
        elif given is not None and not reader.trained:
            wanted = self._given(given)
        else:
            return self.null(device).expand(rows, -1, -1), None
        if prompts.negative is not None:
            other = self._of_captions(prompts.negative)
        else:
            other = self._as_long(self.null(device), wanted).expand_as(wanted)
        self._release()
        return wanted, other

    def drop(self, found: Tensor, dropped: Tensor) -> Tensor:
        null = self._as_long(self.null(found.device), found)
        return torch.where(dropped[:, None, None], null.to(found.dtype), found)

    def null(self, device: torch.device) -> Tensor:
        """1 L E"""
        reader = self.reader
        if reader is None or self.null_text == "zeros" or (not reader.trained and is_fake_or_meta()):
            return torch.zeros(1, self.length, self.width, device=device)
        if self.null_text == "learned":
            embeddings = torch.zeros(1, self.length, self.width, device=device)
            mask = torch.zeros(1, self.length, dtype=torch.bool, device=device)
            return _hidden(*reader.drop(embeddings, mask, ~mask[:, 0]))
        if reader.trained:
            return _hidden(*reader.encode([""]))
        if device not in self._empty:
            self._empty[device] = _hidden(*reader.encode([""])).to(device)
            self._release()
        return self._empty[device]

    def _given(self, batch: Batch) -> Tensor:
        assert batch.text_embeds is not None
        found, self._cached = batch.text_embeds.float(), True
        if found.shape[2] != self.width:
            raise InputError(
                f"text embeddings have {found.shape[2]} channels and text.width={self.width}: make them alike"
            )
        return found if batch.text_mask is None else _hidden(found, batch.text_mask)

    def _of_captions(self, captions: list[str] | None) -> Tensor:
        reader = self.reader
        if captions is None or reader is None:
            raise InputError("these samples have no captions: add them, or set text.kind=none to train without text")
        found = _hidden(*reader.encode(captions))
        if self.null_text == "empty":
            return found
        empty = to_device(torch.tensor([not caption.strip() for caption in captions]), found.device)
        return self.drop(found, empty)

    @staticmethod
    def _as_long(null: Tensor, like: Tensor) -> Tensor:
        """Cut or filled up with zeros to the length of the texts beside it."""
        missing = like.shape[1] - null.shape[1]
        return nn.functional.pad(null, (0, 0, 0, missing)) if missing > 0 else null[:, : like.shape[1]]

    # what the outside asks -----------------------------------------------------------------------------------------

    def precomputed(self, batch: Batch) -> dict[str, Tensor]:
        """For a cache, where the encoder is frozen."""
        return compute_cached_text(self.reader, batch)

    def _release(self) -> None:
        """Give back the memory of an encoder that training does not ask."""
        if self._cached and hasattr(self.encoder, "release"):
            self.encoder.release()  # type: ignore[union-attr,operator]

    def assets(self) -> dict[str, str]:
        return self.reader.assets() if self.reader is not None else {}


def _hidden(embeddings: Tensor, mask: Tensor) -> Tensor:
    """Zeros where there is no token."""
    return embeddings * mask[..., None]
