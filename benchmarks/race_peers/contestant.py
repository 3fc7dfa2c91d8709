"""A peer: its package, and how it is trained on a track."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.race_peers.track import Track


@dataclass(frozen=True)
class Trained:
    """What the judge sees."""

    draw: Callable[[list[str]], Tensor]
    """Captions → B T C H W in [0, 1], by the peer's own sampler with its default guidance."""
    modules: list[nn.Module]
    """Everything that was trained, without averages."""
    reconstruct: Callable[[Tensor], Tensor] | None = None
    """B T C H W in [0, 1] through the codec."""
    unguided: Callable[[list[str]], Tensor] | None = None
    """Where the default guidance is faulty: the sampler without it."""


@dataclass(frozen=True)
class Contestant:
    family: str
    package: str
    version: str
    """The one that this was written for; others may work."""
    module: str
    train: Callable[[Track], Trained]
    needs: tuple[str, ...] = ("torchvision",)

    @property
    def title(self) -> str:
        return f"{self.package} {importlib.metadata.version(self.package)}"

    def list_missing(self) -> list[str]:
        """Arguments of pip install."""
        names = {self.module: f"{self.package}=={self.version}", **{need: need for need in self.needs}}
        return [name for module, name in names.items() if importlib.util.find_spec(module) is None]


def load_contestants() -> dict[str, Contestant]:
    """By family. The packages themselves are imported only in training."""
    from benchmarks.race_peers import cogvideox, dalle2, muse, nuwa, phenaki

    return {each.PEER.family: each.PEER for each in (muse, phenaki, nuwa, dalle2, cogvideox)}


def count_trained(modules: Iterable[nn.Module]) -> int:
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())
