"""The HTTP client of commands, of `LLM` and of the lab, for servers with OpenAI's API and for deployments' own routes.

A command says in a subclass how it words what goes wrong: each failure is an error of one line. The load generator has
a client of its own (lab/bench/connections.py), since what it measures would wait for this one.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from alignedserve.errors import AlignedServeError, ConfigError

CONNECT_S = 5.0
SILENCE_S = 300.0  # to the first token of a long prompt in a long queue
PATIENCE_S = 600.0  # with a server that is full: from a request's first try to its last
_SHORTEST_PAUSE_S = 0.1  # for a server that says 0
_RETRIES = "x-stainless-retry-count"  # as OpenAI's clients say it: our server lets those who come again wait longer
_FULL = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
PLACE = re.compile(r"\d+ before you, about \d+ s")  # our server's comment in a stream that waits for its turn
DONE: dict[str, Any] = {}  # the event that ends a stream
Self = TypeVar("Self", bound="RemoteServer")


class Tries:
    """The tries of one request at a server that may be full: the next one comes exactly when the server says."""

    def __init__(self, patience_s: float, unsaid_s: float | None = None) -> None:
        """`unsaid_s` is the pause where the server does not say when; without it such a refusal is final."""
        self._end_at, self._unsaid_s = monotonic() + patience_s, unsaid_s
        self._num_refused = 0

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the next try."""
        return {_RETRIES: str(self._num_refused)} if self._num_refused else {}

    def pause_after(self, answer: httpx.Response) -> float | None:
        """Return how long to wait before the next try; None where this answer is final, or patience ends before."""
        if answer.status_code not in _FULL or answer.headers.get("x-should-retry") == "false":
            return None
        said = answer.headers.get("retry-after", "")
        self._num_refused += 1
        told_s = float(said) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", said) else self._unsaid_s
        pause_s = None if told_s is None else max(_SHORTEST_PAUSE_S, told_s)
        return None if pause_s is None or monotonic() + pause_s > self._end_at else pause_s


class RemoteServer:
    """A server, within a `with`: requests to it, and what it answers."""

    kind: type[AlignedServeError] = AlignedServeError

    def __init__(self, url: str, api_key: str | None, patience_s: float = 0.0, **how: Any) -> None:
        """`patience_s` is for a server that is full; `how` is what `options` takes."""
        self.url, self.patience_s, self._options = url, patience_s, options(url, api_key, **how)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _http(self) -> httpx.Client:
        return httpx.Client(**self._options)

    def close(self) -> None:
        if "_http" in vars(self):
            self._http.close()

    def in_event_loop(self, **more: Any) -> httpx.AsyncClient:
        """Return a client for the caller's event loop, whose answers `checked` and `event` read."""
        return httpx.AsyncClient(**self._options, **more)

    def lost(self, error: Exception) -> AlignedServeError:
        """Return the error for a server that is not there, or that falls silent."""
        return self.kind(f"no server answers at {self.url}: {one_line(error)}")

    def refused(self, answer: httpx.Response) -> AlignedServeError:
        return self.kind(f"the server refuses with {answer.status_code}: {complaint(answer)}")

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        """Return the answer, whatever its status."""
        with self.failures():
            return self._http.request(method, f"{self.url}{path}", **given)

    def whole(self, method: str, path: str, **given: Any) -> httpx.Response:
        return self.checked(self.ask(method, path, **given))

    def tree(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        return self.tree_of(self.whole(method, path, **given).text)

    def tries(self) -> Tries:
        return Tries(self.patience_s)

    def wait(self, pause_s: float, refusal: httpx.Response) -> None:
        """Wait before the next try."""
        sleep(pause_s)

    def comment(self, text: str) -> None:
        """Take a comment of a stream."""

    @contextmanager
    def stream(self, method: str, path: str, **given: Any) -> Iterator[httpx.Response]:
        """Give the answer while it comes. A server that is full is asked again while patience lasts."""
        tries = self.tries()
        while True:
            asking = self._http.stream(method, f"{self.url}{path}", headers=tries.headers, **given)
            with self.failures(), asking as answer:
                if answer.is_success:
                    yield answer
                    return
                answer.read()
            if (pause_s := tries.pause_after(answer)) is None:
                raise self.refused(answer)
            self.wait(pause_s, answer)

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the server-sent events of an answer."""
        with self.stream("POST", path, json={**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                if (event := self.event(line)) is not None:
                    yield event

    def event(self, line: str) -> dict[str, Any] | None:
        """Return the event of a line of a stream; None where the line has none."""
        name, colon, data = line.partition(":")
        if colon and not name:
            self.comment(data.strip())
        if name != "data":
            return None
        if data.strip() == "[DONE]":
            return DONE
        event = self.tree_of(data.strip())
        if event.get("error"):
            raise self.kind(f"the server gave up: {said_in(event)}")
        return event

    @contextmanager
    def failures(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if (why := _tls_fault(error)) is not None:
                raise self.kind(f"{self.url} {why}") from error
            raise self.lost(error) from error

    def checked(self, answer: httpx.Response) -> httpx.Response:
        if not answer.is_success:
            raise self.refused(answer)
        return answer

    def tree_of(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self.kind(f"the server sent no JSON object but {one_line(text)}")
        return found


def options(
    url: str,
    api_key: str | None,
    silence_s: float | None = SILENCE_S,
    connect_s: float = CONNECT_S,
    may_take_proxy: bool = True,
    ca: Path | None = None,
) -> dict[str, Any]:
    """Return the options of an httpx client. It ignores the environment's proxy for servers on this machine, and trusts
    what `trust` says of `ca`."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key holds characters that a key cannot have")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(silence_s, connect=connect_s)
    try:
        host = httpx.URL(url).host
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except (ValueError, httpx.InvalidURL):
        is_here = False
    trusts = may_take_proxy and not is_here
    # reading all certificates takes longer than a question
    verify = trust(ca) if trusts or not url.startswith("http:") else False
    return {"headers": headers, "timeout": timeout, "trust_env": trusts, "verify": verify}


