"""Samples of tar shards: the config, which members are the image, the caption and the embeddings, and how they are decoded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator

from kineograph.core.batch import Sample
from kineograph.core.config import LocalPath
from kineograph.core.errors import Unreadable
from kineograph.core.text_file import parse_json
from kineograph.data.buckets import Bucket
from kineograph.data.captions import TEXT_KEYS, find_texts, several_texts, split_captions
from kineograph.data.decode import decode_media
from kineograph.data.embeddings import AlignedEmbeddings, pad_encodings, read_npy
from kineograph.data.media_config import CLIPS, IMAGES, MediaConfig
from kineograph.data.open_source import Split
from kineograph.data.shards import Shard
from kineograph.data.transforms import pad_frames

EMBEDDINGS = {  # field → config key of the folder of embedding files
    "image_embed": "img_embeddings_folder",
    "text_embed": "text_embeddings_folder",
    "text_encoding": "text_encodings_folder",
}


CAPTION_HELP = "add a KEY.txt to each in its tar, or name the members that hold captions in data.captions"


class WebDatasetConfig(MediaConfig):
    source: str = "webdataset"
    shards: LocalPath | list[LocalPath]
    """Tar files: a folder, `data/{00000..00099}.tar`, a pattern, pipe:COMMAND, s3://, gs:// or http(s):// URLs; or a list of these."""
    start_shard: int = Field(0, ge=0, le=10_000_000)
    """First number for `{}` in `shards`."""
    end_shard: int | None = Field(None, ge=0, le=10_000_000)
    """Last number for `{}` in `shards`, included."""
    shard_width: int = Field(6, ge=1, le=20)
    """Digits of the number for `{}` in `shards`."""
    media: list[str] | None = Field(None, min_length=1)
    """Suffixes of images and clips, in order of preference; null: all that folders support."""
    pixels: bool = True
    """Decode images and clips; false for a stage that reads only captions and embeddings."""
    captions: list[str] = Field(["txt", "caption", "json"], min_length=1)
    """Suffixes of captions, in order of preference."""
    caption_key: str | None = None
    """Key of the caption in a .json; null: text, caption or prompt."""
    uncaptioned: Literal["refuse", "skip", "empty"] = "skip"
    image_embed: str | None = None
    """Suffix of the image embedding in the tar, such as img_emb.npy."""
    text_embed: str | None = None
    """Suffix of the text embedding in the tar, such as text_emb.npy."""
    text_encoding: str | None = None
    """Suffix of the text encodings in the tar, such as txt_enc.npy: tokens × width, rows of zeros are padding."""
    img_embeddings_folder: LocalPath | None = None
    """Folder, or URL of one, of image embeddings, `*_NNNN.npy`, one file per shard."""
    text_embeddings_folder: LocalPath | None = None
    """Folder of text embeddings."""
    text_encodings_folder: LocalPath | None = None
    """Folder of text encodings: samples × tokens × width."""
    index_width: int = Field(4, ge=1, le=20)
    """The last this many digits of a sample's key are its row in those files."""
    missing_embeddings: Literal["skip", "keep"] = "skip"
    """Skip samples whose embedding is missing or zero, or keep them with zeros and `has_…` = False."""
    text_length: int | None = Field(None, ge=1, le=65536)
    """Pad or cut text encodings to this many tokens; null: all have the same length."""
    resample: bool = False
    """Draw samples (of streams: shards) with replacement, instead of each once per epoch."""
    shuffle_buffer: int = Field(1000, ge=1)
    """Streams only: size of the shuffle buffer, in samples."""
    kept: int = Field(256, ge=1)
    """Streams only: validation (and test) samples, taken from the first shards and kept in a temporary file."""
    pipe_timeout: float = Field(300.0, gt=0)
    """Streams only: give up a pipe after so many seconds without a byte; a URL also below 1 kB a second."""

    @model_validator(mode="after")
    def _check_order(self) -> WebDatasetConfig:
        if self.resample and not self.shuffle:
            raise ValueError("resample=true draws at random, and shuffle=false does not: remove one")
        return self

    @field_validator("media", "captions")
    @classmethod
    def _strip_dots(cls, value: list[str] | None) -> list[str] | None:
        return value and [suffix.lower().removeprefix(".") for suffix in value]


class Member(NamedTuple):
    """One file of a sample."""

    data: bytes
    suffix: str


class Record(NamedTuple):
    """An encoded sample."""

    name: str  # as skipped.jsonl lists it
    shard: int
    rows: dict[str, int]  # field → row in the embedding file beside the shard
    members: dict[str, Member]  # field → its file


