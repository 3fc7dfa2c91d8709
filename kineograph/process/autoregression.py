"""Drawing tokens one after the other, each from what the model says after those before it.

A step is so small that launching its kernels costs more than running them. So nothing in it depends on the host: the token, its place and the
result lie in buffers that stay where they are, and on a GPU one step is recorded as a CUDA graph and replayed for every further place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kineograph.core.noise import Noise
from kineograph.process.sampling import draw_tokens, top_classes

Step = Callable[[Tensor, Tensor], Tensor]
"""step(token before B 1, its position 1) → logits B V of the token at this position. Both are int64 on the device; a cache is the caller's, and
guidance too: it may run more rows than it is given."""

_WARM = (
    3  # steps before a graph is recorded: libraries set themselves up, autocast casts weights, torch.compile compiles
)


def draw_nucleus(
    logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Tokens from softmax(logits / temperature) over the top_k classes, of these the likeliest that together have a probability of top_p.

    logits are … V, uniforms are … in (0, 1). The class with which the sum reaches top_p belongs to them, so that there is always one.
    """
    if top_p is None or top_p >= 1 or temperature == 0:
        return draw_tokens(logits, uniforms, temperature, top_k)[0]
    few = top_k is not None and top_k < logits.shape[-1]
    values, classes = top_classes(logits, top_k) if few and top_k is not None else logits.sort(dim=-1, descending=True)
    chances = (values.float() / temperature).softmax(dim=-1)
    before = chances.cumsum(dim=-1) - chances
    kept = values.float().masked_fill(before >= top_p, -float("inf"))
    place = draw_tokens(kept, uniforms, temperature)[0]
    return classes.gather(-1, place[..., None])[..., 0]


class Drawing:
    """A batch of sequences that are being drawn. `tokens` (B N) holds what is there so far, `index` (1) the next position."""

    def __init__(
        self,
        step: Step,
        length: int,
        noise: Noise,
        *,
        bos: int,
        given: Tensor | None = None,
        start: int = 0,
        place: int = 0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> None:
        """`given` (B K) are the first tokens. Those before `start` are in the caller's cache already, the rest are read step by step.

        Draws belong to (sample, place), and `place` is that of the first token: a part of a longer sequence draws as the whole would have.
        """
        self._step, self._noise, self._bos = step, noise, bos
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self.tokens = torch.empty(noise.batch, length, dtype=torch.int64, device=noise.device)
        self.index, self._known = (torch.empty(1, dtype=torch.int64, device=noise.device) for _ in range(2))
        self._before = torch.empty(noise.batch, 1, dtype=torch.int64, device=noise.device)
        self._uniforms = torch.empty(noise.batch, length, device=noise.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.left = 0
        self.restart(given, start, place)

    def restart(self, given: Tensor | None = None, start: int = 0, place: int = 0, noise: Noise | None = None) -> None:
        """Begin again in the same buffers, so that a recorded graph serves the next part of a long sequence, and with `noise` the next batch,
        too. The caller's cache must be where it was, filled anew."""
        if noise is not None:
            assert noise.batch == self._noise.batch
            self._noise = noise
        length, known = self.tokens.shape[1], 0 if given is None else given.shape[1]
        assert start <= known <= length
        self.left = length - start  # positions that are not drawn yet
        self.tokens.fill_(self._bos)
        if given is not None:
            self.tokens[:, :known] = given
        self._before.fill_(self._bos)
        if start:
            self._before.copy_(self.tokens[:, start - 1 : start])
        self.index.fill_(start)
        self._known.fill_(known)
        self._uniforms.copy_(self._noise.uniform("tokens", place + length)[:, place:])

    def advance(self) -> None:
        """One position, all on the device. On the host nothing changes: this is what a graph records."""
        logits = self._step(self._before, self.index)  # B V
        uniforms = self._uniforms.index_select(1, self.index)[:, 0]
        drawn = draw_nucleus(logits, uniforms, self._temperature, self._top_k, self._top_p)[:, None]  # B 1
        drawn = torch.where(self.index < self._known, self.tokens.index_select(1, self.index), drawn)
        self.tokens.index_copy_(1, self.index, drawn)
        self._before.copy_(drawn)
        self.index.add_(1)

    @torch.no_grad()
    def run(self, count: int | None = None) -> Tensor:
        """Draw `count` more (null: all). Gives a copy of `tokens`."""
        count = self.left if count is None else min(count, self.left)
        self.left -= count
        if self.tokens.is_cuda and self._graph is None and count > _WARM:
            self._record()
            count -= _WARM
        for _ in range(count):
            if self._graph is None:
                self.advance()
            else:
                self._graph.replay()
        return self.tokens.clone()

    def _record(self) -> None:
        """The first steps run on a stream of their own, as recording asks for; they count. Recording itself draws nothing."""
        device = self.tokens.device
        side, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                self.advance()
        main.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # other threads (a loader that pins memory, say) may go on while this one records
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.advance()
