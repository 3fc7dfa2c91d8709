"""Every numeric field of every config, with numbers that nobody means: refused by name, at once."""

from __future__ import annotations

import importlib
import math
import pkgutil
import time
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

import kineograph
from kineograph.core.config import Config, parse
from kineograph.core.errors import ConfigError
from kineograph.data.shards import expand_braces

# No field takes these, whatever it means.
NEVER = [
    math.inf, -math.inf, math.nan, "inf", "nan", "-Infinity", "1e999", 1e308, -1e308, 1.8e308, 1e300, "1e200",
    2**63 - 1, 2**63, -(2**63), 2**64, -(2**64), 10**30, -(10**30), 10**4000, "9" * 40, 5e-324, -5e-324, 1e-320,
]  # fmt: skip
NEGATIVE = [-1, -2, -(2**31), -1e6]
# These are refused or taken, at once and by a ConfigError: what they mean depends on the field.
EITHER: list[Any] = [0, -0.0, 1e-9, 2**20, 2**31 - 1, 2**31, True, None, "", "x", [], {}, [[]], [0] * 3]
# The mean of a logarithm, and a second counted from a clip's end.
MAY_BE_NEGATIVE = {("FirstFrameConfig", "noise"), ("MediaConfig", "end")}
MAY_BE_LARGE = {("RunConfig", "seed"), ("Prompt", "seed"), ("MediaLimits", "bytes")}


def _configs() -> list[type[Config]]:
    for module in pkgutil.walk_packages(kineograph.__path__, "kineograph."):
        if not module.name.endswith("__main__") and not module.name.startswith("kineograph.studio."):  # an extra
            importlib.import_module(module.name)

    def below(cls: type[Config]) -> set[type[Config]]:
        return {cls}.union(*(below(each) for each in cls.__subclasses__()))

    return sorted(
        (cls for cls in below(Config) if cls.__module__.startswith("kineograph.")),
        key=lambda cls: (cls.__module__, cls.__qualname__),
    )


def _numbers(annotation: Any) -> bool:
    if annotation in (int, float):
        return True
    return get_origin(annotation) is not Literal and any(_numbers(part) for part in get_args(annotation))


def _lengths(annotation: Any) -> list[int]:
    """Lengths of the sequences of numbers that the field takes; 0: a number itself."""
    if annotation in (int, float):
        return [0]
    parts = get_args(annotation)
    if get_origin(annotation) in (tuple, list):
        return [3 if Ellipsis in parts or get_origin(annotation) is list else len(parts)]
    found = [length for part in parts if get_origin(annotation) is not Literal for length in _lengths(part)]
    return sorted(set(found))


FIELDS = [
    (cls, name)
    for cls in _configs()
    for name, field in cls.model_fields.items()
    if _numbers(field.annotation)
    and not any(
        name in base.model_fields for base in cls.__mro__[1:] if issubclass(base, Config) and base is not Config
    )
]


REQUIRED: dict[str, Any] = {
    "shape": (1, 2, 2),
    "count": 4,
    "kind": "tokens",
    "packs": (),
    "key": "x",
    "keep": (),
    "seconds": 4,
}


def required(cls: type[Config]) -> dict[str, Any]:
    """What the class needs to be valid."""
    others = {key: REQUIRED.get(key, "x") for key, field in cls.model_fields.items() if field.is_required()}
    return others | {
        "DecoderConfig": {"image_embeds": "none"},
        "CogVideoXConfig": {"codec": "x"},
        "ClipSource": {"name": "x"},
    }.get(cls.__name__, {})


def test_the_required_fields_are_filled():
    for cls in {cls for cls, _ in FIELDS}:
        cls.model_validate(required(cls))


def accepts(cls: type[Config], name: str, value: Any) -> bool:
    began = time.process_time()
    others = required(cls)
    try:
        cls.model_validate(others | {name: value})
        accepted = True
    except (ValidationError, ConfigError):
        accepted = False
    with pytest.raises(ConfigError):
        parse(cls, {name: value, "no such key": 1})
    assert time.process_time() - began < 1, (name, value)
    return accepted


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_every_field_refuses_hostile_numbers(cls, name):
    field = cls.model_fields[name]
    for length in _lengths(field.annotation):
        for value in NEVER:
            if value != 2**63 - 1 or (cls.__name__, name) not in MAY_BE_LARGE:
                assert not accepts(cls, name, [value] * length if length else value), value
        for value in NEGATIVE if (cls.__name__, name) not in MAY_BE_NEGATIVE else []:
            assert not accepts(cls, name, [value] * length if length else value), value
    for value in EITHER:
        accepts(cls, name, value)


def test_there_are_many():
    assert len(FIELDS) > 200
    assert len(NEVER) + len(NEGATIVE) >= 28


@pytest.mark.parametrize("text", ["{0..99999999999}", "{0..9999}{0..9999}", "{0..99999999999..2}"])
def test_a_range_of_shards_has_an_end(text):
    with pytest.raises(ConfigError, match="10,000,000 shards"):
        expand_braces(text)
