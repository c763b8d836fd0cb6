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
from alignedserve.errors import AlignedServeError
from alignedserve.gateway.http.handover import Handover, handed_on
from alignedserve.shell.control import private_socket
from alignedserve.shell.listener import ask_for, bind, handover_name, offered, port_name
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


def test_a_launcher_gets_a_copy_and_the_gateway_goes_on(old: PartSpec) -> None:
    """As where the launcher is killed, and the next one goes on with its gateway."""
    listener = bind("127.0.0.1", 0)
    listener.listen()

    async def copy() -> socket.socket | None:
        handover = Handover(old, listener, has_others=False)
        with handover.offered():
            given = await asyncio.to_thread(ask_for, handover_name(old.deployment, old.name))
        assert not handover.is_done
        return given

    with listener:
        given = asyncio.run(copy())
        assert given is not None
        with given:
            assert given.getsockname() == listener.getsockname()


def test_one_that_says_nothing_is_a_gateway_of_a_version_before(old: PartSpec) -> None:
    async def hand_on(listener: socket.socket) -> None:
        handover = Handover(old, listener, has_others=False)
        with handover.offered(), socket.socket(socket.AF_UNIX) as asking:
            asking.setblocking(False)
            asking.connect(str(private_socket(handover_name(old.deployment, old.name))))
            await asyncio.to_thread(lambda: (asking.settimeout(10), socket.recv_fds(asking, 1, 1)))
            assert handover.is_done

    with bind("127.0.0.1", 0) as listener:
        asyncio.run(hand_on(listener))


@pytest.mark.usefixtures("old")
def test_no_other_process_shares_the_port_and_gateways_have_the_launcher_s_socket() -> None:
    """A process of the same user that allowed it (SO_REUSEPORT) got 90 of 200 chats, with their keys."""
    with bind("127.0.0.1", 0) as web:
        host, port = web.getsockname()
        with offered(web):
            gateways = [ask_for(port_name(port)) for _ in range(2)]
        assert ask_for(port_name(port)) is None
        for gateway in gateways:
            assert gateway is not None
            gateway.listen()
        with pytest.raises(AlignedServeError, match="is in use"):
            bind(host, port, shared=True)
        for gateway in gateways:
            assert gateway is not None
            gateway.close()
        with pytest.raises(AlignedServeError, match="is in use"):  # the launcher keeps it while no gateway runs
            bind(host, port, shared=True)


def test_where_the_old_gateway_has_gone_the_next_one_opens_a_socket_itself(old: PartSpec) -> None:
    assert handed_on(old) is None
    assert handed_on(replace(old, name="gateway-1", replaces=old.name)) is None
