"""Moving digits: endless captioned clips and images of real handwritten digits, generated on the fly.

An item is a pure function of (index, split, config), so evaluation data are the same on every machine. Validation and test use glyphs,
wordings and combinations of digit, colour and motion (or place) that training never shows. A share of the training items may be stills:
single images beside the clips. A sketch is a map of one channel that marks the digits, for models that draw from sketches. With
`sample_rate` each clip has a sound track (digit_sound.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, TypeVar

import numpy as np
import torch
from einops import rearrange
from pydantic import Field, model_validator

from kineograph.core.batch import Sample
from kineograph.core.errors import ConfigError
from kineograph.core.noise import key_of, numpy_rng
from kineograph.core.protocols import Source
from kineograph.data import digit_glyphs
from kineograph.data.digit_captions import COLOURS, PLAIN, Facts, Figure, joins, list_motions, wordings, write_caption
from kineograph.data.digit_motion import CANDIDATES, Canvas
from kineograph.data.digit_sound import make_sound
from kineograph.data.open_source import DataConfig, Split
from kineograph.data.transforms import convert_channels

ENDLESS = 2**40
T = TypeVar("T")


class MovingDigitsConfig(DataConfig):
    digits: Literal[1, 2] = 1
    """Digits on the canvas."""
    coloured: bool | None = None
    """Paint digits in six colours and name these in captions; null: with three channels or more."""
    directions: Literal[4, 8] = 8
    """4: left, right, up, down; 8: diagonals too. Clips only; images have nine places."""
    glyphs: int | None = Field(None, ge=1)
    """Handwritten glyphs per digit for training, the most typical first; null: all (about 150)."""
    grid: int | None = Field(None, ge=1)
    """Digits start at multiples of this many pixels; null: anywhere."""
    speed: float | None = Field(None, gt=0)
    """Pixels per frame; null: about 1/16 of the shorter side (two digits: 1/24), less in long clips."""
    bounce: bool = True
    """Digits may bounce off a wall late in a clip; false: they start where they reach none."""
    stills: float = Field(0.0, ge=0, lt=1)
    """Share of training items that are single images, with an image's caption. Clips only; validation and test stay clips."""
    kept_out: float = Field(0.1, ge=0, le=0.5)
    """Share of the combinations of digit, colour and motion (or place) that training never shows."""
    wordings: Literal["varied", "plain"] = "varied"
    """varied: many wordings per caption, some in validation only; plain: one wording everywhere."""
    sketch: bool = False
    """Add a sketch to each item, T 1 H W: the caption's first digit in white, the second in gray."""
    shows: Literal["clip", "sketch"] = "clip"
    """sketch: the pixels are the sketch, for a codec of sketches."""
    count: int | None = Field(None, ge=1)
    """Items of the training split (the other splits get their share of it); null: endless."""

    @model_validator(mode="after")
    def _check_canvas(self) -> MovingDigitsConfig:
        if self.coloured and self.channels < 3:
            raise ConfigError(
                f"data.coloured=true needs data.channels=3 or 4, not {self.channels}: set coloured=false or channels=3"
            )
        if self.split_seed:
            raise ConfigError(
                f"data.split_seed={self.split_seed}: moving digits have fixed splits, by glyph and motion; set it to 0"
            )
        if self.stills and self.frames == 1:
            raise ConfigError(
                f"data.stills={self.stills:g} mixes images with clips, but data.frames=1 has images only: set stills=0 or raise frames"
            )
        if self.sample_rate is not None and self.digits > 1:
            raise ConfigError(
                f"data.sample_rate={self.sample_rate} with data.digits={self.digits}: one digit sounds at a time; set digits=1 or sample_rate=null"
            )
        _ = self.canvas  # raises a ConfigError if the digits do not fit
        if self.stills:
            _ = self.canvas_for(moving=False)
        return self

    @property
    def has_colour(self) -> bool:
        return self.channels >= 3 if self.coloured is None else self.coloured

    @property
    def canvas(self) -> Canvas:
        return self.canvas_for(moving=self.frames > 1)

    def canvas_for(self, moving: bool) -> Canvas:
        """The canvas of clips, or of images."""
        return Canvas.of(self.size, self.frames if moving else 1, self.digits, self.speed, self.grid, self.bounce)


def is_kept_out(facts: Facts, share: float = 0.1) -> bool:
    """Whether one of the figures is a combination that training never shows."""
    return any(_combination_key(figure) < share * 2**64 for figure in facts)


