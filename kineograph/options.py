"""Commands from plain functions: a parameter is an option or argument, and a line of the docstring is its help."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import typer

F = TypeVar("F", bound=Callable[..., None])


class Help(NamedTuple):
    """`name METAVAR: text (default: shown)`; metavar and default may be missing."""

    text: str
    metavar: str | None
    shown: str | None


def parse_help(docstring: str, names: Iterable[str]) -> tuple[str, dict[str, Help]]:
    """→ the docstring without the lines of `names`, and the help of each. Lines that are indented further continue one."""
    known, found, rest, last = set(names), dict[str, str](), list[str](), ""
    for line in inspect.cleandoc(docstring).splitlines():
        name = line.partition(":")[0].partition(" ")[0]
        if name in known:
            found[name] = line.removeprefix(name)
            last = name
        elif last and line.startswith(" "):
            found[last] += f" {line.strip()}"
        else:
            rest.append(line)
            last = ""
    return "\n".join(rest).strip(), {name: _parse_line(line) for name, line in found.items()}


def _parse_line(line: str) -> Help:
    metavar, _, text = line.partition(": ")
    default = re.search(r" \(default: (.*)\)$", text)
    return Help(text[: default.start()] if default else text, metavar.strip() or None, default and default[1])


def command(group: typer.Typer, shared: str = "", name: str | None = None) -> Callable[[F], F]:
    """Add a function to `group` as a command.

    A parameter without a default is an argument, another one an option, unless its type says otherwise; a bool that is False is a flag.
    `shared`: help lines of parameters that several commands have.
    """

    def add(function: F) -> F:
        parameters = inspect.signature(function).parameters
        hints = get_type_hints(function, include_extras=True)
        _, described = parse_help(shared, parameters)
        function.__doc__, own = parse_help(function.__doc__ or "", parameters)
        for parameter in parameters.values():
            hint, help_ = hints[parameter.name], (described | own)[parameter.name]
            kind, *extra = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
            info: Any = copy.copy(extra[0]) if extra else _make_info(parameter)
            info.help, info.metavar = help_.text, help_.metavar
            if help_.shown is not None:
                info.show_default = help_.shown
            function.__annotations__[parameter.name] = Annotated[kind, info]
        group.command(name)(function)
        return function

    return add


def _make_info(parameter: inspect.Parameter) -> Any:
    if parameter.default is parameter.empty:
        return typer.Argument()
    flag = [f"--{parameter.name.replace('_', '-')}"] if parameter.default is False else []
    return typer.Option(*flag)
