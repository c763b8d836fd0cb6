"""A server with OpenAI's API that plays a script: for the clients that talk to servers.

with scripted() as server:
    server.replies = [full(retry_after="1"), streamed("Hel", "lo!", waits=["3 before you, about 12 s"])]
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from starlette.requests import Request as HttpRequest

from alignedserve.gateway.pages import front_answer

HOLD = "hold"  # in a stream: it goes on once `hold` is set
WHOLE: dict[str, Any] = {
    "id": "cmpl-1",
    "prompt_token_ids": [1, 2],
    "choices": [
        {"index": 0, "text": "fine", "message": {"content": "fine"}, "token_ids": [3], "finish_reason": "stop"}
        | {"logprobs": None}
    ],
    "usage": {"prompt_tokens_details": {"cached_tokens": 0}},
    "prompt": "fine",
}  # an answer that is not streamed, as `LLM` reads it, and of /detokenize


@dataclass(frozen=True)
class Refusal:
    status: int
    body: str
    headers: tuple[tuple[str, str], ...] = ()


Reply: TypeAlias = Refusal | dict[str, Any] | Sequence[str]  # a refusal, a whole answer, or what a stream has


def full(said: str = "it is full", retry_after: str = "1", status: int = 429, *headers: tuple[str, str]) -> Refusal:
    return Refusal(status, json.dumps({"error": {"message": said}}), (("retry-after", retry_after), *headers))


def piece(text: str | None, finish: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": [], "finish_reason": finish}
    return json.dumps({"choices": [choice]})


def thought(text: str) -> str:
    """Return a piece of what a model says to itself, as AlignedServe streams it: by two names."""
    delta = {"reasoning_content": text, "reasoning": text}
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def continued(text: str, finish: str | None = None) -> str:
    """Return a piece of a text that goes on, as /v1/completions streams it."""
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def streamed(*pieces: str, waits: Sequence[str] = ()) -> list[str]:
    """Return the stream of an answer in pieces of text. `waits` are comments before it, or HOLD."""
    comments = [wait if wait == HOLD else f": {wait}" for wait in waits]
    return [*comments, piece(None), *map(piece, pieces), piece(None, "stop"), '{"choices": [], "usage": {}}', "[DONE]"]


class ScriptedServer(ThreadingHTTPServer):
    """Answers each request with the next reply of its script, and keeps what it was sent. / is the chat page."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: list[str] = ["first", "second"]
        self.vector_models: list[str] = []
        self.is_chat = True  # whether its model has a chat template
        self.paths: list[str] = []
        self.replies: list[Reply] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.retries: list[int] = []  # how often a client says that it was refused before
        self.times: list[float] = []  # when each request came
        self.hold = threading.Event()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that leave."""


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        if self.path == "/":
            http = HttpRequest({"type": "http", "headers": [(b"accept", b"text/html"), (b"accept-encoding", b"gzip")]})
            page = front_answer(http, "1", self.server.models, has_keys=False, is_chat=self.server.is_chat)
            headers = {name: value for name, value in page.headers.items() if name != "content-encoding"}
            self._send(200, gzip.decompress(page.body).decode(), *headers.items())
        else:
            vectors = [{"id": name, "promise": None} for name in self.server.vector_models]
            self._send(200, json.dumps({"data": vectors + [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        assert self.path in ("/v1/chat/completions", "/v1/completions", "/detokenize")
        self.server.paths.append(self.path)
        self.server.times.append(time.monotonic())
        self.server.keys.append(self.headers.get("Authorization"))
        self.server.retries.append(int(self.headers.get("x-stainless-retry-count", "0")))
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        reply = self.server.replies.pop(0)
        if isinstance(reply, Refusal):
            self._send(reply.status, reply.body, *reply.headers)
        elif isinstance(reply, dict):
            self._send(200, json.dumps(reply))
        else:
            self._stream(reply)

    def _stream(self, lines: Sequence[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for line in lines:
            if line == HOLD:
                self.server.hold.wait(30)
                self.server.hold.clear()
                continue
            self.wfile.write(f"{line if line.startswith(':') else f'data: {line}'}\n\n".encode())
            self.wfile.flush()

    def _send(self, status: int, body: str, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in headers:
            if name != "content-length":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.hold.set()
        server.shutdown()
        server.server_close()
