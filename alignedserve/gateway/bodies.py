"""Bodies of requests: how large each may be, how long it may take, how much of all of them is held at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from alignedserve.gateway.errors import ApiError, ClientGone, bodies_are_many, too_slow

BODIES_AT_ONCE = 32  # of the largest size


class Bodies:
    """What is held of bodies until they have become requests."""

    def __init__(self, limit_bytes: int, limit_s: float) -> None:
        self._limit_bytes, self._limit_s = limit_bytes, limit_s
        self._held_bytes = 0

    @asynccontextmanager
    async def read(self, http: HttpRequest) -> AsyncIterator[bytes]:
        """The body, given up as soon as it is known to be too large; it counts as held within the block."""
        _check_encoding(http)
        declared = http.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._limit_bytes):
            raise self._too_large()
        body = bytearray()
        try:
            await asyncio.wait_for(self._read(http, body), self._limit_s)
            yield bytes(body)
        except asyncio.TimeoutError:
            raise too_slow(self._limit_s) from None
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self._held_bytes -= len(body)

    async def _read(self, http: HttpRequest, body: bytearray) -> None:
        async for part in http.stream():
            if len(body) + len(part) > self._limit_bytes:
                raise self._too_large()
            if self._held_bytes + len(part) > BODIES_AT_ONCE * self._limit_bytes:
                raise bodies_are_many()
            self._held_bytes += len(part)
            body += part

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limit_bytes} bytes", code="request_too_large")


def _check_encoding(http: HttpRequest) -> None:
    """What is compressed may be of any size: it is not unpacked."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = "the body must not be compressed: send it without Content-Encoding"
        raise ApiError(415, message, code="unsupported_encoding")
