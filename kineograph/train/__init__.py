"""The Trainer (the only loop), optimizers, EMA, checkpoints, trackers."""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """Makes this package callable: importing it replaces the function `kineograph.train`, so it must do the same."""

    def __call__(self, *what: str, **settings: Any) -> Any:
        return sys.modules["kineograph"]._train(*what, **settings)


sys.modules[__name__].__class__ = _Callable
