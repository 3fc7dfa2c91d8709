"""Calls of another package's classes in a file: a Python script, which is parsed and never run, or JSON or YAML of keyword arguments."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kineograph.core.config_file import load_file
from kineograph.core.errors import InputError

_MAX_BYTES = 1_000_000
_MAX_CALLS = 100


@dataclass
class Call:
    """One call, such as `vae = VQGanVAE(dim = 256)`."""

    name: str  # of the class
    keywords: dict[str, Any]
    parts: dict[str, Call] = field(default_factory=dict)  # keyword (or position) → the call whose object is given
    variable: str = ""


def read_calls(path: Path, known: Mapping[str, Collection[str]]) -> list[Call]:
    """Find calls of the `known` classes (name → its keywords). A file without any is refused."""
    if path.suffix.lower() in (".json", ".yaml", ".yml"):
        calls = _read_mapping(path, known)
    else:
        calls = _read_script(path, known)
    if not calls:
        raise InputError(f"{path} calls none of {', '.join(known)}: name the package that it is for with --from")
    return calls


def _read_mapping(path: Path, known: Mapping[str, Collection[str]]) -> list[Call]:
    """{"CViViT": {"dim": 512}, "CViViTTrainer": {…}}; or the keywords of one call."""
    tree = load_file(path)
    if tree and all(isinstance(value, dict) for value in tree.values()) and tree.keys() & known.keys():
        unknown = sorted(tree.keys() - known.keys())
        if unknown:
            raise InputError(f"{path}: unknown class {unknown[0]}: use {', '.join(known)}")
        return [Call(name, dict(keywords)) for name, keywords in tree.items()]
    matches = {name: len(tree.keys() & set(keywords)) for name, keywords in known.items()}
    best = max(matches.values(), default=0)
    names = [name for name, score in matches.items() if score == best]
    if not best:
        return []
    if len(names) > 1:
        raise InputError(
            f"{path} may be the keywords of {' or '.join(names)}: put them under that name, {{{names[0]}: …}}"
        )
    return [Call(names[0], dict(tree))]


def _read_script(path: Path, known: Collection[str]) -> list[Call]:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise InputError(f"{path} has more than {_MAX_BYTES:,} bytes: a script has at most that")
        tree = ast.parse(data.decode("utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "nested too deeply"  # what a RecursionError and a MemoryError do not say
        raise InputError(f"{path} is neither a Python script nor JSON or YAML: {reason}") from None
    finder = _Finder(path, known)
    try:
        finder.visit(tree)
    except RecursionError:
        raise InputError(f"{path} nests too deeply to be read") from None
    return finder.calls


class _Finder(ast.NodeVisitor):
    """Collects calls in the order of the script, inner ones first. Constants assigned to names are resolved."""

    def __init__(self, path: Path, known: Collection[str]) -> None:
        self.path, self.known = path, known
        self.calls: list[Call] = []
        self.constants: dict[str, Any] = {}

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        before = len(self.calls)
        self.generic_visit(node)
        if len(self.calls) > before and names:
            self.calls[-1].variable = names[0]
        for name in names:
            value = self._evaluate(node.value)
            if not isinstance(value, _Source):
                self.constants[name] = value

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name not in self.known:
            return
        if len(self.calls) == _MAX_CALLS:
            raise InputError(
                f"{self.path} has more than {_MAX_CALLS} calls of {', '.join(self.known)}: give the script of one training"
            )
        call = Call(name, {})
        arguments = [(str(index), value) for index, value in enumerate(node.args)]
        arguments += [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
        for key, value in arguments:
            inner = self._find_part(value)
            if inner is not None:
                call.parts[key] = inner
            else:
                call.keywords[key] = self._evaluate(value)
        self.calls.append(call)

    def _find_part(self, node: ast.expr) -> Call | None:
        """The call whose object a variable holds at this place; an inner call gets a name of its own."""
        if isinstance(node, ast.Name):
            return next((call for call in reversed(self.calls) if call.variable == node.id), None)
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            inner = next((call for call in reversed(self.calls) if call.name == name and not call.variable), None)
            if inner is not None:
                inner.variable = f"({name} {len(self.calls)})"
                return inner
        return None

    def _evaluate(self, node: ast.expr) -> Any:
        """A literal or a constant; any other expression stays as its source."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.constants[node.id]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
            return {keyword.arg or "**": self._evaluate(keyword.value) for keyword in node.keywords}
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return _Source(ast.unparse(node))
        return _as_json(value)


@dataclass(frozen=True)
class _Source:
    """An expression that is no literal; no converter takes it."""

    code: str

    def __str__(self) -> str:
        return self.code


def _as_json(value: Any) -> Any:
    """Tuples and sets as lists, so that the value can be written down."""
    if isinstance(value, (tuple, set, list)):
        return [_as_json(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _as_json(part) for key, part in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
