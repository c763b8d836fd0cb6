"""Read the bodies of requests within limits: their size, their time, and the memory of all bodies together.

A body that is held in memory has a fixed time to arrive. A file goes to disk as it arrives, and may be hundreds of
megabytes over a slow line: so the more of it has arrived, the longer its client may take.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from alignedserve.gateway.access.keys import ANONYMOUS, Caller
from alignedserve.gateway.http.middleware import caller_of
from alignedserve.gateway.openai.errors import (
    ApiError,
    ClientGone,
    body_too_slow,
    file_too_slow,
    not_json,
    rate_limited,
    too_many_bodies,
)

BODIES_AT_ONCE = 32  # bodies of the largest size that may be held together, half of them by one key
# An upload of a file may take FILE_S, and more by the time that its bytes so far take at this rate.
FILE_S, FILE_BYTES_PER_S = 30.0, 32 << 10


class Bodies:
    """The bodies that are held in memory until they have become requests."""

    def __init__(self, limit_bytes: int, limit_s: float) -> None:
        self._limit_bytes, self._limit_s = limit_bytes, limit_s
        self._held_bytes: Counter[str] = Counter()  # by caller

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
        body, caller = bytearray(), caller_of(http)
        try:
            await asyncio.wait_for(self._read(http, caller, body), self._limit_s)
            yield body
        except asyncio.TimeoutError:
            raise body_too_slow(self._limit_s) from None
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self._held_bytes[caller.id] -= len(body)

    async def _read(self, http: HttpRequest, caller: Caller, body: bytearray) -> None:
        most = BODIES_AT_ONCE * self._limit_bytes
        most_own = most if caller is ANONYMOUS else most // 2
        async for part in http.stream():
            if len(body) + len(part) > self._limit_bytes:
                raise self._too_large()
            if self._held_bytes.total() + len(part) > most:
                raise too_many_bodies()
            if self._held_bytes[caller.id] + len(part) > most_own:
                raise rate_limited(f"{most_own} bytes of bodies at once", 1.0)
            self._held_bytes[caller.id] += len(part)
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
