"""The network interfaces of this machine."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress

_SIOCGIFADDR, _REQUEST_BYTES = 0x8915, 40  # of the kernel: a name in, an IPv4 address out


def keep_nccl_at(host: str) -> None:
    """Have NCCL listen at the interface of this address alone, and tell no other process of its state, unless
    the environment says otherwise (it outweighs nccl.conf)."""
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")  # a port at which any user of this machine may ask
    if (name := interface_of(host)) is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this IPv4 address, such as `lo`; None where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, name.encode().ljust(_REQUEST_BYTES, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