@lru_cache(maxsize=4096)
def _combination_key(figure: Figure) -> int:
    return key_of(
        "combination", figure.digit, figure.colour or "uncoloured", figure.direction or figure.place or "nowhere"
    )


class Scenes:
    """The possible figures of clips, or of images: those that training shows, and those kept out of it."""

    def __init__(self, config: MovingDigitsConfig, moving: bool, share: float) -> None:
        self.moving, self.canvas = moving, config.canvas_for(moving)
        colours = list(COLOURS) if config.has_colour else [None]
        figures = [
            _figure(digit, colour, value, moving)
            for digit, colour, value in product(range(10), colours, list_motions(moving, config.directions))
        ]
        self.seen = [figure for figure in figures if not is_kept_out((figure,), share)]
        self.unseen = [figure for figure in figures if is_kept_out((figure,), share)]
        self.of_digit = [[figure for figure in self.seen if figure.digit == digit] for digit in range(10)]
        if min(map(len, self.of_digit)) < 2:
            raise ConfigError(f"data.kept_out={share} leaves too little of some digit for training: use 0.1")
        self._partners: dict[tuple[Figure, int], list[Figure]] = {}

    def partners(self, first: Figure, digit: int) -> list[Figure]:
        """Figures of a digit that may appear beside the first."""
        if (first, digit) not in self._partners:
            self._partners[first, digit] = [figure for figure in self.of_digit[digit] if _differ(figure, first)]
        return self._partners[first, digit]


@dataclass(frozen=True)
class Item:
    """All random draws of one index."""

    scenes: Scenes
    facts: Facts
    caption: str
    glyphs: tuple[int, ...]  # indices into load_glyphs()
    starts: np.ndarray  # uniform, candidates × figures × 2


