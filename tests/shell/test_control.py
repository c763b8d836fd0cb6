"""The launcher's socket for orders."""

from __future__ import annotations

import errno
import queue
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from alignedserve.shell import control
from alignedserve.shell.control import Door, HeardOrder, LauncherOrder, ask, door_of, tell

PORT = 8000


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def test_orders_are_heard_again_after_too_many_open_files_and_orders_of_nonsense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = [OSError(errno.EMFILE, "too many open files"), OSError(errno.ECONNABORTED, "it has gone")]
    accept = socket.socket.accept

    def accept_or_fail(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
    monkeypatch.setattr(control, "_PAUSE_S", 0.0)
    heard = queue.SimpleQueue[HeardOrder]()
    door = Door(PORT, heard.put)
    try:
        for nonsense in (b"", b"[" * 4_096, b'{"stop": 1, "door": 2}', b"\xff"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(door_of(PORT)))
                stranger.sendall(nonsense)
        tell(str(door_of(PORT)), LauncherOrder(decode=3))
        assert heard.get(timeout=60).order == LauncherOrder(decode=3)
        assert failures == []
    finally:
        door.close()


def test_an_order_of_a_later_version_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    later = b'{"stop": true, "politely": true}'
    monkeypatch.setattr(control, "_written", lambda _: later)
    door = Door(PORT, lambda order: pytest.fail(f"{order} was heard"))
    try:
        lines = list(ask(PORT, LauncherOrder(stop=True)))
    finally:
        door.close()
    assert lines == ["error: this launcher is of another version and does not know this order"]
