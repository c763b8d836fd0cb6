"""Around every request: its id, its key, its line in the log, and an answer whatever happens."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.access.keys import Caller, KeyRing
from alignedserve.gateway.access.ledger import Ledger
from alignedserve.gateway.http.limits import Tab
from alignedserve.gateway.http.metrics import CLIENT_CLOSED, Metrics, Record
from alignedserve.gateway.http.refusing import response_of
from alignedserve.gateway.openai.errors import ClientGone, no_key

_log = logging.getLogger("alignedserve.gateway")

PROBES = ("/health", "/ready", "/metrics")  # asked by machines every few seconds: open, and not in the log
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")  # what of a client's own ids is safe in a header and in a log line


class AroundRequests:
    def __init__(self, app: ASGIApp, keys: KeyRing, ledger: Ledger, metrics: Metrics, now: Callable[[], float]) -> None:
        self._app, self._keys, self._ledger, self._metrics, self._now = app, keys, ledger, metrics, now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        record = Record(f"req-{uuid4().hex}", scope["method"], scope["path"], self._now())
        record.client_id = _client_id(headers)
        scope.setdefault("state", {})["record"] = record
        try:
            await self._answer(scope, receive, _naming(send, record, scope["state"]), record, headers)
        except ClientGone:
            record.status, record.finish = CLIENT_CLOSED, "abort"
        finally:
            self._end(record, scope["state"].get("tab"))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: Record, headers: Headers) -> None:
        try:
            if record.path not in PROBES:
                scope["state"]["tab"] = tab = Tab(self._ledger, self._caller(headers))
                record.caller = tab.caller.id
                tab.enter()
            await self._app(scope, receive, send)
        except ClientGone:
            raise
        except Exception as error:
            if not isinstance(error, AlignedServeError):
                _log.exception("%s broke", record.id)
            if record.status is not None:
                raise
            await response_of(error)(scope, receive, send)

    def _caller(self, headers: Headers) -> Caller:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent = key.strip().encode("latin-1").decode("utf-8", "replace") if scheme.lower() == "bearer" else None
        caller = self._keys.caller(sent)
        if caller is None:
            raise no_key()
        return caller

    def _end(self, record: Record, tab: Tab | None) -> None:
        if tab is not None:
            tab.close()
        self._metrics.answered(record)
        if record.path not in PROBES:
            record.log(self._now())


def record_of(request: HttpRequest) -> Record:
    record: Record = request.state.record
    return record


def caller_of(request: HttpRequest) -> Caller:
    """Who asks; of every route but the probes."""
    return tab_of(request).caller


def tab_of(request: HttpRequest) -> Tab:
    """What its caller takes by it."""
    tab: Tab = request.state.tab
    return tab


def _client_id(headers: Headers) -> str | None:
    """The name that the client, or a proxy before us, has for this request."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else None


def _naming(send: Send, record: Record, state: Mapping[str, Any]) -> Send:
    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = record.client_id or record.id
            if (tab := state.get("tab")) is not None:
                headers.update(tab.headers())
        await send(message)

    return named