class MovingDigits(Source):
    Config = MovingDigitsConfig

    def __init__(self, config: MovingDigitsConfig, split: Split) -> None:
        self.config = config
        self.split = split
        self.held_out = split != "train"
        self.pad_to_frames = config.frames  # also for a batch of stills alone
        extra = {"sketch": config.sketch, "audio": config.sample_rate is not None}
        self.fields = frozenset({"pixels", *(name for name, has in extra.items() if has)})
        self._pool: tuple[list[int], ...] = digit_glyphs.list_glyphs(
            self.held_out, None if self.held_out else config.glyphs
        )
        self._main = Scenes(config, config.frames > 1, config.kept_out)
        self._stills = Scenes(config, False, config.kept_out) if config.stills and not self.held_out else None

    @property
    def canvas(self) -> Canvas:
        """The canvas of the clips (not of stills beside them)."""
        return self._main.canvas

    @classmethod
    def open(cls, config: MovingDigitsConfig, split: Split, seed: int = 0) -> MovingDigits:
        """The data are the same for every seed. With validation=0, validation is training data, all clips."""
        if split == "validation" and config.validation == 0:
            return cls(config.model_copy(update={"stills": 0.0}), "train")
        return cls(config, split)

    def __len__(self) -> int:
        if self.config.count is None:
            return ENDLESS
        share = {"train": 1.0, "validation": self.config.validation, "test": self.config.test}[self.split]
        count = round(self.config.count * share)
        if count == 0:
            raise ConfigError(
                f"data.{self.split}={share} of data.count={self.config.count} leaves no items: raise one of them"
            )
        return count

    def read(self, index: int, rng: np.random.Generator | None = None) -> Sample:
        """A clip (or a still of one frame) and its caption. `rng` is unused: the index determines everything."""
        item, config = self.item(index), self.config
        sketch = self.sketch(item) if config.sketch or config.shows == "sketch" else None  # T 1 H W
        if sketch is not None and config.shows == "sketch":
            pixels = rearrange(
                convert_channels(rearrange(sketch, "t c h w -> t h w c"), config.channels), "t h w c -> t c h w"
            )
        else:
            pixels = self.paint(item)
        sample = Sample(pixels=torch.from_numpy(pixels), fps=config.shape.fps, caption=item.caption)
        if sketch is not None and config.sketch:
            sample.extra["sketch"] = torch.from_numpy(sketch)
        if config.sample_rate is not None:
            sample.extra["audio"] = torch.from_numpy(self.sound(item))
        return sample

    def caption(self, index: int) -> str:
        return self.item(index).caption

    def facts(self, index: int) -> Facts:
        return self.item(index).facts

    def identity(self, index: int) -> str:
        return f"digits-{self.split}-{index}"

    # one item ----------------------------------------------------------------------------------------------------

    def item(self, index: int) -> Item:
        """The draws of an index; facts, caption and glyphs do not depend on the canvas size."""
        rng = numpy_rng("moving_digits", self.split, index)
        *draws, still = rng.random(12).tolist()
        draw = iter(draws)
        scenes = self._stills if self._stills is not None and still < self.config.stills else self._main
        facts = self._draw_facts(scenes, *(next(draw) for _ in range(5)))
        caption = self._draw_caption(scenes, facts, *(next(draw) for _ in range(3)))
        glyphs = tuple(_pick(self._pool[figure.digit], next(draw)) for figure in facts)
        candidates = CANDIDATES if len(facts) > 1 else 1
        return Item(scenes, facts, caption, glyphs, rng.random((candidates, len(facts), 2)))

    def _draw_facts(self, scenes: Scenes, new: float, which: float, other: float, its: float, swap: float) -> Facts:
        """Half of the held-out items hold a combination that training never shows."""
        first = _pick(scenes.unseen if self.held_out and scenes.unseen and new < 0.5 else scenes.seen, which)
        if self.config.digits == 1:
            return (first,)
        second = _pick(scenes.partners(first, (first.digit + 1 + int(other * 9)) % 10), its)
        return (first, second) if swap < 0.5 else (second, first)

    def _draw_caption(self, scenes: Scenes, facts: Facts, new: float, which: float, join: float) -> str:
        """Half of the held-out captions use a wording that training never uses."""
        if self.config.wordings == "plain":
            return write_caption(facts, PLAIN)
        split: Split = "validation" if self.held_out and new < 0.5 else "train"
        return write_caption(facts, _pick(wordings(split, scenes.moving, len(facts)), which), _pick(joins(facts), join))

    def paint(self, item: Item) -> np.ndarray:
        """T C H W, uint8; where digits overlap, the brighter wins."""
        channels = self.config.channels
        white = (255,) * (channels if channels % 2 else channels - 1)  # without the alpha channel
        patches = [
            digit_glyphs.paint_glyph(glyph, item.scenes.canvas.side, COLOURS[figure.colour] if figure.colour else white)
            for figure, glyph in zip(item.facts, item.glyphs, strict=True)
        ]
        return self._compose(item, patches, channels)

    def sketch(self, item: Item) -> np.ndarray:
        """T 1 H W, uint8: 255 where the first digit has ink, 128 where the second has."""
        glyphs = [digit_glyphs.paint_glyph(index, item.scenes.canvas.side, (255,)) for index in item.glyphs]
        return self._compose(item, [(glyph > 127) * np.uint8(ink) for glyph, ink in zip(glyphs, (255, 128))], 1)

    def sound(self, item: Item) -> np.ndarray:
        """T S, float32: a tone of the digit's pitch, and a click at each bounce."""
        canvas, shape, (figure,) = item.scenes.canvas, self.config.shape, item.facts
        bounces = canvas.bounce_times(figure, item.starts)
        return make_sound(figure.digit, bounces, canvas.frames, shape.samples_per_frame, shape.sample_rate or 0)

    @staticmethod
    def _compose(item: Item, patches: list[np.ndarray], channels: int) -> np.ndarray:
        """One patch per figure, C side side, moved over a black canvas, T channels H W. Missing channels (alpha) are opaque."""
        canvas = item.scenes.canvas
        frames = np.zeros((canvas.frames, channels, canvas.height, canvas.width), dtype=np.uint8)
        paths = canvas.paths(item.facts, item.starts).tolist()
        colours = patches[0].shape[0]
        for patch, path in zip(patches, paths, strict=True):
            for frame, (row, column) in zip(frames, path, strict=True):
                under = frame[:colours, row : row + canvas.side, column : column + canvas.side]
                np.maximum(under, patch, out=under)
        frames[:, colours:] = 255
        return frames


def _figure(digit: int, colour: str | None, value: str, moving: bool) -> Figure:
    return Figure(digit, colour, direction=value) if moving else Figure(digit, colour, place=value)


def _differ(one: Figure, other: Figure) -> bool:
    """Two digits differ in colour and place too, so that both can be read where they touch."""
    return (one.colour is None or one.colour != other.colour) and (one.place is None or one.place != other.place)


def _pick(items: Sequence[T], draw: float) -> T:
    """Pick an item by a uniform draw in [0, 1)."""
    return items[int(draw * len(items))]


SOURCE = MovingDigits
