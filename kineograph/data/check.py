"""`kineo data check DIR`: what a folder holds, and everything that is wrong with it."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from kineograph.core.config import merge, nest, parse, parse_override
from kineograph.core.errors import ConfigError, InputError, Unreadable
from kineograph.data.captions import Problem, find_captions, read_caption
from kineograph.data.decode import VIDEOS, kind_of, measure_picture, reasons
from kineograph.data.folder import Folder, FolderConfig, items_of, list_folder

_ABOUT = {"readme", "license", "licence", "notice", "changelog"}  # .txt files that are about the folder


@dataclass(frozen=True)
class Media:
    """One picture or clip that could be decoded to its end."""

    name: str
    width: int
    height: int
    frames: int = 1
    seconds: float = 0.0  # 0: a still

    @property
    def fps(self) -> float | None:
        return self.frames / self.seconds if self.seconds else None


@dataclass
class Report:
    """Counts, what was measured, and problems. `kineo data check` ends with 1 where there are any."""

    path: Path
    kinds: Counter[str] = field(default_factory=Counter)
    media: list[Media] = field(default_factory=list)
    items: int = 0
    """Pictures and clips, or in place of a clip its parts that are captioned one by one."""
    captions: list[str] = field(default_factory=list)
    """Of those items that have one."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.kinds.values())

    def lines(self) -> list[str]:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common()) or "nothing to train on"
        lines = [f"{self.path}: {counts}", *self.notes]
        if self.media:
            lines += [
                _spread("width", [media.width for media in self.media]),
                _spread("height", [media.height for media in self.media]),
            ]
            lines.append(_spread("aspect", [media.width / media.height for media in self.media], ".2f"))
        clips = [media for media in self.media if media.seconds]
        if clips:
            lines.append(_spread("clip frames", [clip.frames for clip in clips]))
            lines.append(_spread("clip seconds", [clip.seconds for clip in clips], ".2f"))
            lines.append(_spread("clip fps", [clip.fps or 0 for clip in clips], ".2f"))
        if any(kind.startswith(("images", "clips")) for kind in self.kinds):  # notes tell about arrays and shards
            lines.append(self._captions_line())
        lines.append(f"{len(self.problems)} problems" if len(self.problems) != 1 else "1 problem")
        return lines + [f"  {path}: {reason}" for path, reason in self.problems]

    def _captions_line(self) -> str:
        texts = self.captions
        if not texts:
            return "captions: none (fine for a tokenizer; a stage that reads text needs them)"
        words = [len(text.split()) for text in texts]
        repeated = len(texts) - len(set(texts))
        return (
            f"captions: {len(texts)} of {self.items} ({self.items - len(texts)} missing), {repeated} repeated, "
            f"words {min(words)} to {max(words)} (median {statistics.median(words):g})"
        )


def _spread(name: str, values: list[float] | list[int], form: str = "g") -> str:
    return f"{name}: {min(values):{form}} to {max(values):{form}}, median {statistics.median(values):{form}}"


