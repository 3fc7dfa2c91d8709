"""Decoding sessions: static buffers in which clips of one shape are sampled token by token.

A session keeps its KV caches and its CUDA graph for all windows and batches of the same shape. On a GPU it reads a copy of
the weights, made once per sampling call: training swaps weights and their EMA in memory, and autocast would cast every matrix
again for every token. The copy has the matrices in autocast's dtype and the rest unchanged, so that samples are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from kineograph.core.noise import Noise
from kineograph.family.nuwa.config import NuwaSample
from kineograph.family.nuwa.network import Condition, NuwaNetwork
from kineograph.nn.head import Head
from kineograph.process.autoregression import AutoregressiveSampler
from kineograph.process.guidance import make_guided

if TYPE_CHECKING:
    from kineograph.family.nuwa.task import Nuwa

M = TypeVar("M", bound=nn.Module)

# One session for whole batches, one for the last, smaller one.
MAX_SESSIONS = 2


class Weights(NamedTuple):
    network: NuwaNetwork
    head: Head


class SessionKey(NamedTuple):
    """Everything that shapes a session's buffers or is captured in its graph."""

    device: torch.device
    dtype: torch.dtype | None  # autocast's
    rows: int
    frames: int
    guide: bool
    text_length: int | None
    sketch: bool
    options: NuwaSample


class DecodingSession:
    """Samples batches of windows of one shape, all in the same memory."""

    def __init__(self, task: Nuwa, weights: Weights, key: SessionKey, condition: Condition, noise: Noise) -> None:
        self._weights, self._key, self._is_new = weights, key, True
        # Normal tensors: the next caller may not be in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            rows = key.rows * (2 if key.guide else 1)
            self.state = weights.network.init_state(condition.clone(), rows, key.frames)
            allowed = task.sound.is_allowed(noise.device) if task.sound is not None else None

            def step(token: Tensor, index: Tensor) -> Tensor:
                def hidden(tokens: Tensor, _: int) -> Tensor:
                    return cast(Tensor, task.decode_step(weights.network, tokens, index, self.state))  # B 1 D

                # The head is linear, so guiding hidden states equals guiding logits and costs half as much.
                states = (
                    make_guided(hidden, lambda _: key.options.guidance)(token, 0) if key.guide else hidden(token, 0)
                )
                logits = weights.head.logits(states[:, 0])
                if allowed is None:
                    return logits
                return logits.masked_fill(~allowed.index_select(0, index % allowed.shape[0]), -torch.inf)

            _, height, width = task.grid
            self.sampler = AutoregressiveSampler(
                step,
                key.frames * height * width,
                noise,
                bos=weights.network.bos,
                temperature=key.options.temperature,
                top_k=key.options.top_k,
                top_p=key.options.top_p,
            )

    def sample(
        self,
        condition: Condition,
        noise: Noise,
        prefix: Tensor,
        offset: int,
        length: int,
        is_complete: bool = True,
    ) -> Tensor:
        """Continue `prefix` (B K) to B length; `offset` is the position of its first token in the clip.

        `is_complete`: False where tokens of the prefix are unknown, and are drawn in their turn.
        """
        if not self._is_new:
            self._weights.network.reset_state(condition, self.state)
        self._is_new = False
        start = prefix.shape[1] if is_complete else 0
        if start:
            self._weights.network.prefill(torch.cat([prefix, prefix]) if self._key.guide else prefix, self.state)
        self.sampler.restart(prefix if prefix.shape[1] else None, start, offset, noise)
        return self.sampler.run(length - start)[:, :length]


class SessionCache:
    """The most recently used sessions of a task, and the weights that they read."""

    def __init__(self) -> None:
        self.sessions: dict[SessionKey, DecodingSession] = {}
        self.weights: Weights | None = None
        self._copy_key: tuple[torch.device, torch.dtype | None] | None = None

    def update_weights(self, task: Nuwa) -> None:
        """Copy the weights where a copy is used. Needed in every sampling call: they may have changed."""
        device = task.head.weight.device
        own = Weights(task.network, task.head)
        if not uses_weight_copy(device):
            weights, self._copy_key = own, None
        else:
            key = (device, autocast_dtype(device))
            if self.weights is not None and self._copy_key == key:
                weights = self.weights
            else:
                network, head = task.build_on_meta()
                weights, self._copy_key = Weights(_allocate(network, *key), _allocate(head, *key)), key
            for source, target in zip(own, weights, strict=True):
                _copy_tensors(source, target)
        if weights != self.weights:
            self.sessions.clear()
        self.weights = weights

    def get_session(
        self, task: Nuwa, condition: Condition, noise: Noise, frames: int, guide: bool, options: NuwaSample
    ) -> DecodingSession:
        """The session of this shape, or a new one in place of the least recently used."""
        assert self.weights is not None
        key = SessionKey(
            noise.device,
            autocast_dtype(noise.device),
            noise.batch,
            frames,
            guide,
            condition.text.shape[1] if condition.text is not None else None,
            condition.sketch is not None,
            options,
        )
        session = self.sessions.pop(key, None)
        while len(self.sessions) >= MAX_SESSIONS:
            self.sessions.pop(next(iter(self.sessions)))
        self.sessions[key] = session or DecodingSession(task, self.weights, key, condition, noise)
        return self.sessions[key]


def uses_weight_copy(device: torch.device) -> bool:
    """A CPU captures no graphs and computes in float32: it needs no copy."""
    return device.type == "cuda"


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _allocate(module: M, device: torch.device, dtype: torch.dtype | None) -> M:
    """Give a module on the meta device memory on `device`, with the matrices in `dtype`."""
    with torch.inference_mode(False):
        if dtype is not None:
            for part in module.modules():
                if isinstance(part, nn.Linear | Head):
                    part.to(dtype)
        return module.to_empty(device=device).eval().requires_grad_(False)


@torch.no_grad()
def _copy_tensors(source: nn.Module, target: nn.Module) -> None:
    for sources, targets in ((source.parameters(), target.parameters()), (source.buffers(), target.buffers())):
        for value, static in zip(sources, targets, strict=True):
            static.copy_(value)
