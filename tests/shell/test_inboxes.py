"""Sockets of deployments in the folder of their user: those that nobody listens at are removed, and no others."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.shell.links import inbox, remove_dead_sockets, remove_sockets


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    """A socket's name is short, so pytest's own folders cannot be used."""
    with tempfile.TemporaryDirectory(prefix="in-") as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", made)
        yield Path(made)


def listening(deployment: str, part: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(inbox(deployment, part, 1).removeprefix("ipc://"))
    listener.listen()
    return listener


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.sock"))


def test_each_life_of_a_part_has_its_own(folder: Path) -> None:
    assert len({inbox("alignedserve-1", "decode-0", life) for life in (None, 1, 2)}) == 3
    assert inbox("alignedserve-1", "router").startswith(f"ipc://{folder}/")


def test_what_dead_deployments_left_goes_and_others_stay(folder: Path) -> None:
    listening("alignedserve-1", "decode-0").close()
    with listening("alignedserve-2", "decode-0"):
        remove_dead_sockets()
        assert names(folder) == ["alignedserve-2-decode-0.1.sock"]


def test_a_part_removes_what_its_earlier_lives_left(folder: Path) -> None:
    for part in ("decode-0", "decode-0-rank-1", "decode-01"):
        listening("alignedserve-1", part).close()
    remove_sockets("alignedserve-1", "decode-0.")
    assert names(folder) == ["alignedserve-1-decode-0-rank-1.1.sock", "alignedserve-1-decode-01.1.sock"]


def test_a_deployment_removes_what_its_parts_left(folder: Path) -> None:
    for part in ("decode-0", "gateway-0"):
        listening("alignedserve-1", part).close()
    listening("alignedserve-2", "decode-0").close()
    remove_sockets("alignedserve-1")
    assert names(folder) == ["alignedserve-2-decode-0.1.sock"]
