"""What a tar shard's members mean: which are the picture, the caption and the embeddings of a sample, and how they are decoded."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, field_validator

from kineograph.core.batch import Sample
from kineograph.core.errors import Unreadable
from kineograph.data.captions import TEXT_KEYS
from kineograph.data.config import Split
from kineograph.data.decode import CLIPS, IMAGES, MediaConfig, read_encoded
from kineograph.data.embeddings import AlignedEmbeddings, padded, read_npy
from kineograph.data.shards import Shard
from kineograph.data.transforms import pad

EMBEDDINGS = ("image_embed", "text_embed", "text_encoding")


class WebDatasetConfig(MediaConfig):
    source: str = "webdataset"
    shards: str | list[str]
    """Tar files: a folder, `data/{00000..00099}.tar`, a pattern, pipe:COMMAND, s3://, gs:// or http(s):// addresses; or a list of these."""
    start_shard: int = Field(0, ge=0)
    """First number that `{}` in `shards` stands for."""
    end_shard: int | None = Field(None, ge=0)
    """Last number that `{}` in `shards` stands for, included."""
    shard_width: int = Field(6, ge=1)
    """Digits that `{}` in `shards` is written with."""
    media: list[str] | None = Field(None, min_length=1)
    """Endings of pictures and clips; of several in one sample, the first in this list is taken. null: all that folders know."""
    pixels: bool = True
    """Decode pictures and clips; false for a stage that reads captions and embeddings only."""
    captions: list[str] = Field(["txt", "caption", "json"], min_length=1)
    """Endings of captions, the first that a sample has is taken."""
    caption_key: str | None = None
    """Where in a .json the caption stands; null: text, caption or prompt."""
    uncaptioned: Literal["skip", "keep"] = "skip"
    """What to do with a sample that has no caption among samples that have."""
    image_embed: str | None = None
    """Ending of the image embedding in the tar, such as img_emb.npy."""
    text_embed: str | None = None
    """Ending of the text embedding in the tar, such as text_emb.npy."""
    text_encoding: str | None = None
    """Ending of the text encodings in the tar, such as txt_enc.npy: tokens × width, rows of zeros are padding."""
    img_embeddings_folder: str | None = None
    """Folder of image embeddings, `*_NNNN.npy`, a file for each shard."""
    text_embeddings_folder: str | None = None
    """The same of texts."""
    text_encodings_folder: str | None = None
    """The same of text encodings: samples × tokens × width."""
    index_width: int = Field(4, ge=1)
    """The last so many digits of a sample's key are its row in those files."""
    missing_embeddings: Literal["skip", "keep"] = "skip"
    """What to do with a sample whose embedding is missing or zero; keep: zeros, and `has_…` says False."""
    text_length: int | None = Field(None, ge=1)
    """Tokens that text encodings are padded or cut to; null: all have the same length."""
    resample: bool = False
    """Draw samples (of streams: shards) with replacement, instead of each once an epoch."""
    shuffle_buffer: int = Field(1000, ge=1)
    """Streams only: samples that are held and drawn from at random."""
    kept: int = Field(256, ge=1)
    """Streams only: validation (and test) samples, taken from the first shards and held in memory."""
    pipe_timeout: float = Field(300.0, gt=0)
    """Streams only: seconds without a byte after which a pipe is given up."""

    @field_validator("media", "captions")
    @classmethod
    def _plain(cls, value: list[str] | None) -> list[str] | None:
        return value and [ending.lower().removeprefix(".") for ending in value]


class Part(NamedTuple):
    """One member of a sample."""

    data: bytes
    ending: str


