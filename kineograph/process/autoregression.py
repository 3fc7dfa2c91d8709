"""Autoregressive sampling: one token after the other.

A step is so small that launching its kernels costs more than running them. So a step depends on nothing on the host:
token, position and result live in static buffers, and on a GPU one step is captured as a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kineograph.core.noise import Noise
from kineograph.process.token_sampling import cumulative_sum, draw_tokens, top_k_blockwise

Step = Callable[[Tensor, Tensor], Tensor]
"""step(previous token B 1, position 1) → logits B V of the token at this position, both int64 on the device. The KV cache
and guidance belong to the caller, which may run more rows than B."""

# Steps before the graph is captured: libraries initialise, autocast casts weights, torch.compile compiles.
_WARMUP_STEPS = 3


def draw_top_p(
    logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Sample from softmax(logits / temperature), restricted to the top_k classes and then to the nucleus of mass top_p.

    logits are … V, uniforms are … in (0, 1). The class that brings the sum to top_p is included.
    """
    if top_p is None or top_p >= 1 or temperature == 0:
        return draw_tokens(logits, uniforms, temperature, top_k)[0]
    few = top_k is not None and top_k < logits.shape[-1]
    values, classes = (
        top_k_blockwise(logits, top_k) if few and top_k is not None else logits.sort(dim=-1, descending=True)
    )
    chances = (values.float() / temperature).softmax(dim=-1)
    before = cumulative_sum(chances) - chances
    kept = values.float().masked_fill(before >= top_p, -float("inf"))
    place = draw_tokens(kept, uniforms, temperature)[0]
    return classes.gather(-1, place[..., None])[..., 0]


class AutoregressiveSampler:
    """Samples a batch of sequences. `tokens` (B N) holds those sampled so far (−1: none), `index` (1) the next position."""

    def __init__(
        self,
        step: Step,
        length: int,
        noise: Noise,
        *,
        bos: int,
        prefix: Tensor | None = None,
        start: int = 0,
        offset: int = 0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> None:
        """`prefix` (B K) are the first tokens, −1 where one is to be sampled; those before `start` are in the caller's cache already.

        `offset` is the position of the first token in a longer sequence. Random numbers are keyed by (sample,
        position), so a part samples the same tokens as the whole would.
        """
        self._step, self._noise, self._bos = step, noise, bos
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self.tokens = torch.empty(noise.batch, length, dtype=torch.int64, device=noise.device)
        self.index = torch.empty(1, dtype=torch.int64, device=noise.device)
        self._before = torch.empty(noise.batch, 1, dtype=torch.int64, device=noise.device)
        self._uniforms = torch.empty(noise.batch, length, device=noise.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.remaining = 0
        self.restart(prefix, start, offset)

    def restart(
        self, prefix: Tensor | None = None, start: int = 0, offset: int = 0, noise: Noise | None = None
    ) -> None:
        """Start over in the same buffers, to reuse the captured graph for the next part of a long sequence or, with
        `noise`, the next batch. The caller refills its cache in place."""
        if noise is not None:
            assert noise.batch == self._noise.batch
            self._noise = noise
        length, known = self.tokens.shape[1], 0 if prefix is None else prefix.shape[1]
        assert start <= known <= length
        self.remaining = length - start  # positions left to sample
        self.tokens.fill_(-1)
        if prefix is not None:
            self.tokens[:, :known] = prefix
        self._before.fill_(self._bos)
        if start:
            self._before.copy_(self.tokens[:, start - 1 : start])
        self.index.fill_(start)
        self._uniforms.copy_(self._noise.uniform("tokens", offset + length)[:, offset:])

    def advance(self) -> None:
        """Sample one position, entirely on the device: the part that the graph captures."""
        logits = self._step(self._before, self.index)  # B V
        uniforms = self._uniforms.index_select(1, self.index)[:, 0]
        drawn = draw_top_p(logits, uniforms, self._temperature, self._top_k, self._top_p)[:, None]  # B 1
        given = self.tokens.index_select(1, self.index)
        drawn = torch.where(given >= 0, given, drawn)
        self.tokens.index_copy_(1, self.index, drawn)
        self._before.copy_(drawn)
        self.index.add_(1)

    @torch.no_grad()
    def run(self, count: int | None = None) -> Tensor:
        """Sample `count` more tokens (None: all). → a copy of `tokens`."""
        count = self.remaining if count is None else min(count, self.remaining)
        self.remaining -= count
        if self.tokens.is_cuda and self._graph is None and count > _WARMUP_STEPS:
            self._record()
            count -= _WARMUP_STEPS
        for _ in range(count):
            if self._graph is None:
                self.advance()
            else:
                self._graph.replay()
        return self.tokens.clone()

    def _record(self) -> None:
        """Warm up on a side stream (these steps count), then capture one step, which samples nothing."""
        device = self.tokens.device
        side, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(_WARMUP_STEPS):
                self.advance()
        main.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as a loader that pins memory, may use CUDA meanwhile
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.advance()
