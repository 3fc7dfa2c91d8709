"""Files at URLs (https://, s3://, gs://, hf:// …), through fsspec: known protocols, bounded waits, and errors in one line."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from kineograph.core.errors import InputError

TIMEOUT = 60.0  # seconds without an answer or a byte
_RESERVED = 2**28  # bytes of a disk that downloads leave
# A config from elsewhere may hold URLs. fsspec's other protocols open archives, shells and schedulers, or follow lists of addresses.
PROTOCOLS = ("file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss", "webhdfs", "memory")
T = TypeVar("T")


def is_url(path: str) -> bool:
    return "://" in path


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path in it. Refuses other protocols and chains of them."""
    if url.partition("://")[0] not in PROTOCOLS or "::" in url:
        raise InputError(
            f"{url}: addresses of this kind are not opened: use {'://, '.join(PROTOCOLS[:4])}://, gs://, az:// or hf://, "
            "or download the files"
        )
    import fsspec

    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        try:
            import aiohttp
        except ImportError:
            raise InputError(f"{url} needs aiohttp, which is not installed: pip install kineograph[http]") from None
        # aiohttp's default ends any download after five minutes.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True}
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of errors that it raises too
    return fsspec.core.url_to_fs(url, **options)


def await_answer(action: Callable[[], T], progress: Callable[[], Any] = lambda: None, seconds: float = TIMEOUT) -> T:
    """Run `action`; raise TimeoutError if it takes `seconds` while `progress()` stays as it was.

    Filesystems repeat a request for many minutes, each by its own rules.
    """
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(action())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=work, daemon=True).start()
    seen = progress()
    while True:
        try:
            return done.result(seconds)
        except TimeoutError:
            now = progress()
            if done.done() or now == seen:
                raise TimeoutError(f"no answer for {seconds:g} s") from None
            seen = now


def download(filesystem: Any, remote: str, path: str, most: float = math.inf) -> None:
    """Copy a remote file of at most so many bytes to `path`. An answer without an end does not fill the disk."""
    from fsspec.callbacks import Callback

    class Limit(Callback):
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if self.value > most:
                raise InputError(f"{remote} has more than the {most:,} bytes that it should have")
            check_disk(path)

    def size() -> int:
        return os.path.getsize(path) if os.path.exists(path) else -1

    await_answer(lambda: filesystem.get_file(remote, path, callback=Limit()), size)


def check_disk(path: str | Path) -> None:
    """Refuse to fill the disk of this file with what comes from elsewhere."""
    if shutil.disk_usage(os.path.dirname(path) or ".").free < _RESERVED:
        raise InputError(
            f"{path}: less than {_RESERVED:,} bytes of the disk are free: free disk space, or use another disk"
        )


def describe_failure(url: str, error: Exception) -> str:
    """The fault of a URL, and the remedy. Each filesystem has its own errors."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, ImportError):
        return f"{url} needs a package that is not installed ({reason}): install it, or download the files"
    if isinstance(error, FileNotFoundError):
        return f"{url} was not found: check the address"
    return f"{url} cannot be read ({reason}): check the address and your credentials, and run the same command again; or download the files"
