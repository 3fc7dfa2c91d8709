"""The decoder's conditions: image embeddings and text of a batch in training, and of prompts in sampling."""

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
class EmbeddingPrior(Protocol):
    """A stage that turns captions into image embeddings."""

    def embed(self, prompts: Prompts) -> Tensor:
        """B D, of length 1."""


LoadPrior = Callable[[], EmbeddingPrior | None]
"""None: the config names no prior. Raises NotTrained if it has no checkpoint yet."""
ImageSource = Literal["prior", "embedding", "caption", "picture", "nothing"]
"""The prior; the data; the CLIP's embedding of the caption, or of the real picture; no image embedding."""


class ClipText(TextEncoder):
    """A CLIP's encodings of the caption's tokens, as a frozen text encoder."""

    trained = False

    def __init__(self, clip: ClipEmbedder) -> None:
        super().__init__()
        if clip.text_width is None or clip.length is None:
            raise InputError(
                "clip_text=true needs text encodings in the data: set clip.text_width and clip.length, or clip_text=false"
            )
        self.width, self.length = clip.text_width, clip.length
        self.null = NullText(self.width)
        self.reads_captions = clip.reads_captions
        self._clip = {"clip": clip}  # a plain dict: the conditioner owns this module

    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        texts = self._clip["clip"].captions(captions)
        assert texts.encodings is not None and texts.mask is not None
        return texts.encodings, texts.mask

    def drop(self, embeddings: Tensor, mask: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
        return self.null(embeddings, mask, dropped)


class Conditioner(nn.Module):
    """Encodes batches and prompts into a `Condition`."""

    def __init__(self, config: DecoderConfig, context: BuildContext, stages: dict[str, Task]) -> None:
        super().__init__()
        self.config = config
        needs_clip = config.reads_images or config.clip_text
        self.clip = ClipEmbedder(config.clip, context, stages) if config.clip is not None and needs_clip else None
        self.text: TextEncoder | None
        if config.clip_text and self.clip is not None:
            self.text = ClipText(self.clip)
        else:
            self.text = build_text(config.text, context)

    @property
    def image_clip(self) -> ClipEmbedder | None:
        """The embedder of images; None for a decoder that reads no image embeddings."""
        return self.clip if self.config.reads_images else None

    def encode_batch(
        self, batch: Batch, drop_image: Tensor | None = None, drop_text: Tensor | None = None
    ) -> Condition:
        """Rows where `drop_image` (`drop_text`), B, get no image embedding (the null text)."""
        image = no_image = None
        if self.image_clip is not None:
            image = self.image_clip.images(batch)
            no_image = (image == 0).all(dim=1)
            if drop_image is not None:
                no_image = drop_image | no_image
        return Condition(image, no_image, *encode_batch(self.text, batch, drop_text))

    def encode_prompts(self, prompts: Prompts, load_prior: LoadPrior) -> tuple[Condition, Condition | None]:
        """→ conditions of the prompts, and of the negative or null prompts (None: nothing to guide)"""
        positive_text, negative_text = encode_prompts(self.text, prompts)
        image, negative_image = self._embed_images(prompts, load_prior)
        positive = self._build_condition(prompts, image, positive_text)
        # Without a CLIP a negative prompt has no image embedding: then only the text is guided.
        guides_image = image is not None and (prompts.negative is None or negative_image is not None)
        if image is not None and negative_text is None and not guides_image:
            raise InputError(
                "--negative needs an encoder, and this stage has neither a text encoder nor a CLIP (clip.kind=given): remove --negative"
            )
        if negative_text is None and not guides_image:
            return positive, None
        if negative_text is None:
            length = None if positive_text.embeddings is None else positive_text.embeddings.shape[1]
            negative_text = encode_null(self.text, len(prompts), prompts.noise.device, length)
        return positive, self._build_condition(prompts, negative_image, negative_text)

    def _build_condition(self, prompts: Prompts, image: Tensor | None, text: TextEmbeddings) -> Condition:
        if self.image_clip is None:
            return Condition(None, None, *text)
        if image is None:
            image = torch.zeros(len(prompts), self.image_clip.width, device=prompts.noise.device)
        return Condition(image, (image == 0).all(dim=1), *text)

    def find_image_source(self, prompts: Prompts, load_prior: LoadPrior) -> tuple[ImageSource, EmbeddingPrior | None]:
        """The source of the image embedding, and the prior if it is that.

        A caption goes through the prior. Without a trained prior the embedding is that of the real sample beside the
        prompt; without a sample, the CLIP's embedding of the caption.
        """
        clip, batch = self.image_clip, prompts.batch
        if clip is None:
            return "nothing", None
        has_embedding = batch is not None and IMAGE in batch.extra
        has_picture = batch is not None and batch.pixels is not None and clip.reads_captions
        if prompts.captions is not None and not (prompts.from_items and (has_embedding or has_picture)):
            try:
                prior = load_prior()
            except NotTrained:
                if not has_embedding and not has_picture:
                    raise
                prior = None
            if prior is not None:
                return "prior", prior
        if has_embedding or has_picture:
            return ("embedding" if has_embedding else "picture"), None
        encodes_text = self.text is not None and self.text.reads_captions
        if prompts.captions is None or (encodes_text and not clip.reads_captions):
            return "nothing", None  # captions may still be read as text
        return "caption", None

    def _embed_images(self, prompts: Prompts, load_prior: LoadPrior) -> tuple[Tensor | None, Tensor | None]:
        """→ image embeddings of the prompts, and of the negative prompts"""
        source, prior = self.find_image_source(prompts, load_prior)
        if source == "nothing":
            return None, None
        assert self.clip is not None
        if source in ("embedding", "picture"):
            assert prompts.batch is not None
            image = self.clip.images(prompts.batch)
        else:
            image = self._embed_captions(prompts, prior)
        if prompts.negative is None or not self.clip.reads_captions:
            return image, None
        return image, self._embed_captions(Prompts(prompts.noise, prompts.negative), prior)

    def _embed_captions(self, prompts: Prompts, prior: EmbeddingPrior | None) -> Tensor:
        assert self.clip is not None and prompts.captions is not None
        if prior is not None:
            return prior.embed(prompts)
        return self.clip.captions(prompts.captions, encodings=False).embed
