"""Ask all owners of requests, whichever gateway is asked: gateways share one address, and the job runner has none.

Each of them listens at a Unix socket that only its user can open, reads a question from any gateway that connects,
sends its answer, and closes the connection. An owner that is gone or does not answer soon is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from alignedserve.shell.control import private_socket
from alignedserve.shell.part import Part
from alignedserve.store.storage import is_on

# An owner that has ended refuses at once. One that is left out while it lives would look as if it began to count again.
ANSWER_S = 5.0
_MOST_BYTES = 4 << 20
Say: TypeAlias = Callable[[bytes], Awaitable[bytes]]  # the answer to a question


def siblings(part: Part, say: Say, topic: str = "", answer_s: float = ANSWER_S) -> Siblings:
    """Return the owners of this part's deployment, itself among them; each topic has its own sockets."""
    config = part.config
    names = {part.spec.name, *(f"gateway-{number}" for number in range(config.server.gateways + 1))}  # and a spare
    names |= {"jobs-0"} if is_on(config.jobs) else set()
    sockets = {name: private_socket(f"{part.spec.deployment}-{name}{topic}") for name in sorted(names)}
    return Siblings(part.spec.name, sockets, say, answer_s)


class Siblings:
    def __init__(self, name: str, sockets: Mapping[str, Path], say: Say, answer_s: float = ANSWER_S) -> None:
        """`sockets` are those of all owners, by name; `say` returns the answer of this one alone."""
        self._say, self._answer_s = say, answer_s
        self._own = sockets[name]
        self._others = [path for other, path in sockets.items() if other != name]

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Answer gateways that ask meanwhile."""
        if not self._others:
            yield
            return
        server = await asyncio.start_unix_server(self._answer, self._own)  # also where a life that was killed left one
        try:
            yield
        finally:
            server.close()
            self._own.unlink(missing_ok=True)

    async def ask_all(self, question: bytes = b"") -> list[bytes]:
        """Return what all owners say that answer, this one among them."""
        asked = (self._ask(other, question) for other in self._others)
        return [said for said in await asyncio.gather(self._say(question), *asked) if said]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            try:
                writer.write(await self._say(await reader.read()))
            finally:
                writer.close()
            await writer.wait_closed()

    async def _ask(self, other: Path, question: bytes) -> bytes:
        with suppress(OSError, asyncio.TimeoutError):
            return await asyncio.wait_for(_answer_of(other, question), self._answer_s)
        return b""


async def _answer_of(path: Path, question: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path, limit=_MOST_BYTES)
    try:
        writer.write(question)
        writer.write_eof()
        return await reader.read()
    finally:
        writer.close()
