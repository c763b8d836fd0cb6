"""Tests of the socket that a gateway hands to the one that replaces it."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.config.config import Config
from alignedserve.core import Role
from alignedserve.gateway.http.handover import Handover, handed_on
from alignedserve.shell.listener import bind
from alignedserve.shell.part import PartSpec
from tests.launch.keepers import specs_of


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartSpec:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return next(spec for spec in specs_of(Config()) if spec.role is Role.GATEWAY)


@pytest.mark.parametrize("shared", [False, True])
def test_a_connection_that_waits_is_accepted_by_the_next_gateway(old: PartSpec, shared: bool) -> None:
    new = replace(old, name="gateway-1", replaces=old.name)
    listener = bind("127.0.0.1", 0, shared)
    listener.listen()
    with socket.create_connection(listener.getsockname()) as waits:

        async def hand_on() -> socket.socket | None:
            handover = Handover(old, listener, has_others=False)
            with handover.offered():
                given = await asyncio.to_thread(handed_on, new)
            assert handover.is_done
            return given

        given = asyncio.run(hand_on())
        listener.close()
        assert given is not None
        with given, given.accept()[0] as accepted:
            accepted.sendall(b"!")
            assert waits.recv(1) == b"!"


def test_where_the_old_gateway_has_gone_the_next_one_opens_a_socket_itself(old: PartSpec) -> None:
    assert handed_on(old) is None
    assert handed_on(replace(old, name="gateway-1", replaces=old.name)) is None
