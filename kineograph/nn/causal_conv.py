"""Three-dimensional convolutional parts that are causal in time and take a clip in chunks: B C T H W, in channels_last_3d memory.

A part that looks back takes `past`, the last frames that it saw of the chunk before (None: the clip begins here), and gives its
own last frames for the next chunk. The first frame of a clip stands alone: time is halved and doubled behind it.

Shapes are changed by torch's own methods here: there are hundreds of changes in a network, and torch.compile traces each of einops' as
Python, pattern parsing and all.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Statistics = Literal["chunk", "frame"]
Pasts = tuple[Tensor, Tensor]


def frames_of(x: Tensor) -> Tensor:
    """B C T H W → B·T C H W; in channels_last_3d memory a view, and channels_last."""
    return x.transpose(1, 2).flatten(0, 1)


def clips_of(frames: Tensor, clips: int) -> Tensor:
    """B·T C H W → B C T H W"""
    return frames.unflatten(0, (clips, -1)).transpose(1, 2)


# Time ----------------------------------------------------------------------------------------------------------------


def halved(x: Tensor, first: bool) -> Tensor:
    """Means of two neighbouring frames; a clip's first frame stays as it is."""
    rest = x[:, :, 1:] if first else x
    pairs = (rest[:, :, ::2] + rest[:, :, 1::2]) / 2
    return torch.cat([x[:, :, :1], pairs], dim=2) if first else pairs


def stretched(x: Tensor, factor: int, first: bool) -> Tensor:
    """Each frame `factor` times; a clip's first frame once."""
    if factor == 1 or (first and x.shape[2] == 1):
        return x
    rows = x.permute(0, 2, 3, 4, 1)  # the order of channels_last_3d memory
    rest = rows[:, 1:] if first else rows
    longer = rest.unsqueeze(2).expand(-1, -1, factor, -1, -1, -1).flatten(1, 2)  # B t·s H W C
    if first:
        longer = torch.cat([rows[:, :1], longer], dim=1)
    return longer.permute(0, 4, 1, 2, 3)


# Layers --------------------------------------------------------------------------------------------------------------


