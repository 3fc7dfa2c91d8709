"""`kineo data make`: write moving digits as a dataset, in each format that can be read back. For the other sets see crop_writer.py and emoji_writer.py.

    gif, mp4, png   000017.gif beside 000017.txt (its caption); png is one picture an item; with sample_rate 000017.wav too
    memmap          videos.npy, uint8, N T C H W · labels.npy, int64, N × digits, in the order of the caption · captions.txt, one a line
    webdataset      shard-000000.tar … with KEY.gif (or mp4, png, jpg, webp), KEY.txt and KEY.json for each item; embeddings beside

The folder gets its name when it is complete; a killed process leaves a hidden folder beside it.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import numpy as np
from torch import Tensor

from kineograph.core.atomic_folder import write_atomically
from kineograph.core.batch import Sample, Sound
from kineograph.core.config import Tree, parse, parse_override, unknown_key
from kineograph.core.errors import InputError
from kineograph.data.arrays import ArrayWriter
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
from kineograph.data.open_source import Split
from kineograph.data.shard_writer import LARGEST, ShardWriter, SupportsEmbedding
from kineograph.media.clips import write_clip
from kineograph.media.frames import to_images
from kineograph.run.crop_writer import write_crops
from kineograph.run.emoji_writer import write_emoji

KINDS = ("moving-digits", "crops", "emoji")
COUNT = 100  # default of --count
CLIP_FRAMES = 16  # default of `frames`; png has one
# Keys of data.* that --count and --split replace, and `sketch`, which no file can hold (shows=sketch writes sketches).
_NOT_HERE = ("source", "validation", "test", "max_unreadable", "count", "sketch")
_SHARD = 1000
_LINE_EVERY = 10.0  # seconds between lines when there is no terminal


@dataclass(frozen=True)
class _Job:
    """A dataset to write, and its folder."""

    source: MovingDigits
    count: int
    folder: Path
    suffix: str  # of media files
    shard: int
    embedder: SupportsEmbedding | None = None

    def name(self, index: int) -> str:
        return f"{index:0{max(6, len(str(self.count - 1)))}d}"


def write_dataset(
    what: str,
    out: str | Path,
    count: int | None = None,
    as_: str | None = None,
    settings: Sequence[str] = (),
    split: str = "train",
    embeddings: str | SupportsEmbedding | None = None,
    sources: Sequence[Path] = (),
) -> Path:
    """Write `count` items into a new or empty folder. → the folder.

    `count` is 100 unless given; emoji are written all. `embeddings` is a run whose CLIP stage embeds pictures and captions
    (`RUN` or `RUN/STAGE`), or an embedder; `sources` are the folders that crops are cut out of, or the emoji's package.
    """
    if what.replace("_", "-") not in KINDS:
        raise InputError(f"{what!r} cannot be made: use {', '.join(KINDS)}")
    if what == "emoji":
        if as_ not in (None, "png") or split != "train" or embeddings is not None or settings or count is not None:
            raise InputError("emoji are PNG files, written all: remove --count, --as, --split, --embeddings and keys")
        if len(sources) > 1:
            raise InputError("emoji come from one package: give --from once")
        return write_emoji(Path(out), sources[0] if sources else None)
    count = COUNT if count is None else count
    if what == "crops":
        if as_ not in (None, "png") or split != "train" or embeddings is not None:
            raise InputError("crops are PNG files of all pictures: remove --as, --split and --embeddings")
        return write_crops(sources, Path(out), count, settings)
    if sources:
        raise InputError("--from goes with crops and emoji: digits are drawn from nothing")
    as_ = as_ or "gif"
    if as_ not in FORMATS:
        raise InputError(f"--as {as_}: use {', '.join(FORMATS)}")
    if split not in get_args(Split):
        raise InputError(f"--split {split}: use {', '.join(get_args(Split))}")
    if count < 1:
        raise InputError(f"--count {count}: write at least 1 item")
    if embeddings is not None and as_ != "webdataset":
        raise InputError(f"--embeddings goes with --as webdataset, not with --as {as_}")
    config, shard, suffix = _read_settings(settings, as_)
    embedder = open_embedder(embeddings) if isinstance(embeddings, str) else embeddings
    source = MovingDigits(config, cast(Split, split))
    with write_atomically(Path(out).resolve(), "--out") as folder:
        FORMATS[as_](_Job(source, count, folder, suffix, shard, embedder))
    return Path(out)


def _read_settings(settings: Sequence[str], as_: str) -> tuple[MovingDigitsConfig, int, str]:
    """`key=value` of data.*, and for webdataset `shard` (items a file) and `format` (of its media)."""
    known = [name for name in MovingDigitsConfig.model_fields if name not in _NOT_HERE]
    if as_ == "webdataset":
        known += ["shard", "format"]
    tree: Tree = {}
    for text in settings:
        key, value = parse_override(text)
        key = key.removeprefix("data.")
        if key not in known:
            raise InputError(unknown_key(key, known))
        tree[key] = value
    shard, media = tree.pop("shard", _SHARD), tree.pop("format", None)
    if not isinstance(shard, int) or isinstance(shard, bool) or not 1 <= shard <= LARGEST:
        raise InputError(f"shard={shard!r}: give the number of items a tar file, 1 to {LARGEST}")
    is_still = as_ == "png" or media in _STILL
    config = parse(MovingDigitsConfig, {"frames": 1 if is_still else CLIP_FRAMES, **tree})
    if config.stills and as_ == "memmap":
        raise InputError(
            f"stills={config.stills:g} does not fit a memmap, whose items are all clips: remove it, or use gif, mp4 or webdataset"
        )
    if config.sample_rate is not None and as_ not in ("gif", "mp4"):
        raise InputError(
            f"sample_rate={config.sample_rate} goes with --as mp4 or gif (sound as .wav), not with --as {as_}"
        )
    if media is None:
        media = as_ if as_ in _MEDIA else "png" if config.frames == 1 else "gif"
    if media not in (*_MEDIA, *_STILL):
        raise InputError(f"format={media}: use {', '.join(dict.fromkeys((*_MEDIA, *_STILL)))}")
    if media in _STILL and config.frames > 1:
        raise InputError(
            f"frames={config.frames} does not fit {media}, which holds one picture: use frames=1, or gif or mp4 for clips"
        )
    return config, shard, f".{media}"


# Formats ---------------------------------------------------------------------------------------------------------


def _read_item(job: _Job, index: int) -> tuple[Sample, Tensor, float]:
    """→ the item, its pixels and its fps"""
    sample = job.source.read(index)
    assert sample.pixels is not None and sample.fps is not None
    return sample, sample.pixels, sample.fps


def _write_files(job: _Job) -> None:
    for index in _show_progress(job):
        sample, pixels, fps = _read_item(job, index)
        rate, audio = job.source.config.sample_rate, sample.extra.get("audio")
        sound = Sound(audio, rate) if audio is not None and rate is not None else None
        path = write_clip(job.folder / f"{job.name(index)}{job.suffix}", pixels, fps, sound)
        path.with_suffix(".txt").write_text(f"{sample.caption}\n", encoding="utf-8")


def _write_memmap(job: _Job) -> None:
    config = job.source.config
    shape = (job.count, config.frames, config.channels, *config.size)
    videos = ArrayWriter(job.folder / "videos.npy", "uint8", shape)
    labels = np.empty((job.count, config.digits), dtype=np.int64)
    with open(job.folder / "captions.txt", "w", encoding="utf-8") as captions:
        for index in _show_progress(job):
            sample, pixels, _ = _read_item(job, index)
            videos.write(index, pixels.numpy()[None])
            labels[index] = [figure.digit for figure in job.source.facts(index)]
            captions.write(f"{sample.caption}\n")
    videos.close()
    np.save(job.folder / "labels.npy", labels)


def _write_shards(job: _Job) -> None:
    with ShardWriter(job.folder, job.shard, job.embedder) as writer:
        for index in _show_progress(job):
            sample, pixels, fps = _read_item(job, index)
            figures = [
                {key: value for key, value in vars(figure).items() if value is not None}
                for figure in job.source.facts(index)
            ]
            facts = {"identity": job.source.identity(index), "fps": fps, "figures": figures}
            media = _encode_media(job, pixels, fps)
            writer.add(media, job.suffix[1:], str(sample.caption), facts, pixels, sample.frame_mask)


def _encode_media(job: _Job, pixels: Tensor, fps: float) -> bytes:
    if job.suffix in (".jpg", ".webp"):
        buffer = io.BytesIO()
        form, options = ("JPEG", {"quality": 95}) if job.suffix == ".jpg" else ("WEBP", {"lossless": True})
        to_images(pixels)[0].convert("RGB").save(buffer, form, **options)
        return buffer.getvalue()
    path = write_clip(job.folder / f".item{job.suffix}", pixels, fps)
    content = path.read_bytes()
    path.unlink()
    return content


def open_embedder(reference: str) -> SupportsEmbedding:
    """Load the CLIP stage of a run (`RUN`), or a given stage (`RUN/STAGE`)."""
    from kineograph.core import distributed
    from kineograph.core.registry import find_task
    from kineograph.core.run_folder import RunFolder
    from kineograph.stage.load import StageLoader

    path = Path(reference)
    if not (path / "config.yaml").exists() and (path.parent / "config.yaml").exists():
        run, names = RunFolder.existing(path.parent), [path.name]
        if path.name not in run.config()["stages"]:
            raise InputError(
                f"--embeddings {reference}: the stages of {run.path} are {', '.join(run.config()['stages'])}"
            )
    else:
        run = RunFolder.existing(path)
        names = list(run.config()["stages"])
    embedders = [
        name for name in names if issubclass(find_task(run.config()["stages"][name]["task"]), SupportsEmbedding)
    ]
    if not embedders:
        raise InputError(
            f"--embeddings {reference}: none of the stages {', '.join(names)} embeds pictures and texts; name a run with a stage of task: clip"
        )
    clip = StageLoader(run, distributed.resolve_device()).load(embedders[0])
    assert isinstance(clip, SupportsEmbedding)
    return clip


_MEDIA = ("gif", "mp4", "png")
_STILL = ("png", "jpg", "webp")
FORMATS: dict[str, Callable[[_Job], None]] = {
    **dict.fromkeys(_MEDIA, _write_files),
    "memmap": _write_memmap,
    "webdataset": _write_shards,
}


def _show_progress(job: _Job) -> Iterator[int]:
    """Yield the indices; show a bar on a terminal, and elsewhere a line every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(range(job.count), "writing", console=Console(stderr=True), transient=True)
        return
    last = time.monotonic()
    for index in range(job.count):
        if time.monotonic() - last > _LINE_EVERY:
            last = time.monotonic()
            print(f"{index} of {job.count} written", file=sys.stderr, flush=True)
        yield index
