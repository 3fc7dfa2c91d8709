"""One request for samples, from the command line (or Python) through the sampler to the JSON sidecar beside the media.

An option is declared here and, with its help text, in cli/sampling.py. The sidecar and the command line in it follow from these fields.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kineograph.core.config import parse
from kineograph.core.errors import InputError
from kineograph.core.prompt import Prompt
from kineograph.core.text_file import MAX_CAPTION, replace_surrogates
from kineograph.media.gif import MAX_FPS
from kineograph.sample.options import parse_settings
from kineograph.sample.prompt_file import read_prompts
from kineograph.stage.spec import BatchConfig

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("gif", "mp4", "png")
STORY_FORMATS = ("gif", "mp4")
SIDECAR_KEYS = {"prompts": "captions", "checkpoint": "step", "compile": "compiled", "options": "changed_options"}


@dataclass(frozen=True)
class SampleRequest:
    """What to draw, and with which weights. None means: as the run has it."""

    run: str
    stage: str | None = None
    """The stage that draws; None: the last that can."""
    checkpoint: str | int = "last"
    """last, best, or a step."""
    ema: bool = True
    """Use the averaged weights."""
    seed: int = 0
    prompts: Sequence[str | Prompt] | None = None
    """A caption, or a Prompt with inputs of its own, per clip (in a story: per scene); None for an unconditional model, "" for the null text."""
    count: int = 1
    """Samples per prompt."""
    negative: str | None = None
    """What guidance steers away from."""
    guidance: float | None = None
    """Short for options["guidance"]."""
    steps: int | None = None
    """Short for options["steps"]."""
    frames: int | None = None
    """Frames per clip or scene, those of `prime` included."""
    size: tuple[int, int] | None = None
    """Height and width."""
    fps: float | None = None
    """Playback speed; None: as trained, or as the clip in `prime`."""
    prime: str | Path | Tensor | None = None
    """A clip to continue, or a picture to enlarge or inpaint: a file, or T C H W in [0, 1]."""
    sketch: str | Path | Tensor | None = None
    """A sketch to draw from: a file, or T C H W in [0, 1]."""
    mask: str | Path | Tensor | None = None
    """The part of the picture in `prime` to inpaint: a file, white there, or H W bool."""
    overlap: int | None = None
    """Frames that a scene of a story shares with the previous one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other keys of the stage's `sample` section, written `K` or `sample.K`."""
    device: str = "auto"
    compile: bool = False
    """torch.compile: pays off over many batches; may change the last bits."""
    batch: int | None = None
    """Samples drawn at a time; None: `sample.batch` of the run, or as many as fit."""

    def __post_init__(self) -> None:
        if self.prompts is not None and not self.prompts:
            raise InputError(
                "the list of prompts is empty: give at least one caption, or None for an unconditional model"
            )
        for prompt in self.prompts or ():
            if isinstance(prompt, Prompt):
                continue
            if not isinstance(prompt, str):
                raise InputError(f"prompt {prompt!r} has type {type(prompt).__name__}: give a str")
            if len(prompt) > MAX_CAPTION:
                raise InputError(f"a prompt has {len(prompt):,} characters: shorten it to at most {MAX_CAPTION:,}")
            if replace_surrogates(prompt) != prompt:
                raise InputError(f"prompt {prompt!r} holds half a character: give whole Unicode text")
        if self.negative is not None and self.prompts is None:
            raise InputError("--negative has no effect without a prompt: give one")
        for name in ("count", "frames", "batch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)} is too small: use at least 1")
        if self.size is not None and min(self.size) < 1:
            raise InputError(f"--size {self.size[0]}x{self.size[1]} is too small: use at least 1x1")
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise InputError(f"--fps {self.fps:g} is not a speed: use a number above 0")
        if self.mask is not None and self.prime is None:
            raise InputError("--mask needs the picture to inpaint: add --prime (runs of dalle2 can inpaint)")

    @classmethod
    def from_flags(
        cls,
        run: str | Path,
        prompts: Sequence[str | Prompt] | None,
        *,
        size: str | None = None,
        options: Sequence[str] | None = None,
        prompts_file: Path | None = None,
        **flags: Any,
    ) -> SampleRequest:
        """From the values of the command line's flags, which have the names of the fields."""
        settings = parse_settings(options)
        given: list[str | Prompt] = list(prompts or ())
        if prompts_file is not None:
            if given:
                raise InputError(f"--prompts {prompts_file} and the prompt {given[0]!r}: give one or the other")
            given += read_prompts(prompts_file)
        if "sample.batch" in settings:  # of the run, not of the stage
            flags["batch"] = parse(BatchConfig, {"batch": settings.pop("sample.batch")}, "sample").rows
        return cls(str(run), prompts=given or None, size=_parse_size(size), options=settings, **flags)

    @property
    def entries(self) -> list[Prompt] | None:
        """The prompts, each as a Prompt."""
        if self.prompts is None:
            return None
        return [p if isinstance(p, Prompt) else Prompt.model_construct(prompt=p) for p in self.prompts]

    @property
    def captions(self) -> list[str] | None:
        """The captions of the prompts; None where they have none."""
        return [prompt.prompt for prompt in self.entries or ()] if self.has_captions else None

    @property
    def has_captions(self) -> bool:
        return any(prompt.prompt if isinstance(prompt, Prompt) else True for prompt in self.prompts or ())

    @property
    def is_from_file(self) -> bool:
        """Whether prompts may have inputs of their own, which a command line cannot hold."""
        return any(isinstance(prompt, Prompt) for prompt in self.prompts or ())

    def to_sidecar(self) -> dict[str, Any]:
        """The fields under the sidecar's names; guidance and steps are among its `options`, a story adds its overlap."""
        names = [item.name for item in fields(self) if item.name not in ("guidance", "steps", "overlap")]
        return {SIDECAR_KEYS.get(name, name): getattr(self, name) for name in names} | {"captions": self.captions}

    def to_command(
        self, command: str, arguments: Sequence[str], out: Path, format: str | None, prompts_file: Path | None = None
    ) -> str:
        """The command line that repeats this request."""
        words = ["--prompts", str(prompts_file)] if prompts_file is not None else []
        for item in fields(self):
            value = getattr(self, item.name)
            is_default = value is None or (isinstance(value, (int, str)) and value == item.default)
            if item.name == "seed" or not (is_default or item.name in ("run", "prompts", "device")):
                words += _flag_words(item.name, value)
        words += ["--format", format] if format is not None else []
        words += ["--out", str(out)]
        if any(argument.startswith("-") for argument in arguments):  # would be read as flags
            return shlex.join(["kineo", command, self.run, *words, "--", *arguments])
        return shlex.join(["kineo", command, self.run, *arguments, *words])


