"""Sheets of pictures: contact sheets with captions, film strips, and rows of clips to compare."""

from __future__ import annotations

import importlib.util
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from kineograph.media.frames import blend_over_black, to_images, to_pixels

MIN_SIDE, MAX_SIDE = 96, 256  # pixels of a cell's larger side: pictures are enlarged or reduced to that
GAP = 6
MAX_LINES = 3  # of a caption
STRIP = 8  # frames per row of a film strip
PAGE, INK, FAINT = (255, 255, 255), (40, 40, 40), (110, 110, 110)


def make_grid(cells: Sequence[Tensor], captions: Sequence[str | None] | None = None) -> Image.Image:
    """A contact sheet of pictures or clips T C H W; a clip shows four of its frames."""
    images = [_strip(_frames(cell), 4, 4) for cell in cells]
    return _Sheet(images, _columns(images), captions).paint(images)


def add_footer(page: Image.Image, lines: Sequence[str]) -> Image.Image:
    """The page with lines of text below it, wrapped to its width."""
    texts = [text for line in lines for text in wrap_text(line, page.width - 2 * GAP, lines=8)]
    if not texts:
        return page
    whole = Image.new("RGB", (page.width, page.height + len(texts) * _line_height() + GAP), PAGE)
    whole.paste(page)
    draw = ImageDraw.Draw(whole)
    for number, text in enumerate(texts):
        draw.text((GAP, page.height + number * _line_height()), text, INK, _font())
    return whole


def make_animated_grid(cells: Sequence[Tensor], captions: Sequence[str | None] | None = None) -> Tensor:
    """The clips playing side by side, T 3 H W; a shorter one holds its last frame."""
    clips = [_frames(cell) for cell in cells]
    first = [clip[0] for clip in clips]
    return _play(_Sheet(first, _columns(first), captions), clips)


def make_film_strip(clip: Tensor) -> Image.Image:
    """Frames in rows of eight; of a long clip, 32 evenly spaced ones with the first and the last."""
    return _strip(_frames(clip), 4 * STRIP, STRIP)


def make_titled_strips(rows: Sequence[tuple[str, Tensor]]) -> Image.Image:
    """One film strip per row under its title: eight evenly spaced frames of each clip T C H W."""
    images = [_strip(_frames(clip[select_evenly(len(clip), STRIP)]), STRIP, STRIP) for _, clip in rows]
    wide = max(image.width for image in images)
    padded = [ImageOps.pad(image, (wide, image.height), color=PAGE, centering=(0, 0)) for image in images]
    return _Sheet(padded, 1, titles=[title for title, _ in rows]).paint(padded)


