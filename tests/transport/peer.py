"""A worker in a process of its own, for tests that end it in the middle of a transfer.

    python -m tests.transport.peer NAME INCARNATION [SHARED]

SHARED is the folder of device caches that other workers map, for `ipc`.

Its standard output says at which address to reach it, then the outcome of each transfer; and `touched` when it touches
blocks for the second time since it was told to hang, where it then stays. Its standard input names the members it
meets, and its orders, one line of JSON each.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alignedserve.core import Role
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.messages import Member
from alignedserve.transport import payload
from alignedserve.transport.payload import DeviceBlocks
from tests.transport.nodes import Node


def say(line: Any) -> None:
    print(json.dumps(line), flush=True)


def hang_at_the_second_touch(name: str) -> None:
    touch, touches = getattr(DeviceBlocks, name), [0]

    def hanging(*args: Any, **options: Any) -> Any:
        touches[0] += 1
        if touches[0] == 2:
            say("touched")
            threading.Event().wait()
        return touch(*args, **options)

    setattr(DeviceBlocks, name, hanging)


def main() -> None:
    shared = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    node = Node(sys.argv[1], incarnation=int(sys.argv[2]), shared=shared)
    payload.CHUNK_BYTES = 1  # one chunk per token
    say(asdict(node.member))
    for line in sys.stdin:
        what, fields = json.loads(line)
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        if what == "hang":
            hang_at_the_second_touch(**fields)
        elif what == "meet":
            node.transport.meet(Member(**(fields | {"role": Role(fields["role"])})))
        else:
            node.start(SendKv(**fields) if what == "SendKv" else ReceiveKv(**fields))
            threading.Thread(target=lambda: say(asdict(node.outcome())), daemon=True).start()


if __name__ == "__main__":
    main()
