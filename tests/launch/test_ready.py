"""Whom the launcher tells that the deployment takes requests."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from uuid import uuid4

import pytest

from alignedserve.config.config import Config, load
from alignedserve.launch.screen import announce_when_ready

PATIENT_S = 60.0


class _Gateway(BaseHTTPRequestHandler):
    """Answers 503 once, as while a deployment starts, and then 200."""

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        self.send_response(503 if self.server.num_asked == 0 else 200)
        self.end_headers()
        self.server.num_asked += 1

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(HTTPServer):
    num_asked = 0


@pytest.fixture
def starting() -> Iterator[Config]:
    """Yield the config of a deployment that takes requests from the second look on."""
    with _Server(("127.0.0.1", 0), _Gateway) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield load({"model": "demo", "server.port": server.server_port}, {}, None)
        server.shutdown()


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_service_manager_hears_once_that_it_is_ready(
    starting: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool
) -> None:
    name = f"@{uuid4()}" if is_abstract else str(tmp_path / "notify")
    greetings: queue.Queue[str] = queue.Queue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0"))
        manager.settimeout(PATIENT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        announce_when_ready(starting, greetings.put)
        assert manager.recv(100) == b"READY=1"
        greeting = greetings.get(timeout=PATIENT_S)
        assert "serving demo" in greeting
        assert "/v1/chat/completions" in greeting
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)


@pytest.mark.parametrize("address", [None, "", "/nowhere/notify"])
def test_no_service_manager_is_needed(starting: Config, monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    greetings: queue.Queue[str] = queue.Queue()
    announce_when_ready(starting, greetings.put)
    assert "serving demo" in greetings.get(timeout=PATIENT_S)
