"""Give every HTTP request its id, its caller and its log line, and an answer even when something fails."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.access.keys import ANONYMOUS, Caller, KeyRing
from alignedserve.gateway.access.ledger import Ledger
from alignedserve.gateway.access.shared_bound import SharedBound
from alignedserve.gateway.http.error_responses import error_response
from alignedserve.gateway.http.limits import REFUSALS, CallerQuota, RefusalPace
from alignedserve.gateway.http.origins import Origins
from alignedserve.gateway.http.records import CLIENT_CLOSED, HttpRecord
from alignedserve.gateway.openai.errors import ClientGone, draining, key_revoked, no_key, no_key_for_page, no_room
from alignedserve.metrics.meter import ABORT
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.shell.event_loop import ENDS

_log = logging.getLogger("alignedserve.gateway")

MOST_CONNECTIONS = 4096  # of a gateway, where the system allows this number of open files
RATE_LIMITED = 429
PAGE = "/dashboard"  # the live page, which a browser opens: it asks its user for a key as a password
PROBES = ("/live", "/health", "/ready", "/metrics")  # machines read them every few seconds: they are not logged
PUBLIC = ("/live", "/health", "/ready", "/", "/docs")  # these need no key
API_KEY = "x-api-key"  # where Anthropic's clients send their key
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")  # a client's ids that are taken, and logged


class OpenCalls:
    """The HTTP requests that callers have open, by the tasks that answer them. Each takes a connection."""

    def __init__(self) -> None:
        self.most = MOST_CONNECTIONS
        self._open: dict[asyncio.Task[Any], tuple[Caller, dict[str, Any]]] = {}
        self._bound = SharedBound()

    @contextmanager
    def held(self, caller: Caller, state: dict[str, Any]) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None, "a request is answered by a task"
        if not self._bound.take(caller, 1, self.most):
            raise no_room(caller, "open requests")
        self._open[task] = caller, state
        try:
            yield
        finally:
            del self._open[task]
            self._bound.give(caller, 1)

    def end_revoked(self, keys: KeyRing) -> None:
        """End the requests of callers whose keys count no more, or lack the route's scope now: by what their state has
        as `end`, which is told why, else by cancelling their tasks."""
        for task, (caller, state) in [*self._open.items()]:
            if keys.knows(caller, state.get("scopes", ())):
                continue
            error = state.setdefault("revoked", no_key() if caller is ANONYMOUS else key_revoked())
            if (end := state.get("end")) is not None:
                end(error)
            else:  # at each look: asyncio.wait_for may drop a cancellation (Python 3.11)
                task.cancel()


class RequestMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        calls: OpenCalls,
        keys: KeyRing,
        origins: Origins,
        ledger: Ledger,
        metrics: RequestMetrics,
        now: Callable[[], float],
        on_end: Callable[[Caller, HttpRecord], None],
    ) -> None:
        """`on_end` is told each request of a caller when it has ended."""
        self._on_end = on_end
        self._app, self._calls, self._keys, self._origins = app, calls, keys, origins
        self._ledger, self._metrics, self._now = ledger, metrics, now
        self._pace = RefusalPace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        record = HttpRecord(f"req-{uuid4().hex}", scope["method"], scope["path"], self._now())
        client_id = headers.get("x-request-id", "")  # that the client, or a proxy before us, has given
        record.client_id = client_id if _REQUEST_ID.fullmatch(client_id) else None
        scope.setdefault("state", {})["record"] = record
        send = self._sender(send, record, scope["state"])
        try:
            await self._answer(scope, receive, send, record, headers)
        except ClientGone:
            record.status, record.finish = CLIENT_CLOSED, ABORT
        except asyncio.CancelledError:  # its key counts no more; or the server stops now, and it waited for its turn
            if record.status is not None:
                raise
            error = scope["state"].get("revoked") or draining()
            await error_response(error, record)(scope, receive, send)
        finally:
            if (tab := scope["state"].get("tab")) is not None:
                tab.close(is_refused=record.error in REFUSALS and not record.output_tokens)
                self._on_end(tab.caller, record)
            if record.path not in PROBES:
                if record.error is not None:
                    self._metrics.http_errors.of(str(record.error)).inc()
                routes = (route for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE)
                route = scope.get("route") or next(routes, None)  # a refused request has come to no route yet
                record.route = getattr(route, "path", None)
                record.log(self._now())

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: HttpRecord, headers: Headers) -> None:
        try:
            if not self._keys:
                self._origins.check(record.method, headers)
            if record.path not in PUBLIC and record.method != "OPTIONS":  # which no route takes: browsers ask by it
                scope["state"]["tab"] = tab = CallerQuota(self._ledger, self._caller(headers, record.path))
                record.caller = tab.caller.id
                with self._calls.held(tab.caller, scope["state"]):
                    return await self._app(scope, receive, send)
            await self._app(scope, receive, send)
        except (ClientGone, *ENDS):
            raise
        except BaseException as error:
            if not isinstance(error, AlignedServeError):
                _log.exception("%s failed", record.id)
            if record.status is not None:
                raise
            await error_response(error, record)(scope, receive, send)

    def _caller(self, headers: Headers, path: str) -> Caller:
        is_page = path == PAGE or path.startswith(f"{PAGE}/")
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        key = None
        if scheme.lower() == "bearer":
            key = sent.strip().encode("latin-1").decode("utf-8", "replace")
        elif scheme.lower() == "basic" and is_page:
            key = _password(sent)
        elif not sent:
            key = headers.get(API_KEY)
        caller = self._keys.caller(key)
        if caller is None:
            raise no_key_for_page() if is_page else no_key()
        return caller

    def _sender(self, send: Send, record: HttpRecord, state: Mapping[str, Any]) -> Send:
        """Return a `send` that adds the request's id and the caller's limits to the answer's headers, and holds back
        refusals of a caller with too many. Where the deployment is full, a client may try elsewhere at once.
        """

        async def send_answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = record.client_id or record.id  # OpenAI's, Anthropic's
                if (tab := state.get("tab")) is not None:
                    headers.update(tab.headers())
                is_full = status == RATE_LIMITED and (tab is None or not tab.is_over)
                if status in REFUSALS and not is_full:
                    if tab is not None:
                        tab.close(is_refused=True)  # what waits holds no place
                    await self._pace.hold_back(record.caller or "")
                record.status = status  # now: an answer that is held back may still become another one
            await send(message)

        return send_answer


def record_of(request: HttpRequest) -> HttpRecord:
    record: HttpRecord = request.state.record
    return record


def caller_of(request: HttpRequest) -> Caller:
    """Return the sender of a request; requests to the probes have none."""
    return tab_of(request).caller


def tab_of(request: HttpRequest) -> CallerQuota:
    tab: CallerQuota = request.state.tab
    return tab


def _password(sent: str) -> str | None:
    """Return the password of HTTP's basic authentication, whatever the user's name is.

    A browser adds it to each request to this server that a page makes, any page. So the live page alone takes keys
    that way: it only reads, and browsers keep answers from pages of other origins."""
    try:
        return base64.b64decode(sent.strip(), validate=True).decode("utf-8", "replace").partition(":")[2]
    except (binascii.Error, ValueError):
        return None
