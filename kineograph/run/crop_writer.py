"""`kineo data make crops`: cut many small pictures or clips out of a few large ones, such as a folder of wallpapers.

    NAME/000017.png    the crops of one picture, in a folder of its own
    NAME/000017.webp   with frames above 1, crops of a clip in space and time, and pans over a picture (lossless)

With data.split_by=folder no picture has crops in both training and validation. Of a picture in several versions (sizes, light and dark,
mirrored) only the largest is used.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from pydantic import Field, model_validator

from kineograph.core.atomic_folder import write_atomically
from kineograph.core.config import Config, Tree, parse, parse_override
from kineograph.core.errors import InputError, Unreadable
from kineograph.core.noise import numpy_rng
from kineograph.core.notes import Note
from kineograph.core.safe_media import MediaLimits, Meter, open_image, read_media
from kineograph.data.decode import decode_media, probe_media, raise_unreadable
from kineograph.data.file_listing import list_folder
from kineograph.data.media_config import CLIPS, IMAGES, DecodeOptions
from kineograph.data.picture import to_channels
from kineograph.data.transforms import ResizeCrop
from kineograph.media.filenames import slugify

THUMBNAIL = 16  # pixels on a side
ALIKE = 0.95  # correlation of the thumbnails of two versions of one picture
FLAT = 8.0  # standard deviation, of 255, below which another crop is drawn, and a picture is left out
TRIES = 8
CHUNK = 64  # crops of one source that one thread writes
PAN, PAN_ZOOM = 0.3, 1.15  # largest shift of a pan, in sides of the crop, and largest change of its side

Box = tuple[float, float, float, float]  # left, top, right, bottom


class CropConfig(Config):
    size: int = Field(64, ge=8)
    """Height and width of a crop."""
    zoom: float = Field(8.0, ge=1)
    """A crop shows between 1/zoom of the picture's shorter side and all of it. Nothing is enlarged."""
    smallest: int = Field(512, ge=8)
    """Pictures and clips with a shorter side below this many pixels are left out."""
    frames: int = Field(1, ge=1)
    """Frames of a crop. 1: pictures only; otherwise crops of clips, and pans over pictures."""
    fps: float = Field(8.0, gt=0, le=100)
    """Frame rate of crops with several frames."""

    @model_validator(mode="after")
    def _check_smallest(self) -> CropConfig:
        if self.smallest < self.size:
            raise ValueError(f"smallest={self.smallest} is below size={self.size}: crops would be enlarged")
        return self


@dataclass
class Source:
    """A picture (the largest of its versions) or a clip."""

    name: str
    path: Path
    width: int
    height: int

    @property
    def is_clip(self) -> bool:
        return self.path.suffix.lower() in CLIPS


def write_crops(
    folders: Sequence[Path], out: Path, count: int, settings: Sequence[str] = (), note: Note = print
) -> Path:
    """Write `count` crops of what `folders` hold, equally many of each, into a new or empty folder. → the folder."""
    tree: Tree = dict(parse_override(text.removeprefix("data.")) for text in settings)
    config = parse(CropConfig, tree)
    if not folders:
        raise InputError("crops are cut out of pictures of yours: add --from FOLDER")
    sources = find_sources(folders, config, note)
    if count < len(sources):
        raise InputError(f"--count {count}: there are {len(sources)} pictures; write at least one crop of each")
    digits = max(6, len(str(count - 1)))
    with write_atomically(out.resolve(), "--out") as folder:

        def write_some(source: Source, indices: Sequence[int]) -> None:
            picture = None if source.is_clip else _open_picture(source.path)
            for index in indices:
                rng = numpy_rng("crop", source.name, index)
                frames = cut_clip(source, config, rng) if picture is None else draw_crop(picture, config, rng)
                _save(frames, folder / source.name / f"{index:0{digits}d}", config.fps)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow's and FFmpeg's work runs outside the GIL
            jobs = []
            for number, source in enumerate(sources):
                (folder / source.name).mkdir()
                indices = range(number, count, len(sources))
                parts = [indices[first : first + CHUNK] for first in range(0, len(indices), CHUNK)]
                jobs += [pool.submit(write_some, source, part) for part in parts]
            for job in jobs:
                job.result()
    note(f"{count} crops of {config.size} px from {len(sources)} sources; train with data.split_by=folder")
    return out


def _save(frames: list[Image.Image], path: Path, fps: float) -> None:
    if len(frames) == 1:
        frames[0].save(path.with_suffix(".png"))
        return
    frames[0].save(
        path.with_suffix(".webp"), save_all=True, append_images=frames[1:], duration=round(1000 / fps), lossless=True
    )


def draw_crop(picture: Image.Image, config: CropConfig, rng: np.random.Generator) -> list[Image.Image]:
    """The frames of a crop. Of flat ones (sky, background) the liveliest of a few."""
    best: list[Image.Image] = []
    spread = -1.0
    for _ in range(TRIES):
        boxes = _draw_pan(picture.width, picture.height, config, rng)
        shape = (config.size, config.size)
        first = picture.resize(shape, Image.Resampling.BICUBIC, box=boxes[0], reducing_gap=3.0)
        deviation = float(np.asarray(first).std((0, 1)).mean())
        if deviation > spread:
            others = [picture.resize(shape, Image.Resampling.BICUBIC, box=box, reducing_gap=3.0) for box in boxes[1:]]
            best, spread = [first, *others], deviation
        if spread >= FLAT:
            break
    return best


