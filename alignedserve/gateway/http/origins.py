"""Refuse what a web page must not do with a server that asks for no key.

A browser sends the requests of every page from its own machine, so pages of the whole web reach a server on loopback.

    a page of another origin sends a request    refused where it may change something; where it only reads, the browser
                                                keeps the answer from the page (CORS)
    a page whose own name now leads here        refused by its Host: an address, localhost and the server's own names
    (DNS rebinding), so that it may read        are let in, which no page from elsewhere can have as its origin

Pages of `cors_origins` may do both. A server with keys lets nobody in without a key, and a page does not know any.

Where none are named and no other machine reaches the server, pages of this machine may do both: those of localhost and
of the addresses 127.0.0.1 and [::1], at any port. Who serves such a page runs a program here, which reaches the server
without a browser anyway; and no page from elsewhere can have such an origin: a name that is made to lead here stays the
page's own. `null`, the origin of files and of frames in sandboxes, is none of them: any page of the web can have it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from alignedserve.gateway.openai.errors import ApiError

_ONLY_READ = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")  # a name or an address, and a port
_OF_LOOPBACK = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
_OWN_SITES = ("same-origin", "none")  # of Sec-Fetch-Site; none: the user typed the address


class Origins:
    def __init__(self, cors_origins: Iterable[str] | None, names: Iterable[str], is_exposed: bool = False) -> None:
        """`names` are the server's own names, besides localhost and its addresses. `is_exposed`: other machines reach
        the server."""
        self._origins = frozenset(cors_origins or ())
        self._local = None if cors_origins is not None or is_exposed else _OF_LOOPBACK
        hosts = filter(None, map(_host_of, self._origins))
        self._names = frozenset((*map(str.lower, names), *map(_name_in, hosts)))

    def allows(self, origin: str) -> bool:
        """Return whether pages of this origin may use the server."""
        is_local = self._local is not None and self._local.fullmatch(origin) is not None
        return is_local or not self._origins.isdisjoint(("*", origin))

    def check(self, method: str, headers: Headers) -> None:
        """Raise an ApiError for a request that a page of another origin may have sent."""
        if "*" in self._origins:
            return
        for host in headers.getlist("host"):  # browsers always send one
            name, is_host = _name_in(host), _HOST.fullmatch(host) is not None
            is_local = name == "localhost" or name.endswith(".localhost") or name in self._names
            if not is_host or not (is_local or _is_address(name)):
                message = (
                    f"without API keys this server does not answer to the name {host!r:.80}: use its address or "
                    "localhost, or start it with --cors-origins http://NAME, or with keys"
                )
                raise ApiError(421, message, code="unknown_host")
        if method not in _ONLY_READ and self._is_foreign(headers):
            origin = headers.get("origin", "another site")
            message = "without API keys only pages of --cors-origins may use this server"
            raise ApiError(403, f"{message}, not those of {origin:.80}", code="foreign_origin", logged=message)

    def _is_foreign(self, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and self.allows(origin):
            return False
        if site is not None:
            return site not in _OWN_SITES
        return origin is not None and _host_of(origin) != headers.get("host")


class PagesOfOrigins(CORSMiddleware):
    """Tells browsers that pages of the allowed origins may use the server; for others there is no such word."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        super().__init__(app, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"])
        self._origins = origins

    def is_allowed_origin(self, origin: str) -> bool:
        return self._origins.allows(origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is not None and self.is_allowed_origin(origin):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _host_of(origin: str) -> str:
    return origin.partition("://")[2]


def _name_in(host: str) -> str:
    """Return the name or address in a Host header, without its port and a last dot."""
    name = host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