class Assembly:
    """Members → Sample, the same for tars with an index and for streams."""

    def __init__(self, config: WebDatasetConfig, split: Split, shards: Sequence[Shard]) -> None:
        self.config = config
        self.endings: dict[str, tuple[str, ...]] = {"caption": tuple(config.captions)}
        """Field → the endings of its members."""
        if config.pixels:
            self.endings["media"] = tuple(config.media or [suffix[1:] for suffix in (*IMAGES, *CLIPS)])
        for name in EMBEDDINGS:
            if getattr(config, name) is not None:
                self.endings[name] = (getattr(config, name).lower().removeprefix("."),)
        folders = {
            "image_embed": "img_embeddings_folder",
            "text_embed": "text_embeddings_folder",
            "text_encoding": "text_encodings_folder",
        }
        self.aligned = {
            name: AlignedEmbeddings(getattr(config, key), f"data.{key}", shards, config.index_width)
            for name, key in folders.items()
            if getattr(config, key) is not None
        }
        self.captioned = True
        """Whether samples have captions at all."""
        self._wanted = config.wanted(split)
        self._shapes: dict[str, tuple[int, ...]] = {name: aligned.shape for name, aligned in self.aligned.items()}

    @property
    def gives(self) -> frozenset[str]:
        fields = set(self.endings) | set(self.aligned)
        named = {"media": "pixels", "text_encoding": "text_embeds"}
        return frozenset(named.get(name, name) for name in fields - {"caption"})

    def lacking(self, there: Collection[str]) -> str | None:
        """Why a sample with only these fields is left out."""
        if "media" in self.endings and "media" not in there:
            return f"no picture or clip ({', '.join(self.endings['media'][:4])} …)"
        if self.captioned and self.config.uncaptioned == "skip" and "caption" not in there:
            return f"no caption ({', '.join(self.endings['caption'])})"
        if self.config.missing_embeddings == "skip":
            for name in EMBEDDINGS:
                if name in self.endings and name not in there and name not in self.aligned:
                    return f"no embedding ({self.endings[name][0]})"
        return None

    def rows(self, shard: int, key: str) -> tuple[dict[str, int], str | None]:
        """The sample's row in each aligned file, and why it is left out where it has none."""
        found = {}
        for name, aligned in self.aligned.items():
            row = aligned.row(shard, key)
            if row.reason and self.config.missing_embeddings == "skip":
                return {}, row.reason
            found[name] = row.number
        return found, None

    def sample(
        self, name: str, shard: int, rows: Mapping[str, int], parts: Mapping[str, Part], rng: np.random.Generator
    ) -> Sample:
        """Decode; raises Unreadable. `name` is what skipped.jsonl lists."""
        sample = Sample(fps=self.config.shape.fps)
        if "caption" in parts:
            sample.caption = self.caption(parts["caption"], name)
        if sample.caption is None and self.captioned and self.config.uncaptioned == "skip":
            raise Unreadable(name, "an empty caption")
        for field in EMBEDDINGS:
            if field in self.endings or field in self.aligned:
                self._embed(sample, field, name, shard, rows, parts)
        if "media" in self.endings:
            media = parts["media"]
            clip = read_encoded(media.data, f".{media.ending}", name, self._wanted, rng)
            sample.pixels, sample.frame_mask = pad(clip.pixels, self.config.frames)
            sample.fps = clip.fps or sample.fps
        return sample

    def learn_shapes(self, parts: Mapping[str, Part]) -> None:
        """From one sample that has them: the shapes of the zeros that stand for missing embeddings."""
        for field in set(parts) & set(EMBEDDINGS):
            self._shapes[field] = read_npy(parts[field].data, field).shape

    def caption(self, part: Part, name: str) -> str | None:
        """Raises Unreadable."""
        try:
            text = part.data.decode("utf-8-sig")
            if part.ending.rpartition(".")[2] == "json":
                tree = json.loads(text)
                keys = (self.config.caption_key,) if self.config.caption_key else TEXT_KEYS
                text = next((tree[key] for key in keys if isinstance(tree.get(key), str)), "")
        except UnicodeDecodeError:
            raise Unreadable(name, f"its .{part.ending} is not UTF-8 text") from None
        except (ValueError, AttributeError):
            raise Unreadable(name, f"its .{part.ending} is not a JSON object") from None
        return " ".join(text.split()) or None

    def _check(self, field: str, values: np.ndarray, name: str) -> None:
        """One that cannot stand in a batch with the others must not end the run."""
        if not np.isfinite(values).all():
            raise Unreadable(name, "its embedding is not finite")
        usual = self._shapes[field]
        if field == "text_encoding" and self.config.text_length is not None:
            fits = values.shape[-1:] == usual[-1:]  # cut or padded to one length later
        else:
            fits = values.shape == usual if field == "text_encoding" else values.size == math.prod(usual)
        if not fits:
            raise Unreadable(name, f"an embedding of shape {values.shape} among those of {usual}")

    def _embed(
        self, sample: Sample, field: str, name: str, shard: int, rows: Mapping[str, int], parts: Mapping[str, Part]
    ) -> None:
        given = True
        try:
            if field in self.aligned:
                if rows[field] < 0:
                    raise Unreadable(name, "no embedding")
                values = self.aligned[field].read(shard, rows[field], name)
            elif field in parts:
                values = read_npy(parts[field].data, name)
                self._shapes.setdefault(field, values.shape)
            else:
                raise Unreadable(name, f"no embedding ({self.endings[field][0]})")
            self._check(field, values, name)
        except Unreadable:
            if self.config.missing_embeddings == "skip" or field not in self._shapes:
                raise
            values, given = np.zeros(self._shapes[field], np.float32), False
        if field == "text_encoding":
            try:
                values, mask = padded(values, self.config.text_length)
            except ValueError as error:
                raise Unreadable(name, str(error)) from None
            sample.text_embeds, sample.text_mask = torch.from_numpy(values), torch.from_numpy(mask)
        else:
            sample.extra[field] = torch.from_numpy(values.reshape(-1))  # some keep D numbers, some 1 × D
        if self.config.missing_embeddings == "keep":
            sample.extra[f"has_{field}"] = torch.tensor(given)
