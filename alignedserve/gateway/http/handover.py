"""Hand the listening socket of a gateway to the one that replaces it: no connection that waits in it is lost.

old gateway ── listens ──▶ hands on its socket ──▶ accepts beside the new one ──▶ is stopped: accepts no more, and
                                │                                                 answers what its connections ask
new gateway ── starts, asks ────┘ ──▶ knows workers ──▶ accepts
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from alignedserve.shell.control import private_socket
from alignedserve.shell.part import PartSpec

log = logging.getLogger("alignedserve.gateway")

_ASK_S = 5.0


class Handover:
    """Gives the listening socket to a gateway that asks for it."""

    def __init__(self, spec: PartSpec, listener: socket.socket, has_others: bool) -> None:
        """`has_others`: whether other gateways take connections at this port as well."""
        self.has_others = has_others
        self._path, self._listener = private_socket(_name(spec.deployment, spec.name)), listener
        self.is_done = False

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Answer the gateway that asks meanwhile. Only the event loop may enter this."""
        loop = asyncio.get_running_loop()
        self._path.unlink(missing_ok=True)  # of a life that was killed
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(self._path))
            door.listen()
            door.setblocking(False)
            loop.add_reader(door, self._give, door)
            try:
                yield
            finally:
                loop.remove_reader(door)
                self._path.unlink(missing_ok=True)

    def _give(self, door: socket.socket) -> None:
        with suppress(OSError):  # it has gone meanwhile
            connection, _ = door.accept()
            with connection:
                socket.send_fds(connection, [b"."], [self._listener.fileno()])
                self.is_done = True


def handed_on(spec: PartSpec) -> socket.socket | None:
    """Return the socket of the gateway that this one replaces; None where there is none, or it does not answer."""
    if not spec.replaces:
        return None
    try:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_ASK_S)
            asking.connect(str(private_socket(_name(spec.deployment, spec.replaces))))
            (given,) = socket.recv_fds(asking, 1, 1)[1]
    except (OSError, ValueError) as error:
        log.warning("%s does not hand on its socket: this gateway opens its own (%s)", spec.replaces, error)
        return None
    return socket.socket(fileno=given)


def _name(deployment: str, gateway: str) -> str:
    return f"{deployment}-{gateway}.listener"