def _draw_pan(width: int, height: int, config: CropConfig, rng: np.random.Generator) -> list[Box]:
    """Boxes on a straight way, from a random one to one that is shifted and zoomed a little."""
    first = _draw_side(width, height, config, rng)
    left, top = (float(rng.random()) * (length - first) for length in (width, height))
    if config.frames == 1:
        return [(left, top, left + first, top + first)]
    last = min(max(first * rng.uniform(1 / PAN_ZOOM, PAN_ZOOM), config.size), width, height)
    shift = rng.uniform(-PAN, PAN, 2) * first
    start, end = (left, top, first), (*np.clip(np.add((left, top), shift), 0, (width - last, height - last)), last)
    way = np.linspace(start, end, config.frames).tolist()
    return [(x, y, min(x + side, width), min(y + side, height)) for x, y, side in way]


def _draw_side(width: int, height: int, config: CropConfig, rng: np.random.Generator) -> float:
    """Log-uniform, between 1/zoom of the shorter side and all of it."""
    shorter = min(width, height)
    return math.exp(rng.uniform(math.log(max(config.size, shorter / config.zoom)), math.log(shorter)))


def cut_clip(source: Source, config: CropConfig, rng: np.random.Generator) -> list[Image.Image]:
    """`frames` frames from a random start, and of them a square at a random place."""
    share = _draw_side(source.width, source.height, config, rng) ** 2 / (source.width * source.height)
    crop = ResizeCrop((config.size, config.size), "resized", area=(share, share))
    options = DecodeOptions(crop, config.frames, config.fps)
    clip = decode_media(source.path, source.path.suffix, str(source.path), options, rng)
    return [Image.fromarray(frame) for frame in clip.pixels]


# Sources -----------------------------------------------------------------------------------------------------------


def find_sources(folders: Sequence[Path], config: CropConfig, note: Note) -> list[Source]:
    """All pictures of at least `smallest` pixels on the shorter side; clips too, if crops have several frames."""
    found: dict[str, Source] = {}  # by title
    thumbnails: list[tuple[np.ndarray, str]] = []
    skipped: list[str] = []
    paths = [folder / name for folder in folders for name in list_folder(folder, "--from ").media]
    if config.frames == 1:
        paths = [path for path in paths if path.suffix.lower() in IMAGES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        looks = list(pool.map(lambda path: _examine(path, config), paths))
    for path, look in zip(paths, looks, strict=True):
        if isinstance(look, str):
            skipped.append(f"{path}: {look}")
            continue
        thumbnail, mirrored, size = look
        title = find_title(path)
        alike = (name for other, name in thumbnails if max(abs(thumbnail @ other), abs(mirrored @ other)) > ALIKE)
        if title not in found:
            title = next(alike, title)
        thumbnails.append((thumbnail, title))
        if title not in found or size[0] * size[1] > found[title].width * found[title].height:
            found[title] = Source(title, path, *size)
    if skipped:
        note(f"{len(skipped)} files are left out, the first: {skipped[0]}")
    if not found:
        raise InputError(
            f"--from {' --from '.join(map(str, folders))} holds no picture of {config.smallest} px or more on the shorter side: "
            "name a folder of large pictures, or lower smallest="
        )
    return list(found.values())


def _examine(path: Path, config: CropConfig) -> tuple[np.ndarray, np.ndarray, tuple[int, int]] | str:
    """The thumbnail of a picture or of a clip's beginning, the mirrored one, and the size; or why it is left out."""
    try:
        if path.suffix.lower() in CLIPS:
            info = probe_media(path, path.suffix, str(path))
            if info.seconds < config.frames / config.fps:
                return f"{info.seconds:.3g} s are shorter than frames={config.frames} at fps={config.fps:g}"
            whole = DecodeOptions(ResizeCrop((info.height, info.width)))
            pixels = decode_media(path, path.suffix, str(path), whole, np.random.default_rng(0)).pixels
            picture = Image.fromarray(pixels[0])
        else:
            picture = _open_picture(path)
    except Unreadable as error:
        return error.reason
    if min(picture.size) < config.smallest:
        return f"{picture.width} × {picture.height} is below smallest={config.smallest}"
    values = _make_thumbnail(picture)
    if values.std() < FLAT:
        return "shows next to nothing"
    return _standardize(values), _standardize(values[:, ::-1]), picture.size


def find_title(path: Path) -> str:
    """The name without resolution and tint: of sea_1920x1080.jpg and sea-dark.jpg sea, of KDE's sea/contents/images/1920x1080.png too."""
    parts = path.parts
    if "contents" in parts[1:]:
        return slugify(parts[parts.index("contents") - 1])
    return slugify(re.sub(r"[\W_]+(\d+x\d+.*|d|l|dark|light)$", "", path.stem))


def _open_picture(path: Path) -> Image.Image:
    limits = MediaLimits()
    with raise_unreadable(str(path)), open_image(read_media(path, limits)) as image:
        Meter(limits).check_size(*image.size)
        image.load()
        return to_channels(ImageOps.exif_transpose(image), 3)


def _make_thumbnail(picture: Image.Image) -> np.ndarray:
    """The gray centre of a picture, small."""
    small = ImageOps.fit(picture.convert("L"), (THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return np.asarray(small, np.float32)


def _standardize(values: np.ndarray) -> np.ndarray:
    """Flat, of zero mean and unit norm: a product of two is their correlation."""
    centred = values.ravel() - values.mean()
    return centred / np.linalg.norm(centred)
