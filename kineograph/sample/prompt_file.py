"""Files of prompts, for `kineo sample`, `kineo story`, `kineo evaluate` and the samples of training.

A text file holds a prompt per line, or `prompt@@picture`; blank lines and lines that begin with # are skipped. A .jsonl
file holds an object per line with the fields of Prompt. Pictures are relative to the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kineograph.core.capabilities import (
    RoutesCaptions,
    SupportsAnimation,
    SupportsContinuation,
    SupportsInpainting,
    SupportsUpscaling,
)
from kineograph.core.config import parse, shorten
from kineograph.core.config_file import parse_json_tree
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.prompt import Prompt
from kineograph.core.run_folder import write_atomic
from kineograph.core.text_file import split_lines
from kineograph.media.clips import read_frames
from kineograph.stage.spec import StageSpec

MAX_BYTES = 2**26
MAX_PROMPTS = 1_000_000  # 1 GB of memory
SEPARATOR = "@@"
OTHER_FORMS = (".csv", ".tsv", ".json", ".yaml", ".yml", ".parquet")  # each of their lines would be a prompt
# Errors name the flags of a command; a prompt has these fields in their place.
_FIELDS = {"--prime": "image", "--mask": "mask", "--negative": "negative", "--frames": "frames", "--overlap": "overlap"}


def read_prompts(path: str | Path, noun: str = "prompt") -> list[Prompt]:
    """Read a file of prompts or (`noun`) scenes; check its pictures. An error names the file, the line and the remedy."""
    path = Path(path)
    if path.suffix.lower() in OTHER_FORMS:
        raise InputError(
            f"{path}: {noun}s are read from text, one per line, or from .jsonl, one object per line: save them in one of these forms"
        )
    is_json = path.suffix.lower() == ".jsonl"
    prompts: list[Prompt] = []
    for number, line in enumerate(split_lines(_read_text(path, noun)), 1):
        line = line.strip()
        if line and (is_json or not line.startswith("#")):
            where = f"{path}, line {number}"
            fields = _parse_object(line, where) if is_json else _parse_line(line, where)
            for key in ("image", "mask"):
                if isinstance(fields.get(key), str) and fields[key]:
                    fields[key] = os.path.join(path.parent, os.path.expanduser(fields[key]))
            if len(prompts) == MAX_PROMPTS:
                raise InputError(f"{where}: more than {MAX_PROMPTS:,} {noun}s in a file: split it into several")
            prompts.append(parse_prompt(fields, where))
    if not prompts:
        raise InputError(f"{path} holds no {noun}s: write one per line (blank lines and lines with # are skipped)")
    _check_scenes(prompts)
    check_pictures(prompts)
    return prompts


def parse_prompt(fields: dict[str, Any], where: str) -> Prompt:
    """Check the fields of one prompt. `where` is its file and line, or its key, for errors."""
    try:
        prompt = parse(Prompt, fields)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None
    if not fields.keys() & {"prompt", "image"}:
        raise ConfigError(f"{where}: there is nothing to draw: add a prompt")
    return prompt.located(where)


def check_pictures(prompts: Iterable[Prompt]) -> None:
    """Refuse pictures that are missing or cannot be read, before a model is loaded for them."""
    seen: set[str] = set()
    for prompt in prompts:
        for path in (prompt.image, prompt.mask):
            if path is not None and path not in seen:
                seen.add(path)
                with name_prompt(prompt):
                    next(read_frames(path))


@contextmanager
def name_prompt(prompt: Prompt) -> Iterator[None]:
    """Let errors name the file and line that the prompt comes from."""
    try:
        yield
    except InputError as error:
        text = str(error)
        blamed = next((field for flag, field in _FIELDS.items() if text.startswith(flag)), None)
        if not prompt.where or (blamed is not None and getattr(prompt, blamed) is None):  # a flag of the command
            raise
        for flag, field in _FIELDS.items():
            if getattr(prompt, field) is not None:
                text = text.replace(flag, field)
        kind = ConfigError if isinstance(error, ConfigError) else InputError
        raise kind(f"{prompt.where}: {text}") from None


def check_fields(prompts: Sequence[Prompt], spec: StageSpec) -> None:
    """Refuse fields that no stage of this task can use. What depends on the trained stage is checked when it is loaded."""
    task, name = spec.task, spec.config.task
    reads_captions = "captions" in spec.config.reads() or issubclass(task, RoutesCaptions)
    takes_pictures = (SupportsContinuation, SupportsUpscaling, SupportsInpainting, SupportsAnimation)
    for prompt in prompts:
        with name_prompt(prompt):
            if prompt.prompt and not reads_captions:
                raise InputError(f"{name} was trained without captions: remove the prompt, and leave only an image")
            if not prompt.prompt and reads_captions:
                raise InputError(f"there is no prompt, and {name} draws captions: add one")
            if prompt.image is not None and not issubclass(task, takes_pictures):
                raise InputError(f"image has no effect: {name} draws from captions alone; remove it")
            if prompt.mask is not None and not issubclass(task, SupportsInpainting):
                raise InputError(f"mask has no effect: {name} cannot inpaint; remove it, or use a run of dalle2")
            if (prompt.frames or 1) > 1 and spec.data.shape.frames == 1:
                raise InputError(f"frames={prompt.frames} cannot be drawn: {name} was trained on pictures; remove it")
            if prompt.scene is not None and not issubclass(task, SupportsContinuation):
                raise InputError(
                    f"scene={prompt.scene} needs a generator that continues clips, and {name} does not: remove it, "
                    "or use a run of phenaki, nuwa or cogvideox"
                )


def refuse_scenes(prompts: Iterable[Prompt], remedy: str) -> None:
    """For uses that draw single clips."""
    for prompt in prompts:
        for key in ("scene", "overlap"):
            if getattr(prompt, key) is not None:
                with name_prompt(prompt):
                    raise InputError(f"{key}={getattr(prompt, key)} has an effect in a story only: {remedy}")


def split_stories(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[list[Prompt]]]:
    """→ the single clips, and the scenes of each story."""
    clips: list[Prompt] = []
    stories: list[list[Prompt]] = []
    for prompt in prompts:
        if prompt.scene is None:
            clips.append(prompt)
        elif prompt.scene == 1:
            stories.append([prompt])
        else:
            stories[-1].append(prompt)
    return clips, stories


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write a .jsonl file from which `read_prompts` gives the same prompts."""
    write_atomic(path, "".join(json.dumps(prompt.to_json(), ensure_ascii=False) + "\n" for prompt in prompts))


