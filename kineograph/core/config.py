"""Typed, strict config: a base class, layers that merge, dotted overrides, and errors that name the right key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import yaml
from annotated_types import Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from kineograph.core.config_file import MAX_DEPTH, Tree, read_yaml
from kineograph.core.errors import ConfigError, UnknownKey

C = TypeVar("C", bound="Config")


def _check_size(value: tuple[int, int]) -> tuple[int, int]:
    if min(value) < 1:
        raise ValueError("height and width must be at least 1 pixel")
    if max(value) > 65536:
        raise ValueError("height and width must be at most 65,536 pixels")
    return value


Axis = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""One side of an array."""
Positive = Annotated[int, Field(ge=1, le=65536)]
"""A side in pixels, or the width of a level of a network."""
Size = Annotated[
    tuple[int, int],
    BeforeValidator(lambda value: (value, value) if isinstance(value, int) else value),
    AfterValidator(_check_size),
]
"""Height and width; one number is both."""
BlockCount = Annotated[int, Field(ge=0, le=1000)]
"""Blocks of one level of a network."""
_MAX_INT, _MAX_FLOAT, _MIN_FLOAT = 2**31 - 1, 1e9, 1e-30


def make_absolute(path: str) -> str:
    """Complete a local path, so that it means the same files from any folder; URLs and commands (pipe:…) stay."""
    if re.match(r"[A-Za-z][\w+.-]*://|pipe:", path):
        return path
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:  # ~NAME of nobody: opening it says so
        return path


LocalPath = Annotated[str, AfterValidator(make_absolute)]
"""A path on this machine. It is kept absolute, since a run may be continued and evaluated from another folder."""


class Config(BaseModel):
    """Base of every config class: unknown keys are errors, defaults are checked too."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="after")
    @classmethod
    def _check_magnitude(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse numbers that no key means. A field with an upper bound of its own may take larger ones."""
        field = cls.model_fields[str(info.field_name)]
        _check_magnitude(value, bounded=any(isinstance(bound, Le | Lt) for bound in field.metadata))
        return value

    def check_pretrained(self, given: Collection[str], hub: bool) -> None:
        """Refuse pretrained weights (a folder, a text encoder) that are missing or do not fit, with an InputError that begins with the key.

        `given`: the fields of the data. `hub`: also look names up on the hub. Nothing large is read or downloaded.
        """
        for _, section in self:
            if isinstance(section, Config):
                section.check_pretrained(given, hub)


def _check_magnitude(value: Any, bounded: bool) -> None:
    if isinstance(value, list | tuple):
        for part in value:
            _check_magnitude(part, bounded)
    elif isinstance(value, int) and abs(value) > _MAX_INT and not bounded:
        raise ValueError(f"use a number up to {_MAX_INT:,}")
    elif isinstance(value, float) and ((abs(value) > _MAX_FLOAT and not bounded) or 0 < abs(value) < _MIN_FLOAT):
        raise ValueError(f"use 0, or a number from {_MIN_FLOAT:g} to {_MAX_FLOAT:g}")


PlayerDefaults = Mapping[str, Mapping[str, Any]]


class StageConfig(Config):
    """Keys that every stage has. A Task's own `Config` adds its own beside them."""

    references: ClassVar[tuple[str, ...]] = ()
    """The keys that name another stage (`codec`)."""
    sample_references: ClassVar[tuple[str, ...]] = ()
    """The keys that name a stage which only sampling needs (`prior`): it is loaded then, and may be trained later."""
    inherits_sample: ClassVar[str | None] = None
    """The key that names the stage whose `sample` section gives the defaults of this one's (`generator`)."""
    player_defaults: ClassVar[PlayerDefaults] = {}
    """Defaults of `players.*` that differ from those of `train.*`; what a config sets for `train` goes before them."""
    task: str
    """Which Task trains here: a module of family, codec or text (`muse`), or a dotted path to a class of yours."""
    skip: bool = False
    """Leave this stage out of training (and unloaded)."""
    init: str | None = None
    """Warm start: another stage, `runs/x/stage`, a safetensors file, a URL or `wandb:…`, whose weights are copied where names and shapes fit."""
    cache: Literal["auto", "if_possible"] | bool = "auto"
    """Train from tokens on disk instead of pixels: true encodes the data first; if_possible: as true, but data that cannot be
    cached are encoded in every step; auto uses a cache that `kineo cache` made."""
    cache_precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    """How latents and embeddings are kept in a cache."""

    def player_names(self) -> tuple[str, ...]:
        """The players that `players.*` may configure; a Task has some or all of them."""
        return ("model",)

    def reads(self) -> frozenset[str]:
        """The fields of the data that training needs: "pixels", "captions", "sketch", "audio"."""
        return frozenset({"pixels"})

    @property
    def sample_options(self) -> Config | None:
        """The `sample` section; None for a stage that has none."""
        return vars(self).get("sample")


# Parsing ---------------------------------------------------------------------------------------------------------


