"""Sets of pictures or clips that metrics compare: the files of a folder, or a split of a run's data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from kineograph.core import distributed, heartbeat
from kineograph.core.batch import Shape
from kineograph.core.errors import InputError, NoData, Unreadable
from kineograph.core.noise import key_of
from kineograph.core.protocols import Source
from kineograph.core.run_folder import RunFolder
from kineograph.core.text_file import parse_json, read_regular
from kineograph.data.decode import decode_media, probe_media
from kineograph.data.file_listing import list_folder
from kineograph.data.folder import Folder, FolderConfig
from kineograph.data.loader import Loader
from kineograph.data.media_config import CLIPS, IMAGES, DecodeOptions, media_kind
from kineograph.data.mix import MixConfig
from kineograph.data.open_source import DataConfig, Split, open_source
from kineograph.data.transforms import ResizeCrop
from kineograph.media.grids import select_evenly

MAX_FRAMES = 512  # of a clip that is read whole
MAX_VALUES = 2**28  # of an item or a batch: 1 GiB as floats
MAX_UNREADABLE = 0.2  # share of the files
MAX_ITEMS = 50_000  # of a split, unless the user says how many: moving digits have no end


@dataclass(frozen=True)
class Clips:
    """Clips of one size, B T C H W in [0, 1]; frame_mask B T, False where a frame is padding; None: no padding."""

    pixels: Tensor
    frame_mask: Tensor | None = None


class PictureSet(Protocol):
    @property
    def label(self) -> str: ...

    def __len__(self) -> int: ...

    def shape(self) -> Shape:
        """Of the first item; `frames` is 1 where all are pictures."""

    def batches(self, size: int) -> Iterator[Clips]:
        """This process's share of the items, each once."""


