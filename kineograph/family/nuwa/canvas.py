"""Where NUWA draws: its weights as they are multiplied, its caches, and the one step that is repeated for every token.

All of it stays where it is in memory and is filled anew for every window and batch of the same shape, so that on a GPU one recorded graph serves
them all. The weights there are a copy: those that train change places when averages take their turn, and autocast would cast them again for every
token. The copy has the matrices in autocast's type and all else as it is, so that it draws what the weights themselves would draw; it is
brought up to date in every sampling call.
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
KEPT = 2  # canvases: one for whole batches, one for what is left over


class Pen(NamedTuple):
    """What turns tokens into logits."""

    network: NuwaNetwork
    head: Head


class Kind(NamedTuple):
    """What a canvas is made for; another kind needs another one."""

    device: torch.device
    dtype: torch.dtype | None  # autocast's
    rows: int
    times: int
    guide: bool
    words: int | None  # length of the texts
    sketch: bool
    guidance: float
    temperature: float
    top_k: int | None
    top_p: float | None


class Canvas:
    """A batch of windows of one shape, drawn again and again in the same memory."""

    def __init__(self, task: Nuwa, pen: Pen, kind: Kind, condition: Condition, noise: Noise) -> None:
        self._pen, self._kind, self._fresh = pen, kind, True
        with torch.inference_mode(False), torch.no_grad():  # whoever draws next may be in another mode
            self.state = pen.network.start(condition.clone(), kind.rows * (2 if kind.guide else 1), kind.times)

            def step(token: Tensor, index: Tensor) -> Tensor:
                def hidden(tokens: Tensor, _: int) -> Tensor:
                    return cast(Tensor, task.one_step(pen.network, tokens, index, self.state))  # B 1 D

                # the head is linear: guiding hidden states is guiding logits, at half the price
                found = make_guided(hidden, lambda _: kind.guidance)(token, 0) if kind.guide else hidden(token, 0)
                return pen.head.logits(found[:, 0])

            _, height, width = task.grid
            self.drawing = AutoregressiveSampler(
                step,
                kind.times * height * width,
                noise,
                bos=pen.network.bos,
                temperature=kind.temperature,
                top_k=kind.top_k,
                top_p=kind.top_p,
            )

    def draw(self, condition: Condition, noise: Noise, given: Tensor, place: int, length: int) -> Tensor:
        """B length: the first tokens are given (B K), token 0 is number `place` of the clip."""
        if not self._fresh:
            self._pen.network.restart(condition, self.state)
        self._fresh = False
        known = given.shape[1]
        if known:
            self._pen.network.fill(torch.cat([given, given]) if self._kind.guide else given, self.state)
        self.drawing.restart(given if known else None, known, place, noise)
        return self.drawing.run(length - known)[:, :length]


class Easel:
    """The pen and the canvases of a task."""

    def __init__(self) -> None:
        self._copy: tuple[torch.device, torch.dtype | None, Pen] | None = None
        self._canvases: dict[Kind, Canvas] = {}
        self._pen: Pen | None = None

    def prepare(self, task: Nuwa) -> None:
        """Once a sampling call: weights may have changed since the last."""
        pen = self._up_to_date(task)
        if pen != self._pen:
            self._canvases.clear()
        self._pen = pen

    def _up_to_date(self, task: Nuwa) -> Pen:
        device = task.head.weight.device
        if not copies(device):
            self._copy = None
            return Pen(task.network, task.head)
        dtype = autocast_dtype(device)
        if self._copy is None or self._copy[:2] != (device, dtype):
            network, head = task.blank()
            self._copy = (device, dtype, Pen(_like(network, device, dtype), _like(head, device, dtype)))
        pen = self._copy[2]
        for own, copied in zip((task.network, task.head), pen, strict=True):
            _transfer(own, copied)
        return pen

    def canvas(
        self, task: Nuwa, condition: Condition, noise: Noise, times: int, guide: bool, options: NuwaSample
    ) -> Canvas:
        """One that was used before where it fits, else a new one; the one longest unused goes."""
        assert self._pen is not None
        kind = Kind(
            noise.device,
            autocast_dtype(noise.device),
            noise.batch,
            times,
            guide,
            condition.text.shape[1] if condition.text is not None else None,
            condition.sketch is not None,
            options.guidance,
            options.temperature,
            options.top_k,
            options.top_p,
        )
        found = self._canvases.pop(kind, None)
        while len(self._canvases) >= KEPT:
            self._canvases.pop(next(iter(self._canvases)))
        if found is None:
            found = Canvas(task, self._pen, kind, condition, noise)
        self._canvases[kind] = found
        return found

    def clear(self) -> None:
        """Give the memory of the canvases back."""
        self._canvases.clear()


def copies(device: torch.device) -> bool:
    """Whether drawing reads a copy of the weights. A CPU records no graphs and computes in float32."""
    return device.type == "cuda"


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _like(made: M, device: torch.device, dtype: torch.dtype | None) -> M:
    """A module of the meta device with memory of its own, and the matrices in the type that autocast would cast them to."""
    with torch.inference_mode(False):
        if dtype is not None:
            for part in made.modules():
                if isinstance(part, nn.Linear | Head):
                    part.to(dtype)
        return made.to_empty(device=device).eval().requires_grad_(False)


@torch.no_grad()
def _transfer(own: nn.Module, copied: nn.Module) -> None:
    for pairs in (
        zip(own.parameters(), copied.parameters(), strict=True),
        zip(own.buffers(), copied.buffers(), strict=True),
    ):
        for value, place in pairs:
            place.copy_(value)