def select_evenly(count: int, most: int) -> list[int]:
    """At most `most` evenly spaced indices of 0 … count − 1, with the first and the last."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()


def make_comparison(rows: Sequence[tuple[str, Sequence[Tensor]]], captions: Sequence[str | None]) -> Image.Image:
    """Rows of equally many pictures or clips under their titles (real, generated, …), with a caption below each column."""
    images = [_strip(_frames(cell), 4, 2) for _, cells in rows for cell in cells]
    columns = len(captions)
    below = [""] * (len(images) - columns) + list(captions)
    return _Sheet(images, columns, below, [title for title, _ in rows]).paint(images)


def make_animated_comparison(rows: Sequence[tuple[str, Sequence[Tensor]]]) -> Tensor:
    """Rows of pictures or clips playing under their titles (input, reconstruction, …), T 3 H W; T = 1 for pictures."""
    clips = [[_frames(cell) for cell in cells] for _, cells in rows]
    columns = max(len(row) for row in clips)
    blank = [Image.new("RGB", (1, 1), PAGE)]
    flat = [clip for row in clips for clip in [*row, *[blank] * (columns - len(row))]]
    return _play(_Sheet([clip[0] for clip in flat], columns, titles=[title for title, _ in rows]), flat)


# Layout ----------------------------------------------------------------------------------------------------------


class _Sheet:
    """A page with captions and titles, and the corners of its cells."""

    def __init__(
        self,
        images: Sequence[Image.Image],
        columns: int,
        captions: Sequence[str | None] | None = None,
        titles: Sequence[str] | None = None,
    ) -> None:
        if not images:
            raise ValueError("a sheet needs at least one picture")
        columns = max(1, min(columns, len(images)))
        rows = math.ceil(len(images) / columns)
        wide, high = max(image.width for image in images), max(image.height for image in images)
        texts = [wrap_text(text or "", wide) for text in captions or []]
        line = _line_height()
        heads = [wrap_text(title, columns * (wide + GAP) - GAP) for title in titles or []]
        above = max(map(len, heads)) * line + 2 if heads else 0
        below = [max(map(len, texts[row * columns : (row + 1) * columns]), default=0) * line for row in range(rows)]
        tops = [GAP + row * (above + high + GAP) + sum(below[:row]) for row in range(rows + 1)]
        self.page = Image.new("RGB", (GAP + columns * (wide + GAP), tops[-1]), PAGE)
        self.corners = []
        draw = ImageDraw.Draw(self.page)
        for index, image in enumerate(images):
            row, column = divmod(index, columns)
            x, y = GAP + column * (wide + GAP), tops[row]
            head = heads[row] if heads and column == 0 else []
            for number, text in enumerate(reversed(head), 1):  # right above the pictures
                draw.text((x, y + above - 2 - number * line), text, INK, _font())
            self.corners.append((x + (wide - image.width) // 2, y + above + (high - image.height) // 2))
            for number, text in enumerate(texts[index] if index < len(texts) else []):
                draw.text((x, y + above + high + 1 + number * line), text, FAINT, _font())

    def paint(self, images: Sequence[Image.Image]) -> Image.Image:
        page = self.page.copy()
        for image, corner in zip(images, self.corners):
            page.paste(image, corner)
        return page


def _play(sheet: _Sheet, clips: Sequence[Sequence[Image.Image]]) -> Tensor:
    length = max(len(clip) for clip in clips)
    return to_pixels([sheet.paint([clip[min(time, len(clip) - 1)] for clip in clips]) for time in range(length)])


def _strip(frames: list[Image.Image], most: int, columns: int) -> Image.Image:
    if len(frames) > most:
        frames = [frames[index] for index in select_evenly(len(frames), most)]
    if len(frames) == 1:
        return frames[0]
    gap = 2
    wide, high = frames[0].size
    columns = min(columns, len(frames))
    rows = math.ceil(len(frames) / columns)
    strip = Image.new("RGB", (columns * (wide + gap) - gap, rows * (high + gap) - gap), PAGE)
    for index, frame in enumerate(frames):
        row, column = divmod(index, columns)
        strip.paste(frame, (column * (wide + gap), row * (high + gap)))
    return strip


def _columns(images: Sequence[Image.Image]) -> int:
    """For a sheet about as wide as it is high."""
    wide, high = max((image.width for image in images), default=1), max((image.height for image in images), default=1)
    return max(1, math.ceil(math.sqrt(len(images) * high / wide)))


def _frames(cell: Tensor) -> list[Image.Image]:
    return [_scale(blend_over_black(image).convert("RGB")) for image in to_images(cell)]


def _scale(image: Image.Image) -> Image.Image:
    """Enlarge by a whole factor, so that pixels stay square, or reduce smoothly."""
    side = max(image.size)
    if side < MIN_SIDE:
        factor = math.ceil(MIN_SIDE / side)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if side > MAX_SIDE:
        size = (max(1, round(image.width * MAX_SIDE / side)), max(1, round(image.height * MAX_SIDE / side)))
        return image.resize(size, Image.Resampling.LANCZOS)
    return image


# Text ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """matplotlib's DejaVu Sans, which has most alphabets; Pillow's own font has Latin only."""
    spec = importlib.util.find_spec("matplotlib")  # does not import it
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / "mpl-data/fonts/ttf/DejaVuSans.ttf"
        if file.is_file():
            return ImageFont.truetype(file, 10)
    return ImageFont.load_default(size=11)


def _line_height() -> int:
    return math.ceil(_font().getbbox("Ágy")[3]) + 2


def wrap_text(text: str, width: int, lines: int = MAX_LINES) -> list[str]:
    """Lines that fit `width` pixels, broken between words where possible; the last one ends in an ellipsis if text is left."""
    measure = _font().getlength
    wrapped: list[str] = []
    rest = " ".join(text[: 8 * lines * width].split())  # more never fits, and measuring takes time
    while rest:
        if measure(rest) <= width:
            return [*wrapped, rest]
        last = len(wrapped) == lines - 1
        tail = "…" if last else ""
        ends = range(1, len(rest) + 1)
        fits = max(1, bisect_right(ends, width, key=lambda end: math.ceil(measure(rest[:end] + tail))))
        space = rest.rfind(" ", 0, fits + 1)
        cut = space if space > 0 and not last else fits
        if last:
            return [*wrapped, rest[:cut].rstrip() + tail]
        wrapped.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return wrapped
