"""`python -m kineograph.data.print_url URL`: the file at a URL, to stdout, for shards whose own tool is not installed."""

from __future__ import annotations

import shutil
import sys

from kineograph.core.remote_files import open_filesystem


def main(url: str) -> int:
    try:
        filesystem, path = open_filesystem(url)
        with filesystem.open(path, "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
        sys.stdout.buffer.flush()
    except Exception as error:  # each filesystem has its own errors
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
