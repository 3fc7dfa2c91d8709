"""2D convolutional layers: channel norm, residual block, down- and upsampling, attention over a small feature map.

All expect channels_last memory: norms read whole pixels, and permutes are free.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of each pixel. It has no statistics over space or batch, so tiles and frames cannot
    leak into one another. In channels_last it costs no more than GroupNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:  # B C H W
        pixels = x.permute(0, 2, 3, 1)
        normed = F.layer_norm(pixels, self.weight.shape, self.weight, self.bias)
        # Autocast returns float32, which would double the memory traffic from here on.
        return normed.to(x.dtype).permute(0, 3, 1, 2)


class ResidualBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), initialised to the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = ChannelNorm(width), ChannelNorm(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        zero_init(self.conv2)

    def forward(self, x: Tensor) -> Tensor:  # B C H W
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class MapAttention(nn.Module):
    """Self-attention over the pixels of a small feature map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = next(heads for heads in range(max(width // 64, 1), 0, -1) if width % heads == 0)
        self.norm = ChannelNorm(width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)
        zero_init(self.out)

    def forward(self, x: Tensor) -> Tensor:  # B C H W
        q, k, v = rearrange(self.qkv(self.norm(x)), "b (n heads c) h w -> n b heads (h w) c", n=3, heads=self.heads)
        mixed = F.scaled_dot_product_attention(q, k, v)  # B heads HW c
        return x + self.out(rearrange(mixed, "b heads (h w) c -> b (heads c) h w", h=x.shape[2]))


def zero_init(layer: nn.Module) -> None:
    """Zero a layer's parameters, so that its residual branch starts as zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)


def downsample_conv(width: int, wider: int) -> nn.Module:
    """H W → H/2 W/2"""
    return nn.Conv2d(width, wider, 4, stride=2, padding=1)


def upsample_conv(width: int, narrower: int) -> nn.Module:
    """H W → 2H 2W. Kernel 4 at stride 2 covers every output pixel by four taps: no checkerboard, and less than half the
    FLOPs of interpolation followed by a 3×3 convolution."""
    return nn.ConvTranspose2d(width, narrower, 4, stride=2, padding=1)
