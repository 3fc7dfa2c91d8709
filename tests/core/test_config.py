"""Config base: strict parsing with errors that name the right key, layers, overrides, YAML's scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Discriminator, Field, Tag

from kineograph.core.config import Config, flatten, merge, nest, parse, parse_override
from kineograph.core.config_file import dump_yaml, load_file, read_yaml
from kineograph.core.errors import ConfigError


class Inner(Config):
    decay: float = Field(0.9, ge=0, lt=1)
    every: int = 1


class Other(Config):
    kind: Literal["other"] = "other"
    levels: int = 8


class Outer(Config):
    steps: int
    betas: tuple[float, float] = (0.9, 0.99)
    mode: Literal["auto"] | bool = "auto"
    clip: float | None = 1.0
    inner: Inner = Inner()
    either: Inner | int = 3
    named: dict[str, int] = Field(default_factory=dict)
    kinds: Annotated[
        Annotated[Inner, Tag("inner")] | Annotated[Other, Tag("other")],
        Discriminator(lambda value: value.get("kind", "inner") if isinstance(value, dict) else "inner"),
    ] = Inner()


def refusal(tree: dict, where: str = "") -> str:
    with pytest.raises(ConfigError) as error:
        parse(Outer, tree, where)
    assert error.value.exit_code == 2
    return str(error.value)


def test_a_good_tree_is_typed() -> None:
    found = parse(Outer, {"steps": 5, "betas": [0.5, 0.6], "clip": None, "inner": {"every": 2}})
    assert (found.steps, found.betas, found.clip, found.inner.every, found.inner.decay) == (5, (0.5, 0.6), None, 2, 0.9)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"step": 5}, "unknown key step: did you mean steps?"),
        ({"inner": {"evry": 5}}, "unknown key inner.evry: did you mean inner.every?"),
        ({"qqq": 5}, "unknown key qqq: known here: betas, clip, either, inner, kinds, mode, named, steps"),
        ({"steps": "many"}, "steps='many': input should be a valid integer"),
        ({"steps": 1.5}, "steps=1.5: input should be a valid integer"),
        ({"inner": {"decay": 1}}, "inner.decay=1: input should be less than 1"),
        ({"inner": 3}, "inner=3: "),
        ({"betas": [0.9, "x"]}, "betas.1='x': input should be a valid number"),
        ({"named": {"a": "x"}}, "named.a='x': input should be a valid integer"),
    ],
)
def test_a_bad_tree_names_key_and_remedy(tree: dict, message: str) -> None:
    assert message in refusal({"steps": 1, **tree})


def test_where_stands_before_the_key() -> None:
    assert "stages.base.train.inner.every='x'" in refusal({"steps": 1, "inner": {"every": "x"}}, "stages.base.train")
    assert "did you mean stages.base.train.steps?" in refusal({"stepz": 1}, "stages.base.train")


def test_a_required_key_is_named() -> None:
    remedy = "give steps=VALUE on the command line, or write it into the config"
    assert refusal({}) == f"steps is required and not set: {remedy}"


def test_every_mistake_is_told_at_once() -> None:
    lines = refusal({"steps": "x", "betaz": 1, "stepz": 2}).splitlines()
    assert len(lines) == 3
    assert sum("did you mean" in line for line in lines) == 2


def test_the_members_of_a_union_are_no_keys() -> None:
    message = refusal({"steps": 1, "mode": "sometimes"})
    assert message.startswith("mode='sometimes': input should be 'auto', or input should be a valid boolean")
    assert "\n" not in message
    assert "either.decay=7" in refusal({"steps": 1, "either": {"decay": 7}})


def test_keys_and_kinds_of_a_section_that_has_several() -> None:
    """A key of one kind is not the remedy for another."""
    wrong = {"kinds": {"kind": "other", "every": 3}}
    assert refusal({"steps": 1, **wrong}) == "unknown key kinds.every: known here: kind, levels"
    assert refusal({"steps": 1, "kinds": {"kind": "third"}}) == "kinds.kind=third: use one of 'inner', 'other'"


# Layers ----------------------------------------------------------------------------------------------------------


def test_merge_joins_mappings_and_replaces_the_rest() -> None:
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert merge(base, {"a": {"c": [3]}, "d": {"e": 1}}) == {"a": {"b": 1, "c": [3]}, "d": {"e": 1}}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 1}


def test_a_word_stays_when_keys_are_laid_over_it() -> None:
    base = {"parallel": "hybrid"}
    assert merge(base, {"parallel": {"shard": 3}}) == {"parallel": {"layout": "hybrid", "shard": 3}}
    assert merge(base, {"parallel": "shard"}) == {"parallel": "shard"}


def test_merge_shares_nothing_with_what_was_laid_over() -> None:
    over = {"a": {"b": [1]}}
    merged = merge({}, over)
    merged["a"]["b"].append(2)
    assert over == {"a": {"b": [1]}}


def test_flatten_undoes_nest() -> None:
    assert flatten(nest("a.b.c", [1, 2])) == {"a.b.c": [1, 2]}
    assert flatten({"a": {}, "b": {"c": None}}) == {"a": {}, "b.c": None}


# Overrides and YAML ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("100", 100), ("1e-4", 1e-4), ("-1E+3", -1000.0), (".5", 0.5), ("1.", 1.0), ("1_000", 1000), ("null", None), ("", None),
        ("true", True), ("[1, 2]", [1, 2]), ("[a, 1e-3]", ["a", 1e-3]), ("{a: 1}", {"a": 1}), ("on", "on"), ("no", "no"), ("2026-11-15", "2026-11-15"),
        ("007", "007"), ("1:30", "1:30"), ("a red 3", "a red 3"), ("'5'", "5"), ("a=b", "a=b"), ("[1", "[1"), ("e4", "e4"), (".inf", float("inf")),
    ],
)  # fmt: skip
def test_override_values_are_yaml(text: str, value: object) -> None:
    found = parse_override(f"some.key={text}")
    assert found == ("some.key", value)
    assert type(found[1]) is type(value)


@pytest.mark.parametrize("text", ["steps", "=3", "a..b=3", "a b=3", ".a=3", "1a=3"])
def test_what_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="overrides look like"):
        parse_override(text)


def test_what_is_dumped_comes_back() -> None:
    words = [
        "1e-4",
        "1e5",
        "on",
        "no",
        "null",
        "~",
        "007",
        "1_0",
        "1:30",
        "2026-11-15",
        "",
        " a",
        "ünï",
        "a: b",
        "- x",
        "#",
        "0x10",
        "true",
        "3",
        "*",
    ]
    tree = {"words": words, "numbers": [1e-4, 1e-08, 0.1, 3, -2, 1e20, 1.0], "rest": [None, True, {"a": []}]}
    back = read_yaml(dump_yaml(tree), "")
    assert back == tree
    assert [type(v) for v in back["numbers"]] == [type(v) for v in tree["numbers"]]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    with pytest.raises(ConfigError, match="does not exist"):
        load_file(path)
    path.write_text("")
    assert load_file(path) == {}
    path.write_text('{"train": {"lr": 1e-4}}')  # JSON is YAML
    assert load_file(path) == {"train": {"lr": 1e-4}}
    for text, message in (
        ("- 1", "must hold a mapping"),
        ("a: [", "not readable YAML"),
        ("a: !!python/object:os.system x", "not readable YAML"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_file(path)
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match="not readable YAML"):
        load_file(path)


def test_json_is_read_as_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n\t"prompts": ["a \\ud83d\\udc31 cat"],\n\t"train": {"lr": 1E-4, "betas": [0.9, 0.99]}\n}')
    assert load_file(path) == {"prompts": ["a 🐱 cat"], "train": {"lr": 1e-4, "betas": [0.9, 0.99]}}
    for text, message in (
        ("{train: 1}", "not readable JSON"),
        ("[1]", "must hold a mapping"),
        ("", "not readable JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_file(path)
