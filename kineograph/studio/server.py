"""`kineo studio`: serve the page on this machine."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from kineograph.core.errors import InputError
from kineograph.studio.runs import check_roots

DEFAULT_PORT = 8765
TRIES = 20  # ports after the default one


def require_packages(command: str) -> None:
    """Refuse a command whose optional packages are missing, with the line that installs them."""
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"kineo {command} needs {error.name}, which is not installed: pip install 'kineograph[studio]'"
        ) from None


def serve(
    folders: Sequence[Path],
    host: str,
    port: int | None,
    note: Callable[[str], None],
    trust: bool = False,
    data: Sequence[Path] = (),
) -> None:
    """Serve the page until it is interrupted. The address, with its token, is printed."""
    require_packages("studio")
    roots = check_roots(folders)
    for folder in data:
        if not folder.is_dir():
            raise InputError(f"--data {folder} is not a folder: give one with pictures or clips")
    import uvicorn

    from kineograph.studio.app import create_app

    with _listen(host, port) as listening:
        port = listening.getsockname()[1]
        token = secrets.token_urlsafe(32)
        if not _is_loopback(host):
            note(
                f"warning: --host {host} lets every machine that reaches this one talk to the page, unencrypted. Whoever has the "
                "token can read these runs and draw with them. ssh -L 8765:localhost:8765 is safer."
            )
        app = create_app(roots, token, allowed_hosts(host), cookie=f"kineo-studio-{port}", trust=trust, data=data)
        shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{port}/?token={token}", flush=True)
        note(f"showing the runs in {', '.join(map(str, roots))}; Ctrl+C ends it")
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="on")
        uvicorn.Server(config).run(sockets=[listening])


def allowed_hosts(host: str) -> set[str]:
    """Host headers under which the page answers. "*": any address that is a number."""
    local = {"localhost", "127.0.0.1", "::1"}
    return local | (
        {host} if _is_loopback(host) else {host, socket.gethostname().lower(), socket.getfqdn().lower(), "*"}
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int | None) -> socket.socket:
    """A listening socket; without a given port, on the first free one from the default on."""
    wanted = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + TRIES)
    problem = ""
    for candidate in wanted:
        try:
            family = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0][0]
            listening = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise InputError(f"--host {host} is no address of this machine: {error.strerror}") from None
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, candidate))
            listening.listen(64)
            return listening
        except (OSError, OverflowError) as error:
            listening.close()
            problem = str(error)
    ports = f"--port {port}" if port is not None else f"ports {DEFAULT_PORT} to {DEFAULT_PORT + TRIES - 1}"
    raise InputError(f"cannot listen on {host}, {ports}: {problem}; give another --port")
