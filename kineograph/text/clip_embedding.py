"""CLIP embeddings for stages that are conditioned on them: precomputed with the data, or by a CLIP."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from kineograph.core.batch import Batch
from kineograph.core.capabilities import SupportsEmbedding
from kineograph.core.config import Config
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import BuildContext, Task
from kineograph.text.clip import unit
from kineograph.text.clip_pretrained import PretrainedClip
from kineograph.text.conditioning import find_blank

IMAGE, TEXT = "image_embed", "text_embed"  # in Batch.extra: B D


@runtime_checkable
class Clip(SupportsEmbedding, Protocol):
    """A trained clip stage, or a CLIP of transformers."""

    width: int  # channels of an embedding
    text_width: int  # channels of a token's encoding
    length: int  # tokens of a caption
    picture_size: tuple[int, int]  # height and width of its input


class ClipSource(Config):
    """A CLIP that is not a stage."""

    kind: Literal["transformers", "given"] = "transformers"
    """transformers: a frozen model of that library. given: no CLIP; embeddings come with the data."""
    name: str | None = None
    """transformers: a local folder with config, weights and tokenizer, or a name on the Hugging Face hub."""
    width: int | None = Field(None, ge=2, le=65536)
    """given: channels of the embeddings in the data."""
    text_width: int | None = Field(None, ge=1)
    """given: channels of the text encodings in the data (`text_embeds`); null: there are none."""
    length: int | None = Field(None, ge=2, le=65536)
    """Tokens of a caption. transformers: null takes the model's. given: required with text_width."""

    @model_validator(mode="after")
    def _check_kind(self) -> ClipSource:
        if self.kind == "transformers":
            if not self.name:
                raise ValueError("kind=transformers needs name: a local folder or a hub name")
            for name in ("width", "text_width"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for kind given only: remove it")
            return self
        if self.name is not None:
            raise ValueError("name is for kind transformers only: remove it")
        if self.width is None:
            raise ValueError("kind=given needs width: the channels of the embeddings in the data")
        if (self.text_width is None) != (self.length is None):
            raise ValueError("text_width and length describe the text encodings in the data: set both, or neither")
        return self


ClipChoice = str | ClipSource
"""The name of a clip stage (or runs/x/stage), or a ClipSource."""


class CaptionEmbeddings(NamedTuple):
    """A CLIP's embeddings of captions."""

    embed: Tensor  # B D, of length 1
    encodings: Tensor | None  # B L E, if any
    mask: Tensor | None  # B L, True = a real token
    empty: Tensor  # B: True for a blank caption or a row of zeros, which is the null text


class ClipEmbedder(nn.Module):
    """Returns the precomputed embeddings of a batch, or computes them; a CLIP of transformers is loaded only then.

    A clip stage is added to the task's `stages`, where it is neither trained nor saved.
    """

    width: int
    text_width: int | None  # None: no encodings
    length: int | None

    def __init__(self, choice: ClipChoice, context: BuildContext, stages: dict[str, Task]) -> None:
        super().__init__()
        self._clip: dict[str, Clip] = {}  # a plain dict: a stage is not a submodule
        self.adapter: PretrainedClip | None = None
        if isinstance(choice, str):
            stage = context.stage(choice)
            if not isinstance(stage, Clip):
                raise ConfigError(f"clip={choice} gives no embeddings: name a stage whose task is clip")
            stages["clip"] = stage
            self._set_clip(stage)
            _note_blur(choice, stage.picture_size, context)
        elif choice.kind == "transformers":
            assert choice.name is not None
            self.adapter = PretrainedClip(choice.name, choice.length, context.note)
            self._set_clip(self.adapter)
            _note_blur(choice.name, self.adapter.picture_size, context)
        else:
            assert choice.width is not None
            self.width, self.text_width, self.length = choice.width, choice.text_width, choice.length

    def _set_clip(self, clip: Clip) -> None:
        self._clip["clip"] = clip
        self.width, self.text_width, self.length = clip.width, clip.text_width, clip.length

    @property
    def reads_captions(self) -> bool:
        """Whether there is a CLIP, not only precomputed embeddings."""
        return bool(self._clip)

    def clip(self, field: str) -> Clip:
        """The CLIP, to compute a field that the data lack."""
        if not self._clip:
            raise InputError(
                f"the data have no {field}, and clip.kind=given cannot compute it: add it to the data, or set clip to a clip stage "
                "or to {kind: transformers, name: …}"
            )
        return self._clip["clip"]

    @torch.no_grad()
    def images(self, batch: Batch) -> Tensor:
        """B D, of length 1."""
        if IMAGE in batch.extra:
            return unit(self._check_width(batch.extra[IMAGE], IMAGE))
        clip = self.clip(IMAGE)
        if batch.pixels is None:
            raise InputError(f"these samples have neither {IMAGE} nor pixels: add one of them")
        return clip.embed_images(batch.video, batch.frame_mask)

    @torch.no_grad()
    def texts(self, batch: Batch, encodings: bool = True) -> CaptionEmbeddings:
        """Embeddings of a batch's captions; without `encodings` only the pooled ones."""
        if TEXT in batch.extra and (not encodings or batch.text_embeds is not None):
            embed = self._check_width(batch.extra[TEXT], TEXT)
            empty = (embed == 0).all(-1) | self._find_blank(batch.captions, embed)
            tokens = batch.text_embeds if encodings else None
            if tokens is not None and (tokens.shape[2] != self.text_width or tokens.shape[1] != self.length):
                raise InputError(
                    f"text encodings of {tokens.shape[1]} tokens × {tokens.shape[2]} channels do not fit clip's {self.length} × "
                    f"{self.text_width}: make them with the same CLIP, or set clip.length and clip.text_width"
                )
            mask = batch.text_mask
            if tokens is not None and mask is None:
                mask = (tokens != 0).any(-1)
            return CaptionEmbeddings(unit(embed), tokens, mask if tokens is not None else None, empty)
        if batch.captions is None:
            missing = TEXT if TEXT not in batch.extra else "text_embeds"
            raise InputError(f"these samples have neither captions nor {missing}: add one of them")
        return self.captions(batch.captions, encodings)

    @torch.no_grad()
    def captions(self, captions: list[str], encodings: bool = True) -> CaptionEmbeddings:
        embed, tokens, mask = self.clip(TEXT).embed_texts(captions)
        empty = self._find_blank(captions, embed)
        return (
            CaptionEmbeddings(embed, tokens, mask, empty) if encodings else CaptionEmbeddings(embed, None, None, empty)
        )

    def precomputed(self, batch: Batch, encodings: bool = True) -> dict[str, Tensor]:
        """The fields of a batch for a cache. Blank captions become rows of zeros, which `texts` recognizes."""
        texts = self.texts(batch, encodings)
        fields = {IMAGE: self.images(batch), TEXT: texts.embed.masked_fill(texts.empty[:, None], 0)}
        if texts.encodings is not None and texts.mask is not None:
            fields |= {"text_embeds": texts.encodings, "text_mask": texts.mask}
        return fields

    def _check_width(self, embed: Tensor, name: str) -> Tensor:
        if embed.ndim != 2 or embed.shape[1] != self.width:
            raise InputError(
                f"{name} in the data has shape {tuple(embed.shape[1:])}, and clip has {self.width} channels: compute it with the same CLIP"
            )
        return embed

    @staticmethod
    def _find_blank(captions: list[str] | None, like: Tensor) -> Tensor:
        if captions is None:
            return torch.zeros(len(like), dtype=torch.bool, device=like.device)
        return find_blank(captions, like.device)


def _note_blur(name: str, expects: tuple[int, int], context: BuildContext) -> None:
    """Note that images smaller than a CLIP's input look blurred to it."""
    size = (context.shape.height, context.shape.width)
    if min(size) < min(expects):
        context.note(
            f"clip={name} takes images of {expects[0]}×{expects[1]}: those of data.size={size[0]}×{size[1]} are enlarged and look blurred to "
            "it; raise data.size (a decoder's own `size` may stay), or give embeddings with the data"
        )
