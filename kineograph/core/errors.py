"""Errors for people. Each carries the exit code that the command line ends with."""

from __future__ import annotations

import re


class KineoError(Exception):
    """One plain message: the value, the limit and the remedy, naming the key or file."""

    exit_code = 1


class RunFailed(KineoError):
    """The run itself failed: diverged, ran out of disk, lost its workers."""

    exit_code = 1


class InputError(KineoError):
    """Bad config, arguments, data or weights. Raised before anything is written."""

    exit_code = 2


class ConfigError(InputError):
    """A config key is unknown, ill-typed or does not fit the others."""


class UnknownKey(ConfigError):
    """Nothing reads this key of a config, whose full name is `key`."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class NoData(InputError):
    """Files or folders of data that are named and not there."""


class NotTrained(InputError):
    """A stage has no checkpoint yet."""


class RunInUse(KineoError):
    """A live process holds the run folder."""

    exit_code = 3


class Stopped(KineoError):
    """A signal asked the run to stop, and everything is saved."""

    exit_code = 75


class Unreadable(Exception):
    """One data item cannot be read. Never reaches a person: it is counted, listed and replaced."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple:  # crosses worker processes
        return (Unreadable, (self.path, self.reason))


def explain_oversized_image(error: Exception) -> str:
    """The size, the limit and the remedy, from a PIL.Image.DecompressionBombError."""
    numbers = re.findall(r"(\d+) pixels", str(error))
    if len(numbers) != 2:
        return f"too large: {error}"
    pixels, limit = map(int, numbers)
    return f"too large: {pixels:,} pixels, and no more than {limit:,} are decoded; scale it down first"
