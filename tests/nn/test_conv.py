from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

from kineograph.nn.conv import ChannelNorm, MapAttention, ResidualBlock, downsample_conv, upsample_conv


def test_channel_norm_normalises_each_pixel_alone():
    norm = ChannelNorm(6)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(2, 6, 3, 5)
    pixel = F.layer_norm(x[1, :, 2, 3], (6,), norm.weight, norm.bias)
    assert torch.allclose(norm(x)[1, :, 2, 3], pixel, atol=1e-6)
    changed = x.clone()
    changed[0, :, 0, 0] += 3.0
    apart = (norm(changed) - norm(x)).abs().amax(1)
    assert apart[0, 0, 0] > 0
    apart[0, 0, 0] = 0
    assert apart.max() == 0


def test_channels_last_stays_channels_last():
    x = torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    for layer in (ChannelNorm(16), ResidualBlock(16), downsample_conv(16, 32), upsample_conv(16, 8)):
        assert layer(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("block", [ResidualBlock, MapAttention])
def test_new_blocks_change_nothing_and_learn(block):
    layer = block(16)
    x = torch.randn(2, 16, 4, 6)
    assert torch.equal(layer(x), x)
    layer(x).square().sum().backward()
    last = (layer.conv2 if block is ResidualBlock else layer.out).weight
    assert last.grad.abs().sum() > 0


@pytest.mark.parametrize("width", [32, 96, 128, 200])
def test_map_attention_is_attention_over_all_pixels(width):
    layer = MapAttention(width)
    torch.nn.init.normal_(layer.out.weight, std=0.1)
    x = torch.randn(2, width, 3, 4)
    q, k, v = layer.qkv(layer.norm(x)).flatten(2).transpose(1, 2).chunk(3, -1)  # B HW C
    parts = []
    size = width // layer.heads
    for head in range(layer.heads):
        a, b, c = (t[..., head * size : (head + 1) * size] for t in (q, k, v))
        parts.append(torch.softmax(a @ b.transpose(1, 2) / size**0.5, -1) @ c)
    expected = x + layer.out(rearrange(torch.cat(parts, -1), "b (h w) c -> b c h w", h=3))
    assert torch.allclose(layer(x), expected, atol=1e-4)


def test_halve_and_double_are_inverse_in_shape():
    x = torch.randn(1, 8, 6, 10)
    assert downsample_conv(8, 12)(x).shape == (1, 12, 3, 5)
    assert upsample_conv(8, 4)(x).shape == (1, 4, 12, 20)
