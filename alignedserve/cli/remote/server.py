"""How commands reach a server, and what it says where it refuses."""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

import httpx

from alignedserve.errors import AlignedServeError, ConfigError

CONNECT_S = 5.0
SILENCE_S = 300.0  # to the first token of a long prompt in a long queue
_STATUS_S = 5.0
CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class StatusError(AlignedServeError):
    """The gateway does not answer."""


def api_at(url: str) -> str:
    """Return the address of a server's API: below /v1 where the address of the server alone is named."""
    try:
        names_server = not urlsplit(url).path.strip("/")
    except ValueError:  # it is no address, as who asks it will say
        names_server = False
    return url.rstrip("/") + ("/v1" if names_server else "")


def client(url: str, api_key: str | None, silence_s: float = SILENCE_S) -> httpx.Client:
    """Return an HTTP client for the server. It ignores the environment's proxy for servers on this machine."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key holds characters that a key cannot have")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(silence_s, connect=min(silence_s, CONNECT_S))
    try:
        host = httpx.URL(url).host
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except (ValueError, httpx.InvalidURL):
        is_here = False
    return httpx.Client(headers=headers, timeout=timeout, trust_env=not is_here)


def asking(url: str, api_key: str | None) -> httpx.Client:
    """Return an HTTP client for all routes of a deployment."""
    asks = client(url, api_key, _STATUS_S)
    try:
        asks.base_url = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        return asks
    except httpx.InvalidURL as error:
        raise StatusError(f"--url {url!r} is not a URL: {error}") from error


def answered(http: httpx.Client, path: str, **params: str) -> httpx.Response:
    """Return the answer of a route of a deployment."""
    try:
        answer = http.get(path, params=params)
    except httpx.HTTPError as error:
        raise StatusError(f"nothing answers at {http.base_url}: {error}") from error
    if answer.status_code != httpx.codes.OK:
        key = " (--api-key)" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
        raise StatusError(f"{http.base_url} answers {answer.status_code} to {path}: {said_by(answer)}{key}")
    return answer


def complaint(response: httpx.Response) -> str:
    """Return what a server says where it refuses, and a hint where the address may be wrong."""
    lacks_base = response.status_code == httpx.codes.NOT_FOUND and "/v1/" not in response.url.path
    return said_by(response) + (" (--url is the API's base, which mostly ends with /v1)" if lacks_base else "")


def said_by(response: httpx.Response) -> str:
    try:
        return said_in(response.json())
    except ValueError:
        return one_line(response.text) or response.reason_phrase


def said_in(given: Any) -> str:
    """Return the text of an error, in whichever shape the server gives it."""
    while isinstance(given, dict):
        given = next((given[name] for name in ("error", "message", "detail") if name in given), str(given))
    return one_line(given)


def one_line(text: object) -> str:
    return " ".join(str(text).translate(CONTROL | {10: " ", 9: " "}).split())[:500]