class SampleDecoder:
    """Record → Sample, for indexed tars and for streams."""

    def __init__(self, config: WebDatasetConfig, split: Split, shards: Sequence[Shard]) -> None:
        self.config = config
        self.suffixes: dict[str, tuple[str, ...]] = {"caption": tuple(config.captions)}
        """Field → suffixes of its members."""
        if config.pixels:
            self.suffixes["media"] = tuple(config.media or [suffix[1:] for suffix in (*IMAGES, *CLIPS)])
        self.aligned: dict[str, AlignedEmbeddings] = {}
        """Field → files of embeddings beside the shards."""
        for field, key in EMBEDDINGS.items():
            suffix, folder = getattr(config, field), getattr(config, key)
            if suffix is not None:
                self.suffixes[field] = (suffix.lower().removeprefix("."),)
            if folder is not None:
                self.aligned[field] = AlignedEmbeddings(folder, f"data.{key}", shards, config.index_width)
        self.has_captions = True
        """Any sample has a caption."""
        self.is_stream = False
        """Captions are only known once they are read: later samples without one are skipped, also with uncaptioned=refuse."""
        self._options = config.decode_options(split)
        self._shapes: dict[str, tuple[int, ...]] = {field: aligned.shape for field, aligned in self.aligned.items()}

    @property
    def fields(self) -> frozenset[str]:
        names = {"media": "pixels", "text_encoding": "text_embeds"}
        fields = {*self.suffixes, *self.aligned} - {"caption"}
        return frozenset(names.get(field, field) for field in fields)

    def missing_reason(self, fields: Collection[str]) -> str | None:
        """Why a sample with only these fields is skipped; None if it is not."""
        if "media" in self.suffixes and "media" not in fields:
            return f"no image or clip ({', '.join(self.suffixes['media'][:4])} …)"
        if self.has_captions and self.config.uncaptioned == "skip" and "caption" not in fields:
            return f"no caption ({', '.join(self.suffixes['caption'])})"
        if self.config.missing_embeddings == "skip":
            for field in EMBEDDINGS:
                if field in self.suffixes and field not in fields and field not in self.aligned:
                    return f"no embedding ({self.suffixes[field][0]})"
        return None

    def find_rows(self, shard: int, key: str) -> tuple[dict[str, int], str | None]:
        """The sample's row in each aligned file, and why it is skipped if it has none."""
        rows = {}
        for field, aligned in self.aligned.items():
            row = aligned.row(shard, key)
            if row.reason and self.config.missing_embeddings == "skip":
                return {}, row.reason
            rows[field] = row.number
        return rows, None

    def decode(self, record: Record, rng: np.random.Generator, shape: Bucket | None = None) -> Sample:
        """Decode a clip of `shape` (default: data.frames × data.size). Raises Unreadable."""
        texts = self.decode_captions(record)
        sample = Sample(fps=self.config.shape.fps, caption=next(iter(texts), None), texts=several_texts(texts))
        if not texts and self.has_captions:
            if self.config.uncaptioned == "skip" or (self.config.uncaptioned == "refuse" and self.is_stream):
                raise Unreadable(record.name, "an empty caption" if "caption" in record.members else "no caption")
            sample.caption = "" if self.config.uncaptioned == "empty" else None
        for field in EMBEDDINGS:
            if field in self.suffixes or field in self.aligned:
                self._add_embedding(sample, field, record)
        if "media" in self.suffixes:
            media, shape = record.members["media"], shape or self.config.base_shape
            clip = decode_media(media.data, f".{media.suffix}", record.name, self._options.with_shape(shape), rng)
            sample.pixels, sample.frame_mask = pad_frames(clip.pixels, shape.frames)
            sample.fps = clip.fps or sample.fps
        return sample

    def learn_shapes(self, members: Mapping[str, Member]) -> None:
        """Take the shapes of embeddings from one sample: missing ones are replaced by zeros of that shape."""
        for field in members.keys() & EMBEDDINGS.keys():
            self._shapes[field] = read_npy(members[field].data, field).shape

    def decode_captions(self, record: Record) -> tuple[str, ...]:
        """All captions of a sample. Raises Unreadable."""
        member, name = record.members.get("caption"), record.name
        if member is None:
            return ()
        try:
            text = member.data.decode("utf-8-sig")
            if member.suffix.rpartition(".")[2] != "json":
                return split_captions(text, self.config.caption_lines)
            tree = parse_json(text)
        except UnicodeDecodeError:
            raise Unreadable(name, f"its .{member.suffix} is not UTF-8 text") from None
        except ValueError:
            tree = None
        if not isinstance(tree, dict):
            raise Unreadable(name, f"its .{member.suffix} is not a JSON object")
        return find_texts(tree, (self.config.caption_key,) if self.config.caption_key else TEXT_KEYS)

    def _add_embedding(self, sample: Sample, field: str, record: Record) -> None:
        name, exists = record.name, True
        try:
            if field in self.aligned:
                if record.rows[field] < 0:
                    raise Unreadable(name, "no embedding")
                values = self.aligned[field].read(record.shard, record.rows[field], name)
            elif field in record.members:
                values = read_npy(record.members[field].data, name)
                self._shapes.setdefault(field, values.shape)
            else:
                raise Unreadable(name, f"no embedding ({self.suffixes[field][0]})")
            self._check_embedding(field, values, name)
        except Unreadable:
            if self.config.missing_embeddings == "skip" or field not in self._shapes:
                raise
            values, exists = np.zeros(self._shapes[field], np.float32), False
        if field == "text_encoding":
            try:
                values, mask = pad_encodings(values, self.config.text_length)
            except ValueError as error:
                raise Unreadable(name, str(error)) from None
            sample.text_embeds, sample.text_mask = torch.from_numpy(values), torch.from_numpy(mask)
        else:
            sample.extra[field] = torch.from_numpy(values.reshape(-1))  # stored as D or as 1 × D
        if self.config.missing_embeddings == "keep":
            sample.extra[f"has_{field}"] = torch.tensor(exists)

    def _check_embedding(self, field: str, values: np.ndarray, name: str) -> None:
        """Refuse an embedding that cannot be batched with the others."""
        if not np.isfinite(values).all():
            raise Unreadable(name, "its embedding is not finite")
        expected = self._shapes[field]
        if field == "text_encoding" and self.config.text_length is not None:
            fits = values.shape[-1:] == expected[-1:]  # cut or pad_encodings to one length later
        else:
            fits = values.shape == expected if field == "text_encoding" else values.size == math.prod(expected)
        if not fits:
            raise Unreadable(name, f"an embedding of shape {values.shape} among those of {expected}")
