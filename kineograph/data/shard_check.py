"""Tar shards in `kineo data check`: every member is decoded, and every sample looked up in the embeddings beside the shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np

from kineograph.core.errors import InputError, Unreadable
from kineograph.data.captions import Lines, Problem, names_side
from kineograph.data.check_report import Report
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
        results = list(pool.map(lambda name: _check_shard(report.path, name, lines), names))
    for note, problems, sample_keys, sided in results:
        report.notes.append(note)
        report.problems += problems
        report.sided += sided
        keys.append(sample_keys)
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


def _check_shard(root: Path, name: str, lines: Lines) -> tuple[str, list[Problem], list[str], int]:
    """One tar → a line about it, its problems, the keys of its samples with an image or clip, and its captions that name a side."""
    from kineograph.data.webdataset_samples import Member, Record, SampleDecoder, WebDatasetConfig

    shard = Shard(str(root / name), name)
    decoder = SampleDecoder(WebDatasetConfig(shards=str(root / name), caption_lines=lines), "train", [shard])
    problems: list[Problem] = []
    caption_suffixes = decoder.suffixes["caption"]
    keys: list[str] = []
    with_media, with_caption, with_side, unreadable = set(), set(), set(), set()
    several: list[int] = []  # captions of samples with more than one
    for row, (key, members) in enumerate((_iterate_stream if shard.is_stream else _iterate_tar)(shard, problems)):
        keys.append(key)
        found: dict[str, bytes] = {}
        for suffix, data in members:
            member = f"{name}:{key}.{suffix}"
            try:
                has_media = _check_member(data, suffix, member)
            except Unreadable as error:
                problems.append(Problem(member, error.reason))
                has_media = suffix not in caption_suffixes
            if has_media:
                with_media.add(row)
            elif suffix in caption_suffixes:
                found[suffix] = data
        for suffix in [suffix for suffix in caption_suffixes if suffix in found][:1]:  # as training prefers them
            record = Record(f"{name}:{key}.{suffix}", 0, {}, {"caption": Member(found[suffix], suffix)})
            try:
                texts = decoder.decode_captions(record)
            except Unreadable as error:
                problems.append(Problem(record.name, error.reason))
                unreadable.add(row)
                continue
            with_caption |= {row} if texts else set()
            if not texts and suffix == "txt":  # an empty one, named above
                unreadable.add(row)
            with_side |= {row} if any(map(names_side, texts)) else set()
            several += [len(texts)] if len(texts) > 1 else []
    if with_caption:
        problems += [
            Problem(f"{name}:{keys[row]}", "no caption") for row in sorted(with_media - with_caption - unreadable)
        ]
    note = f"{name}: {len(with_media)} samples, {len(with_media & with_caption)} with text"
    if several:
        note += f", {len(several)} with several captions, up to {max(several)}"
    if shard.is_stream:
        note += "; compressed, so it is read from its beginning: unpack it to shuffle all samples and resume exactly"
    return note, problems, [keys[row] for row in sorted(with_media)], len(with_side)


def _iterate_tar(shard: Shard, problems: list[Problem]) -> Iterator[tuple[str, Iterator[tuple[str, bytes]]]]:
    """Key and members (suffix, content) of each sample."""
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
            yield key, ((index.suffixes[kind], os.pread(file.fileno(), size, at)) for _, kind, at, size in members)


def _iterate_stream(shard: Shard, problems: list[Problem]) -> Iterator[tuple[str, Iterator[tuple[str, bytes]]]]:
    from kineograph.core.media_file import MediaLimits
    from kineograph.data.tar import stream_samples

    try:
        for key, members in stream_samples(shard, 0.0, lambda suffix: True, MediaLimits()):
            yield key, iter(members.items())
    except Unreadable as error:
        problems.append(Problem(shard.name, error.reason))


def _check_member(data: bytes, suffix: str, name: str) -> bool:
    """Decode a member; → whether it is an image or clip."""
    from kineograph.data.embeddings import read_npy

    if suffix.endswith("npy"):
        read_npy(data, name)
    if suffix == "txt" and not data.strip():
        raise Unreadable(name, "an empty caption")
    if not media_kind(f"x.{suffix}"):
        return False
    probe_media(data, f".{suffix}", name, decode_all=True)
    return True
