"""Read the bodies of requests within limits: their size, their time, and the memory of all bodies together.

A body that is held in memory has a fixed time to arrive. A file goes to disk as it arrives, and may be hundreds of
megabytes over a slow line: so the more of it has arrived, the longer its client may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from alignedserve.gateway.openai.errors import (
    ApiError,
    ClientGone,
    body_too_slow,
    file_too_slow,
    not_json,
    too_many_bodies,
)
from alignedserve.gateway.openai.parsing import LARGE_BYTES

BODIES_AT_ONCE = 32  # bodies of the largest size that may be held together
SMALL_AT_ONCE = 32  # small bodies that may be parsed at once, beside one large body
# An upload of a file may take FILE_S, and more by the time that its bytes so far take at this rate.
FILE_S, FILE_BYTES_PER_S = 30.0, 32 << 10


class Bodies:
    """The bodies that are held in memory until they have become requests."""

    def __init__(self, limit_bytes: int, limit_s: float) -> None:
        self._limit_bytes, self._limit_s = limit_bytes, limit_s
        self._held_bytes = 0
        self._large, self._small = asyncio.Semaphore(1), asyncio.Semaphore(SMALL_AT_ONCE)

    def turn(self, body: bytearray) -> asyncio.Semaphore:
        """Return the semaphore to hold from before the body is parsed until it has become requests.

        A parsed body may take 25 times its memory. So large bodies take turns; small bodies do not wait for them."""
        return self._large if len(body) > LARGE_BYTES else self._small

    @asynccontextmanager
    async def read(self, http: HttpRequest) -> AsyncIterator[bytearray]:
        """Give the body of JSON, which counts as held inside the block; raise as soon as it is known to be too large.

        A page may send any other type to every server, and JSON only where that server lets it (CORS)."""
        check_encoding(http)
        content_type = http.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise not_json(content_type)
        declared = http.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._limit_bytes):
            raise self._too_large()
        body = bytearray()
        try:
            await asyncio.wait_for(self._read(http, body), self._limit_s)
            yield body
        except asyncio.TimeoutError:
            raise body_too_slow(self._limit_s) from None
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self._held_bytes -= len(body)

    async def _read(self, http: HttpRequest, body: bytearray) -> None:
        async for part in http.stream():
            if len(body) + len(part) > self._limit_bytes:
                raise self._too_large()
            if self._held_bytes + len(part) > BODIES_AT_ONCE * self._limit_bytes:
                raise too_many_bodies()
            self._held_bytes += len(part)
            body += part

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limit_bytes} bytes", code="request_too_large")


async def parts_of_file(http: HttpRequest) -> AsyncIterator[bytes]:
    """Yield the parts of a body of any size as they arrive; only the time of waiting for the client is limited."""
    check_encoding(http)
    loop, waited_s, num_bytes = asyncio.get_running_loop(), 0.0, 0
    try:
        async with aclosing(http.stream()) as parts:
            while True:
                began_at = loop.time()
                left_s = FILE_S + num_bytes / FILE_BYTES_PER_S - waited_s
                part = await asyncio.wait_for(anext(parts, None), left_s)
                if part is None:
                    return
                waited_s += loop.time() - began_at
                num_bytes += len(part)
                yield part
    except asyncio.TimeoutError:
        raise file_too_slow(FILE_BYTES_PER_S) from None
    except ClientDisconnect:
        raise ClientGone from None


def check_encoding(http: HttpRequest) -> None:
    """Raise if the body is compressed: it could unpack to any size, so it is not unpacked."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = "the body must not be compressed: send it without Content-Encoding"
        raise ApiError(415, message, code="unsupported_encoding")
