"""The socket by which a user commands a running deployment: `alignedserve stop`, `scale`, `reload`,
`restart`.

The launcher listens at a socket in the file system, in a folder that only its user can open. A connection carries one
line of JSON, the order, and lines of text, the answer. It ends when the order is done; after `stop`, with the
launcher itself.
"""

from __future__ import annotations

import json
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from alignedserve.errors import AlignedServeError
from alignedserve.locks import NotPrivate, private_folder

RESTARTED = "all parts are new"  # the answer to a restart that is done begins so
_MOST_BYTES = 4096  # of an order
_CONNECT_S = 5.0
_PAUSE_S = 0.5  # where no connection can be accepted: files may be free again then
_MOST_PATH = 107  # bytes of a socket's name, by the kernel


class ControlError(AlignedServeError):
    """No launcher answers, or the order cannot be carried out."""


@dataclass(frozen=True)
class LauncherOrder:
    """An order to the launcher. A count of None stays as it is."""

    stop: bool = False
    reload: bool = False  # read the settings again
    restart: bool = False  # replace all parts, one after another
    in_place: bool = False  # end each worker before the next one starts
    leave: bool = False  # end the launcher alone
    prefill: int | None = None
    decode: int | None = None
    why: str = ""  # the reason, where the router orders it


class HeardOrder:
    """An order with the connection on which it is answered; a signal has none."""

    def __init__(self, order: LauncherOrder, connection: socket.socket | None = None) -> None:
        self.order, self._connection = order, connection

    def answer(self, line: str) -> None:
        if self._connection is not None:
            with suppress(OSError):  # the other end may have gone
                self._connection.sendall(line.encode() + b"\n")

    @property
    def has_gone(self) -> bool:
        """Return whether the command that gave the order has ended: it says nothing more until then."""
        if self._connection is None:
            return False
        ends = select.poll()
        ends.register(self._connection, select.POLLIN)
        return bool(ends.poll(0))

    def done(self) -> None:
        if self._connection is not None:
            self._connection.close()


class Door:
    """The socket of a launcher. Each order that arrives is passed to `hear`, in the door's own thread."""

    def __init__(self, port: int, hear: Callable[[HeardOrder], None]) -> None:
        self._path, self._hear = door_of(port), hear
        self._path.unlink(missing_ok=True)  # the port is ours, so the process that made this file has gone
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # too many open files, a connection that has gone, or the door was closed
                time.sleep(_PAUSE_S)
                continue
            connection.settimeout(_CONNECT_S)
            try:
                order = LauncherOrder(**json.loads(connection.recv(_MOST_BYTES)))
            except TypeError:  # a command of a later version, or what is no order
                with suppress(OSError):
                    connection.sendall(b"error: this launcher is of another version and does not know this order\n")
                connection.close()
            except (OSError, ValueError, RecursionError):
                connection.close()
            else:
                self._hear(HeardOrder(order, connection))


def ask(port: int, order: LauncherOrder) -> Iterator[str]:
    """Send an order and yield the lines of its answer, until it is done."""
    path = door_of(port)
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError as error:
            here = f"you serve nothing on port {port} of this machine (--port names another), or not with this TMPDIR"
            raise ControlError(f"{here}: {path} does not answer ({error.strerror})") from None
        connection.sendall(_written(order))
        with connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                yield line.rstrip("\n")


def tell(door: str, order: LauncherOrder) -> None:
    """Send an order without waiting for the answer; raises OSError if no launcher hears it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_S)
        connection.connect(door)
        connection.sendall(_written(order))


def _written(order: LauncherOrder) -> bytes:
    """Return the order without what it leaves as it is: a launcher of an earlier version does not know all fields."""
    usual = asdict(LauncherOrder())
    return json.dumps({name: value for name, value in asdict(order).items() if value != usual[name]}).encode()


def door_of(port: int) -> Path:
    """Return the path of the launcher's socket; raises ControlError if other users could open it."""
    return private_socket(str(port))


def private_socket(name: str) -> Path:
    """Return the path of a socket with this name in a folder that only this user can open; raises ControlError if there
    is none."""
    folders = [Path(tempfile.gettempdir(), f"alignedserve-{os.getuid()}")]
    if ours := os.environ.get("XDG_RUNTIME_DIR"):  # of a user who has logged in; in /tmp, others may take our name
        folders.append(Path(ours, "alignedserve"))
    try:
        path = private_folder(*folders) / f"{name}.sock"
    except NotPrivate as error:
        raise ControlError(f"{error}, or set TMPDIR") from None
    if len(os.fsencode(path)) > _MOST_PATH:
        raise ControlError(f"{path} is too long for the name of a socket: set TMPDIR to a folder with a shorter one")
    return path
