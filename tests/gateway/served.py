"""An application behind a real socket, as the gateway serves it, in a thread of the tests' own process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from alignedserve.gateway.http.connections import GatewayConnection
from alignedserve.shell.listener import bind
from tests.gateway.conftest import PATIENT_S

SOON_S = 0.3


class Served:
    def __init__(self, app: ASGIApp, most_connections: int) -> None:
        self._listener = bind("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self._most_connections, self.head_s = most_connections, PATIENT_S
        http = cast(Any, self._connection)
        self.server = uvicorn.Server(
            uvicorn.Config(app, http=http, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _connection(self, *args: Any, **options: Any) -> GatewayConnection:
        return GatewayConnection(*args, most_connections=self._most_connections, head_s=self.head_s, **options)

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        await self.server.serve([self._listener])

    def start(self) -> None:
        self._listener.listen()
        self._thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENT_S)

    def hurry(self) -> None:
        """Shorten the patience for every open connection from now on; a read that has begun keeps its old limit."""
        connections: set[Any] = self.server.server_state.connections
        for connection in connections:
            connection._head_s = SOON_S

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    def say(self, *parts: bytes) -> bytes:
        """Send the parts and return all that the server answers until it hangs up."""
        with self.connect() as connection:
            for part in parts:
                connection.sendall(part)
            return read_all(connection)


def until(happened: Callable[[], object], within_s: float = PATIENT_S) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def read_all(connection: socket.socket) -> bytes:
    read = bytearray()
    while new := connection.recv(1 << 16):
        read += new
    return bytes(read)


@contextmanager
def served(app: ASGIApp, most_connections: int = 100) -> Iterator[Served]:
    server = Served(app, most_connections)
    server.start()
    try:
        yield server
    finally:
        server.stop()
