"""Which text encoder a stage has, and building it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field, model_validator

from kineograph.core.config import Config
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import BuildContext

_READ_BY = {
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
    """learned: trained with the model on its captions. t5, clip: frozen, through transformers. given: embeddings come with the data. none: no text."""
    name: str | None = None
    """t5, clip: a local folder with config, weights and tokenizer, or a name on the Hugging Face hub."""
    width: int | None = Field(None, ge=2)
    """Channels of an embedding. learned: null is 256. t5, clip: null reads it from the weights' config. given: required."""
    length: int = Field(64, ge=2)
    """Tokens a caption; longer captions are cut (and the log says so)."""
    padding: Literal["hidden", "read"] = "hidden"
    """t5, clip: what comes after a caption's end is hidden from the encoder and the model, or read by both, as CogVideoX was trained."""
    vocabulary: int = Field(4096, ge=259)
    """learned: most tokens that the vocabulary may have, all 256 bytes included, so that nothing is unknown."""
    tokenizer: Literal["bpe", "byte"] = "bpe"
    """learned: pieces of words found in the training captions, or single bytes."""
    depth: int = Field(4, ge=0)
    """learned: transformer blocks; 0 leaves token (and position) embeddings alone."""
    heads: int = Field(4, ge=1)
    """learned: attention heads."""
    positions: Literal["rotary", "learned", "none"] = "rotary"
    """learned: rotary, blocks know how far tokens are apart and no more, so that a phrase reads the same anywhere in a caption. learned: a vector of
    each place is added to its token. none: words alone, whatever their order, where captions name one thing."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """learned: dropout in its blocks."""

    @model_validator(mode="after")
    def _fits(self) -> TextConfig:
        for name, kinds in _READ_BY.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is read by kind {' and '.join(kinds)} only, not by kind={self.kind}: leave it out"
                )
        if self.kind in ("t5", "clip") and not self.name:
            raise ValueError(f"kind={self.kind} needs name: a local folder or a hub name")
        if self.kind == "given" and self.width is None:
            raise ValueError("kind=given needs width: the channels of the embeddings in the data")
        if self.positions == "rotary" and not self.depth:
            raise ValueError(
                "positions=rotary turns queries and keys of blocks, and depth=0 has none: raise depth, or say positions: none for words in any order"
            )
        if self.kind == "learned" and (self.width or 256) % (2 * self.heads):
            raise ValueError(f"width={self.width or 256} must be a multiple of 2 × heads = {2 * self.heads}")
        return self

    def reads(self) -> frozenset[str]:
        """The fields of the data that a stage with this encoder needs: captions only where it reads them."""
        return frozenset({"pixels", "captions"} if self.kind in ("learned", "t5", "clip") else {"pixels"})

    def check_pretrained(self, given: Collection[str], hub: bool) -> None:
        """An encoder that is never asked, where embeddings come with the data, need not be there."""
        if self.kind in ("t5", "clip") and "text_embeds" not in given:
            from kineograph.text.pretrained import check_encoder

            check_encoder(self, hub)


def build_text(config: TextConfig, context: BuildContext) -> TextEncoder | None:
    """The encoder as a module; None for kind=none."""
    if config.kind == "none":
        return None
    if config.kind == "learned":
        from kineograph.text.learned import LearnedText

        return LearnedText(config, context)
    if config.kind == "given":
        from kineograph.text.encoder import GivenText

        assert config.width is not None
        return GivenText(config.width, config.length)
    from kineograph.text.pretrained import PretrainedText

    return PretrainedText(config, context.note)
