"""The config of a stage's text encoder, and its construction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field, model_validator

from kineograph.core.config import Config
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import BuildContext

_KINDS = {  # key → kinds that use it
    "vocabulary": ("learned",),
    "tokenizer": ("learned",),
    "depth": ("learned",),
    "heads": ("learned",),
    "positions": ("learned",),
    "dropout": ("learned",),
    "name": ("t5", "clip"),
    "padding": ("t5", "clip"),
    "width": ("learned", "t5", "clip", "given"),
    "length": ("learned", "t5", "clip", "given"),
}


class TextConfig(Config):
    kind: Literal["learned", "t5", "clip", "given", "none"] = "learned"
    """learned: trained with the model. t5, clip: frozen, of transformers. given: embeddings come with the data. none: no text."""
    name: str | None = None
    """t5, clip: a local folder with config, weights and tokenizer, or a name on the Hugging Face hub."""
    width: int | None = Field(None, ge=2, le=65536)
    """Channels of an embedding. learned: null is 256. t5, clip: null takes it from the encoder's config. given: required."""
    length: int = Field(64, ge=2, le=65536)
    """Tokens of a caption; longer captions are cut, with a note in the log."""
    padding: Literal["hidden", "read"] = "hidden"
    """t5, clip: mask the padding after a caption (hidden), or let encoder and model attend to it (read), as CogVideoX does."""
    vocabulary: int = Field(4096, ge=259, le=2**24)
    """learned: maximum size of the vocabulary, which includes all 256 bytes, so that nothing is unknown."""
    tokenizer: Literal["bpe", "byte"] = "bpe"
    """learned: byte-pair encoding of the training captions, or single bytes."""
    depth: int = Field(4, ge=0, le=1000)
    """learned: transformer blocks; 0: token (and position) embeddings only."""
    heads: int = Field(4, ge=1, le=65536)
    """learned: attention heads."""
    positions: Literal["rotary", "learned", "none"] = "rotary"
    """learned: rotary: relative positions only, so that a phrase means the same anywhere in a caption. learned: an embedding of each
    position is added. none: a bag of words, for captions that name one thing."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """learned: dropout in its blocks."""

    @model_validator(mode="after")
    def _check_kind(self) -> TextConfig:
        for name, kinds in _KINDS.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for kind {' and '.join(kinds)} only, not for kind={self.kind}: remove it")
        if self.kind in ("t5", "clip") and not self.name:
            raise ValueError(f"kind={self.kind} needs name: a local folder or a hub name")
        if self.kind == "given" and self.width is None:
            raise ValueError("kind=given needs width: the channels of the embeddings in the data")
        if self.positions == "rotary" and not self.depth:
            raise ValueError("positions=rotary needs blocks, and depth=0 has none: raise depth, or set positions=none")
        if self.kind == "learned" and (self.width or 256) % (2 * self.heads):
            raise ValueError(f"width={self.width or 256} must be a multiple of 2 × heads = {2 * self.heads}")
        return self

    def reads(self) -> frozenset[str]:
        """The fields of the data that a stage with this encoder needs: captions only where it encodes them."""
        return frozenset({"pixels", "captions"} if self.kind in ("learned", "t5", "clip") else {"pixels"})

    def check_pretrained(self, precomputed: Collection[str], hub: bool) -> None:
        """Check that the encoder can be loaded, unless its embeddings come with the data."""
        if self.kind in ("t5", "clip") and "text_embeds" not in precomputed:
            from kineograph.text.pretrained import check_encoder

            check_encoder(self, hub)


def build_text(config: TextConfig, context: BuildContext) -> TextEncoder | None:
    """None for kind=none."""
    if config.kind == "none":
        return None
    if config.kind == "learned":
        from kineograph.text.learned import LearnedText

        return LearnedText(config, context)
    if config.kind == "given":
        from kineograph.text.encoder import PrecomputedText

        assert config.width is not None
        return PrecomputedText(config.width, config.length)
    from kineograph.text.pretrained import PretrainedText

    return PretrainedText(config, context.note)