def parse(cls: type[C], tree: Mapping[str, Any], where: str = "") -> C:
    """Build a config class from a mapping, or raise a ConfigError that names the key, the value and the closest right key."""
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        found: dict[str, list[str]] = {}
        for problem in error.errors():
            subject, message = _explain(cls, problem, where)
            found.setdefault(subject, []).append(message)
        # A value that fits no member of a union is refused once by each of them.
        text = "\n".join(subject + ", or ".join(dict.fromkeys(messages)) for subject, messages in found.items())
        if (first := error.errors()[0])["type"] == "extra_forbidden":
            raise UnknownKey(text, _full_key(cls, first, where)) from None
        raise ConfigError(text) from None


def _full_key(cls: type[Config], problem: Any, where: str) -> str:
    return ".".join(filter(None, [where, *_keys(cls, problem["loc"])[0]]))


def _explain(cls: type[Config], problem: Any, where: str) -> tuple[str, str]:
    """→ the key and its value, and the message."""
    key, known = _full_key(cls, problem, where), _keys(cls, problem["loc"])[1]
    if problem["type"] == "extra_forbidden":
        return unknown_key(key, known), ""
    if problem["type"] == "missing":
        return f"{key} is required and not set: give {key}=VALUE on the command line, or write it into the config", ""
    if problem["type"] == "union_tag_invalid":  # sections that have a kind
        return f"{key}.kind={problem['ctx']['tag']}: ", f"use one of {problem['ctx']['expected_tags']}"
    message = problem["msg"].removeprefix("Value error, ")
    if isinstance(problem["input"], Mapping) and problem["type"] == "value_error":  # about several keys together
        return f"{key}: " if key else "", message
    return f"{key}={problem['input']!r}: ", f"{message[0].lower()}{message[1:]}"


def _keys(cls: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """The keys of a pydantic location, without the names of union members (`literal['auto']`), and the keys known beside the last."""
    path: list[str] = []
    model: type[BaseModel] | None = cls
    holder: type[BaseModel] | None = cls  # of the last key
    union: Any = None
    for part in location:
        field = model.model_fields.get(str(part)) if model else None
        if field is None and union is not None and not isinstance(part, int):
            model = _member(union, str(part)) or model
            union = None
            continue
        path.append(str(part))
        holder = model
        if field is not None:
            several = len([a for a in get_args(field.annotation) if a is not type(None)]) > 1
            union = field.annotation if several and get_origin(field.annotation) in (Union, UnionType) else None
            model = _model_in(field.annotation)
    return path, list(holder.model_fields) if holder else []


def _member(union: Any, name: str) -> type[BaseModel] | None:
    """The member of a union with this tag or class name."""
    for argument in get_args(union):
        model = _model_in(argument)
        tags = [part.tag for part in getattr(argument, "__metadata__", ()) if isinstance(part, Tag)]
        if model is not None and name in (tags or [model.__name__]):
            return model
    return None


def unknown_key(key: str, known: list[str]) -> str:
    """The message for an unknown key."""
    parent, _, last = key.rpartition(".")
    close = difflib.get_close_matches(last, known, n=1)
    hint = (
        f"did you mean {parent + '.' if parent else ''}{close[0]}?"
        if close
        else f"known here: {', '.join(sorted(known)) or 'none'}"
    )
    return f"unknown key {key}: {hint}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found:
            return found
    return None


# Layers ----------------------------------------------------------------------------------------------------------


_WORDS = {"parallel": "layout"}  # sections that may be one word: the key that the word sets


def merge(base: Tree, over: Mapping[str, Any]) -> Tree:
    """A new tree: mappings join key by key, anything else in `over` replaces."""
    result = dict(base)
    for key, value in over.items():
        if key in _WORDS and isinstance(value, Mapping) and isinstance(result.get(key), str):
            result[key] = {_WORDS[key]: result[key]}
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merge(_of_kind(result[key], value), value)
        else:
            result[key] = deepcopy(dict(value) if isinstance(value, Mapping) else value)
    return result


def _of_kind(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Drop the old keys where `over` sets another `kind` (of quantizer, of text encoder)."""
    return base if over.get("kind", base.get("kind")) == base.get("kind") else {}


def nest(path: str, value: Any) -> Tree:
    """`a.b.c`, v → {a: {b: {c: v}}}"""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """{a: {b: v}} → {'a.b': v}; empty mappings and lists are values."""
    flat: Tree = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def parse_override(text: str) -> tuple[str, Any]:
    """`train.steps=100` → ('train.steps', 100). The value is YAML, so lists and null work too."""
    path, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", path) or path.count(".") > MAX_DEPTH:
        raise ConfigError(
            f"{shorten(text)!r} is neither a preset, a file nor an override: overrides look like train.steps=100"
        )
    try:
        return path, read_yaml(value, path)
    except yaml.YAMLError:
        return path, value


def shorten(text: str, length: int = 200) -> str:
    """For an error message."""
    return text if len(text) <= length else f"{text[:length]}…"
