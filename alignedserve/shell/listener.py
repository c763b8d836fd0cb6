"""The socket at which HTTP arrives: one for a port, which the launcher binds and its gateways share.

    launcher ── binds, offers ──▶ gateway asks, and accepts
                                     │ offers it to the gateway that replaces it (gateway/http/handover.py),
                                     ▼ and to the next launcher, where this one is killed

No other process gets connections of the port: two that both allow it (SO_REUSEPORT) would share them.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from alignedserve.errors import AlignedServeError
from alignedserve.shell.control import ControlError, private_socket

MOST_UNSENT_BYTES = 16 << 10  # of a connection that its client's machine has no room for: who does not read is noticed

# A client whose machine or network has gone says nothing: the kernel probes it, and gives it up within about 90 s.
_GONE_IS_NOTICED = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 60,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}
_STALL_IS_NOTICED = {(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT): MOST_UNSENT_BYTES}


COPY, REPLACE = b"c", b"r"  # what a process asks for that wants a socket: to listen as well, or in the other's place
_ASK_S = 5.0
_SAY_S = 0.2  # in which one that asks says what for: a version before says nothing, and replaces


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """Return a bound socket, so that a port in use is found out before anything is built on it.

    Shared sockets may listen at the same port: gateways on another machine than the launcher's, which cannot have its.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP is named because asyncio turns off Nagle's delay of 40 ms only where it knows the protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    for option, value in (_GONE_IS_NOTICED | _STALL_IS_NOTICED).items():  # accepted connections inherit them
        listener.setsockopt(*option, value)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AlignedServeError(f"port {port} of {host} is in use: choose another with --port") from None
        raise AlignedServeError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def ask_for(name: str, what: bytes = COPY) -> socket.socket | None:
    """Return the socket that another process of this user offers by this name; None where none does."""
    try:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_ASK_S)
            asking.connect(str(private_socket(name)))
            asking.send(what)
            (given,) = socket.recv_fds(asking, 1, 1)[1]
    except (OSError, ValueError, ControlError):
        return None
    return socket.socket(fileno=given)


@contextmanager
def door_for(name: str) -> Iterator[socket.socket]:
    """Open the door at which others ask for a socket by this name."""
    path = private_socket(name)
    path.unlink(missing_ok=True)  # of a life that was killed
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        try:
            yield door
        finally:
            path.unlink(missing_ok=True)


def give(door: socket.socket, listener: socket.socket) -> bytes:
    """Give the socket to who asks for it next, and return what for."""
    connection, _ = door.accept()
    with connection:
        connection.settimeout(_SAY_S)
        what = REPLACE
        with suppress(TimeoutError):
            what = connection.recv(1)
        socket.send_fds(connection, [b"."], [listener.fileno()])
    return what


@contextmanager
def offered(listener: socket.socket) -> Iterator[None]:
    """Offer the launcher's socket meanwhile to its gateways, by its port, from a thread that waits for them."""

    def serve() -> None:
        while is_open:
            try:
                give(door, listener)
            except OSError:  # it has gone meanwhile, or there are too many open files
                time.sleep(_SAY_S)

    is_open = True
    with door_for(port_name(listener.getsockname()[1])) as door:
        threading.Thread(target=serve, name="port", daemon=True).start()
        try:
            yield
        finally:
            is_open = False
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # which ends the wait of the thread


def port_name(port: int) -> str:
    return f"{port}.listener"


def handover_name(deployment: str, gateway: str) -> str:
    return f"{deployment}-{gateway}.listener"
