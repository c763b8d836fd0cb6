"""The addresses of inboxes where a deployment is on one machine: sockets in a folder that only its user can open.

The keys of links (link_keys.py) say who is heard, but only after a handshake: whoever may connect can hold connections
open, and make a part keep room for a frame, before it. At these sockets no other user of the machine may connect.
Killed parts leave theirs behind; their next life, their launcher or the next deployment removes them.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from alignedserve.shell.control import private_socket

PREFIX = "alignedserve-"  # of the names of all deployments
_YOUNG_S = 0.1  # a socket is there before its process listens, though for less than this


def inbox(deployment: str, part: str, incarnation: int | None = None) -> str:
    """Return the address of a part, or of one of its lives; raises ControlError if there is no folder for it."""
    life = "" if incarnation is None else f".{incarnation}"
    return f"ipc://{private_socket(f'{deployment}-{part}{life}')}"


def remove_sockets(deployment: str, beginning: str = "") -> None:
    """Remove the sockets that killed parts of this deployment have left, or those whose names begin so."""
    for path in _sockets(f"{deployment}-{beginning}"):
        path.unlink(missing_ok=True)


def remove_dead_sockets() -> None:
    """Remove the sockets of deployments whose launcher was killed too."""
    if dead := [path for path in _sockets(PREFIX) if not _is_heard(path)]:
        time.sleep(_YOUNG_S)
        for path in dead:
            if not _is_heard(path):
                path.unlink(missing_ok=True)


def _sockets(prefix: str) -> list[Path]:
    return list(private_socket(prefix).parent.glob(f"{prefix}*.sock"))


def _is_heard(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)  # whoever listens may be busy
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True
