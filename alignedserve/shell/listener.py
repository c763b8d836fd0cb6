"""The socket at which HTTP arrives."""

from __future__ import annotations

import errno
import socket

from alignedserve.errors import AlignedServeError

MOST_UNSENT_BYTES = 16 << 10  # of a connection that its client's machine has no room for: who does not read is noticed

# A client whose machine or network has gone says nothing: the kernel probes it, and gives it up within about 90 s.
_GONE_IS_NOTICED = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 60,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}
_STALL_IS_NOTICED = {(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT): MOST_UNSENT_BYTES}


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """Return a bound socket, so that a port in use is found out before anything is built on it.

    Shared sockets may listen at the same port: the kernel deals the connections out to them. The launcher's socket is
    not shared, so that it finds out if the gateways of another deployment share the port.
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
