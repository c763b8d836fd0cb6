"""Tests of `alignedserve batch` against another server, which has OpenAI's objects and none of our own headers."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cli import main as cli
from alignedserve.cli.remote import batch as batch_command
from alignedserve.cli.remote.options import BatchOptions, BatchSubmission
from alignedserve.errors import BatchError
from alignedserve.progress import ProgressBar

HALF = b'{"custom_id": "c"}\n'  # the end of this file does not come
FILES = {"out": b'{"custom_id": "a"}\n', "err": b'{"custom_id": "b"}\n', "half": HALF, "large": bytes(1 << 20)}


def batch(status: str, **more: Any) -> dict[str, Any]:
    counts = {"total": 2, "completed": int(status == "completed"), "failed": 0}
    return {"id": "batch_1", "status": status, "completion_window": "24h", "request_counts": counts, **more}


class Server:
    """A server that gives scripted states of its batch in turn, and repeats the last state."""

    def __init__(self) -> None:
        self.batches: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.asked: list[tuple[str, str, bytes, str | None]] = []
        self.is_half_sent, self.breaks_off = threading.Event(), threading.Event()
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
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
                if len(body) < int(headers.get("Content-Length", 0)):  # the rest of the body never comes
                    self.wfile.flush()
                    server.is_half_sent.set()
                    server.breaks_off.wait(30)

            def log_message(self, format: str, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.options = BatchOptions(f"http://127.0.0.1:{self.http.server_port}/v1", "secret")

    def got(self, path: str) -> tuple[bytes, dict[str, str]]:
        if path.endswith("/content"):
            body = FILES[path.split("/")[3]]
            return (body[:-9], {"Content-Length": str(len(body))}) if body is HALF else (body, {})
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
    server.breaks_off.set()
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
    assert batch_command.submit(server.options, BatchSubmission(file, "2h", weight=3, wait=True, out=out)) == 0
    assert (out.read_bytes(), (tmp_path / "facts.errors.jsonl").read_bytes()) == (FILES["out"], FILES["err"])
    method, path, body, key = server.asked[1]
    assert (method, path, key) == ("POST", "/v1/batches", "Bearer secret")
    assert json.loads(body) == {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "2h",
        "weight": 3,
    }
    said, told = capsys.readouterr()
    assert said.splitlines()[0] == "batch_1"
    assert [line.split()[1] for line in told.splitlines()] == ["validating", "in_progress"]


def test_the_bar_shows_how_many_lines_have_ended(server: Server, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[tuple[int, int]]()
    monkeypatch.setattr(ProgressBar, "show", lambda _, done, total: shown.append((done, total)))
    some = {"total": 9, "completed": 3, "failed": 2}
    server.batches = [(batch("in_progress") | {"request_counts": some}, {}), (batch("cancelled"), {})]
    batch_command.submit(server.options, BatchSubmission(file, "2h", wait=True))
    assert shown == [(5, 9), (0, 2)]


@pytest.mark.parametrize(
    "line",
    [
        {"custom_id": "a", "response": {"body": {"error": {"message": "too long by 7 tokens"}}}},
        {"custom_id": "a", "response": None, "error": {"code": "lost", "message": "too long by 7 tokens"}},
    ],
)
def test_failed_lines_are_an_error_whose_first_is_shown(
    server: Server,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: dict[str, Any],
) -> None:
    monkeypatch.setitem(FILES, "err", json.dumps(line).encode() + b"\n" + FILES["err"])
    counts = {"total": 2, "completed": 0, "failed": 2}
    server.batches = [(batch("completed", error_file_id="err") | {"request_counts": counts}, {})]
    assert batch_command.submit(server.options, BatchSubmission(file, "2h", wait=True)) == 1
    assert "2 lines failed; the first, 'a': too long by 7 tokens" in capsys.readouterr().err


def test_who_stops_waiting_is_told_that_the_batch_goes_on(
    server: Server, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.batches, sleep = [(batch("in_progress"), {})], time.sleep

    def interrupt(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        sleep(seconds)  # in a thread that another test has left

    monkeypatch.setattr("alignedserve.cli.remote.batch.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        batch_command.submit(server.options, BatchSubmission(file, "2h", wait=True))
    assert "alignedserve batch cancel batch_1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [("", "is no JSON"), ('{"url": 1,}', "is no JSON"), ("[]", "is no request"), ("{}", "names no url")],
)
def test_a_first_line_that_names_no_endpoint_is_refused(server: Server, tmp_path: Path, line: str, said: str) -> None:
    (file := tmp_path / "lines.jsonl").write_text(line)
    with pytest.raises(BatchError, match=said):
        batch_command.submit(server.options, BatchSubmission(file, "2h"))


def test_that_it_will_be_late_is_said_once_while_it_is_waited_for(
    server: Server, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {"x-batch-late": "true", "x-batch-predicted-finish-at": "86400", "x-batch-tokens-per-s": "12.5"}
    server.batches = [(batch("in_progress"), {}), *[(batch("in_progress"), late)] * 3, (batch("expired"), {})]
    assert batch_command.submit(server.options, BatchSubmission(file, "24h", wait=True)) == 1
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
    assert [line.split()[1] for line in said[3:]] == ["completed", "completed", "failed", "validating"]


def test_why_a_batch_failed_is_in_the_list_and_what_did_not_run_is_no_failure(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = {"code": "model_not_found", "message": "the model 'x' is\nnot served here", "line": 3}
    failed = batch("failed", errors={"data": [problem, {"message": "more"}]})
    counts = {"total": 196, "completed": 68, "failed": 2}
    cut = batch("cancelled") | {"request_counts": counts}
    runs = batch("in_progress") | {"request_counts": counts}
    listed = json.dumps({"data": [failed, cut, runs]}).encode(), dict[str, str]()
    monkeypatch.setattr(server, "got", lambda _: listed)
    assert batch_command.listed(server.options, 7) == 0
    assert capsys.readouterr().out.splitlines() == [
        "batch_1  failed  0 done, 0 failed, 2 not run, 2 in all  window 24h: line 3: the model 'x' is not served here",
        "batch_1  cancelled  68 done, 2 failed, 126 not run, 196 in all  window 24h",
        "batch_1  in_progress  68 done, 2 failed, 196 in all  window 24h",
    ]


def test_what_a_batch_used_is_told(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    usage = {"input_tokens": 1200, "input_tokens_details": {"cached_tokens": 800}, "output_tokens": 50}
    usage["total_tokens"] = 1250
    cost = {"device_seconds": 12.34, "joules": 617.2, "modelled_joules": 0.0}
    server.batches = [
        (batch("completed", usage=usage), {}),
        (batch("completed", usage={**usage, "cost": {**cost, "price": 0.00125}}), {}),
    ]
    for _ in range(2):
        batch_command.status(server.options, "batch_1")
    tokens = "  used: 1,200 tokens of prompts (800 cached), 50 of outputs"
    said = capsys.readouterr().out.splitlines()
    assert said[1::2] == [tokens, f"{tokens}, 12.3 s of workers, 617.2 J, price 0.0013"]


@pytest.mark.parametrize("words", [["--out", "FILE"], ["FILE"]])
def test_the_file_of_a_download_is_named_with_a_flag_or_without(
    server: Server, tmp_path: Path, words: list[str]
) -> None:
    server.batches = [(batch("completed", output_file_id="out"), {})]
    file = tmp_path / "facts.jsonl"
    named = [str(file) if word == "FILE" else word for word in words]
    assert cli.main(["batch", "download", "batch_1", *named, "--url", server.options.url]) == 0
    assert file.read_bytes() == FILES["out"]


@pytest.mark.parametrize("words", [[], ["a", "--out", "b"]])
def test_a_download_goes_to_one_file(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["batch", "download", "batch_1", *words]) == 2
    assert "name the file to write: --out FILE" in capsys.readouterr().err


def test_nothing_to_download_yet(server: Server, tmp_path: Path) -> None:
    server.batches = [(batch("in_progress"), {})]
    assert batch_command.download(server.options, "batch_1", tmp_path / "out") == 1


@pytest.fixture(params=["", "of yesterday"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return where results should go; the file exists from before, or does not."""
    (tmp_path / "of yesterday").write_text("old\n")
    return tmp_path / (request.param or "facts.jsonl")


