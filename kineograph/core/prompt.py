"""One prompt: a caption, and what else holds for this drawing alone."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, PrivateAttr, StrictInt, StrictStr, model_validator

from kineograph.core.config import Config, make_absolute
from kineograph.core.text_file import MAX_CAPTION, replace_surrogates, split_lines


def _join_lines(text: str) -> str:
    """One line of whole characters."""
    if len(text) > MAX_CAPTION:
        raise ValueError(f"it has {len(text):,} characters, and a prompt has at most {MAX_CAPTION:,}: shorten it")
    return " ".join(line.strip() for line in split_lines(replace_surrogates(text))).strip()


Caption = Annotated[StrictStr, AfterValidator(_join_lines)]
File = Annotated[StrictStr, Field(min_length=1), AfterValidator(make_absolute)]


class Prompt(Config):
    """One line of a prompts file. A field that is not set is as the command or the run has it."""

    prompt: Caption = ""
    """The caption."""
    negative: Caption | None = None
    """What guidance steers away from."""
    image: File | None = None
    """The picture or clip to begin with, to enlarge or to inpaint."""
    mask: File | None = None
    """A picture, white where the one of `image` is inpainted."""
    seed: StrictInt | None = Field(None, ge=0, lt=2**63)
    """Draws this prompt as if alone with that seed."""
    frames: StrictInt | None = Field(None, ge=1)
    """Frames of the clip, those of `image` included."""
    scene: StrictInt | None = Field(None, ge=1)
    """The number of this scene in its story: 1 begins one, the next lines continue it."""
    overlap: StrictInt | None = Field(None, ge=1)
    """Frames of the previous scene that this scene continues."""

    _where: str = PrivateAttr("")

    @model_validator(mode="after")
    def _check_fields(self) -> Prompt:
        if self.mask is not None and self.image is None:
            raise ValueError("mask needs the picture to inpaint: add image")
        return self

    @property
    def where(self) -> str:
        """The file and line, or the config key, for errors; empty for a prompt given in Python."""
        return self._where

    def located(self, where: str) -> Prompt:
        """The same prompt, from `where`."""
        copy = self.model_copy()
        copy._where = where
        return copy

    def to_json(self) -> dict[str, Any]:
        """The fields that are set."""
        return {key: value for key, value in self.model_dump().items() if value not in (None, "")}


def dump_prompts(prompts: list[Prompt]) -> list[str | dict[str, Any]]:
    """As a config holds them: a caption alone is a string."""
    trees = [prompt.to_json() for prompt in prompts]
    return [tree["prompt"] if tree.keys() == {"prompt"} else tree for tree in trees]
