"""A text encoder trained with the model: byte-pair encoding of the training captions, and a small transformer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from kineograph.core.device_copy import copy_to_device
from kineograph.core.errors import InputError
from kineograph.core.notes import Note
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import BuildContext
from kineograph.nn.positions import LearnedPositions, Rotary
from kineograph.nn.transformer import Transformer, TransformerConfig, init_weights
from kineograph.text.encoder import NullText

if TYPE_CHECKING:
    from kineograph.text.config import TextConfig

PAD, BOS, EOS = 0, 1, 2
ASSET = "text/tokenizer.json"


class Vocabulary:
    """Caption → token ids: BOS, byte-level pieces, EOS, padded with PAD. No letter is unknown."""

    def __init__(self, text: str, length: int, note: Note) -> None:
        from tokenizers import Tokenizer

        self.text, self.length, self.note = text, length, note
        try:
            self.tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises no narrower one
            raise InputError(f"the stored tokenizer of the captions is damaged: {error}") from None
        self.size: int = self.tokenizer.get_vocab_size()
        self._pieces = lru_cache(maxsize=1 << 16)(self._encode)  # of words: they recur, captions do not
        self._noted = False

    @staticmethod
    def learn(captions: Iterable[str], size: int) -> str:
        """Learn byte-pair merges. → the JSON of the tokenizers library"""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<pad>", "<bos>", "<eos>"],  # ids 0, 1, 2
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            min_frequency=2,
            show_progress=False,
        )
        tokenizer.train_from_iterator(captions, trainer)
        return tokenizer.to_str()

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _split(self, caption: str) -> list[int]:
        """Encode word by word, with a cache: no merge crosses a space. Ten times as fast as the library, for which a GPU would wait."""
        words = caption.split(" ")
        if words == caption.split():
            return [piece for word in words for piece in self._pieces(word)]
        return self._encode(caption)  # other white space has pieces of its own

    def count_tokens(self, caption: str) -> int:
        return len(self._split(caption)) + 2

    def ids(self, caption: str) -> tuple[int, ...]:
        pieces = self._split(caption)
        room = self.length - 2
        if len(pieces) > room and not self._noted:
            self._noted = True
            self.note(
                f"captions are cut to text.length={self.length} tokens: {caption[:60]!r} has {len(pieces) + 2} (noted once)"
            )
        ids = (BOS, *pieces[:room], EOS)
        return ids + (PAD,) * (self.length - len(ids))

    def batch(self, captions: list[str]) -> Tensor:
        """B L, on the host."""
        flat = chain.from_iterable(map(self.ids, captions))
        ids = np.fromiter(flat, dtype=np.int64, count=len(captions) * self.length)
        return torch.from_numpy(ids).view(len(captions), self.length)


class LearnedText(TextEncoder):
    trained = True
    reads_captions = True

    def __init__(self, config: TextConfig, context: BuildContext) -> None:
        super().__init__()
        self.width, self.length = config.width or 256, config.length
        text = context.assets.get(ASSET)
        if text is None:
            size = config.vocabulary if config.tokenizer == "bpe" else 259
            text = Vocabulary.learn(context.captions() if config.tokenizer == "bpe" else (), size)
        self.vocabulary = Vocabulary(text, self.length, context.note)
        self.tokens = nn.Embedding(self.vocabulary.size, self.width)
        self.positions = LearnedPositions((self.length,), self.width) if config.positions == "learned" else None
        init_weights(self, 1)
        if config.positions != "learned" and config.depth:
            # Unit variance, like the blocks' outputs; with learned positions it would drown their embeddings.
            nn.init.normal_(self.tokens.weight)
        shape = TransformerConfig(
            width=self.width, depth=max(config.depth, 1), heads=config.heads, dropout=config.dropout
        )
        rotary = Rotary((self.length,), self.width // config.heads) if config.positions == "rotary" else None
        self.transformer = Transformer(shape, rotary=rotary) if config.depth else None
        self.null = NullText(self.width)

    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        ids = copy_to_device(self.vocabulary.batch(captions), self.tokens.weight.device)  # B L
        mask = ids != PAD
        x = self.tokens(ids)  # B L D
        if self.positions is not None:
            x = x + self.positions()
        return (self.transformer(x, mask) if self.transformer is not None else x), mask

    def count_cut(self, captions: list[str]) -> int:
        return sum(self.vocabulary.count_tokens(caption) > self.length for caption in captions)

    def drop(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        return self.null(embeddings, mask, dropped)

    def assets(self) -> dict[str, str]:
        return {ASSET: self.vocabulary.text}

    def compile_targets(self) -> list[nn.Module]:
        # As many small kernels as the network has, if nothing compiles them.
        return [self.transformer] if self.transformer is not None else []
