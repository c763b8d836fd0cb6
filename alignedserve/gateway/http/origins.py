"""Refuse what a web page must not do with a server that asks for no key.

A browser sends the requests of every page from its own machine, so pages of the whole web reach a server on loopback.

    a page of another origin sends a request    refused where it may change something; where it only reads, the browser
                                                keeps the answer from the page (CORS)
    a page whose own name now leads here        refused by its Host: an address, localhost and the server's own names
    (DNS rebinding), so that it may read        are let in, which no page from elsewhere can have as its origin

Pages of `cors_origins` may do both. A server with keys lets nobody in without a key, and a page does not know any.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers

from alignedserve.gateway.openai.errors import ApiError

_ONLY_READ = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")  # a name or an address, and a port
_OWN_SITES = ("same-origin", "none")  # of Sec-Fetch-Site; none: the user typed the address


class Origins:
    def __init__(self, cors_origins: Iterable[str], names: Iterable[str]) -> None:
        """`names` are the server's own names, besides localhost and its addresses."""
        self._origins = frozenset(cors_origins)
        self._names = frozenset((*map(str.lower, names), *(_name_in(_host_of(origin)) for origin in self._origins)))

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
            message = f"without API keys only pages of --cors-origins may use this server, not those of {origin:.80}"
            raise ApiError(403, message, code="foreign_origin")

    def _is_foreign(self, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin in self._origins:
            return False
        if site is not None:
            return site not in _OWN_SITES
        return origin is not None and _host_of(origin) != headers.get("host")


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
