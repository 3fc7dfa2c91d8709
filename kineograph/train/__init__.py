"""The Trainer (the only loop), optimizers, EMA, checkpoints, trackers."""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """`kineograph.train` is a function of the package's face, and this package, which the import system puts in its place.

    So the package can be called too, and does what the function does.
    """

    def __call__(self, *what: str, **settings: Any) -> Any:
        return sys.modules["kineograph"]._train(*what, **settings)


sys.modules[__name__].__class__ = _Callable
