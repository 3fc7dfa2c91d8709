"""`kineo data check DIR`: the contents of a folder, and everything that is wrong with it."""

from __future__ import annotations

import hashlib
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kineograph.core.config import merge, nest, parse, parse_override
from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.core.media_file import read_media
from kineograph.data.array_layout import FPS, Layout, check_values, describe_layout, infer_layout
from kineograph.data.arrays import Array, list_npz, read_captions_beside
from kineograph.data.buckets import MediaInfo
from kineograph.data.captions import Problem, Span, find_captions, names_side, read_captions
from kineograph.data.decode import has_damaged_profile, media_kind, probe_media, raise_unreadable
from kineograph.data.folder import Folder, FolderConfig, Listing, build_items, cut_items, list_folder
from kineograph.data.loss_masks import find_mask_problems
from kineograph.data.shards import SUFFIXES, Shard
from kineograph.data.split_folders import describe_split_folders
from kineograph.data.trim import UNTRIMMED
from kineograph.data.unread_files import find_unread

_DOCUMENTS = {"readme", "license", "licence", "notice", "changelog"}  # .txt files that are no captions
_LISTED = 5  # problems of one kind
_CHECKED = {"buckets", "flip", "caption_lines", "uncaptioned", "start", "end", "skip_frames", "cut", "limits"}
"""Keys of data.* that change what is checked."""
T = TypeVar("T")


class MemberPlace(NamedTuple):
    """Where the image or clip of a sample lies in a tar."""

    file: str  # below the folder
    member: str
    offset: int | None  # None: the tar is compressed
    size: int


class ArrayPlace(NamedTuple):
    """An item of an array."""

    file: str  # below the folder
    array: str | None  # its name within a .npz
    layout: str
    item: int


class CheckedItem(NamedTuple):
    """An image, a clip, a captioned span of one, a sample of a tar, or an item of an array."""

    name: str  # of its file, below the folder
    info: MediaInfo | None  # None: it cannot be read
    captions: tuple[str, ...]
    span: Span | None = None  # the part of a clip
    place: MemberPlace | ArrayPlace | None = None  # inside its file


