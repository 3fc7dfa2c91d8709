"""Who may talk to the page: whoever has the token, under a name of this machine, from the page itself."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
NO_TOKEN = "Open the address that `kineo studio` printed: it holds the token that this page asks for.\n"


class Guard:
    """ASGI middleware: checks the Host header, the token, and where a POST comes from; adds security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str, cookie: str, hosts: Collection[str]) -> None:
        self.app, self.token, self.cookie = app, token, cookie
        self.hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets here
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refuse(scope)
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._is_known_host(headers.get("host", "")):
            # A name that an attacker's DNS points at this machine (DNS rebinding).
            return PlainTextResponse("This page answers under the address that kineo studio printed only.\n", 421)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given and scope["method"] == "GET":
            if not self._is_token(given[0]):
                return PlainTextResponse(NO_TOKEN, 401)
            return self._log_in(scope, [pair for pair in query if pair[0] != "token"])
        if not self._is_token(self._read_cookie(headers)):
            return PlainTextResponse(NO_TOKEN, 401)
        if scope["method"] not in ("GET", "HEAD") and not self._is_same_origin(headers):
            return PlainTextResponse("This request comes from another site and is refused.\n", 403)
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self.token.encode())

    def _read_cookie(self, headers: Headers) -> str:
        # Not http.cookies: it drops all cookies if another program on this machine has set one with braces or spaces.
        return cookie_parser(headers.get("cookie", "")).get(self.cookie, "")

    def _log_in(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """Move the token from the address, which others may see, into a cookie."""
        path = "/" + scope["raw_path"].decode("latin-1").partition("?")[0].lstrip("/")  # never //another.host
        answer = RedirectResponse(f"{path}?{urlencode(query)}" if query else path, 303)
        # Lax: a link to the page in a mail works. Requests that change something are checked by their origin.
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="lax", max_age=30 * 86_400)
        return answer

    def _is_known_host(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self.hosts or ("*" in self.hosts and _is_address(name))

    @staticmethod
    def _is_same_origin(headers: Headers) -> bool:
        origin = urlsplit(headers.get("origin", ""))
        return origin.scheme in ("http", "https") and origin.netloc == headers.get("host")


def _is_address(name: str) -> bool:
    """Whether a host is a number: DNS cannot point it elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
