"""Embeddings of pictures and captions in one space, for the stages that stand on a CLIP: those that come with the data, or the CLIP's own."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from kineograph.core.batch import Batch
from kineograph.core.capabilities import SupportsEmbedding
from kineograph.core.config import Config
from kineograph.core.device_copy import copy_to_device
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import BuildContext, Task
from kineograph.text.clip import unit
from kineograph.text.clip_pretrained import PretrainedClip

IMAGE, TEXT = "image_embed", "text_embed"  # in Batch.extra: B D


@runtime_checkable
class Clip(SupportsEmbedding, Protocol):
    """A trained clip stage, or the adapter for one of transformers."""

    width: int  # channels of an embedding
    text_width: int  # of a token's encoding
    length: int  # tokens a caption
    picture_size: tuple[int, int]  # height and width of the pictures that it embeds


class ClipSource(Config):
    """A CLIP that is no stage."""

    kind: Literal["transformers", "given"] = "transformers"
    """transformers: a frozen model of that library. given: embeddings come with the data, and there is no CLIP."""
    name: str | None = None
    """transformers: a local folder with config, weights and tokenizer, or a name on the Hugging Face hub."""
    width: int | None = Field(None, ge=2)
    """given: channels of the embeddings in the data."""
    text_width: int | None = Field(None, ge=1)
    """given: channels of the text encodings in the data (`text_embeds`); null: there are none."""
    length: int | None = Field(None, ge=2)
    """Tokens a caption. transformers: null reads as many as the model does. given: required beside text_width."""

    @model_validator(mode="after")
    def _fits(self) -> ClipSource:
        if self.kind == "transformers":
            if not self.name:
                raise ValueError("kind=transformers needs name: a local folder or a hub name")
            for name in ("width", "text_width"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is read by kind given only: a model says it itself; leave it out")
            return self
        if self.name is not None:
            raise ValueError("name is read by kind transformers only: leave it out")
        if self.width is None:
            raise ValueError("kind=given needs width: the channels of the embeddings in the data")
        if (self.text_width is None) != (self.length is None):
            raise ValueError(
                "text_width and length of the text encodings in the data go together: give both, or neither"
            )
        return self


ClipChoice = str | ClipSource
"""The name of a clip stage (or runs/x/stage), or a CLIP that is no stage."""


class CaptionEmbeddings(NamedTuple):
    """Captions as a CLIP embeds them."""

    embed: Tensor  # B D, of length 1
    encodings: Tensor | None  # B L E; None: there are none
    mask: Tensor | None  # B L, True = a real token
    empty: Tensor  # B: nothing is said (a blank caption, a row of zeros), so that it counts as no text


class ClipEmbedder(nn.Module):
    """What a stage asks for embeddings. Those that come with the data take precedence: with both kinds of them no CLIP is ever run, and
    one of transformers not even loaded. A clip stage is put among the stages of the Task that asks; it is neither trained nor saved there.
    """

    width: int
    text_width: int | None  # None: there are no encodings
    length: int | None

    def __init__(self, choice: ClipChoice, context: BuildContext, stages: dict[str, Task]) -> None:
        super().__init__()
        self._clip: dict[str, Clip] = {}  # a plain dict: a stage is no submodule
        self.adapter: PretrainedClip | None = None
        if isinstance(choice, str):
            stage = context.stage(choice)
            if not isinstance(stage, Clip):
                raise ConfigError(f"clip={choice} gives no embeddings: name a stage whose task is clip")
            stages["clip"] = stage
            self._take(stage)
            _tell_blur(choice, stage.picture_size, context)
        elif choice.kind == "transformers":
            assert choice.name is not None
            self.adapter = PretrainedClip(choice.name, choice.length, context.note)
            self._take(self.adapter)
            _tell_blur(choice.name, self.adapter.picture_size, context)
        else:
            assert choice.width is not None
            self.width, self.text_width, self.length = choice.width, choice.text_width, choice.length

    def _take(self, clip: Clip) -> None:
        self._clip["clip"] = clip
        self.width, self.text_width, self.length = clip.width, clip.text_width, clip.length

    @property
    def reads_captions(self) -> bool:
        """Whether there is a CLIP to ask, and not embeddings of the data alone."""
        return bool(self._clip)

    def clip(self, wanted: str) -> Clip:
        """The CLIP itself, or an InputError for data that lack what is wanted."""
        if not self._clip:
            raise InputError(
                f"there is no {wanted} here, and clip.kind=given has nothing to make it with: give it with the data, or set clip to a "
                "clip stage or to {kind: transformers, name: …}"
            )
        return self._clip["clip"]

    @torch.no_grad()
    def images(self, batch: Batch) -> Tensor:
        """B D, of length 1."""
        if IMAGE in batch.extra:
            return unit(self._checked(batch.extra[IMAGE], IMAGE))
        clip = self.clip(IMAGE)
        if batch.pixels is None:
            raise InputError(f"these samples have neither {IMAGE} nor pixels: give one of them")
        return clip.embed_images(batch.video, batch.frame_mask)

    @torch.no_grad()
    def texts(self, batch: Batch, encodings: bool = True) -> CaptionEmbeddings:
        """Without `encodings`, embeddings in the data are enough."""
        if TEXT in batch.extra and (not encodings or batch.text_embeds is not None):
            embed = self._checked(batch.extra[TEXT], TEXT)
            empty = (embed == 0).all(-1) | self._blank(batch.captions, embed)
            found = batch.text_embeds if encodings else None
            if found is not None and (found.shape[2] != self.text_width or found.shape[1] != self.length):
                raise InputError(
                    f"text encodings of {found.shape[1]} tokens × {found.shape[2]} channels do not fit clip's {self.length} × "
                    f"{self.text_width}: make them with the same CLIP, or set clip.length and clip.text_width"
                )
            mask = batch.text_mask
            if found is not None and mask is None:
                mask = (found != 0).any(-1)
            return CaptionEmbeddings(unit(embed), found, mask if found is not None else None, empty)
        if batch.captions is None:
            missing = TEXT if TEXT not in batch.extra else "text_embeds"
            raise InputError(f"these samples have neither captions nor {missing}: give one of them")
        return self.captions(batch.captions, encodings)

    @torch.no_grad()
    def captions(self, captions: list[str], encodings: bool = True) -> CaptionEmbeddings:
        embed, found, mask = self.clip(TEXT).embed_texts(captions)
        empty = self._blank(captions, embed)
        return (
            CaptionEmbeddings(embed, found, mask, empty) if encodings else CaptionEmbeddings(embed, None, None, empty)
        )

    def precomputed(self, batch: Batch, encodings: bool = True) -> dict[str, Tensor]:
        """What a cache holds of a batch. Blank captions become rows of zeros, which `texts` knows again."""
        texts = self.texts(batch, encodings)
        made = {IMAGE: self.images(batch), TEXT: texts.embed.masked_fill(texts.empty[:, None], 0)}
        if texts.encodings is not None and texts.mask is not None:
            made |= {"text_embeds": texts.encodings, "text_mask": texts.mask}
        return made

    def _checked(self, embed: Tensor, name: str) -> Tensor:
        if embed.ndim != 2 or embed.shape[1] != self.width:
            raise InputError(
                f"{name} in the data has shape {tuple(embed.shape[1:])}, and clip has {self.width} channels: make them alike"
            )
        return embed

    @staticmethod
    def _blank(captions: list[str] | None, like: Tensor) -> Tensor:
        if captions is None:
            return torch.zeros(len(like), dtype=torch.bool, device=like.device)
        return copy_to_device(torch.tensor([not caption.strip() for caption in captions]), like.device)


def _tell_blur(name: str, looks_at: tuple[int, int], context: BuildContext) -> None:
    """A picture that is enlarged is another picture to a CLIP than the sharp one that it learned from."""
    given = (context.shape.height, context.shape.width)
    if min(given) < min(looks_at):
        context.note(
            f"clip={name} looks at pictures of {looks_at[0]}×{looks_at[1]} and is shown ones of data.size={given[0]}×{given[1]}, enlarged, which "
            "look blurred to it: raise data.size (a decoder's `size` says what it draws), or give embeddings with the data"
        )
