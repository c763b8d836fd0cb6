"""Measure what time and memory large hostile bodies cost a gateway: `python -m benchmarks.hostile`, about a minute.

The server is that of benchmarks.gateway: a separate process with a fake engine. The figures for each kind of body are
the processor time of the event loop's thread for a single body, without other requests; and the peak memory above the
memory before, with as many bodies at once as the gateway accepts. Then the time to a chat's first token beside floods
of bodies that are served or refused late, and the gateway's memory above that before. It needs a quiet machine.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import uvloop

from alignedserve.gateway.http.bodies import BODIES_AT_ONCE
from benchmarks.common.serving import memory_mb
from benchmarks.gateway import CLOCK, MODEL, VOCABULARY, Server, connect, ours, request
from benchmarks.report import command, report

SIZE = 4 << 20  # the usual limit of a body
FLOODERS, CHATS = 16, 100
MOST_TIMES = 1.5  # the first token of a chat alone
_HEAD = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hi"}}], '
_PROMPT = f'{{"model": "{MODEL}", "prompt": '


def filled(before: str, unit: str, after: str) -> bytes:
    return (before + unit * ((SIZE - len(before) - len(after)) // len(unit)) + after).encode()


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield the kind, the route and the body of each hostile request."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    part, names = '{"type": "text", "text": ""}', ", ".join(f'"{number}": 1' for number in range(300_000))
    yield "token ids", completions, filled(_PROMPT + "[1", ",1", "]}")
    yield "prompts", completions, filled(_PROMPT + "[[1]", ",[1]", "]}")
    yield "a text", completions, filled(_PROMPT + '"', "word ", '"}')
    yield "escapes", completions, filled(_PROMPT + '"', "\\u0000", '"}')
    begun = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": [{part}'
    yield "parts of a message", chat, filled(begun, f",{part}", "]}]}")
    yield "messages", chat, filled(f'{{"model": "{MODEL}", "messages": [{{}}', ",{}", "]}")
    yield "nested lists", chat, filled(_HEAD + '"odd": [1', "," + "[" * 190 + "]" * 190, "]}")
    yield "names", chat, f"{_HEAD}{names}}}".encode()
    yield "digits", chat, filled(_HEAD + '"max_tokens": 1', "0", "}")
    yield "a schema", chat, filled(_HEAD + '"guided_json": {"enum": [1', ', {"a": []}', "]}}")


def floods() -> Iterator[tuple[str, str, bytes]]:
    """Yield the key, the route and the body of each flood, which goes on while chats are measured."""
    tokens = ",".join(map(str, range(VOCABULARY)))
    ids = f'{_PROMPT}[[5]{",[5]" * 199}], "max_tokens": 1, "allowed_token_ids": [{tokens}]}}'
    yield "tokenize", "/tokenize", f'{{"prompt": "{"word " * 48_000}"}}'.encode()
    yield "ids", "/v1/completions", ids.encode()


async def first_token_ms(server: Server) -> list[float]:
    """Return the times of chats of one token, one after the other."""
    body = f'{_HEAD}"max_tokens": 1}}'.encode()
    times_ms = []
    for _ in range(CHATS):
        began_at = time.perf_counter()
        await post(server, "/v1/chat/completions", body)
        times_ms.append((time.perf_counter() - began_at) * 1e3)
    return sorted(times_ms)


async def first_token_beside_ms(server: Server, route: str, body: bytes) -> list[float]:
    """Return the times of these chats while some clients send such bodies again and again."""

    async def flood() -> None:
        while True:
            await post(server, route, body)

    flooding = [asyncio.create_task(flood()) for _ in range(FLOODERS)]
    try:
        await asyncio.sleep(1.0)  # until the flood is under way
        return await first_token_ms(server)
    finally:
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)


async def post(server: Server, route: str, body: bytes) -> bytes:
    """Return the whole answer."""
    reader, writer = await connect(server)
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        return await reader.read()
    finally:
        writer.close()


async def say(server: Server, route: str, body: bytes) -> None:
    answer = await post(server, route, body)
    assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 503")), answer[:80]


async def at_once(server: Server, route: str, body: bytes) -> None:
    async def send() -> None:
        with suppress(ConnectionError):  # refused before the body was read: the answer may be lost
            await say(server, route, body)

    await asyncio.gather(*(send() for _ in range(BODIES_AT_ONCE)))


async def works(server: Server) -> None:
    reader, writer = await connect(server)
    writer.write(request(server, max_tokens=1))
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


def loop_s(server: Server) -> float:
    """Return the processor time of the event loop's thread, the first thread of the process."""
    return int(Path(f"/proc/{server.pid}/task/{server.pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    command(__doc__).parse_args()
    with tempfile.NamedTemporaryFile() as file:
        os.ftruncate(file.fileno(), CLOCK.size)
        most_s = most_mb = 0.0
        for kind, route, body in bodies():
            with ours(0.001, Path(file.name)) as server:
                uvloop.run(works(server))
                before_s, before_mb = loop_s(server), server.memory_mb
                uvloop.run(say(server, route, body))
                took_s = loop_s(server) - before_s

                uvloop.run(at_once(server, route, body))
                uvloop.run(works(server))
                report(f"gateway, {kind}, {SIZE >> 20} MB, the event loop's time", took_s * 1e3, "ms")
                report(
                    f"gateway, {kind}, {BODIES_AT_ONCE} at once, memory",
                    memory_mb(server.pid, "VmHWM") - before_mb,
                    "MB",
                )
                most_s, most_mb = max(most_s, took_s), max(most_mb, memory_mb(server.pid, "VmHWM") - before_mb)
        report("gateway, the most of all kinds, the event loop's time", most_s * 1e3, "ms")
        report("gateway, the most of all kinds, memory", most_mb, "MB")
        for key, route, body in floods():
            with ours(0.001, Path(file.name)) as server:
                alone = p95(uvloop.run(first_token_ms(server)))
                before_mb = server.memory_mb
                beside = p95(uvloop.run(first_token_beside_ms(server, route, body)))
                goal = MOST_TIMES * alone
                report(f"{key}: a chat's first token beside it, p95", beside, "ms", baseline=alone, goal=goal)
                report(f"{key}: the gateway's memory", memory_mb(server.pid, "VmHWM") - before_mb, "MB")


def p95(ascending: Sequence[float]) -> float:
    return ascending[len(ascending) * 95 // 100]


if __name__ == "__main__":
    main()
