"""PSNR and SSIM of pictures in [0, 1]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import reduce
from torch import Tensor

MIN_MSE = 1e-10  # a perfect copy has 100 dB
WINDOW = 11  # pixels of SSIM's Gaussian window, σ = 1.5, as in its paper
_C1, _C2 = 0.01**2, 0.03**2


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """−10 log₁₀ MSE of pictures F C H W → F"""
    error = reduce((x.float() - y.float()).square(), "f c h w -> f", "mean")
    return -10 * torch.log10(error.clamp_min(MIN_MSE))


def ssim(x: Tensor, y: Tensor) -> Tensor:
    """(2μxμy + c₁)(2σxy + c₂) / ((μx² + μy² + c₁)(σx² + σy² + c₂)) of pictures F C H W → F, mean over channels and all whole windows."""
    x, y = x.double(), y.double()
    places = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    weights = torch.softmax(-places.square() / (2 * 1.5**2), 0)
    channels = x.shape[1]

    def blur(pixels: Tensor) -> Tensor:
        for shape in ((1, 1, WINDOW, 1), (1, 1, 1, WINDOW)):
            pixels = F.conv2d(pixels, weights.view(shape).expand(channels, -1, -1, -1), groups=channels)
        return pixels

    mean_x, mean_y = blur(x), blur(y)
    var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    covariance = blur(x * y) - mean_x * mean_y
    score = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    score = score / ((mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2))
    return reduce(score, "f c h w -> f", "mean")
