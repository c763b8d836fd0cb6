"""Answer with the metrics of all gateways of a deployment, because all of them share one address.

Each gateway listens at a Unix socket that only its user can open, sends its series to any gateway that connects, and
closes the connection. Its series carry its name as the label `gateway`. A gateway that is gone or does not answer soon
is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

# A gateway that has ended refuses at once. A gateway that is left out while it lives would look as if it began to
# count again.
ANSWER_S = 5.0
_MOST_BYTES = 4 << 20


class Siblings:
    def __init__(self, name: str, sockets: Mapping[str, Path], series: Callable[[], bytes]) -> None:
        """`sockets` are those of all gateways, by name; `series` returns the series of this gateway alone."""
        self._name, self._series = name, series
        self._own = sockets[name]
        self._others = {other: path for other, path in sockets.items() if other != name}

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Answer the other gateways meanwhile."""
        if not self._others:
            yield
            return
        self._own.unlink(missing_ok=True)  # an earlier life of this gateway was killed
        server = await asyncio.start_unix_server(self._send_series, self._own)
        try:
            yield
        finally:
            server.close()
            self._own.unlink(missing_ok=True)

    async def series(self) -> bytes:
        if not self._others:
            return self._series()
        answers = await asyncio.gather(*map(self._ask, self._others.values()))
        return merge_series({self._name: self._series(), **dict(zip(self._others, answers, strict=True))})

    async def _send_series(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(self._series())
            writer.close()
            await writer.wait_closed()

    @staticmethod
    async def _ask(other: Path) -> bytes:
        with suppress(OSError, asyncio.TimeoutError):
            return await asyncio.wait_for(_read_series(other), ANSWER_S)
        return b""


async def _read_series(path: Path) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path, limit=_MOST_BYTES)
    try:
        return await reader.read()
    finally:
        writer.close()


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