def trust(ca: Path | None) -> ssl.SSLContext:
    """Return whose certificates are trusted: the authorities in this file alone, else in SSL_CERT_FILE or SSL_CERT_DIR,
    else those that Mozilla trusts."""
    try:
        return httpx.create_ssl_context() if ca is None else ssl.create_default_context(cafile=ca)
    except OSError as error:  # an SSLError too
        file = ca or os.environ.get("SSL_CERT_FILE")
        raise ConfigError(f"{file} holds no certificates that can be read: {error.strerror or error}") from error


def _tls_fault(error: BaseException) -> str | None:
    """Return why a server that is there cannot be trusted or speaks no TLS; None where that is not the reason."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = f"has a certificate that is not trusted ({cause.verify_message})"
        return f"{why}: name the file of its authority by --ca or SSL_CERT_FILE"
    return None if cause is None else f"speaks no TLS as it should ({one_line(cause)}): is it http:// there?"


def api_at(url: str) -> str:
    """Return the address of a server's API: below /v1 where the address of the server alone is named."""
    try:
        names_server = not urlsplit(url).path.strip("/")
    except ValueError:  # it is no address, as who asks it will say
        names_server = False
    return url.rstrip("/") + ("/v1" if names_server else "")


def server_at(url: str) -> str:
    """Return the address of the server whose API is named."""
    return url.rstrip("/").removesuffix("/v1")


def complaint(answer: httpx.Response) -> str:
    """Return what a server says where it refuses, and a hint where the address may be wrong."""
    lacks_base = answer.status_code == httpx.codes.NOT_FOUND and "/v1/" not in answer.url.path
    return said_by(answer) + (" (--url is the API's base, which mostly ends with /v1)" if lacks_base else "")


def said_by(answer: httpx.Response) -> str:
    try:
        return said_in(answer.json())
    except ValueError:
        return one_line(answer.text) or answer.reason_phrase


def said_in(given: Any) -> str:
    """Return the text of an error, in whichever shape the server gives it."""
    while isinstance(given, dict):
        given = next((given[name] for name in ("error", "message", "detail") if name in given), str(given))
    return one_line(given)


def one_line(text: object) -> str:
    return " ".join(str(text).translate(CONTROL | {10: " ", 9: " "}).split())[:500]
