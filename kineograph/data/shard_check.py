"""Tar shards in `kineo data check`: every member is decoded, and every sample looked up in the embeddings beside the shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from kineograph.core.errors import InputError, Unreadable
from kineograph.data.buckets import MediaInfo
from kineograph.data.captions import Lines, Problem, names_side
from kineograph.data.check_report import CheckedItem, MemberPlace, Report
from kineograph.data.decode import probe_media
from kineograph.data.media_config import media_kind
from kineograph.data.shards import SUFFIXES, Shard


def check_shards(report: Report, names: Sequence[str], arrays: Sequence[str], lines: Lines) -> None:
    """Decode every member of every tar, and find each sample's row in each folder of embeddings."""
    from kineograph.data.embeddings import AlignedEmbeddings
    from kineograph.data.shard_writer import INDEX_WIDTH

    for name in names:
        report.kinds[f"shards ({next(suffix for suffix in SUFFIXES if name.lower().endswith(suffix))[1:]})"] += 1
    keys: list[list[str]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        checked = list(pool.map(lambda name: _check_shard(report.path, name, lines), names))
    for found in checked:
        report.notes.append(found.note)
        report.problems += found.problems
        report.sided += found.sided
        report.packed += found.items
        keys.append(found.keys)
    shards = [Shard(str(report.path / name), PurePosixPath(name).name) for name in names]
    for folder in sorted({str(PurePosixPath(name).parent) for name in arrays}):
        try:
            aligned = AlignedEmbeddings(str(report.path / folder), folder, shards, INDEX_WIDTH)
        except InputError as error:
            report.problems.append(Problem(folder, str(error)))
            continue
        count = 0
        for number, shard in enumerate(shards):
            for key in keys[number]:
                row = aligned.row(number, key)
                try:
                    if row.reason:
                        raise Unreadable("", row.reason)
                    if not np.isfinite(aligned.read(number, row.number, "")).all():
                        raise Unreadable("", "an embedding that is not finite")
                    count += 1
                except Unreadable as error:
                    report.problems.append(Problem(f"{shard.name}:{key}", f"{folder}: {error.reason}"))
        shape = " × ".join(map(str, aligned.shape))
        report.notes.append(f"{folder}: embeddings of {shape} for {count} of {sum(map(len, keys))} samples")


@dataclass
class _CheckedShard:
    note: str = ""
    problems: list[Problem] = field(default_factory=list)
    items: list[CheckedItem] = field(default_factory=list)  # samples with an image or clip
    keys: list[str] = field(default_factory=list)  # of these
    sided: int = 0  # captions that name a side


def _check_shard(root: Path, name: str, lines: Lines) -> _CheckedShard:
    from kineograph.data.webdataset_samples import Member, Record, SampleDecoder, WebDatasetConfig

    shard, found = Shard(str(root / name), name), _CheckedShard()
    decoder = SampleDecoder(WebDatasetConfig(shards=shard.url, caption_lines=lines), "train", [shard])
    media_suffixes, caption_suffixes = decoder.suffixes["media"], decoder.suffixes["caption"]
    with_text, without = 0, []
    several: list[int] = []  # captions of samples with more than one
    for key, members in (_iterate_stream if shard.is_stream else _iterate_tar)(shard, found.problems):
        sample = f"{name}:{key}"
        media: dict[str, tuple[MediaInfo | None, MemberPlace]] = {}  # by suffix, as `texts`
        texts: dict[str, Member] = {}
        for suffix, data, offset in members:
            info = None
            try:
                info = _check_member(data, suffix, f"{sample}.{suffix}")
            except Unreadable as error:
                found.problems.append(Problem(f"{sample}.{suffix}", error.reason))
            if media_kind(f"x.{suffix}"):
                media[suffix] = info, MemberPlace(name, f"{key}.{suffix}", offset, len(data))
            elif suffix in caption_suffixes:
                texts[suffix] = Member(data, suffix)
        captions: tuple[str, ...] = ()
        is_named = False  # as a problem
        if texts:
            text = texts[_prefer(texts, caption_suffixes)]
            record = Record(f"{sample}.{text.suffix}", 0, {}, {"caption": text})
            try:
                captions = tuple(decoder.decode_captions(record))
                is_named = not captions and text.suffix == "txt"  # an empty one
            except Unreadable as error:
                found.problems.append(Problem(record.name, error.reason))
                is_named = True
        found.sided += any(map(names_side, captions))
        if not media:
            continue
        with_text += bool(captions)
        without += [] if captions or is_named else [sample]
        several += [len(captions)] if len(captions) > 1 else []
        info, place = media[_prefer(media, media_suffixes)]
        found.items.append(CheckedItem(sample, info, captions, place=place))
        found.keys.append(key)
    if with_text:
        found.problems += [Problem(sample, "no caption") for sample in without]
    found.note = f"{name}: {len(found.items)} {'sample' if len(found.items) == 1 else 'samples'}, {with_text} with text"
    if several:
        found.note += f", {len(several)} with several captions, up to {max(several)}"
    if shard.is_stream:
        found.note += (
            "; compressed, so it is read from its beginning: unpack it to shuffle all samples and resume exactly"
        )
    return found


def _prefer(found: Mapping[str, object], suffixes: Sequence[str]) -> str:
    """The suffix that the source takes: the one that comes first."""
    return min(found, key=lambda name: suffixes.index(name) if name in suffixes else len(suffixes))


_Samples = Iterator[tuple[str, Iterator[tuple[str, bytes, int | None]]]]


def _iterate_tar(shard: Shard, problems: list[Problem]) -> _Samples:
    """Key and members (suffix, content, offset) of each sample."""
    from kineograph.data.tar import TarIndex

    try:
        index = TarIndex.build(shard.url)
    except OSError as error:
        problems.append(Problem(shard.name, f"cannot be read: {error.strerror}"))
        return
    if index.problem:
        problems.append(Problem(shard.name, f"not a whole tar file: {index.problem}"))
    with open(shard.url, "rb") as file:
        ends = np.searchsorted(index.members[0], np.arange(len(index.keys)), side="right").tolist()
        for key, start, end in zip(index.keys, [0, *ends], ends):
            members = index.members[:, start:end].T.tolist()
            yield key, ((index.suffixes[kind], os.pread(file.fileno(), size, at), at) for _, kind, at, size in members)


def _iterate_stream(shard: Shard, problems: list[Problem]) -> _Samples:
    from kineograph.core.safe_media import MediaLimits
    from kineograph.data.tar import stream_samples

    try:
        for key, members in stream_samples(shard, 0.0, lambda suffix: True, MediaLimits()):
            yield key, ((suffix, data, None) for suffix, data in members.items())
    except Unreadable as error:
        problems.append(Problem(shard.name, error.reason))


def _check_member(data: bytes, suffix: str, name: str) -> MediaInfo | None:
    """Decode a member. → size and length of an image or clip; None for any other"""
    from kineograph.data.embeddings import read_npy

    if suffix.endswith("npy"):
        read_npy(data, name)
    if suffix == "txt" and not data.strip():
        raise Unreadable(name, "an empty caption")
    return probe_media(data, f".{suffix}", name, decode_all=True) if media_kind(f"x.{suffix}") else None
