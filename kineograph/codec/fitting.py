"""Whether a picture divides into tokens."""

from __future__ import annotations

from kineograph.core.errors import ConfigError


def tokens_across(codec: str, height: int, width: int, patch: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of tokens that cover `patch` pixels each."""
    for name, size, side in (("height", height, patch[0]), ("width", width, patch[1])):
        if size % side or not size:
            below, above = size // side * side, (size // side + 1) * side
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"data.size=[{height}, {width}] does not fit this {codec}: a token covers {patch[0]} × {patch[1]} pixels, "
                f"so the {name} must be a multiple of {side} ({near})"
            )
    return height // patch[0], width // patch[1]
