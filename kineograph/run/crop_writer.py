"""`kineo data make crops`: cut many small pictures out of a few large ones, such as a folder of wallpapers.

    NAME/000017.png   the crops of one picture, in a folder of its own

With data.split_by=folder no picture has crops in both training and validation. Of a picture in several versions (sizes, light and dark,
mirrored) only the largest is used.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from pydantic import Field, model_validator

from kineograph.core.atomic_folder import write_atomically
from kineograph.core.config import Config, Tree, parse, parse_override
from kineograph.core.errors import InputError, Unreadable
from kineograph.core.media_file import MediaLimits, Meter, open_image, read_media
from kineograph.core.noise import numpy_rng
from kineograph.data.decode import IMAGES, raise_unreadable, to_channels
from kineograph.data.folder import list_folder
from kineograph.media.filenames import slugify

THUMBNAIL = 16  # pixels on a side
ALIKE = 0.95  # correlation of the thumbnails of two versions of one picture
FLAT = 8.0  # standard deviation, of 255, below which another crop is drawn, and a picture is left out
TRIES = 8

Note = Callable[[str], None]


class CropConfig(Config):
    size: int = Field(64, ge=8)
    """Height and width of a crop."""
    zoom: float = Field(8.0, ge=1)
    """A crop shows between 1/zoom of the picture's shorter side and all of it. Nothing is enlarged."""
    smallest: int = Field(512, ge=8)
    """Pictures with a shorter side below this many pixels are left out."""

    @model_validator(mode="after")
    def _check_smallest(self) -> CropConfig:
        if self.smallest < self.size:
            raise ValueError(f"smallest={self.smallest} is below size={self.size}: crops would be enlarged")
        return self


@dataclass
class Source:
    """A picture: the largest of its versions."""

    name: str
    path: Path
    pixels: int


def write_crops(
    folders: Sequence[Path], out: Path, count: int, settings: Sequence[str] = (), note: Note = print
) -> Path:
    """Write `count` crops of the pictures in `folders`, equally many of each, into a new or empty folder. → the folder."""
    tree: Tree = dict(parse_override(text) for text in settings)
    config = parse(CropConfig, tree)
    if not folders:
        raise InputError("crops are cut out of pictures of yours: add --from FOLDER")
    sources = find_sources(folders, config.smallest, note)
    if count < len(sources):
        raise InputError(f"--count {count}: there are {len(sources)} pictures; write at least one crop of each")
    with write_atomically(out.resolve(), "--out") as folder:

        def write_source(number: int) -> None:
            source = sources[number]
            (folder / source.name).mkdir()
            picture = _open_picture(source.path)
            for index in range(number, count, len(sources)):
                crop = draw_crop(picture, config, numpy_rng("crop", source.name, index))
                crop.save(folder / source.name / f"{index:0{max(6, len(str(count - 1)))}d}.png")

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow's work runs outside the GIL
            list(pool.map(write_source, range(len(sources))))
    note(f"{count} crops of {config.size} px from {len(sources)} pictures; train with data.split_by=folder")
    return out


def draw_crop(picture: Image.Image, config: CropConfig, rng: np.random.Generator) -> Image.Image:
    """A square at a random place, its side log-uniform. Of flat ones (sky, background) the liveliest of a few."""
    shorter = min(picture.size)
    smallest = max(config.size, shorter / config.zoom)
    best, spread = picture, -1.0
    for _ in range(TRIES):
        side = math.exp(rng.uniform(math.log(smallest), math.log(shorter)))
        left, top = rng.random(2) * (np.array(picture.size) - side)
        crop = picture.resize(
            (config.size, config.size),
            Image.Resampling.BICUBIC,
            box=(left, top, left + side, top + side),
            reducing_gap=3.0,
        )
        deviation = float(np.asarray(crop).std((0, 1)).mean())
        if deviation > spread:
            best, spread = crop, deviation
        if spread >= FLAT:
            break
    return best


# Sources -----------------------------------------------------------------------------------------------------------


def find_sources(folders: Sequence[Path], smallest: int, note: Note) -> list[Source]:
    """All pictures of at least `smallest` pixels on the shorter side."""
    found: dict[str, Source] = {}  # by title
    thumbnails: list[tuple[np.ndarray, str]] = []
    skipped: list[str] = []
    paths = [folder / name for folder in folders for name in list_folder(folder, "--from ").media]
    paths = [path for path in paths if path.suffix.lower() in IMAGES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        looks = list(pool.map(lambda path: _look(path, smallest), paths))
    for path, look in zip(paths, looks, strict=True):
        if isinstance(look, str):
            skipped.append(f"{path}: {look}")
            continue
        thumbnail, mirrored, pixels = look
        title = title_of(path)
        alike = (name for other, name in thumbnails if max(abs(thumbnail @ other), abs(mirrored @ other)) > ALIKE)
        if title not in found:
            title = next(alike, title)
        thumbnails.append((thumbnail, title))
        if title not in found or pixels > found[title].pixels:
            found[title] = Source(title, path, pixels)
    if skipped:
        note(f"{len(skipped)} pictures are left out, the first: {skipped[0]}")
    if not found:
        raise InputError(
            f"--from {' --from '.join(map(str, folders))} holds no picture of {smallest} px or more on the shorter side: "
            "name a folder of large pictures, or lower smallest="
        )
    return list(found.values())


def _look(path: Path, smallest: int) -> tuple[np.ndarray, np.ndarray, int] | str:
    """A picture's thumbnail, the mirrored one, and its pixels; or why it is left out."""
    try:
        picture = _open_picture(path)
    except Unreadable as error:
        return error.reason
    if min(picture.size) < smallest:
        return f"{picture.width} × {picture.height} is below smallest={smallest}"
    values = _thumbnail(picture)
    if values.std() < FLAT:
        return "shows next to nothing"
    return _standardize(values), _standardize(values[:, ::-1]), picture.width * picture.height


def title_of(path: Path) -> str:
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


def _thumbnail(picture: Image.Image) -> np.ndarray:
    """The gray centre of a picture, small."""
    small = ImageOps.fit(picture.convert("L"), (THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return np.asarray(small, np.float32)


def _standardize(values: np.ndarray) -> np.ndarray:
    """Flat, of zero mean and unit norm: a product of two is their correlation."""
    centred = values.ravel() - values.mean()
    return centred / np.linalg.norm(centred)
