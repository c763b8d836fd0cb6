"""Answer with the metrics of all gateways of a deployment, because all of them share one address.

Each gateway listens at an abstract Unix socket, sends its series to any gateway that connects, and closes the
connection. Its series carry its name as the label `gateway`. A gateway that is gone or does not answer soon is left
out.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

# A gateway that has ended refuses at once. A gateway that is left out while it lives would look as if it began to
# count again.
ANSWER_S = 5.0
_MOST_BYTES = 4 << 20


class Siblings:
    def __init__(self, deployment: str, name: str, others: Sequence[str], series: Callable[[], bytes]) -> None:
        """`series` returns the series of this gateway alone."""
        self._deployment, self._name, self._others, self._series = deployment, name, others, series
        self._server: asyncio.AbstractServer | None = None  # kept: uvloop closes a server without a reference

    async def listen(self) -> None:
        """Start to answer the other gateways, until the event loop ends."""
        if self._others:
            listener = socket.socket(socket.AF_UNIX)  # made here: uvloop cannot name an abstract socket
            listener.bind(self._address(self._name))
            self._server = await asyncio.start_unix_server(self._send_series, sock=listener)

    async def series(self) -> bytes:
        if not self._others:
            return self._series()
        answers = await asyncio.gather(*map(self._ask, self._others))
        return merge_series({self._name: self._series(), **dict(zip(self._others, answers, strict=True))})

    async def _send_series(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(self._series())
            writer.close()
            await writer.wait_closed()

    async def _ask(self, other: str) -> bytes:
        with suppress(OSError, asyncio.TimeoutError):
            return await asyncio.wait_for(self._read_series(other), ANSWER_S)
        return b""

    async def _read_series(self, other: str) -> bytes:
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


def merge_series(expositions: dict[str, bytes]) -> bytes:
    """Merge the gateways' metrics, in Prometheus's text form: each family once, with the series of all gateways."""
    families: dict[str, list[str]] = {}  # by their HELP line
    for name, exposition in sorted(expositions.items()):
        lines: list[str] = []
        for line in exposition.decode().splitlines():
            if line.startswith("# HELP "):
                lines = families.setdefault(line, [])
            elif not line.startswith("#"):
                lines.append(_add_label(line, name))
            elif line not in lines:
                lines.append(line)
    return "".join(f"{line}\n" for about, lines in families.items() for line in (about, *lines)).encode()


def _add_label(line: str, gateway: str) -> str:
    series, _, value = line.rpartition(" ")
    series, _, labels = series.partition("{")
    return f'{series}{{gateway="{gateway}"{"," if labels else "}"}{labels} {value}'
