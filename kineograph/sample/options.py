"""The sampling options of a stage, with changes from the command line or from Python applied and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kineograph.core.config import Config, StageConfig, flatten, merge, nest, parse, parse_override
from kineograph.core.errors import ConfigError


def resolve_options(config: StageConfig, options: Mapping[str, Any] | None = None, **flags: Any) -> Config | None:
    """The stage's `sample` section with `options` (keys `sample.K` or `K`) and then flags such as guidance applied."""
    current = config.sample_options
    flags = {key: value for key, value in flags.items() if value is not None}
    changes: dict[str, Any] = {}
    for key, value in (options or {}).items():
        name = key.removeprefix("sample.")
        if name in changes or name in flags:
            raise ConfigError(f"sample.{name} is set twice, by --{name} too: leave one of them out")
        changes[name] = value
    if not changes and not flags:
        return current
    if current is None:
        raise ConfigError(f"{config.task} has no sampling options: leave out {', '.join([*flags, *changes])}")
    known = type(current).model_fields
    for key in flags:
        if key not in known:
            raise ConfigError(f"--{key}: {config.task} has no sample.{key}; use {', '.join(known) or 'none'}")
    tree = current.model_dump()
    for key, value in (changes | flags).items():
        tree = merge(tree, nest(key, value))
    resolved = parse(type(current), tree, "sample")
    # Sampling cannot use what training left out (guidance without caption dropout, say): the stage's config checks that.
    parse(type(config), {**config.model_dump(exclude_unset=True), "sample": tree})
    return resolved


def find_changes(original: Config | None, options: Config | None) -> dict[str, Any]:
    """Dotted keys whose values differ from those of the run."""
    before, after = flatten(dump_options(original)), flatten(dump_options(options))
    return {key: value for key, value in after.items() if key not in before or before[key] != value}


def dump_options(options: Config | None) -> dict[str, Any]:
    return options.model_dump(mode="json") if options is not None else {}


def parse_settings(texts: Sequence[str] | None) -> dict[str, Any]:
    """`--set sample.K=V …` → its keys and values."""
    settings = {}
    for text in texts or ():
        key, value = parse_override(text)
        if not key.startswith("sample."):
            raise ConfigError(
                f"--set {text} is not a sampling option: use a key of the sample section, as in sample.guidance=3"
            )
        settings[key] = value
    return settings