def check_format(format: str | None, fps: float | None = None, allowed: tuple[str, ...] = FORMATS) -> None:
    """Refuse a format before anything is drawn; clips are GIFs by default."""
    if format is not None and format not in allowed:
        raise InputError(f"--format {format} is not supported here: use {', '.join(allowed[:-1])} or {allowed[-1]}")
    if fps is not None and format == "png":
        raise InputError(f"--fps {fps:g} has no effect with --format png: leave one out")
    if fps is not None and fps > MAX_FPS and format in (None, "gif"):
        raise InputError(f"--fps {fps:g} is faster than a GIF can play, {MAX_FPS}: add --format mp4, or lower it")


def _flag_words(name: str, value: Any) -> list[str]:
    flag = f"--{name}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [word for key, item in value.items() for word in ("--set", f"sample.{key}={_to_yaml(item)}")]
    if isinstance(value, tuple):
        return [flag, "x".join(map(str, value))]
    return [flag, str(value) if isinstance(value, (str, int, float, Path)) else "FILE"]  # a tensor has no file


def _to_yaml(value: Any) -> str:
    """On one line, as an override is written."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()


def _parse_size(text: str | None) -> tuple[int, int] | None:
    """`64` or `48x64` (height x width)."""
    if text is None:
        return None
    try:
        parts = [int(part) for part in text.lower().split("x")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2):
        raise InputError(f"--size {text} is not a size: use 64, or height x width as in 48x64")
    return parts[0], parts[-1]
