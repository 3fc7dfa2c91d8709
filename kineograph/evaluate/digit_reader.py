"""A small network that reads the digits of a clip or image: which, in which colour, and where they move or stand.

Each of the ten digits has an attention map in every frame. The map's strength gives the digit's presence, the features pooled under it
its colour, and the path of its centre the direction and place. So every attribute belongs to its digit, and no matching is needed.
Two equal digits in one clip cannot be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from kineograph.core import weight_cache
from kineograph.core.errors import InputError
from kineograph.data.digit_captions import COLOURS, DIRECTIONS, PLACES, Facts, Figure

SIDE = 32  # frames are resized to SIDE × SIDE
FRAMES = 4  # of a clip, evenly spaced from the first to the last
COLOUR_NAMES = (*COLOURS, None)  # None: white
DIRECTION_NAMES = (*DIRECTIONS, None)  # None: stands still
MOST_FIGURES = 2
PRESENT = 0.5  # probability from which a second digit counts

WEIGHTS = Path(__file__).with_name("reader.safetensors")


@dataclass
class Reading:
    """Logits for each of the ten digits."""

    presence: Tensor  # B 10
    colour: Tensor  # B 10 7
    direction: Tensor | None  # B 10 9; None for images
    place: Tensor  # B 10 9


class ReaderNet(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            _conv(3, 32, 4, 2),  # 16 × 16
            _conv(32, 64, 3, 1),
            _conv(64, width, 3, 2),  # 8 × 8
            _conv(width, width, 3, 1),
            _conv(width, width, 3, 1),
        )
        self.seen = nn.Conv2d(width, 10, 1)
        assert self.seen.bias is not None
        nn.init.constant_(self.seen.bias, -6.0)  # at first no digit is present: log 64 − 6 < 0
        self.colour = _mlp(width, len(COLOUR_NAMES))
        self.direction = _mlp(width + 2 * FRAMES, len(DIRECTION_NAMES))
        self.place = _mlp(width + 2, len(PLACES))

    def forward(self, frames: Tensor) -> Reading:
        """B T 3 SIDE SIDE, in [0, 1], T = FRAMES or 1."""
        features = self.trunk(rearrange(frames, "b t c h w -> (b t) c h w"))
        return self.heads(rearrange(features, "(b t) c h w -> b t c h w", t=frames.shape[1]))

    def heads(self, features: Tensor) -> Reading:
        """Features B T D h w → the reading"""
        frames, side = features.shape[1], features.shape[-1]
        logits = self.seen(rearrange(features, "b t d h w -> (b t) d h w"))
        logits = rearrange(logits, "(b t) n h w -> b t n (h w)", t=frames)
        presence = logits.logsumexp(-1).mean(1)  # B 10
        maps = logits.softmax(-1)  # B T 10 (h w)
        pooled = torch.einsum("btnp,btdp->bnd", maps, rearrange(features, "b t d h w -> b t d (h w)")) / frames
        line = torch.linspace(-1, 1, side, device=features.device, dtype=features.dtype)
        grid = torch.stack([line.repeat_interleave(side), line.repeat(side)], -1)  # (h w) 2
        centres = torch.einsum("btnp,pc->bntc", maps, grid)  # B 10 T 2
        middle = centres.mean(2)
        path = rearrange(centres - middle[:, :, None], "b n t c -> b n (t c)")
        return Reading(
            presence,
            self.colour(pooled),
            self.direction(torch.cat([pooled, 4 * path], -1)) if frames > 1 else None,
            self.place(torch.cat([pooled, 4 * middle], -1)),
        )


def _conv(in_channels: int, out_channels: int, size: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, size, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True))


def _mlp(in_width: int, out_width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_width, 64), nn.ReLU(inplace=True), nn.Linear(64, out_width))


def preprocess(pixels: Tensor) -> Tensor:
    """B T C H W float in [0, 1], any size → B t 3 SIDE SIDE, t = FRAMES or 1."""
    count, channels = pixels.shape[1], pixels.shape[2]
    if count > 1:
        times = torch.linspace(0, count - 1, FRAMES).round().long()
        pixels = pixels[:, times.to(pixels.device)]
    pixels = pixels[:, :, :3] if channels >= 3 else pixels[:, :, :1].expand(-1, -1, 3, -1, -1)
    frames = rearrange(pixels, "b t c h w -> (b t) c h w").float()
    if frames.shape[-2:] != (SIDE, SIDE):
        frames = F.interpolate(frames, (SIDE, SIDE), mode="bilinear", antialias=True)
    return rearrange(frames, "(b t) c h w -> b t c h w", b=pixels.shape[0])


class Reader:
    """The trained network."""

    def __init__(self, net: ReaderNet, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.net = net.float().eval().requires_grad_(False).to(self.device)

    @staticmethod
    def load(path: Path | str = WEIGHTS, device: torch.device | str = "cpu") -> Reader:
        """Load the shipped weights, or a file that tools/train_digit_reader.py wrote."""
        net = ReaderNet()
        try:
            net.load_state_dict(weight_cache.load(Path(path)))
        except RuntimeError as error:
            raise InputError(f"{path} does not hold this reader's weights: {error}") from None
        return Reader(net, device)

    @torch.no_grad()
    def read(self, pixels: Tensor, chunk: int = 256) -> list[Facts]:
        """B T C H W in [0, 1] → for each clip its digits, colours and directions; for images (T = 1) places, not directions."""
        facts: list[Facts] = []
        for part in pixels.split(chunk):
            facts += _decode(self.net(preprocess(part.to(self.device))))
        return facts


def _decode(reading: Reading) -> list[Facts]:
    """The likeliest digit, and a second one where it is likely enough."""
    top = reading.presence.sigmoid().topk(MOST_FIGURES, dim=-1)
    colours = reading.colour.argmax(-1).tolist()
    directions = reading.direction.argmax(-1).tolist() if reading.direction is not None else None
    places = reading.place.argmax(-1).tolist()
    result = []
    for row, (chances, digits) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
        result.append(
            tuple(
                Figure(
                    digit,
                    COLOUR_NAMES[colours[row][digit]],
                    direction=DIRECTION_NAMES[directions[row][digit]] if directions else None,
                    place=None if directions else PLACES[places[row][digit]],
                )
                for rank, (chance, digit) in enumerate(zip(chances, digits, strict=True))
                if rank == 0 or chance > PRESENT
            )
        )
    return result
