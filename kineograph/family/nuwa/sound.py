"""The sound beside the picture: its tokens are the last rows of each frame's grid, after the picture's, with ids of their own.

So frame t is drawn first, then its sound, then frame t + 1. Picture tokens see the sound of earlier frames, sound tokens also the
picture of their own frame (nn/window.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kineograph.codec.audio_codec import AudioCodec
from kineograph.core.errors import ConfigError
from kineograph.core.task import BuildContext
from kineograph.nn.window import Grid

UNKNOWN = -1  # a token that is to be drawn


class SoundRows:
    """Joins the tokens of pictures and sound in one grid, and takes them apart."""

    def __init__(self, codec: AudioCodec, picture: Grid, picture_codes: int) -> None:
        self.codec, self.picture, self.picture_codes = codec, picture, picture_codes
        self.rows = codec.tokens_per_frame // picture[2]

    @staticmethod
    def open(name: str, context: BuildContext, picture: Grid, picture_codes: int) -> SoundRows:
        """`name` is the stage of the audio codec; refuses grids that do not go together."""
        codec = context.stage(name)
        if not isinstance(codec, AudioCodec):
            raise ConfigError(f"sound={name} is not a codec of sound: name a stage of task: audio_codec")
        frames, samples = context.shape.frames, context.shape.samples_per_frame
        if picture[0] != frames:
            raise ConfigError(
                f"sound={name} needs a codec with a grid of tokens for every frame, and this one has {picture[0]} for {frames} frames: "
                "use task: vqgan"
            )
        if samples != codec.shape.samples_per_frame:
            raise ConfigError(
                f"sound={name} was trained with {codec.shape.samples_per_frame} samples a frame, and this stage has {samples}: "
                "use the same data.sample_rate and data.fps"
            )
        if codec.tokens_per_frame % picture[2]:
            raise ConfigError(
                f"sound={name} has {codec.tokens_per_frame} tokens a frame, which fill no whole rows of {picture[2]} tokens: change its patch "
                f"or strides, so that a frame has {picture[2]}, {2 * picture[2]} … tokens"
            )
        return SoundRows(codec, picture, picture_codes)

    @property
    def grid(self) -> Grid:
        """Of pictures and sound."""
        frames, rows, columns = self.picture
        return frames, rows + self.rows, columns

    @property
    def vocabulary(self) -> int:
        return self.picture_codes + self.codec.vocabulary

    def encode(self, picture: Tensor, sound: Tensor) -> Tensor:
        """Picture tokens B t h w and sound B t S → B t (h + r) w"""
        return self._join(picture, self.codec.encode(sound) + self.picture_codes)

    def leave_unknown(self, picture: Tensor) -> Tensor:
        """Picture tokens B t h w → B t (h + r) w, with the sound left to be drawn."""
        return self._join(picture, picture.new_full((*picture.shape[:2], self.codec.tokens_per_frame), UNKNOWN))

    def _join(self, picture: Tensor, sound: Tensor) -> Tensor:
        return torch.cat([picture, sound.view(*sound.shape[:2], self.rows, self.picture[2])], dim=2)

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """B t (h + r) w → tokens of the pictures B t h w and of the sound B t n, each as its codec numbers them."""
        picture, sound = tokens.split([self.picture[1], self.rows], dim=2)
        return picture, sound.flatten(2) - self.picture_codes

    def is_allowed(self, device: torch.device) -> Tensor:
        """(Y X) V, bool: the ids that may stand at each position of a frame."""
        _, rows, columns = self.grid
        is_sound_row = torch.arange(rows, device=device).repeat_interleave(columns) >= self.picture[1]
        is_sound_id = torch.arange(self.vocabulary, device=device) >= self.picture_codes
        return is_sound_row[:, None] == is_sound_id
