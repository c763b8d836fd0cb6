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

from alignedserve.shell.listener import COPY, REPLACE, ask_for, door_for, give, handover_name
from alignedserve.shell.part import PartSpec

log = logging.getLogger("alignedserve.gateway")


class Handover:
    """Gives the listening socket to a gateway that asks for it."""

    def __init__(self, spec: PartSpec, listener: socket.socket, has_others: bool) -> None:
        """`has_others`: whether other gateways take connections at this port as well."""
        self.has_others = has_others
        self._name, self._listener = handover_name(spec.deployment, spec.name), listener
        self.is_done = False

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Answer the gateway that asks meanwhile. Only the event loop may enter this."""
        loop = asyncio.get_running_loop()
        with door_for(self._name) as door:
            door.setblocking(False)
            loop.add_reader(door, self._give, door)
            try:
                yield
            finally:
                loop.remove_reader(door)

    def _give(self, door: socket.socket) -> None:
        with suppress(OSError):  # it has gone meanwhile
            self.is_done |= give(door, self._listener) != COPY


def handed_on(spec: PartSpec) -> socket.socket | None:
    """Return the socket of the gateway that this one replaces; None where there is none, or it does not answer."""
    if not spec.replaces:
        return None
    given = ask_for(handover_name(spec.deployment, spec.replaces), REPLACE)
    if given is None:
        log.warning("%s does not hand on its socket: this gateway asks the launcher", spec.replaces)
    return given
