"""Where the decoder's conditions come from: image embeddings and texts of a batch in training, and of prompts in sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kineograph.core.batch import Batch, Prompts
from kineograph.core.errors import InputError, NotTrained
from kineograph.core.protocols import TextEncoder
from kineograph.core.task import BuildContext, Task
from kineograph.family.dalle2.config import DecoderConfig
from kineograph.family.dalle2.network import Condition
from kineograph.text import build_text
from kineograph.text.clip_embedding import IMAGE, ClipEmbedder
from kineograph.text.conditioning import TextEmbeddings, encode_batch, encode_null, encode_prompts
from kineograph.text.encoder import NullText


@runtime_checkable
class Prior(Protocol):
    """A stage that makes image embeddings of captions."""

    def embed(self, prompts: Prompts) -> Tensor:
        """B D, of length 1."""


FindPrior = Callable[[], Prior | None]
"""None: there is none. Raises NotTrained while there is only its name."""
ImageSource = Literal["prior", "embedding", "caption", "picture", "nothing"]
"""Made of the caption by the prior; given with the data; the CLIP's embedding of the caption, or of the real picture; none."""


class ClipText(TextEncoder):
    """A CLIP's encodings of the caption's tokens, as a text encoder that is not trained."""

    trained = False

    def __init__(self, clip: ClipEmbedder) -> None:
        super().__init__()
        if clip.text_width is None or clip.length is None:
            raise InputError(
                "clip_text=true and clip has no text encodings: set clip.text_width and clip.length to those in the data"
            )
        self.width, self.length = clip.text_width, clip.length
        self.null = NullText(self.width)
        self.reads_captions = clip.reads_captions
        self._clip = {"clip": clip}  # a plain dict: the reader is a module of the task, not of this one

    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        found = self._clip["clip"].captions(captions)
        assert found.encodings is not None and found.mask is not None
        return found.encodings, found.mask

    def drop(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        return self.null(embeddings, mask, dropped)


class Conditioner(nn.Module):
    """Reads conditions as training and sampling give them. A part that the config does not ask for is None."""

    def __init__(self, config: DecoderConfig, context: BuildContext, stages: dict[str, Task]) -> None:
        super().__init__()
        self.config = config
        wanted = config.reads_images or config.clip_text
        self.clip = ClipEmbedder(config.clip, context, stages) if config.clip is not None and wanted else None
        self.text: TextEncoder | None
        if config.clip_text and self.clip is not None:
            self.text = ClipText(self.clip)
        else:
            self.text = build_text(config.text, context)

    @property
    def clip_reads_captions(self) -> bool:
        """Whether there is a CLIP to ask, and not embeddings of the data alone."""
        return self.clip is not None and self.clip.reads_captions

    @property
    def image_width(self) -> int | None:
        return self.clip.width if self.clip is not None and self.config.reads_images else None

    @property
    def text_width(self) -> int | None:
        return self.text.width if self.text is not None else None

    def of_batch(self, batch: Batch, no_image: Tensor | None = None, no_text: Tensor | None = None) -> Condition:
        """Rows where `no_image` (`no_text`) is True have no image embedding (no text)."""
        image = missing = None
        if self.clip is not None and self.config.reads_images:
            image = self.clip.images(batch)
            missing = no_image if no_image is not None else torch.zeros_like(image[:, 0], dtype=torch.bool)
            missing = missing | (image == 0).all(dim=1)
        return Condition(image, missing, *encode_batch(self.text, batch, no_text))

    def of_prompts(self, prompts: Prompts, prior: FindPrior) -> tuple[Condition, Condition | None]:
        """What is asked for, and what to be guided away from (None: nothing was asked for)."""
        words, other_words = encode_prompts(self.text, prompts)
        image, other_image = self._images(prompts, prior)
        if other_words is None and other_image is None:
            return self._condition(image, words, prompts), None
        null = encode_null(self.text, len(prompts), prompts.noise.device, _length(words))
        other = self._condition(other_image if prompts.negative is not None else None, other_words or null, prompts)
        return self._condition(image, words, prompts), other

    def _condition(self, image: Tensor | None, words: TextEmbeddings, prompts: Prompts) -> Condition:
        if not self.config.reads_images or self.clip is None:
            return Condition(None, None, *words)
        absent = image is None
        if image is None:
            image = torch.zeros(len(prompts), self.clip.width, device=prompts.noise.device)
        missing = torch.full((len(prompts),), absent, dtype=torch.bool, device=prompts.noise.device)
        return Condition(image, missing | (image == 0).all(dim=1), *words)

    def image_source(self, prompts: Prompts, find_prior: FindPrior) -> tuple[ImageSource, Prior | None]:
        """Where the image embedding comes from. A caption says it where a prior can make one of it. Without a prior (or while it is not
        trained) it is that of the item beside the prompt; and where there is none, the CLIP's of the caption."""
        if not self.config.reads_images or self.clip is None:
            return "nothing", None
        batch = prompts.batch
        given = batch is not None and IMAGE in batch.extra
        pictured = batch is not None and batch.pixels is not None and self.clip.reads_captions
        if prompts.captions is not None:
            try:
                prior = find_prior()
            except NotTrained:
                if not given and not pictured:
                    raise
                prior = None
            if prior is not None:
                return "prior", prior
        if given or pictured:
            return ("embedding" if given else "picture"), None
        told = self.text is not None and self.text.reads_captions
        if prompts.captions is None or (told and not self.clip.reads_captions):
            return "nothing", None  # captions may still be read as text
        return "caption", None

    def _images(self, prompts: Prompts, find_prior: FindPrior) -> tuple[Tensor | None, Tensor | None]:
        """The image embedding that is asked for, and that of the negative prompt (or the first again, to say that there is one)."""
        source, prior = self.image_source(prompts, find_prior)
        if source == "nothing":
            return None, None
        assert self.clip is not None
        if source in ("embedding", "picture"):
            assert prompts.batch is not None
            image = self.clip.images(prompts.batch)
        else:
            image = self._of_captions(prompts, prior)
        if prompts.negative is None:
            return image, image
        if not self.clip.reads_captions:
            return image, None
        return image, self._of_captions(Prompts(prompts.noise, prompts.negative), prior)

    def _of_captions(self, prompts: Prompts, prior: Prior | None) -> Tensor:
        assert self.clip is not None and prompts.captions is not None
        if prior is not None:
            return prior.embed(prompts)
        return self.clip.captions(prompts.captions, encodings=False).embed


def _length(words: TextEmbeddings) -> int | None:
    return None if words.embeddings is None else words.embeddings.shape[1]
