"""Help of commands in the docstrings of their functions."""

from __future__ import annotations

import pytest
import typer

from kineograph.options import Help, command, parse_help

DOCSTRING = """Cut crops.

    Example: crop big.png

    file FILE: A picture: PNG or JPEG.
    size HxW: Height and width,
        in pixels. (default: as it is)
    """


def test_lines_of_parameters_are_their_help() -> None:
    text, described = parse_help(DOCSTRING, ["file", "size"])
    assert text == "Cut crops.\n\nExample: crop big.png"
    assert described == {
        "file": Help("A picture: PNG or JPEG.", "FILE", None),
        "size": Help("Height and width, in pixels.", "HxW", "as it is"),
    }


def test_a_parameter_without_help_is_an_error() -> None:
    def crop(file: str, colour: bool = False) -> None:
        """file: A picture."""

    with pytest.raises(KeyError, match="colour"):
        command(typer.Typer())(crop)