class FromStart(np.random.Generator):
    """Stands in for a random generator: clips are read from their start."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def random(self, *args: Any, **options: Any) -> Any:
        return 0.0

    def integers(self, *args: Any, **options: Any) -> Any:
        return 0


@dataclass
class MediaFolder:
    """Files of a folder and its subfolders, each at its own size, or scaled and cropped to `size` as training does.

    Clips are read from their start: all frames at their own rate, or the first `frames`, at `fps`.
    """

    root: Path
    files: list[str]  # those that are read
    listed: list[str]  # all, in which pairs are looked up
    size: tuple[int, int] | None = None
    frames: int | None = None
    fps: float | None = None
    note: Callable[[str], None] = lambda line: None
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # height and width of the items that were read
    unreadable: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return str(self.root)

    def __len__(self) -> int:
        return len(self.files)

    def shape(self) -> Shape:
        for name in self.files:
            try:
                clip = self.read(name)
            except Unreadable:
                continue
            frames = clip.shape[0]
            if any(media_kind(name) == "clip" for name in self.files):
                frames = max(frames, self.frames or 16)
            return Shape(frames, clip.shape[2], clip.shape[3], 3, self.fps or 8.0)
        raise InputError(
            f"none of the {len(self.files)} files in {self.root} can be read: kineo data check {self.root} says why"
        )

    def read(self, name: str) -> Tensor:
        """T 3 H W in [0, 1]. Raises Unreadable."""
        path = self.root / name
        info = probe_media(path, path.suffix, name)
        frames = self.frames or info.frames_at(self.fps)
        if self.frames is None and frames > MAX_FRAMES:
            raise InputError(
                f"{path} has {frames:,} frames: give --frames N to compare the first N of each clip, up to {MAX_FRAMES}"
            )
        height, width = self.size or (info.height, info.width)
        if 3 * frames * height * width > MAX_VALUES:
            raise InputError(
                f"{path} has {frames:,} frames of {height} × {width} pixels, and up to {MAX_VALUES // 3:,} pixels fit into one item: "
                "give --size, or a smaller --frames"
            )
        options = DecodeOptions(ResizeCrop((height, width)), frames, self.fps)
        pixels = decode_media(path, path.suffix, name, options, FromStart()).pixels  # T H W C
        return rearrange(torch.tensor(pixels), "t h w c -> t c h w").float().div_(255)

    def count_size(self, clip: Tensor) -> None:
        self.sizes[clip.shape[2], clip.shape[3]] += 1

    def batches(self, size: int) -> Iterator[Clips]:
        self.sizes.clear()
        waiting: list[Tensor] = []
        for name in self.files[distributed.data_rank() :: distributed.data_world()]:
            heartbeat.beat()
            try:
                clip = self.read(name)
            except Unreadable as error:
                self.unreadable[name] = error.reason
                continue
            self.count_size(clip)
            is_full = len(waiting) == size or (len(waiting) + 1) * clip.numel() > MAX_VALUES
            if waiting and (is_full or clip.shape != waiting[0].shape):
                yield Clips(torch.stack(waiting))
                waiting = []
            waiting.append(clip)
        if waiting:
            yield Clips(torch.stack(waiting))
        self._report_unreadable()

    def _report_unreadable(self) -> None:
        if not self.unreadable:
            return
        name, reason = next(iter(self.unreadable.items()))
        text = f"{len(self.unreadable)} of {len(self.files)} files in {self.root} cannot be read, such as {name} ({reason})"
        if len(self.unreadable) > MAX_UNREADABLE * len(self.files):
            raise InputError(f"{text}: remove or replace them (kineo data check {self.root} lists them)")
        self.note(f"{text}: they are not counted")

    def describe_sizes(self) -> str:
        """`64 × 64`, or how many sizes there are."""
        names = [f"{height} × {width}" for height, width in sorted(self.sizes)]
        return names[0] if len(names) == 1 else f"{len(names)} sizes, {names[0]} to {names[-1]}" if names else "none"


@dataclass
class SplitItems:
    """A split of a data source, as a stage reads it, without random crops and flips."""

    source: Source
    data: DataConfig
    label: str
    seed: int
    count: int
    resize: Callable[[Tensor], Tensor] = lambda pixels: pixels

    def __len__(self) -> int:
        return self.count

    def shape(self) -> Shape:
        return self.data.shape

    def batches(self, size: int) -> Iterator[Clips]:
        world = distributed.data_world()
        loader = Loader(self.source, seed=self.seed, batch_size=world, rank=distributed.data_rank(), world=world)
        for batch in loader.fixed_batches(self.count, size * world):
            heartbeat.beat()
            if not batch.spare:
                yield Clips(self.resize(batch.video), batch.frame_mask)


def open_folder(
    path: Path,
    *,
    split: Split | None = None,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    fps: float | None = None,
    limit: int | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> MediaFolder:
    """The files of a folder, or of one split of it (folders train, validation and test, or shares by name, as in training)."""
    listing = list_folder(path, "")
    if not listing.media:
        known = ", ".join(suffix[1:] for suffix in (*IMAGES, *CLIPS))
        found = Counter(PurePosixPath(name).suffix or "(no suffix)" for name in listing.others).most_common(4)
        text = ", ".join(f"{count} {suffix}" for suffix, count in found) or "no files"
        raise InputError(f"{path} holds no pictures or clips: looked for {known}, also in subfolders, and found {text}")
    drawn = _read_previews(path, listing.others)
    files = _leave_out_sheets(listing.media, listing.others, drawn)
    if len(files) < len(listing.media):
        count = len(listing.media) - len(files)
        counted = "1 contact sheet of drawn files is" if count == 1 else f"{count} contact sheets of drawn files are"
        note(f"{path}: {counted} left out")
    if split is not None:
        own = {item.name for item in Folder.open(FolderConfig(folder=str(path)), split, 0).items}
        files = [name for name in files if name in own]
    for problem in listing.problems:
        note(f"{problem.path}: {problem.reason}")
    # Evenly spaced: the first files of a folder may be of one class.
    chosen = [files[index] for index in select_evenly(len(files), limit)] if limit is not None else files
    return MediaFolder(path, chosen, files, size, frames, fps, note)


def _read_previews(root: Path, others: list[str]) -> dict[PurePosixPath, set[str]]:
    """Folder of samples of a training step → the files that were drawn there, by its prompts.json."""
    drawn = {}
    for name in others:
        path = PurePosixPath(name)
        if path.name == "prompts.json":
            with suppress(OSError, ValueError):
                rows = parse_json(read_regular(root / name))
                if isinstance(rows, list) and rows and all(isinstance(row, dict) and "file" in row for row in rows):
                    drawn[path.parent] = {str(row["file"]) for row in rows}
    return drawn


def _leave_out_sheets(media: list[str], others: list[str], drawn: dict[PurePosixPath, set[str]]) -> list[str]:
    """Without what is written beside drawn files.

    `kineo sample` and `kineo story` write sheet-0001.png, and NAME.png of NAME.gif. Training writes grids and film strips, and
    `online/`, the same prompts without the average of weights; `drawn` lists what counts there.
    """
    sidecars = {name.removesuffix(".json") for name in others if name.endswith(".json")}
    folders = {PurePosixPath(stem).parent for stem in sidecars}
    clips = {str(PurePosixPath(name).with_suffix("")) for name in media if media_kind(name) == "clip"} & sidecars

    def is_sheet(name: str) -> bool:
        path = PurePosixPath(name)
        if path.parent in drawn:
            return path.name not in drawn[path.parent]
        if path.parent.name == "online" and path.parent.parent in drawn:
            return True
        if path.suffix != ".png" or path.parent not in folders:
            return False
        stem = str(path.with_suffix(""))
        return stem in clips or (bool(re.fullmatch(r"sheet-\d{4,}", path.stem)) and stem not in sidecars)

    return [name for name in media if not is_sheet(name)]


def open_split(
    data: DataConfig,
    split: Split,
    seed: int,
    label: str,
    limit: int | None = None,
    resize: Callable[[Tensor], Tensor] = lambda pixels: pixels,
    dataset: Any = None,
    note: Callable[[str], None] = lambda line: None,
) -> SplitItems:
    """A split of a stage's data, with what training varies at random switched off."""
    still = {"flip": 0.0, "crop": "center", "rotate": False}
    present: dict[str, Any] = {key: value for key, value in still.items() if key in type(data).model_fields}
    if isinstance(data, MixConfig):  # its parts may have their own
        present["mix"] = {
            name: {key: value for key, value in part.items() if key not in still} for name, part in data.mix.items()
        }
    source = open_source(data.model_copy(update=present), split, seed, dataset)
    count = min(len(source), limit or MAX_ITEMS)
    if count < len(source):
        note(f"{label}: {count:,} of {len(source):,} items")
    return SplitItems(source, data, f"{label} ({count:,} items)", key_of(seed, "reference") >> 1, count, resize)