TAKES_THE_PLACE = pytest.mark.parametrize("out", ["of yesterday"], indirect=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_breaks_off_leaves_what_was_there_before(server: Server, out: Path) -> None:
    server.batches = [(batch("completed", output_file_id="half"), {})]
    server.breaks_off.set()
    before = names(out.parent)
    with pytest.raises(BatchError, match="no server answers"):
        batch_command.download(server.options, "batch_1", out)
    assert names(out.parent) == before
    assert (out.parent / "of yesterday").read_text() == "old\n"


@TAKES_THE_PLACE
def test_interrupted_leaves_what_was_there_before(server: Server, out: Path) -> None:
    server.batches = [(batch("completed", output_file_id="half"), {})]
    before = names(out.parent)
    with downloading(server, out) as process:
        assert server.is_half_sent.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert names(out.parent) == before
    assert (out.parent / "of yesterday").read_text() == "old\n"


@TAKES_THE_PLACE
def test_a_full_disk_leaves_what_was_there_before(server: Server, out: Path) -> None:
    server.batches = [(batch("completed", output_file_id="large"), {})]
    before = names(out.parent)
    with downloading(server, out, most_bytes=1 << 16) as process:  # as full as a disk of this size would be
        assert process.stderr is not None
        assert process.stderr.read() == f"alignedserve: {out} cannot be written: File too large\n"
        assert process.wait(60) == 2
    assert names(out.parent) == before
    assert (out.parent / "of yesterday").read_text() == "old\n"


@contextmanager
def downloading(server: Server, out: Path, most_bytes: int = resource.RLIM_INFINITY) -> Iterator[subprocess.Popen[str]]:
    """Download in a process of its own."""
    command = [sys.executable, "-m", "alignedserve", "batch", "download", "batch_1", str(out)]
    limit = (most_bytes, most_bytes)
    with subprocess.Popen(
        [*command, "--url", server.options.url],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_link_stays_a_link_and_a_mode_as_it_is(server: Server, tmp_path: Path) -> None:
    server.batches = [(batch("completed", output_file_id="out"), {})]
    link, file = tmp_path / "link.jsonl", tmp_path / "secret"
    file.touch(0o600)
    link.symlink_to(file)
    assert batch_command.download(server.options, "batch_1", link) == 0
    assert link.is_symlink()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (FILES["out"], 0o600)


def test_what_is_no_file_is_written_to_as_it_is(server: Server, tmp_path: Path) -> None:
    server.batches = [(batch("completed", output_file_id="out"), {})]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert batch_command.download(server.options, "batch_1", pipe) == 0
    assert os.read(reading, 1_000) == FILES["out"]
    os.close(reading)
    assert names(tmp_path) == ["pipe"]


def test_a_server_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(BatchError, match=r"no server answers at http://127.0.0.1:1/v1"):
        batch_command.submit(BatchOptions("http://127.0.0.1:1"), BatchSubmission(file, "24h"))  # /v1 is understood