def check_folder(
    path: Path | str, threads: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Report:
    """Decode everything, to the last frame."""
    root = Path(path).expanduser()
    listing = list_folder(root, "")
    report = Report(root, problems=list(listing.problems))
    if listing.media:
        _check_media(report, listing.media, threads, progress)
        _check_captions(report, listing.media, listing.others)
    arrays = [name for name in listing.others if name.endswith(".npy")]
    tars = [name for name in listing.others if name.endswith(".tar")]
    if tars:
        from kineograph.data.check_shards import check_shards

        notes, problems = check_shards(root, tars, arrays, threads, progress)
        report.kinds["shards (tar)"] += len(tars)
        report.notes += notes
        report.problems += problems
    elif not listing.media:
        _check_arrays(report, arrays)
    if not report.count and not report.problems:
        found = Counter(PurePosixPath(name).suffix or name for name in listing.others)
        report.problems.append(
            Problem(
                ".",
                f"no pictures, clips, arrays or tar shards; {', '.join(f'{n} {s}' for s, n in found.most_common(5)) or 'no files at all'}",
            )
        )
    return report


def measure(path: Path, name: str) -> Media:
    with reasons(name):
        if path.suffix.lower() in VIDEOS:
            from kineograph.data.video import measure as measure_video

            return Media(name, *measure_video(path))
        return Media(name, *measure_picture(path.read_bytes()))


def bucket_config(path: Path | str, settings: Sequence[str]) -> FolderConfig:
    """What `settings` ask of a folder: keys of data.*, with or without that prefix. Wrong ones are refused before anything is read."""
    tree: dict[str, Any] = {"folder": str(path), "validation": 0, "max_unreadable": 1.0}
    for text in settings:
        key, value = parse_override(text.removeprefix("data."))
        tree = merge(tree, nest(key, value))
    config = parse(FolderConfig, tree, "data")
    if config.buckets is None:
        raise ConfigError(
            "these keys ask for no buckets: add 'buckets={}', or the shapes as in 'buckets={sizes: [[480, 720], [720, 480]]}'"
        )
    return config


def bucket_lines(config: FolderConfig) -> list[str]:
    """What `data.buckets` would make of a folder."""
    found = Folder.open(config, "train", 0)
    assert found.buckets is not None
    return found.buckets.lines()


def _check_media(
    report: Report, names: list[str], threads: int | None, progress: Callable[[int, int], None] | None
) -> None:
    def attempt(name: str) -> Media | Problem:
        try:
            return measure(report.path / name, name)
        except Unreadable as error:
            return Problem(name, error.reason)

    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        for done, found in enumerate(pool.map(attempt, names), 1):
            (report.problems if isinstance(found, Problem) else report.media).append(found)  # type: ignore[arg-type]
            if progress:
                progress(done, len(names))
    report.kinds.update(f"{kind_of(name)}s ({PurePosixPath(name).suffix.lower()[1:]})" for name in names)


def _check_captions(report: Report, names: list[str], others: list[str]) -> None:
    try:
        found = find_captions(report.path, names, others)
    except InputError as error:
        report.problems.append(Problem("captions", str(error)))
        return
    report.problems += found.problems
    if found.spans:
        report.notes.append(f"{sum(map(len, found.spans.values()))} captioned parts of {len(found.spans)} clips")
    texts, unread = dict(found.given), set()
    for name, text_file in found.sidecar.items():
        if name in found.spans:  # its parts have texts of their own
            continue
        try:
            text = read_caption(report.path / text_file)
        except UnicodeDecodeError:
            report.problems.append(Problem(text_file, "not UTF-8 text"))
        except OSError as error:
            report.problems.append(Problem(text_file, f"cannot be read: {error.strerror}"))
        else:
            if text:
                texts[name] = text
                continue
            report.problems.append(Problem(text_file, "an empty caption"))
        unread.add(name)
    lonely = [name for name in found.unused if PurePosixPath(name).stem.lower() not in _ABOUT]
    report.problems += [Problem(name, "a caption without picture or clip") for name in lonely]
    items = items_of(names, found)
    captioned = {item: said for item in items if (said := item.span.text if item.span else texts.get(item.name))}
    report.items, report.captions = len(items), list(captioned.values())
    if captioned or unread:  # a folder without any captions is no problem: a tokenizer trains on it
        report.problems += [
            Problem(item.identity, "no caption") for item in items if item not in captioned and item.name not in unread
        ]


def _check_arrays(report: Report, names: list[str]) -> None:
    from kineograph.data.arrays import Array, lines_beside

    counts = {}
    for name in names:
        try:
            array = Array.npy(report.path / name)
        except InputError as error:
            report.problems.append(Problem(name, str(error)))
            continue
        report.kinds["arrays (npy)"] += 1
        report.notes.append(f"{name}: {array.dtype} {' × '.join(map(str, array.shape))}")
        counts[name] = array.shape
    videos = {name: shape for name, shape in counts.items() if PurePosixPath(name).stem != "labels"}
    for name, shape in videos.items():
        labels = counts.get(str(PurePosixPath(name).with_name("labels.npy")))
        try:
            captions = lines_beside(report.path / name)
        except InputError as error:
            report.problems.append(Problem(name, str(error)))
            captions = None
        for what, count in (
            ("labels", labels[0] if labels else None),
            ("captions", len(captions) if captions is not None else None),
        ):
            if count is not None:
                report.notes.append(f"{name}: {count} {what} beside it")
            if count is not None and count not in shape[:2]:
                report.problems.append(Problem(name, f"{count} {what} fit neither axis of {shape[:2]}"))