def _check_scenes(prompts: Sequence[Prompt]) -> None:
    """Scenes count 1, 2, 3 … in consecutive lines."""
    before: int | None = None
    for prompt in prompts:
        if prompt.scene not in (None, 1) and prompt.scene != (before or 0) + 1:
            wanted = f"{before + 1}, or 1 for a new story" if before else "1"
            raise InputError(
                f"{prompt.where}: scene={prompt.scene} continues no scene: number the lines of a story 1, 2, 3 …; use {wanted}"
            )
        before = prompt.scene


def _read_text(path: Path, noun: str) -> str:
    remedy = f"give a text file with one {noun} per line, or a .jsonl file with an object per line"
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: {remedy}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    if len(data) > MAX_BYTES:
        raise InputError(f"{path} has more than {MAX_BYTES:,} bytes: {remedy}, and split long lists into several files")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{path} is not UTF-8 text: save it as UTF-8, or {remedy}")
    return text


def _open_without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to is empty, instead of waiting for ever; others, such as <(command), are read."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def _parse_line(line: str, where: str) -> dict[str, Any]:
    """`prompt`, or `prompt@@picture`."""
    if line.startswith("{") and line.endswith("}"):
        raise InputError(f"{where}: {shorten(line, 60)} looks like JSON: let the name of the file end in .jsonl")
    prompt, separator, picture = (part.strip() for part in line.rpartition(SEPARATOR))
    if not separator:
        return {"prompt": line}
    if not picture:
        raise InputError(f"{where}: no picture is named after {SEPARATOR}: write prompt{SEPARATOR}picture.png")
    return {"prompt": prompt, "image": picture}


def _parse_object(line: str, where: str) -> dict[str, Any]:
    example = '{"prompt": "a red 3 moves left", "seed": 7}'
    try:
        fields = parse_json_tree(line)
    except ValueError as error:
        raise InputError(
            f"{where}: not JSON that can be read ({error}): write an object per line, as {example}"
        ) from None
    if not isinstance(fields, dict):
        raise InputError(f"{where}: a {type(fields).__name__} instead of an object: write {example}")
    return fields
