"""`kineo data check DIR`: the contents of a folder, and everything that is wrong with it."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from kineograph.core.config import merge, nest, parse, parse_override
from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.core.safe_media import read_media
from kineograph.data.array_layout import FPS, Layout, check_values, describe_layout, infer_layout
from kineograph.data.arrays import Array, list_npz, read_captions_beside
from kineograph.data.buckets import MediaInfo
from kineograph.data.captions import Problem, find_captions, names_side, read_captions
from kineograph.data.check_report import ArrayPlace, CheckedItem, Report
from kineograph.data.decode import has_damaged_profile, probe_media, raise_unreadable
from kineograph.data.file_listing import Listing, list_folder
from kineograph.data.folder import Folder, FolderConfig, Item, build_items, cut_items
from kineograph.data.loss_masks import find_mask_problems
from kineograph.data.media_config import media_kind
from kineograph.data.shard_check import check_shards
from kineograph.data.shards import SUFFIXES
from kineograph.data.split_folders import describe_split_folders
from kineograph.data.trim import UNTRIMMED
from kineograph.data.unread_files import find_unread

_DOCUMENTS = {"readme", "license", "licence", "notice", "changelog"}  # .txt files that are no captions
_CHECKED = {"buckets", "flip", "caption_lines", "uncaptioned", "start", "end", "skip_frames", "cut", "limits"}
"""Keys of data.* that change what is checked."""
T = TypeVar("T")


def check_folder(path: Path | str, config: FolderConfig | None = None, follow_links: bool = True) -> Report:
    """Decode everything, to the last frame, and find what is wrong with it under a config. With data.flip, captions that name a side are.

    Without `follow_links`, files that a link brings in from outside the folder are problems instead of items.
    """
    root = Path(path).expanduser()
    config = config or FolderConfig(folder=str(root))
    title = str(root)
    if root.is_file() and root.name.lower().endswith((".npy", ".npz", *SUFFIXES)):
        listing, root = Listing([], [root.name], [], {}), root.parent
    else:
        listing = list_folder(root, "")
    if not follow_links:
        listing = _leave_out_links(root, listing)
    report = Report(root, title, problems=list(listing.problems))
    if listing.media:
        measured = _check_media(report, listing.media, config, listing.masks)
        _check_captions(report, listing.media, listing.others, config, measured)
        splits = describe_split_folders(listing.media)
        report.notes += [splits] if splits else []
    arrays = [name for name in listing.others if name.endswith((".npy", ".npz"))]
    tars = [name for name in listing.others if name.lower().endswith(SUFFIXES)]
    if tars:
        check_shards(report, tars, [name for name in arrays if name.endswith(".npy")], config.caption_lines)
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
            f"nothing that is checked depends on {', '.join(settings)}: kineo data show {path} shows what the model sees; "
            f"keys that change what is checked are {', '.join(sorted(_CHECKED))}"
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
    """→ sizes and whole lengths of the files that can be read"""
    unusable: list[str] = []

    def measure(name: str) -> MediaInfo | Problem:
        path, suffix = report.path / name, PurePosixPath(name).suffix
        try:
            if media_kind(name) == "clip":
                info = probe_media(path, suffix, name, decode_all=True, limits=config.limits)
            else:
                with raise_unreadable(name):
                    content = read_media(path, config.limits)  # once, for both
                info = probe_media(content, suffix, name, decode_all=True, limits=config.limits)
                if has_damaged_profile(content, name):
                    unusable.append(name)
            config.trim.measure(info)  # refuses a clip of which nothing is left
            return info
        except Unreadable as error:
            return Problem(name, error.reason)

    results = _map_threads(measure, names)
    report.media += [config.trim.measure(result) for result in results if isinstance(result, MediaInfo)]
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
            f"{joined} caption {'file has' if joined == 1 else 'files have'} several lines, read as one caption; "
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
        CheckedItem(item.name, _measure_item(report, item, measured, config), tuple(found[item] or ()), item.span)
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


def _measure_item(report: Report, item: Item, measured: dict[str, MediaInfo], config: FolderConfig) -> MediaInfo | None:
    """Size and length of a file, or of a part of it, which may begin after the end of its clip."""
    info, is_cut = measured.get(item.name), config.cut is not None and item.span is not None  # cut clips are trimmed
    try:
        return info and (UNTRIMMED if is_cut else config.trim).measure(info, item.span and item.span[:2])
    except Unreadable as error:
        report.problems.append(Problem(item.identity, error.reason))
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
