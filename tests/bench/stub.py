"""A server with OpenAI's API whose answers a test scripts: it streams so many tokens to every request, or refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from typing import Any

Refusal = tuple[int, dict[str, Any]]


@dataclass
class Script:
    """What the server says, and what it heard."""

    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "m", "max_model_len": 2048}])
    refuse: Callable[[int, dict[str, Any]], Refusal | None] = lambda _number, _body: None  # requests count from 1
    tells_ids: bool = True
    tells_usage: bool = True
    breaks_from: float = inf  # the first request whose answer breaks off
    holds_from: float = inf  # the first request whose answer waits for `released` in its midst
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    waits: threading.Event = field(default_factory=threading.Event)  # set once an answer waits
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hear(self, body: dict[str, Any]) -> int:
        """Keep the body of a request, and return its number."""
        with self.lock:
            self.bodies.append(body)
            return len(self.bodies)

    def pieces(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        count = body["max_tokens"]
        for number in range(count):
            finish = "length" if number == count - 1 else None
            said = {"delta": {"content": "w "}} if "messages" in body else {"text": "w "}
            ids = {"token_ids": [number]} if self.tells_ids and body.get("return_token_ids") else {}
            yield {"choices": [{"index": 0, "finish_reason": finish, **said, **ids}]}
        if self.tells_usage and (body.get("stream_options") or {}).get("include_usage"):
            yield {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": count}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        script = self.server.script
        if script.key is not None and self.headers.get("Authorization") != f"Bearer {script.key}":
            self._send(401, {"error": {"message": "wrong key", "type": "authentication_error"}})
        elif self.path == "/v1/models":
            self._send(200, {"data": script.models})
        else:
            self._send(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        script = self.server.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = script.hear(body)
        refusal = script.refuse(number, body)
        if refusal is not None:
            self._send(*refusal)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in script.pieces(body):
            self._chunk(f"data: {json.dumps(piece)}\n\n".encode())
            if number >= script.breaks_from:
                self.close_connection = True
                return
            if number >= script.holds_from:
                script.waits.set()
                script.released.wait(60)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that leave."""


@contextmanager
def served(script: Script) -> Iterator[str]:
    """Yield the server's address."""
    server = _Server(script)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    script.released.set()
    server.shutdown()
    server.server_close()
