"""What the processes that tests start have in common: where they find the package, and ports that nobody else takes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

ROOT = Path(__file__).parents[1]
_held: list[socket.socket] = []


def python_path() -> str:
    """The repository, before what PYTHONPATH names already: on some machines it holds torch itself."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def free_port() -> int:
    """A port of this machine. A bound socket keeps others from it until this process ends; servers reuse its address, and may listen."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return holder.getsockname()[1]
