"""What a launcher says before there is a deployment."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from alignedserve.config import Config
from alignedserve.gateway.listener import bind
from alignedserve.launch import url_of


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_the_address_can_be_pasted(host: str, url: str) -> None:
    config = Config()
    assert url_of(replace(config, server=replace(config.server, host=host, port=8000))) == url


def test_connections_are_known_to_be_tcp() -> None:
    """Otherwise asyncio leaves Nagle's delay on, and each answer that is not streamed comes 40 ms late."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
