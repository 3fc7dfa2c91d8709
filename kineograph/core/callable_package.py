"""Packages that have the name of a public function, such as `kineograph.train`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """Importing the package replaces the function of that name, so calling it does the same."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        parent, _, name = self.__name__.rpartition(".")
        return sys.modules[parent]._FUNCTIONS[name](*arguments, **settings)