@dataclass
class Report:
    """Counts, measurements and problems. `kineo data check` exits with 1 if there are problems."""

    path: Path
    kinds: Counter[str] = field(default_factory=Counter)
    media: list[MediaInfo] = field(default_factory=list)
    items: list[CheckedItem] = field(default_factory=list)
    """Images and clips; captioned spans stand instead of their clip."""
    packed: list[CheckedItem] = field(default_factory=list)
    """Samples of tars and items of arrays."""
    captions: list[str] = field(default_factory=list)
    sided: int = 0
    """Captions, also of shards, that say left or right."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.kinds.values())

    def lines(self, everything: bool = False) -> list[str]:
        """What was found, for a person. More than a few problems of one kind are shortened, unless `everything` is asked for."""
        lines = [f"{self.path}: {_count_kinds(self.kinds) or 'nothing to train on'}", *self.notes]
        if self.media:
            lines += [
                _format_range("width", [media.width for media in self.media]),
                _format_range("height", [media.height for media in self.media]),
                _format_range("aspect", [media.width / media.height for media in self.media], ".2f"),
            ]
        clips = [media for media in self.media if media.seconds]
        if clips:
            lines += [
                _format_range("clip frames", [clip.frames for clip in clips]),
                _format_range("clip seconds", [clip.seconds for clip in clips], ".2f"),
                _format_range("clip fps", [clip.frames / clip.seconds for clip in clips], ".2f"),
            ]
        if any(kind.startswith(("images", "clips")) for kind in self.kinds):  # notes describe arrays and shards
            lines.append(self._captions_line())
        if self.sided:
            lines.append(
                f"sides: {self.sided} captions say left or right; leave data.flip at 0, which would mirror the pictures only"
            )
        lines.append(f"{len(self.problems)} problems" if len(self.problems) != 1 else "1 problem")
        return lines + _list_problems(self.problems, everything)

    def _captions_line(self) -> str:
        texts = self.captions
        if not texts:
            return "captions: none (fine for a tokenizer; a stage that reads text needs them)"
        words = [len(text.split()) for text in texts]
        repeated = len(texts) - len(set(texts))
        return (
            f"captions: {len(texts)} of {len(self.items)} ({len(self.items) - len(texts)} missing), {repeated} repeated, "
            f"words {min(words)} to {max(words)} (median {statistics.median(words):g})"
        )


def _count_kinds(kinds: Counter[str]) -> str:
    """`12 images (png), 3 clips (2 mp4, 1 gif)` of kinds such as `images (png)`."""
    endings: dict[str, list[tuple[str, int]]] = {}
    for kind, count in kinds.most_common():
        noun, _, ending = kind.removesuffix(")").partition(" (")
        endings.setdefault(noun, []).append((ending, count))
    texts = []
    for noun, counted in endings.items():
        total = sum(count for _, count in counted)
        listed = ", ".join(f"{count} {ending}" for ending, count in counted) if len(counted) > 1 else counted[0][0]
        texts.append(f"{total} {noun if total != 1 else noun.removesuffix('s')} ({listed})")
    return ", ".join(texts)


def _list_problems(problems: Sequence[Problem], everything: bool) -> list[str]:
    """A line per problem; those with the same reason together, and only the first few of them."""
    reasons: dict[str, list[str]] = {}
    for path, reason in problems:
        reasons.setdefault(reason, []).append(path)
    lines = []
    for reason, paths in reasons.items():
        shown = paths if everything or len(paths) <= _LISTED else paths[: _LISTED - 1]
        lines += [f"  {path}: {reason}" for path in shown]
        if len(shown) < len(paths):
            lines.append(f"  … and {len(paths) - len(shown)} more: {reason} (--all lists them)")
    return lines


def _format_range(name: str, values: list[float] | list[int], form: str = "g") -> str:
    return f"{name}: {min(values):{form}} to {max(values):{form}}, median {statistics.median(values):{form}}"


def check_folder(path: Path | str, config: FolderConfig | None = None, follow_links: bool = True) -> Report:
    """Decode everything, to the last frame, and find what is wrong with it under a config. With data.flip, captions that name a side are.

    Without `follow_links`, files that a link brings in from outside the folder are problems instead of items.
    """
    root = Path(path).expanduser()
    config = config or FolderConfig(folder=str(root))
    listing = list_folder(root, "")
    if not follow_links:
        listing = _leave_out_links(root, listing)
    report = Report(root, problems=list(listing.problems))
    if listing.media:
        measured = _check_media(report, listing.media, config, listing.masks)
        _check_captions(report, listing.media, listing.others, config, measured)
        splits = describe_split_folders(listing.media)
        report.notes += [splits] if splits else []
    arrays = [name for name in listing.others if name.endswith((".npy", ".npz"))]
    tars = [name for name in listing.others if name.lower().endswith(SUFFIXES)]
    if tars:
        _check_shards(report, tars, [name for name in arrays if name.endswith(".npy")])
    elif not listing.media:
        _check_arrays(report, arrays)
    if config.flip and report.sided:
        report.problems.append(
            Problem(
                "captions",
                f"{report.sided} say left or right, and data.flip={config.flip:g} mirrors the pictures: set data.flip=0",
            )
        )
    if not report.count and not report.problems:
        suffixes = Counter(PurePosixPath(name).suffix or name for name in listing.others)
        found = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(5)) or "no files at all"
        report.problems.append(Problem(".", f"no images, clips, arrays or tar shards; {found}"))
    return report


def _leave_out_links(root: Path, listing: Listing) -> Listing:
    inside = root.resolve()
    names = (*listing.media, *listing.others, *listing.masks.values())
    outside = {name for name in names if not (root / name).resolve().is_relative_to(inside)}
    problems = [
        Problem(name, "a link to a file outside this folder, which is not read here") for name in sorted(outside)
    ]
    media, others = ([name for name in names if name not in outside] for names in listing[:2])
    masks = {name: mask for name, mask in listing.masks.items() if not {name, mask} & outside}
    return Listing(media, others, listing.problems + problems, masks)


def _map_threads(function: Callable[[str], T], names: Sequence[str]) -> list[T]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, names))


def parse_settings(path: Path | str, settings: Sequence[str]) -> FolderConfig:
    """Parse keys of data.*, with or without that prefix; refuse wrong ones, and those without effect, before anything is read."""
    tree: dict[str, Any] = {"folder": str(path), "validation": 0, "max_unreadable": 1.0}
    for text in settings:
        key, value = parse_override(text.removeprefix("data."))
        tree = merge(tree, nest(key, value))
    config = parse(FolderConfig, tree, "data")
    if not tree.keys() & _CHECKED:
        raise ConfigError(
            f"these keys change nothing that is checked: give one of {', '.join(sorted(_CHECKED))}, such as 'buckets={{}}' or caption_lines=several"
        )
    return config


def bucket_lines(config: FolderConfig) -> list[str]:
    """How `data.buckets` sorts a folder; no lines without buckets."""
    if config.buckets is None:
        return []
    buckets = Folder.open(config, "train", 0).buckets
    assert buckets is not None
    return buckets.lines()


def _check_media(report: Report, names: list[str], config: FolderConfig, masks: dict[str, str]) -> dict[str, MediaInfo]:
    """→ sizes and lengths of the files that can be read"""
    unusable: list[str] = []

    def measure(name: str) -> MediaInfo | Problem:
        path, suffix = report.path / name, PurePosixPath(name).suffix
        try:
            if media_kind(name) == "clip":
                return config.trim.measure(probe_media(path, suffix, name, decode_all=True, limits=config.limits))
            with raise_unreadable(name):
                content = read_media(path, config.limits)  # once, for both
            info = probe_media(content, suffix, name, decode_all=True, limits=config.limits)
            if has_damaged_profile(content, name):
                unusable.append(name)
            return config.trim.measure(info)
        except Unreadable as error:
            return Problem(name, error.reason)

    results = _map_threads(measure, names)
    report.media += [result for result in results if isinstance(result, MediaInfo)]
    report.problems += [result for result in results if isinstance(result, Problem)]
    if masks:
        known = {name: info for name, info in zip(names, results, strict=True) if isinstance(info, MediaInfo)}
        report.problems += find_mask_problems(report.path, masks, known)
        report.notes.append(
            f"masks: {len(masks)} of {len(names)} items have one, such as {min(masks.values())}; data.masks=true uses them"
        )
    if unusable:
        text = (
            f"colours: {len(unusable)} pictures have a colour profile (ICC) that cannot be used, and are read as sRGB"
        )
        report.notes.append(f"{text}, such as {min(unusable)}")
    repeats = find_repeats(report.path, names)
    if repeats:
        text = f"repeats: {sum(map(len, repeats)) - len(repeats)} files have the content of another, such as {' = '.join(repeats[0][:3])}"
        report.notes.append(f"{text}; a copy may be held out for validation while training sees the other")
    report.kinds.update(f"{media_kind(name)}s ({PurePosixPath(name).suffix.lower()[1:]})" for name in names)
    return {name: result for name, result in zip(names, results, strict=True) if isinstance(result, MediaInfo)}


def find_repeats(root: Path, names: Sequence[str]) -> list[list[str]]:
    """Groups of files with the same content. Only files of equal size are read."""
    sizes: dict[int, list[str]] = {}
    for name in names:
        with suppress(OSError):
            sizes.setdefault((root / name).stat().st_size, []).append(name)
    found: dict[str, list[str]] = {}
    for size, alike in sizes.items():
        for name in alike if size and len(alike) > 1 else ():
            with suppress(OSError), open(root / name, "rb") as file:
                found.setdefault(hashlib.file_digest(file, "blake2b").hexdigest(), []).append(name)
    return [group for group in found.values() if len(group) > 1]


def _check_captions(
    report: Report, names: list[str], others: list[str], config: FolderConfig, measured: dict[str, MediaInfo]
) -> None:
    try:
        captions = find_captions(report.path, names, others)
    except InputError as error:
        report.problems.append(Problem("captions", str(error)))
        report.items = [CheckedItem(name, measured.get(name), ()) for name in names]
        return
    report.problems += captions.problems
    if captions.spans:
        report.notes.append(f"{sum(map(len, captions.spans.values()))} captioned parts of {len(captions.spans)} clips")
    texts, unreadable, joined = dict(captions.listed), set(), 0
    for name, text_file in captions.sidecars.items():
        if name in captions.spans:  # its spans have their own captions
            continue
        try:
            lines = read_captions(report.path / text_file, "several")
        except UnicodeDecodeError:
            report.problems.append(Problem(text_file, "not UTF-8 text"))
        except OSError as error:
            report.problems.append(Problem(text_file, f"cannot be read: {error.strerror}"))
        else:
            if lines:
                joined += len(lines) > 1
                texts[name] = lines if config.caption_lines == "several" else (" ".join(lines),)
                continue
            report.problems.append(Problem(text_file, "an empty caption"))
        unreadable.add(name)
    if joined and config.caption_lines == "one":
        report.notes.append(
            f"{joined} caption files have several lines, each file read as one caption; "
            "with data.caption_lines=several each line is a caption, and training draws one each time"
        )
    unread = find_unread(
        report.path, names, [name for name in others if not name.lower().endswith((*SUFFIXES, ".npy", ".npz"))]
    )
    report.notes += [unread.note] if unread.note else []
    report.problems += unread.problems
    unused = [name for name in captions.unused if PurePosixPath(name).stem.lower() not in _DOCUMENTS]
    report.problems += [Problem(name, "a caption without image or clip") for name in unused]
    items = build_items(names, captions)
    if config.cut is not None:
        items, line = cut_items(items, report.path, config, config.cut, str(report.path))
        report.notes.append(line)
    own = {item: item.span.texts if item.span else None for item in items}
    found = {item: texts.get(item.name) if own[item] is None else own[item] for item in items}
    captioned = {item: several for item, several in found.items() if several}
    report.captions = [several[0] for several in captioned.values()]
    report.items = [
        CheckedItem(item.name, _measure_part(measured.get(item.name), item.span), tuple(found[item] or ()), item.span)
        for item in items
    ]
    report.sided += sum(any(map(names_side, several)) for several in captioned.values())
    most = max(map(len, captioned.values()), default=1)
    if most > 1:
        count = sum(len(several) > 1 for several in captioned.values())
        report.notes.append(f"{count} items have several captions, up to {most}: training draws one each time")
    missing = [item for item in items if item not in captioned and item.name not in unreadable]
    if config.uncaptioned != "refuse" and captioned:
        fate = "are left out" if config.uncaptioned == "skip" else "train on the null text"
        report.notes += (
            [f"data.uncaptioned={config.uncaptioned}: {len(missing)} items without a caption {fate}"] if missing else []
        )
    elif captioned or unreadable:  # a folder without any captions is fine: a tokenizer trains on it
        report.problems += [Problem(item.identity, "no caption") for item in missing]


def _measure_part(info: MediaInfo | None, span: Span | None) -> MediaInfo | None:
    if info is None or span is None:
        return info
    try:
        return UNTRIMMED.measure(info, span[:2])
    except Unreadable:  # it begins after the end of its clip
        return None


def _check_arrays(report: Report, names: list[str]) -> None:
    arrays: dict[str, Array] = {}
    for name in names:
        path = report.path / name
        try:
            if path.suffix == ".npz":
                arrays |= {f"{name}:{member}": Array.npz(path, member) for member in list_npz(path)}
            else:
                arrays[name] = Array.npy(path)
        except (InputError, OSError, ValueError) as error:
            report.problems.append(Problem(name, str(error)))
            continue
        report.kinds[f"arrays ({path.suffix[1:]})"] += 1
    report.notes += [f"{name}: {array.dtype} {' × '.join(map(str, array.shape))}" for name, array in arrays.items()]
    for name, array in arrays.items():
        if (array.member or array.path.stem) == "labels":
            continue
        labels = arrays.get(f"{name.rpartition(':')[0]}:labels") or arrays.get(
            str(PurePosixPath(array.path.relative_to(report.path)).with_name("labels.npy"))
        )
        try:
            captions = read_captions_beside(array.path)
        except InputError as error:
            report.problems.append(Problem(name, str(error)))
            captions = None
        known = {"labels": labels.shape[0]} if labels is not None else {}
        if captions is not None:
            known["captions"] = len(captions)
        report.notes += [f"{name}: {count} {kind} beside it" for kind, count in known.items()]
        misfits = [(kind, count) for kind, count in known.items() if count not in array.shape[:2]]
        report.problems += [
            Problem(name, f"{count} {kind} fit neither axis of {array.shape[:2]}") for kind, count in misfits
        ]
        if misfits:
            continue
        try:
            layout = infer_layout(array.shape, set(known.values()))
        except InputError as error:  # nothing is wrong with it: the config must say
            report.notes.append(f"{name}: {error}")
            continue
        report.notes.append(f"{name}: read as {describe_layout(array.shape, layout)}")
        try:
            check_values(array, layout)
        except InputError as error:
            report.problems.append(Problem(name, str(error)))
            continue
        report.packed += _list_array(report.path, array, layout, captions)


def _list_array(
    root: Path, array: Array, layout: Layout, captions: list[tuple[str, ...]] | None
) -> Iterator[CheckedItem]:
    """The items of an array, named by file and number."""
    sizes = dict(zip(layout, array.shape, strict=True))
    frames = sizes.get("T", 1)
    info = MediaInfo(sizes["W"], sizes["H"], frames, frames / FPS if "T" in sizes else 0.0)
    file = array.path.relative_to(root).as_posix()
    name = f"{file}:{array.member}" if array.member else file
    if captions is None or len(captions) != sizes["N"]:
        captions = [()] * sizes["N"]
    for item in range(sizes["N"]):
        place = ArrayPlace(file, array.member, layout, item)
        yield CheckedItem(f"{name}:{item}", info, captions[item], place=place)


# Tar shards -------------------------------------------------------------------------------------------------------


def _check_shards(report: Report, names: Sequence[str], arrays: Sequence[str]) -> None:
    """Decode every member of every tar, and find each sample's row in each folder of embeddings."""
    from kineograph.data.embeddings import AlignedEmbeddings
    from kineograph.data.shard_writer import INDEX_WIDTH

    for name in names:
        report.kinds[f"shards ({next(suffix for suffix in SUFFIXES if name.lower().endswith(suffix))[1:]})"] += 1
    keys: list[list[str]] = []
    for found in _map_threads(lambda name: _check_shard(report.path, name), names):
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


