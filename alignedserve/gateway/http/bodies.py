"""Bodies of requests: how large each may be, how long it may take, how much of all of them is held at once.

One that is held has a fixed time to arrive. A file, which goes to disk as it comes, may be hundreds of megabytes from a
slow place: the more of it has come, the longer its client may be waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from alignedserve.gateway.openai.errors import ApiError, ClientGone, bodies_are_many, too_slow, too_slow_a_file
from alignedserve.gateway.openai.parsing import LARGE_BYTES

BODIES_AT_ONCE = 32  # of the largest size
SMALL_AT_ONCE = 32  # of those that are more than bytes, beside one large one
FILE_S, FILE_BYTES_PER_S = (
    30.0,
    32 << 10,
)  # a file may take so long, and as much more as what has come takes at this rate


class Bodies:
    """What is held of bodies until they have become requests."""

    def __init__(self, limit_bytes: int, limit_s: float) -> None:
        self._limit_bytes, self._limit_s = limit_bytes, limit_s
        self._held_bytes = 0
        self._large, self._small = asyncio.Semaphore(1), asyncio.Semaphore(SMALL_AT_ONCE)

    def turn(self, body: bytearray) -> asyncio.Semaphore:
        """To be held from before the body is parsed until it has become requests: as objects it may be 25 times as
        large. Large ones have theirs one after the other, and small ones do not wait for them."""
        return self._large if len(body) > LARGE_BYTES else self._small

    @asynccontextmanager
    async def read(self, http: HttpRequest) -> AsyncIterator[bytearray]:
        """The body, given up as soon as it is known to be too large; it counts as held within the block."""
        check_encoding(http)
        declared = http.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._limit_bytes):
            raise self._too_large()
        body = bytearray()
        try:
            await asyncio.wait_for(self._read(http, body), self._limit_s)
            yield body
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


async def parts_of_file(http: HttpRequest) -> AsyncIterator[bytes]:
    """A large body as it comes, of any size; only waiting for the client counts as its time."""
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
        raise too_slow_a_file(FILE_BYTES_PER_S) from None
    except ClientDisconnect:
        raise ClientGone from None


def check_encoding(http: HttpRequest) -> None:
    """What is compressed may be of any size: it is not unpacked."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = "the body must not be compressed: send it without Content-Encoding"
        raise ApiError(415, message, code="unsupported_encoding")
