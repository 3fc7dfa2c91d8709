"""The Trainer (the only loop), optimizers, EMA, checkpoints, trackers."""

import sys

from kineograph.core.callable_package import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
