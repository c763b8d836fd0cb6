"""`alignedserve batch` against a server that is not ours: OpenAI's objects, and no header of our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from alignedserve import batch_command
from alignedserve.batch_command import Options, Submission
from alignedserve.errors import BatchError

FILES = {"out": b'{"custom_id": "a"}\n', "err": b'{"custom_id": "b"}\n'}


def batch(status: str, **more: Any) -> dict[str, Any]:
    counts = {"total": 2, "completed": int(status == "completed"), "failed": 0}
    return {"id": "batch_1", "status": status, "completion_window": "24h", "request_counts": counts, **more}


class Server:
    """Says one thing after the other of its batch; the last again and again."""

    def __init__(self) -> None:
        self.batches: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.asked: list[tuple[str, str, bytes, str | None]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append((self.command, self.path, b"", self.headers.get("Authorization")))
                self._answer(*server.got(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.asked.append((self.command, self.path, body, self.headers.get("Authorization")))
                made = {"id": "file-1"} if self.path == "/v1/files" else batch("validating")
                self._answer(json.dumps(made).encode(), {})

            def _answer(self, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(200)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.options = Options(f"http://127.0.0.1:{self.http.server_port}/v1", "secret")

    def got(self, path: str) -> tuple[bytes, dict[str, str]]:
        if path.endswith("/content"):
            return FILES[path.split("/")[3]], {}
        if "?" in path:
            return json.dumps({"object": "list", "data": [batch("completed"), batch("failed")]}).encode(), {}
        said, headers = self.batches.pop(0) if len(self.batches) > 1 else self.batches[0]
        return json.dumps(said).encode(), headers


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(batch_command, "_LOOK_S", 0.01)
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "url": "/v1/completions"}) + "\n")
    return path


def test_submitted_waited_for_and_downloaded(
    server: Server, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = batch("completed", output_file_id="out", error_file_id="err")
    server.batches = [(batch("validating"), {}), (batch("in_progress"), {}), (done, {})]
    out = tmp_path / "facts.jsonl"
    assert batch_command.submit(server.options, Submission(file, "2h", wait=True, out=out)) == 0
    assert (out.read_bytes(), (tmp_path / "facts.errors.jsonl").read_bytes()) == (FILES["out"], FILES["err"])
    method, path, body, key = server.asked[1]
    assert (method, path, key) == ("POST", "/v1/batches", "Bearer secret")
    assert json.loads(body) == {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "2h",
    }
    said, told = capsys.readouterr()
    assert said.splitlines()[0] == "batch_1"
    assert [line.split()[1] for line in told.splitlines()] == ["validating", "in_progress"]


def test_that_it_will_be_late_is_said_once_while_it_is_waited_for(
    server: Server, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {"x-batch-late": "true", "x-batch-predicted-finish-at": "86400", "x-batch-tokens-per-s": "12.5"}
    server.batches = [(batch("in_progress"), {}), *[(batch("in_progress"), late)] * 3, (batch("expired"), {})]
    assert batch_command.submit(server.options, Submission(file, wait=True)) == 1
    warned = [line for line in capsys.readouterr().err.splitlines() if "too late" in line]
    assert len(warned) == 1
    assert "12.5 tokens/s" in warned[0]


def test_looked_at_listed_and_cancelled(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    late = {"x-batch-late": "true"}
    server.batches = [(batch("in_progress"), {}), (batch("in_progress"), late), (batch("completed"), late)]
    for _ in range(3):
        assert batch_command.status(server.options, "batch_1") == 0
    assert batch_command.listed(server.options, 7) == 0
    assert batch_command.cancel(server.options, "batch_1") == 0
    assert [path for _, path, _, _ in server.asked[3:]] == ["/v1/batches?limit=7", "/v1/batches/batch_1/cancel"]
    line = "batch_1  in_progress  0 done, 0 failed, 2 in all  window 24h"
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [line, line, "predicted finish: unknown, too late"]
    assert [one.split()[1] for one in said[3:]] == ["completed", "completed", "failed", "validating"]


def test_nothing_to_download_yet(server: Server, tmp_path: Path) -> None:
    server.batches = [(batch("in_progress"), {})]
    assert batch_command.download(server.options, "batch_1", tmp_path / "out") == 1


def test_a_server_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(BatchError, match=r"no server answers at http://127.0.0.1:1/v1"):
        batch_command.submit(Options("http://127.0.0.1:1/v1"), Submission(file))
