"""Limit what connections cost whose clients are slow, greedy, broken or gone.

uvicorn's protocol serves the requests. This class limits what uvicorn leaves unlimited:

    the head of a request, or a body that is not read        HEAD_S from the connection's start, or an answer's end
    headers and trailers                                     MOST_HEADERS, MOST_HEAD_BYTES in all
    bytes without content: of an unfinished line, of a       MOST_HEAD_BYTES
        chunk's extensions
    the rest of an answer that its client does not read      HEAD_S from the answer's end
    connections                                              most_connections

The time of bodies is limited in bodies.py, that of streamed answers in openai/streaming.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from alignedserve.gateway.http.error_responses import error_response
from alignedserve.gateway.openai.errors import ApiError, bad_head, head_too_large, invalid, overloaded
from alignedserve.machine.resources import allow_open_files
from alignedserve.shell.listener import MOST_UNSENT_BYTES

HEAD_S = 15.0
MOST_HEADERS, MOST_HEAD_BYTES = 100, 32 << 10
_SPARE_FILES = 64  # open files besides connections

_uvicorn_log = logging.getLogger("uvicorn.error")
_uvicorn_log.setLevel(logging.ERROR)  # it warns of broken requests, which any client can send
# It tells, with all of a stack, of an answer that a stop has cut off: another line counts them.
_uvicorn_log.addFilter(lambda record: not (record.exc_info and record.exc_info[0] is asyncio.CancelledError))


class GatewayConnection(HttpToolsProtocol):
    def __init__(self, *args: Any, most_connections: int, head_s: float = HEAD_S, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most_connections, self._head_s = most_connections, head_s
        self._refusal: ApiError = bad_head()
        self._num_headers, self._head_bytes, self._silent_bytes, self._is_silent = 0, 0, 0, True
        self._deadline: asyncio.TimerHandle | None = None  # set while no request is running
        self._is_in_head, self._num_received = False, 0
        self._running: RequestResponseCycle | None = None  # the request being answered; `cycle` may be a later request

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MOST_UNSENT_BYTES)
        self._set_deadline()
        if len(self.connections) > self._most_connections:
            self._refusal = overloaded("the server has as many connections as it accepts: try again")
            self.send_400_response("")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_deadline()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._is_silent, self._num_received = True, self._num_received + 1
        super().data_received(data)
        self._silent_bytes = self._silent_bytes + len(data) if self._is_silent else 0
        if self._silent_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = head_too_large()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers, self._head_bytes, self._is_in_head = 0, 0, True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        self._is_silent = False
        self._head_bytes += num_bytes
        if self._head_bytes > MOST_HEAD_BYTES or self._num_headers > MOST_HEADERS:
            self._refusal = head_too_large()
            raise self._refusal  # the parser stops, and `send_400_response` sends the refusal

    def on_headers_complete(self) -> None:
        self._is_silent = self._is_in_head = False
        has_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        )
        if self.parser.should_upgrade() and has_body:  # the parser would drop the body
            message = "a request with a body cannot upgrade its connection: send HTTP/1.1 without Upgrade"
            self._refusal = invalid(message, code="invalid_http")
            raise self._refusal
        self._unset_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._is_silent = False
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline or self.transport.is_closing():
            self._set_deadline()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Send the refusal that was found here; if the parser found the fault, `msg` adds nothing to bad_head()."""
        if self._can_refuse():
            response = error_response(self._refusal)
            head = [STATUS_LINE[response.status_code], b"connection: close\r\n"]
            head += [b"%s: %s\r\n" % header for header in response.raw_headers]
            self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self.transport.close()

    def _can_refuse(self) -> bool:
        """Return whether a refusal can be sent now.

        During another answer it would be read as a part of that answer. But if the running request is broken, in its
        body, and the answer has not begun, the refusal becomes the answer."""
        running = self._running
        if running is None or running.response_complete:
            return True
        if running is not self.cycle or not running.more_body or running.response_started:
            return False
        running.disconnected = True  # the application's own answer is no longer written
        return True

    def timeout_keep_alive_handler(self) -> None:
        """End the connection; but first read what came while this process was stopped: when it goes on, timers run
        before anything is read. A client that has begun a head gets no more time."""
        if self._is_in_head:
            self._end()
        else:
            self.loop.call_later(0.0, self._end_if_silent, self._num_received)

    def _end_if_silent(self, num_received: int) -> None:
        if num_received == self._num_received:
            self._end()
        elif self._is_in_head or self._running is None or self._running.response_complete:
            self._set_deadline()

    def _end(self) -> None:
        """Close the connection, or abort it if bytes are unsent: a client that reads nothing would keep it open."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _set_deadline(self) -> None:
        self._unset_deadline()
        self._deadline = self.loop.call_later(self._head_s, self.timeout_keep_alive_handler)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def raise_file_limit(most_connections: int) -> int:
    """Allow as many open files as the connections need; return how many connections the system allows."""
    allowed = allow_open_files(most_connections + _SPARE_FILES)
    return max(1, min(most_connections, allowed - _SPARE_FILES))