def open_run_split(run: Path, split: Split, limit: int | None, note: Callable[[str], None]) -> SplitItems:
    """A split of the data that the last stage of a run reads."""
    from kineograph.stage.spec import read_stage

    tree = RunFolder.existing(run).config()
    data = read_stage(tree, list(tree["stages"])[-1]).data
    if data.source == "dataset":
        raise InputError(f"{run} was trained on a Dataset object: write its items to a folder first")
    try:
        return open_split(data, split, int(tree.get("seed", 0)), f"{run}: {split} split", limit, note=note)
    except NoData as error:
        raise InputError(f"{error}; if the data were moved, give their folder instead of {run}") from None


def pair_files(drawn: MediaFolder, real: MediaFolder) -> Iterator[tuple[Tensor, Tensor]]:
    """Items of two folders with the same name (the suffix may differ), one at a time: drawn, real, T 3 H W each."""
    stems = {str(PurePosixPath(name).with_suffix("")): name for name in real.listed}
    missing = [name for name in drawn.files if str(PurePosixPath(name).with_suffix("")) not in stems]
    if missing:
        raise InputError(
            f"{len(missing)} of {len(drawn.files)} files in {drawn.root} have no file of that name in {real.root}, such as "
            f"{missing[0]}: name each as its real picture, or leave the metrics of pairs out"
        )
    for name in drawn.files:
        try:
            pair = drawn.read(name), real.read(stems[str(PurePosixPath(name).with_suffix(""))])
            for folder, clip in zip((drawn, real), pair, strict=True):
                folder.count_size(clip)
            yield pair
        except Unreadable as error:
            raise InputError(
                f"{error.path} cannot be read ({error.reason}): replace or remove both files of the pair"
            ) from None


def read_at(folder: MediaFolder, shape: Shape, fps: float | None) -> MediaFolder:
    """The folder as a run with this shape reads its data."""
    return replace(folder, size=(shape.height, shape.width), frames=shape.frames, fps=fps)
