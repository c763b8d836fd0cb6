"""The metrics of all gateways of a deployment, whichever of them is asked: they are behind one address.

Each listens at an abstract Unix socket for the others, tells its series to whoever connects, and hangs up. Its series
have its name as the label `gateway`; one that is not there, or does not answer soon, is left out.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

ANSWER_S = 5.0  # one that has ended refuses at once; what is left out while it lives looks as if it counted anew
_MOST_BYTES = 4 << 20


class Siblings:
    def __init__(self, deployment: str, name: str, others: Sequence[str], series: Callable[[], bytes]) -> None:
        """`series` are those of this gateway alone."""
        self._deployment, self._name, self._others, self._series = deployment, name, others, series
        self._server: asyncio.AbstractServer | None = None  # uvloop closes one that nobody knows any more

    async def listen(self) -> None:
        """Until the event loop ends."""
        if self._others:
            listener = socket.socket(socket.AF_UNIX)  # made here: uvloop cannot name an abstract one
            listener.bind(self._address(self._name))
            self._server = await asyncio.start_unix_server(self._tell, sock=listener)

    async def series(self) -> bytes:
        if not self._others:
            return self._series()
        told = await asyncio.gather(*map(self._ask, self._others))
        return merged({self._name: self._series(), **dict(zip(self._others, told, strict=True))})

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(self._series())
            writer.close()
            await writer.wait_closed()

    async def _ask(self, other: str) -> bytes:
        with suppress(OSError, asyncio.TimeoutError):
            return await asyncio.wait_for(self._asked(other), ANSWER_S)
        return b""

    async def _asked(self, other: str) -> bytes:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        connection.connect(self._address(other))
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_MOST_BYTES)
        try:
            return await reader.read()
        finally:
            writer.close()

    def _address(self, name: str) -> str:
        return f"\0{self._deployment}-{name}"


def merged(told: dict[str, bytes]) -> bytes:
    """Expositions in Prometheus's text form as one: each family once, with the series of all."""
    families: dict[str, list[str]] = {}  # by their HELP line
    for name, exposition in sorted(told.items()):
        lines: list[str] = []
        for line in exposition.decode().splitlines():
            if line.startswith("# HELP "):
                lines = families.setdefault(line, [])
            elif not line.startswith("#"):
                lines.append(_labelled(line, name))
            elif line not in lines:
                lines.append(line)
    return "".join(f"{about}\n" + "".join(f"{line}\n" for line in lines) for about, lines in families.items()).encode()


def _labelled(line: str, gateway: str) -> str:
    labelled, _, value = line.rpartition(" ")
    series, _, labels = labelled.partition("{")
    return f'{series}{{gateway="{gateway}"{"," if labels else "}"}{labels} {value}'
