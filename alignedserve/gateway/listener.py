"""The socket that HTTP arrives at."""

from __future__ import annotations

import errno
import socket

from alignedserve.errors import AlignedServeError


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that a port in use is known before anything is built on it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, for asyncio turns off Nagle's delay of 40 ms only where it knows the protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AlignedServeError(f"port {port} of {host} is in use: choose another with --port") from None
        raise AlignedServeError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener
