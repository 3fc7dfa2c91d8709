"""Addresses of files elsewhere, opened with fsspec. A config from elsewhere may hold some, so unusual protocols are refused."""

from __future__ import annotations

from typing import Any

from kineograph.core.errors import InputError

# fsspec's others open archives, shells and schedulers, or follow a list of further addresses.
PROTOCOLS = ("file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss", "webhdfs", "memory")


def open_filesystem(url: str, **options: Any) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path in it. Refuses other protocols and chains of them."""
    protocol = url.partition("://")[0]
    if protocol not in PROTOCOLS or "::" in url:
        raise InputError(
            f"{url}: addresses of this kind are not opened: use {'://, '.join(PROTOCOLS[:4])}://, gs://, az:// or hf://, "
            "or download the files"
        )
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(url, **options)
    return filesystem, path