def _check_shard(root: Path, name: str) -> _CheckedShard:
    from kineograph.data.webdataset_samples import Member, Record, SampleDecoder, WebDatasetConfig

    shard, found = Shard(str(root / name), name), _CheckedShard()
    decoder = SampleDecoder(WebDatasetConfig(shards=shard.url), "train", ())
    with_text, without = 0, []
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
                if suffix in decoder.suffixes["caption"]:
                    continue
            if media_kind(f"x.{suffix}"):
                media[suffix] = info, MemberPlace(name, f"{key}.{suffix}", offset, len(data))
            elif suffix in decoder.suffixes["caption"]:
                texts[suffix] = Member(data, suffix)
        found.sided += any(names_side(text.data.decode("utf-8", "replace")) for text in texts.values())
        if not media:
            continue
        with_text += bool(texts)
        without += [] if texts else [sample]
        captions: tuple[str, ...] = ()
        if texts:
            record = Record(sample, 0, {}, {"caption": _find_preferred(texts, decoder.suffixes["caption"])})
            with suppress(Unreadable):
                captions = decoder.decode_captions(record)
        info, place = _find_preferred(media, decoder.suffixes["media"])
        found.items.append(CheckedItem(sample, info, captions, place=place))
        found.keys.append(key)
    if with_text:
        found.problems += [Problem(sample, "no caption") for sample in without]
    found.note = f"{name}: {len(found.items)} samples, {with_text} with text"
    if shard.is_stream:
        found.note += (
            "; compressed, so it is read from its beginning: unpack it to shuffle all samples and resume exactly"
        )
    return found


def _find_preferred(by_suffix: Mapping[str, T], suffixes: Sequence[str]) -> T:
    """The member that the source takes: the one whose suffix comes first."""
    return by_suffix[min(by_suffix, key=lambda name: suffixes.index(name) if name in suffixes else len(suffixes))]


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
    from kineograph.core.media_file import MediaLimits
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
