"""A worker in a process of its own, for tests that end it in the middle of a transfer.

It says at which address to reach it, then the outcome of each transfer; and `touched` when it touches blocks for the
second time since it was told to hang, where it then stays. It is told whom it meets, and its orders.
"""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.messages import Member
from alignedserve.shell.link_keys import LinkKeys
from alignedserve.transport import payload
from alignedserve.transport.payload import DeviceBlocks
from tests.transport.nodes import Node

# The server of forks loads torch once for all peers.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def hang_at_the_second_touch(name: str, link: Connection) -> None:
    touch, touches = getattr(DeviceBlocks, name), [0]

    def hanging(*args: Any, **options: Any) -> Any:
        touches[0] += 1
        if touches[0] == 2:
            link.send("touched")
            threading.Event().wait()
        return touch(*args, **options)

    setattr(DeviceBlocks, name, hanging)


def be_peer(name: str, incarnation: int, shared: Path | None, keys: LinkKeys, link: Connection) -> None:
    """Be a worker. `shared` is the folder of device caches that other workers map, for `ipc`."""
    node = Node(name, incarnation=incarnation, shared=shared, keys=keys)
    payload.CHUNK_BYTES = 1  # one chunk per token
    link.send(node.member)
    while True:
        match link.recv():
            case Member() as member:
                node.transport.meet(member)
            case SendKv() | ReceiveKv() as transfer:
                node.start(transfer)
                threading.Thread(target=lambda: link.send(node.outcome()), daemon=True).start()
            case str(to_hang):
                hang_at_the_second_touch(to_hang, link)
