"""Around every request: its id, its key, its line in the log, and an answer whatever happens."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.errors import ApiError, ClientGone, api_error
from alignedserve.gateway.metrics import CLIENT_CLOSED, Metrics, Record

_log = logging.getLogger("alignedserve.gateway")

PROBES = ("/health", "/ready", "/metrics")  # asked by machines every few seconds: open, and not in the log


class AroundRequests:
    def __init__(self, app: ASGIApp, api_key: str | None, metrics: Metrics, now: Callable[[], float]) -> None:
        self._app, self._api_key, self._metrics, self._now = app, api_key, metrics, now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = Record(f"req-{uuid4().hex}", scope["method"], scope["path"], self._now())
        scope.setdefault("state", {})["record"] = record
        try:
            await self._answer(scope, receive, _naming(send, record), record)
        except ClientGone:
            record.status, record.finish = CLIENT_CLOSED, "abort"
        finally:
            self._end(record)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        try:
            if record.path not in PROBES:
                self._check_key(Headers(scope=scope))
            await self._app(scope, receive, send)
        except ClientGone:
            raise
        except Exception as error:
            if not isinstance(error, AlignedServeError):
                _log.exception("%s broke", record.id)
            if record.status is not None:
                raise
            await api_error(error).response()(scope, receive, send)

    def _check_key(self, headers: Headers) -> None:
        if self._api_key is None:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(key.strip().encode("latin-1"), self._api_key.encode())
        if scheme.lower() != "bearer" or not known:
            message = "a correct API key is needed: send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _end(self, record: Record) -> None:
        self._metrics.answered(record)
        if record.path not in PROBES:
            record.log(self._now())


def record_of(request: HttpRequest) -> Record:
    record: Record = request.state.record
    return record


def _naming(send: Send, record: Record) -> Send:
    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = record.id
        await send(message)

    return named