class CausalConv(nn.Module):
    """3 × 3 × 3 over a frame and the two before it, as one convolution a chunk; before a clip's first frame stands that frame."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(width, out, 3, padding=(0, 1, 1))

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        first = x[:, :, :1]
        x = torch.cat([first, first, x] if past is None else [past, x], dim=2)
        return self.conv(x), x[:, :, -2:].clone(memory_format=torch.channels_last_3d)  # a view would keep all of it


class GroupNorm(nn.Module):
    """Over groups of channels, all places, and the frames of a chunk (`chunk`) or each frame alone (`frame`). In the input's own type, weights
    rounded to it and statistics in float32: autocast would copy each map to float32 and back."""

    def __init__(self, width: int, groups: int, statistics: Statistics) -> None:
        super().__init__()
        self.groups, self.statistics = groups, statistics
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            if self.statistics == "chunk":
                return F.group_norm(x, self.groups, weight, bias, 1e-6)
            return clips_of(F.group_norm(frames_of(x), self.groups, weight, bias, 1e-6), x.shape[0])


class Pointwise(nn.Module):
    """1 × 1 × 1, a matrix product over the channels"""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return pointwise(x, self.conv)


def pointwise(x: Tensor, conv: nn.Conv3d) -> Tensor:
    """conv(x), of a convolution of 1 × 1 × 1, whose own kernels may leave channels_last_3d memory."""
    return F.linear(x.permute(0, 2, 3, 4, 1), conv.weight.flatten(1), conv.bias).permute(0, 4, 1, 2, 3)


class LatentNorm(nn.Module):
    """norm(x) · y(z) + b(z): the latents scale and shift what was normalised, each at its own place and time.

    y and b are computed where the latents are, and then stretched to the map: as y(stretched z), of which this is equal but
    smaller by the area that a latent covers.
    """

    def __init__(self, width: int, latents: int, groups: int, statistics: Statistics) -> None:
        super().__init__()
        self.norm_layer = GroupNorm(width, groups, statistics)
        self.conv_y, self.conv_b = Pointwise(latents, width), Pointwise(latents, width)

    def forward(self, x: Tensor, z: Tensor, first: bool) -> Tensor:
        frames, h, w = z.shape[2:]
        lead = int(first)
        factor = (x.shape[2] - lead) // (frames - lead) if frames > lead else 1
        y, b = (
            stretched(part(z), factor, first).permute(0, 2, 3, 4, 1)[:, :, :, None, :, None].to(x.dtype)
            for part in (self.conv_y, self.conv_b)
        )  # B T h 1 w 1 C
        rows = self.norm_layer(x).permute(0, 2, 3, 4, 1)  # B T H W C
        places = rows.unflatten(3, (w, -1)).unflatten(2, (h, -1))  # B T h p w q C
        return (places * y + b).flatten(4, 5).flatten(2, 3).permute(0, 4, 1, 2, 3)


class CausalResidual(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), the norms under the latents' command where there are `latents` channels of them."""

    def __init__(self, width: int, out: int, groups: int, statistics: Statistics, latents: int | None = None) -> None:
        super().__init__()
        self.norm1 = _norm(width, groups, statistics, latents)
        self.conv1 = CausalConv(width, out)
        self.norm2 = _norm(out, groups, statistics, latents)
        self.conv2 = CausalConv(out, out)
        self.conv_shortcut = nn.Conv3d(width, out, 1) if width != out else None

    def forward(self, x: Tensor, past: Pasts | None, z: Tensor | None = None) -> tuple[Tensor, Pasts]:
        normed = (lambda norm, x: norm(x)) if z is None else (lambda norm, x: norm(x, z, past is None))
        h, past1 = self.conv1(F.silu(normed(self.norm1, x)), past and past[0])
        h, past2 = self.conv2(F.silu(normed(self.norm2, h)), past and past[1])
        return (x if self.conv_shortcut is None else pointwise(x, self.conv_shortcut)) + h, (past1, past2)


def _norm(width: int, groups: int, statistics: Statistics, latents: int | None) -> nn.Module:
    if latents is None:
        return GroupNorm(width, groups, statistics)
    return LatentNorm(width, latents, groups, statistics)


class Halve(nn.Module):
    """H W → H/2 W/2, and with `time` T → 1 + (T − 1)/2."""

    def __init__(self, width: int, time: bool) -> None:
        super().__init__()
        self.time = time
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        if self.time:
            x = halved(x, first)
        return clips_of(self.conv(F.pad(frames_of(x), (0, 1, 0, 1))), x.shape[0])


class Double(nn.Module):
    """H W → 2H 2W, and with `time` T → 1 + 2(T − 1). Frames are doubled last: the convolution sees each alone."""

    def __init__(self, width: int, time: bool) -> None:
        super().__init__()
        self.factor = 2 if time else 1
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        larger = F.interpolate(frames_of(x), scale_factor=2.0)
        return stretched(clips_of(self.conv(larger), x.shape[0]), self.factor, first)


def begin(network: nn.Module) -> None:
    """Weights to train from: convolutions that keep the size of what they are given, without a bias; residual blocks that add
    nothing yet; norms that the latents do not command yet, y = 1 and b = 0.

    torch's own start shrinks the signal at each convolution until random biases outweigh it, and norms then make them
    louder: after 60 steps on one clip the squared error was four times that of this start.
    """
    for part in network.modules():
        if isinstance(part, nn.Conv2d | nn.Conv3d):
            nn.init.normal_(part.weight, std=part.weight[0].numel() ** -0.5)
            nn.init.zeros_(part.bias)  # type: ignore[arg-type]
    for part in network.modules():
        if isinstance(part, CausalResidual):
            nn.init.zeros_(part.conv2.conv.weight)
        elif isinstance(part, LatentNorm):
            nn.init.zeros_(part.conv_y.conv.weight)
            nn.init.zeros_(part.conv_b.conv.weight)
            nn.init.ones_(part.conv_y.conv.bias)  # type: ignore[arg-type]
