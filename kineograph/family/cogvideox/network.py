"""The expert transformer: text and video in one sequence, with separate adaptive layer norms.

    x ← x + gate · attention(norm(x) · (1 + scale) + shift)        then the same with an MLP

The sequence is never split between blocks: the modulation of text or video is selected elementwise, which torch.compile
fuses. Latents are B t c h w.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from kineograph.core.parallel_plan import ParallelPlan
from kineograph.family.cogvideox.positions import Grid, PositionTables, build_positions
from kineograph.family.cogvideox.transformer_config import Latents, TransformerShape
from kineograph.nn.attention import attend, key_mask

OFS = 2.0  # the constant that the released image-to-video model reads
NORM_EPS, QK_EPS = 1e-5, 1e-6


class Modulation(nn.Module):
    """Adaptive layer norm: shift, scale and gate of video and of text from the time embedding; one shared norm."""

    def __init__(self, width: int, time_width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(time_width, 6 * width)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, x: Tensor, time: Tensor, is_text: Tensor) -> tuple[Tensor, Tensor]:
        """→ the modulated sequence B N D and its gates. `time` is silu of the time embedding, `is_text` is 1 N 1.

        (w x̂ + b)(1 + scale) + shift = w (1 + scale) x̂ + (b (1 + scale) + shift): with vectors multiplied first, the
        backward pass needs two sums over the sequence instead of four.
        """
        weight, bias = self.norm.weight.float(), self.norm.bias.float()
        slopes, offsets, gates = [], [], []
        for part in self.linear(time)[:, None].chunk(2, dim=-1):  # video, then text; B 1 3D each
            shift, scale, gate = part.chunk(3, dim=-1)
            slope = 1 + scale.float()
            slopes.append(weight * slope)
            offsets.append(bias * slope + shift.float())
            gates.append(gate)
        slope, offset, gate = (torch.where(is_text, text, video) for video, text in (slopes, offsets, gates))
        plain = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
        return (plain * slope + offset).to(x.dtype), gate


class Attention(nn.Module):
    """Full attention over text and video. With LoRA, q, k and v have separate projections."""

    def __init__(self, shape: TransformerShape, fused: bool) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.fused = shape.heads, fused
        if fused:
            self.to_qkv = nn.Linear(width, 3 * width)
        else:
            self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.norm_q = nn.LayerNorm(shape.head_width, eps=QK_EPS)
        self.norm_k = nn.LayerNorm(shape.head_width, eps=QK_EPS)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, positions: PositionTables, keep: Tensor | None = None) -> Tensor:
        """x is B N D; `keep` B N is False for padding, which no token attends to."""
        if self.fused:
            q, k, v = rearrange(self.to_qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        else:
            q, k, v = (
                rearrange(to(x), "b n (h d) -> b h n d", h=self.heads) for to in (self.to_q, self.to_k, self.to_v)
            )
        q, k = apply_rotary(self.norm_q(q), positions), apply_rotary(self.norm_k(k), positions)
        mixed = attend(q.to(v.dtype), k.to(v.dtype), v, key_mask(keep))
        return self.to_out(rearrange(mixed, "b h n d -> b n (h d)"))


def apply_rotary(x: Tensor, positions: PositionTables) -> Tensor:
    """Rotate pairs of channels (2i, 2i + 1) in float32: x cos + swapped x sin. B h N d."""
    if positions.cos is None or positions.sin is None:
        return x
    x = x.float()
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * positions.cos + swapped * positions.sin


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, shape: TransformerShape, fused: bool) -> None:
        super().__init__()
        self.norm1 = Modulation(shape.width, shape.time_width)
        self.attention = Attention(shape, fused)
        self.norm2 = Modulation(shape.width, shape.time_width)
        self.mlp = Mlp(shape.width)

    def forward(
        self, x: Tensor, time: Tensor, is_text: Tensor, positions: PositionTables, keep: Tensor | None = None
    ) -> Tensor:
        """x is B N D, keep is B N."""
        modulated, gate = self.norm1(x, time, is_text)
        x = x + gate * self.attention(modulated, positions, keep)
        modulated, gate = self.norm2(x, time, is_text)
        return x + gate * self.mlp(modulated)

    def parallel_plan(self) -> ParallelPlan:
        read = {"to_qkv": 3} if self.attention.fused else {"to_q": 1, "to_k": 1, "to_v": 1}
        return ParallelPlan(
            column_layers={**{f"attention.{name}": stacked for name, stacked in read.items()}, "mlp.up": 1},
            row_layers=("attention.to_out", "mlp.down"),
            attentions=("attention",),
            head_norms=("attention.norm_q", "attention.norm_k"),
            self_attentions=("attention",),
            token_arguments=(0, 2),
        )


class TimeEmbedding(nn.Module):
    """Timestep → sines and cosines → two-layer MLP."""

    def __init__(self, waves: int, width: int) -> None:
        super().__init__()
        self.waves = waves
        self.linear_1 = nn.Linear(waves, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        half = self.waves // 2
        frequency = torch.exp(-math.log(10_000.0) / half * torch.arange(half, device=t.device, dtype=torch.float32))
        angle = t.float()[:, None] * frequency
        waves = torch.cat([angle.cos(), angle.sin()], dim=1).to(self.linear_1.weight.dtype)
        return self.linear_2(F.silu(self.linear_1(waves)))


class LearnedPositions(nn.Module):
    """A learned vector per position, text included. Shorter clips use the first frames; other sizes are interpolated."""

    def __init__(self, text: int, base: Grid, width: int) -> None:
        super().__init__()
        self.text, self.base = text, base
        self.table = nn.Parameter(torch.zeros(1, text + math.prod(base), width))

    def forward(self, text: int, grid: Grid) -> Tensor:
        """1 (L + t h w) D"""
        if text == self.text and grid == self.base:
            return self.table
        words, video = self.table[0].split([self.text, math.prod(self.base)])
        words = F.pad(words, (0, 0, 0, max(0, text - self.text)))[:text]
        t, h, _w = self.base
        video = rearrange(video, "(t h w) d -> d t h w", t=t, h=h)
        size = (max(grid[0], t), *grid[1:])  # longer clips stretch the table, shorter ones cut it
        if size != self.base:
            video = F.interpolate(video[None].float(), size, mode="trilinear", align_corners=False)[0].to(video.dtype)
        return torch.cat([words, rearrange(video[:, : grid[0]], "d t h w -> (t h w) d")])[None]


class Transformer(nn.Module):
    """The denoiser of CogVideoX."""

    def __init__(
        self,
        shape: TransformerShape,
        channels: int,
        text_width: int,
        text_length: int,
        base: Latents,
        fused: bool = True,
    ) -> None:
        """`base`: frames, height and width of latents for positions, where the shape has no base_size and base_frames."""
        super().__init__()
        width, cell = shape.width, shape.patch_time * shape.patch**2
        self.shape, self.channels = shape, channels
        self.read_channels = channels * (2 if shape.first_frame else 1)
        self.base_frames = shape.base_frames or base[0]
        self.base_size = shape.base_size or (base[1], base[2])
        self.patch_in = nn.Linear(self.read_channels * cell, width)
        self.text_in = nn.Linear(text_width, width)
        self.positions = (
            LearnedPositions(
                text_length,
                (self.base_frames, self.base_size[0] // shape.patch, self.base_size[1] // shape.patch),
                width,
            )
            if shape.positions == "rotary+learned"
            else None
        )
        self.time = TimeEmbedding(width, shape.time_width)
        self.ofs = TimeEmbedding(shape.time_width, shape.time_width) if shape.ofs else None
        self.blocks = nn.ModuleList(Block(shape, fused) for _ in range(shape.depth))
        self.norm_final = nn.LayerNorm(width, eps=NORM_EPS)
        self.out_linear = nn.Linear(shape.time_width, 2 * width)
        self.out_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.patch_out = nn.Linear(width, channels * cell)
        self._position_tables: dict[tuple[Grid, int, torch.device], PositionTables] = {}
        self.reset()

    def reset(self) -> None:
        """Initialise with variance 1 / fan-in; gates and the last layer at zero, so that each block starts as the identity."""
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=part.in_features**-0.5)
                nn.init.zeros_(part.bias)
        for block in self.blocks:
            for modulation in (cast(Block, block).norm1, cast(Block, block).norm2):
                nn.init.zeros_(modulation.linear.weight)
        nn.init.zeros_(self.out_linear.weight)
        nn.init.zeros_(self.patch_out.weight)

    def token_grid(self, latents: Latents) -> Grid:
        """Token grid of latents t h w, which must be multiples of the patch size."""
        return latents[0] // self.shape.patch_time, latents[1] // self.shape.patch, latents[2] // self.shape.patch

    def positions_for(self, latents: Latents, text: int, device: torch.device) -> PositionTables:
        """Positions for latents of this size after `text` tokens. Cached, and built outside the compiled graph."""
        key = (self.token_grid(latents), text, device)
        if key not in self._position_tables:
            self._position_tables[key] = build_positions(self.shape, key[0], self.base_size, text, device)
        return self._position_tables[key]

    def _position_embedding(self, grid: Grid, text: int, positions: PositionTables, like: Tensor) -> Tensor | None:
        """1 N D (or 1 (t h w) D for sincos), or None."""
        if self.positions is not None:
            return self.positions(text, grid).to(like.dtype)
        if positions.time is None or positions.height is None or positions.width is None:
            return None
        t, h, w = grid
        parts = (
            positions.time[:, None, None].expand(t, h, w, -1),
            positions.width[None, None].expand(t, h, w, -1),
            positions.height[None, :, None].expand(t, h, w, -1),
        )
        return torch.cat(parts, dim=-1).to(like.dtype).flatten(0, 2)[None]

    def _needs_input_grad(self, x: Tensor) -> bool:
        """Whether the first block trains on an input without gradient. With one it looks like all other blocks, and blocks
        that are compiled one by one share a graph."""
        return (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not x.requires_grad
            and any(p.requires_grad for p in self.blocks[0].parameters())
        )

    def _keep_tokens(self, times: Tensor | None, text: int, grid: Grid) -> Tensor | None:
        """Real latent frames B t → real tokens B N, the text first; a token is real if any of its frames is."""
        if times is None:
            return None
        frames = times.unflatten(1, (-1, self.shape.patch_time)).any(-1)
        return F.pad(frames.repeat_interleave(grid[1] * grid[2], dim=1), (text, 0), value=True)

    def forward(
        self, latents: Tensor, t: Tensor, text: Tensor, positions: PositionTables, times: Tensor | None = None
    ) -> Tensor:
        """B t c h w, timesteps B, text B L E → B t c h w; `positions` come from `positions_for`. `times` B t: False for
        padding, which has no effect on other frames; None: no padding."""
        p, pt = self.shape.patch, self.shape.patch_time
        grid = self.token_grid((latents.shape[1], latents.shape[3], latents.shape[4]))
        patches = rearrange(latents, "b (t r) c (h p) (w q) -> b (t h w) (c r p q)", r=pt, p=p, q=p)
        dtype = self.patch_in.weight.dtype
        video, words = self.patch_in(patches.to(dtype)), self.text_in(text.to(dtype))
        added = self._position_embedding(grid, text.shape[1], positions, video)
        if added is not None and self.positions is None:
            video = video + added
        x = torch.cat([words, video], dim=1)  # B N D
        if added is not None and self.positions is not None:
            x = x + added
        vector = self.time(t)
        if self.ofs is not None:
            vector = vector + self.ofs(torch.full_like(t, OFS, dtype=torch.float32))
        vector = F.silu(vector)
        is_text = (torch.arange(x.shape[1], device=x.device) < text.shape[1])[None, :, None]
        if self._needs_input_grad(x):
            x = x.detach().requires_grad_()
        keep = self._keep_tokens(times, text.shape[1], grid)
        for block in self.blocks:
            x = block(x, vector, is_text, positions, keep)
        x = self.norm_final(x[:, text.shape[1] :])
        shift, scale = self.out_linear(vector)[:, None].chunk(2, dim=-1)
        patches = self.patch_out(self.out_norm(x) * (1 + scale) + shift)
        sides = {"h": grid[1], "w": grid[2], "r": pt, "p": p, "q": p}
        return rearrange(patches, "b (t h w) (c r p q) -> b (t r) c (h p) (w q)", **sides)
