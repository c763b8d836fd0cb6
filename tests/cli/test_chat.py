"""Tests of a chat with a scripted server: what is sent, what is shown, and how errors are reported."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.cli.remote.chat import run
from alignedserve.cli.remote.options import ChatOptions
from alignedserve.errors import ConfigError
from alignedserve.http_client import complaint

ROOT = Path(__file__).resolve().parents[2]


class Script(ThreadingHTTPServer):
    """Answers each chat with the next reply of its script, and keeps what it was sent.

    A reply is a list of raw server-sent events, or (status, body) for a refusal.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: list[str] = ["first", "second"]
        self.replies: list[list[str] | tuple[int, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.hold = threading.Event()  # once it is set, a reply with `HOLD` in it goes on

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Script

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.keys.append(self.headers.get("Authorization"))
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        reply = self.server.replies.pop(0)
        if isinstance(reply, tuple):
            self._send(*reply)
            return
        self.send_response(200)
        self.end_headers()
        for event in reply:
            if event == HOLD:
                self.server.hold.wait(30)
                continue
            self.wfile.write(f"data: {event}\n\n".encode())
            self.wfile.flush()

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


HOLD = "hold"


def _piece(text: str | None, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def _answer(*pieces: str) -> list[str]:
    return [_piece(None), *map(_piece, pieces), _piece(None, "stop"), '{"choices": [], "usage": {}}', "[DONE]"]


@pytest.fixture
def script() -> Iterator[Script]:
    server = Script()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.hold.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: Script) -> Any:
    """Run a chat over lines of piped input, and return (exit status, stdout, stderr)."""

    def talk(*lines: str, **options: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        given: dict[str, Any] = {"url": script.url, **options}
        status = run(ChatOptions(**given))
        return (status, *capsys.readouterr())

    return talk


def _said(body: dict[str, Any]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in body["messages"]]


def test_each_line_is_a_turn_that_knows_those_before(script: Script, talk: Any) -> None:
    script.replies = [_answer("Hel", "lo!"), _answer("Bye.")]
    assert talk("Hi", "", "And now?") == (0, "Hello!\nBye.\n", "")
    assert _said(script.bodies[1]) == ["user: Hi", "assistant: Hello!", "user: And now?"]


def test_options_are_sent_and_only_those_that_were_given(script: Script, talk: Any) -> None:
    script.replies = [_answer("a"), _answer("b")]
    talk("Hi")
    talk("Hi", model="m", api_key="k", system="Be brief.", max_tokens=3, temperature=0.0)
    assert script.bodies[0] == {"model": "first", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    assert _said(script.bodies[1]) == ["system: Be brief.", "user: Hi"]
    assert {name: script.bodies[1][name] for name in ("model", "max_tokens", "temperature")} == {
        "model": "m",
        "max_tokens": 3,
        "temperature": 0.0,
    }
    assert script.keys == [None, "Bearer k"]


def test_commands(script: Script, talk: Any) -> None:
    script.replies = [_answer("a"), _answer("b"), _answer("c")]
    status, out, err = talk("one", "/system Be kind.", "two", "/reset", "/system", "three", "/quit", "four")
    assert (status, out, err) == (0, "a\nb\nc\n", "")
    assert _said(script.bodies[1]) == ["system: Be kind.", "user: one", "assistant: a", "user: two"]
    assert _said(script.bodies[2]) == ["user: three"]


def test_an_unknown_command_is_not_sent(script: Script, talk: Any) -> None:
    status, _, err = talk("/rest")
    assert status == 1
    assert err.startswith("alignedserve: /rest is not a command: /reset")
    assert script.bodies == []


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ((400, '{"error": {"message": "too\\nlong", "code": 400}}'), "the server refuses with 400: too long"),
        ((429, '{"detail": "try later"}'), "the server refuses with 429: try later"),
        ((401, '{"message": "no key"}'), "the server refuses with 401: no key"),
        ((500, "<h1>oh\x1b[31m no</h1>"), "the server refuses with 500: <h1>oh[31m no</h1>"),
        ((503, ""), "the server refuses with 503: Service Unavailable"),
        ((400, '{"error": {}}'), "the server refuses with 400: {}"),
        ([_piece("Hal"), '{"error": {"message": "lost"}}'], "the server gave up: lost"),
        ([_piece("Hal"), "{no json"], "the server sent no JSON object but {no json"),
        ([_piece("Hal"), "7"], "the server sent no JSON object but 7"),
        ([_piece("Hal")], "ended its answer early"),
    ],
)
def test_the_chat_goes_on_after_an_error_as_if_the_turn_had_not_been(
    script: Script, talk: Any, reply: list[str] | tuple[int, str], complaint: str
) -> None:
    script.replies = [reply, _answer("fine")]
    status, out, err = talk("one", "two")
    assert status == 1
    assert err.count("\n") == 1
    assert complaint in err
    assert out == ("Hal\nfine\n" if isinstance(reply, list) else "fine\n")
    assert _said(script.bodies[1]) == ["user: two"]


def test_a_full_context_forgets_the_oldest_turns(script: Script, talk: Any) -> None:
    full = (400, json.dumps({"error": {"message": "this model's maximum context length is 20 tokens: it has 21"}}))
    script.replies = [_answer("one"), _answer("two"), full, full, _answer("three"), _answer("four")]
    status, out, err = talk("a", "b", "c", "d")
    assert (status, out.split()) == (0, ["one", "two", "three", "four"])
    assert "2 of the oldest turns are forgotten" in err
    asked = [[message["content"] for message in body["messages"]] for body in script.bodies]
    assert asked[2:] == [["a", "one", "b", "two", "c"], ["b", "two", "c"], ["c"], ["c", "three", "d"]]


def test_a_question_that_is_too_long_by_itself_is_refused(script: Script, talk: Any) -> None:
    full = (400, json.dumps({"error": {"message": "this model's maximum context length is 20 tokens: it has 21"}}))
    script.replies = [full]
    status, _, err = talk("a")
    assert status == 1
    assert "maximum context length" in err


def test_no_server(talk: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and the socket does not listen
        status, out, err = talk("Hi", "Hello?", url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
    assert (status, out, err.count("\n")) == (1, "", 2)
    assert "no server at http://127.0.0.1" in err
    assert "`alignedserve serve`" in err


@pytest.mark.parametrize("url", ["foo", "ftp://x", "http://[", ""])
def test_a_url_that_is_none(talk: Any, url: str) -> None:
    status, _, err = talk("Hi", url=url)
    assert (status, err.count("\n")) == (1, 1)


def test_a_server_without_models(script: Script, talk: Any) -> None:
    script.models = []
    assert "lists no model: name one with --model" in talk("Hi")[2]


def test_a_proxy_is_not_for_servers_on_this_machine(script: Script, talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    script.replies = [_answer("a")]
    assert talk("Hi")[:2] == (0, "a\n")


def test_a_key_that_no_header_can_hold(talk: Any) -> None:
    with pytest.raises(ConfigError, match="API key"):
        talk("Hi", api_key="k\n")


@pytest.mark.parametrize(("path", "hint"), [("/files", True), ("/v1/files", False)])
def test_a_base_without_v1_is_hinted_at(path: str, hint: bool) -> None:
    request = httpx.Request("GET", f"http://server{path}")
    said = complaint(httpx.Response(404, json={"error": {"message": f"there is no {path} here"}}, request=request))
    assert said.startswith(f"there is no {path} here")
    assert ("ends with /v1" in said) is hint


def test_control_characters_of_an_answer_do_not_reach_the_terminal(script: Script, talk: Any) -> None:
    script.replies = [_answer("a\x1b[2J\tb\x07\nü")]
    assert talk("Hi")[1] == "a[2J\tb\nü\n"


def test_ctrl_c_interrupts_the_answer_and_keeps_what_came(script: Script) -> None:
    told = json.dumps({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}})
    fine = [_piece("fine"), _piece(None, "stop"), told, "[DONE]"]
    script.replies = [[_piece("Half an"), HOLD, _piece(" answer")], fine]
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "alignedserve.cli.main", "chat", "--url", script.url]
    process = subprocess.Popen(command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    screen = _Screen(ours)
    try:
        screen.wait_for("Chatting with first")
        os.write(ours, b"one\n")
        screen.wait_for("Half an")
        process.send_signal(signal.SIGINT)
        screen.wait_for("> ")
        os.write(ours, b"two\n")
        screen.wait_for("fine")
        screen.wait_for("(tokens: 1 in the answer, 9 in the conversation)")
        screen.wait_for("> ")
        os.write(ours, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert _said(script.bodies[1]) == ["user: one", "assistant: Half an", "user: two"]


class _Screen:
    """Reads what a program writes to its terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._unseen = ""

    def wait_for(self, text: str, limit_s: float = 20) -> None:
        """Read up to and including the next `text`."""
        while text not in self._unseen:
            assert select.select([self._terminal], [], [], limit_s)[0], f"{text!r} did not come after {self._unseen!r}"
            self._unseen += os.read(self._terminal, 4096).decode(errors="replace")
        self._unseen = self._unseen.partition(text)[2]
