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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.cli.remote.chat import run
from alignedserve.cli.remote.options import ChatOptions
from alignedserve.errors import ConfigError
from alignedserve.http_client import complaint
from tests.scripted_server import HOLD, Refusal, Reply, ScriptedServer, full, piece, scripted, streamed

ROOT = Path(__file__).resolve().parents[2]
TOO_LONG = Refusal(400, '{"error": {"message": "this model\'s maximum context length is 20 tokens: it has 21"}}')


@pytest.fixture
def script() -> Iterator[ScriptedServer]:
    with scripted() as server:
        yield server


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: ScriptedServer) -> Any:
    """Run a chat over lines of piped input, and return (exit status, stdout, stderr)."""

    def talk(*lines: str, **options: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        given: dict[str, Any] = {"url": script.url, **options}
        status = run(ChatOptions(**given))
        return (status, *capsys.readouterr())

    return talk


def _said(body: dict[str, Any]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in body["messages"]]


def test_each_line_is_a_turn_that_knows_those_before(script: ScriptedServer, talk: Any) -> None:
    script.replies = [streamed("Hel", "lo!"), streamed("Bye.")]
    assert talk("Hi", "", "And now?") == (0, "Hello!\nBye.\n", "")
    assert _said(script.bodies[1]) == ["user: Hi", "assistant: Hello!", "user: And now?"]


def test_options_are_sent_and_only_those_that_were_given(script: ScriptedServer, talk: Any) -> None:
    script.replies = [streamed("a"), streamed("b")]
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


def test_commands(script: ScriptedServer, talk: Any) -> None:
    script.replies = [streamed("a"), streamed("b"), streamed("c")]
    status, out, err = talk("one", "/system Be kind.", "two", "/reset", "/system", "three", "/quit", "four")
    assert (status, out, err) == (0, "a\nb\nc\n", "")
    assert _said(script.bodies[1]) == ["system: Be kind.", "user: one", "assistant: a", "user: two"]
    assert _said(script.bodies[2]) == ["user: three"]


def test_an_unknown_command_is_not_sent(script: ScriptedServer, talk: Any) -> None:
    status, _, err = talk("/rest")
    assert status == 1
    assert err.startswith("alignedserve: /rest is not a command: /reset")
    assert script.bodies == []


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (Refusal(400, '{"error": {"message": "too\\nlong", "code": 400}}'), "the server refuses with 400: too long"),
        (Refusal(429, '{"detail": "try later"}'), "the server refuses with 429: try later"),
        (Refusal(401, '{"message": "no key"}'), "the server refuses with 401: no key"),
        (Refusal(500, "<h1>oh\x1b[31m no</h1>"), "the server refuses with 500: <h1>oh[31m no</h1>"),
        (Refusal(503, ""), "the server refuses with 503: Service Unavailable"),
        (Refusal(400, '{"error": {}}'), "the server refuses with 400: {}"),
        ([piece("Hal"), '{"error": {"message": "lost"}}'], "the server gave up: lost"),
        ([piece("Hal"), "{no json"], "the server sent no JSON object but {no json"),
        ([piece("Hal"), "7"], "the server sent no JSON object but 7"),
        ([piece("Hal")], "ended its answer early"),
    ],
)
def test_the_chat_goes_on_after_an_error_as_if_the_turn_had_not_been(
    script: ScriptedServer, talk: Any, reply: Reply, complaint: str
) -> None:
    script.replies = [reply, streamed("fine")]
    status, out, err = talk("one", "two")
    assert status == 1
    assert err.count("\n") == 1
    assert complaint in err
    assert out == ("Hal\nfine\n" if isinstance(reply, list) else "fine\n")
    assert _said(script.bodies[1]) == ["user: two"]


def test_a_full_context_forgets_the_oldest_turns(script: ScriptedServer, talk: Any) -> None:
    script.replies = [streamed("one"), streamed("two"), TOO_LONG, TOO_LONG, streamed("three"), streamed("four")]
    status, out, err = talk("a", "b", "c", "d")
    assert (status, out.split()) == (0, ["one", "two", "three", "four"])
    assert "2 of the oldest turns are forgotten" in err
    asked = [[message["content"] for message in body["messages"]] for body in script.bodies]
    assert asked[2:] == [["a", "one", "b", "two", "c"], ["b", "two", "c"], ["c"], ["c", "three", "d"]]


def test_a_question_that_is_too_long_by_itself_is_refused(script: ScriptedServer, talk: Any) -> None:
    script.replies = [TOO_LONG]
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


def test_a_server_without_models(script: ScriptedServer, talk: Any) -> None:
    script.models = []
    assert "lists no model: name one with --model" in talk("Hi")[2]


def test_a_proxy_is_not_for_servers_on_this_machine(
    script: ScriptedServer, talk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    script.replies = [streamed("a")]
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


def test_control_characters_of_an_answer_do_not_reach_the_terminal(script: ScriptedServer, talk: Any) -> None:
    script.replies = [streamed("a\x1b[2J\tb\x07\nü")]
    assert talk("Hi")[1] == "a[2J\tb\nü\n"


@pytest.mark.parametrize("ends", ["/quit", "/bye", "/exit"])
def test_commands_of_other_chats_are_understood(script: ScriptedServer, talk: Any, ends: str) -> None:
    status, out, err = talk("/help", "/?", ends, "not asked")
    assert (status, out.count("/reset forgets the chat"), err, script.bodies) == (0, 2, "", [])


def test_a_full_server_is_asked_again_when_it_says_and_a_pipe_is_told_once(script: ScriptedServer, talk: Any) -> None:
    waits = ["keep-alive", "3 before you, about 12 s", "0 before you, about 4 s"]
    script.replies = [full("it is\nfull"), full("not ready", "0", 503), streamed("fine", waits=waits), streamed("b")]
    assert talk("one", "two") == (0, "fine\nb\n", "asked again in 1 s: it is full\n")
    assert [_said(body) for body in script.bodies[:3]] == [["user: one"]] * 3
    assert script.times[1] - script.times[0] >= 1
    assert script.retries == [0, 1, 2, 0]


def test_a_pipe_is_told_once_of_its_place_in_the_line(script: ScriptedServer, talk: Any) -> None:
    waits = ["keep-alive", "3 before you, about 12 s", "0 before you, about 4 s"]
    script.replies = [streamed("fine", waits=waits)]
    assert talk("Hi") == (0, "fine\n", "3 before you, about 12 s\n")


@pytest.mark.parametrize(
    "final",
    [full("spent", "9", 429, ("x-should-retry", "false")), full("spent", "601"), full("spent", "Mon, 30 Nov 2026")],
    ids=["told not to", "longer than patience", "a date"],
)
def test_a_refusal_that_waiting_does_not_mend_is_told_at_once(
    script: ScriptedServer, talk: Any, final: Refusal
) -> None:
    script.replies = [final]
    assert talk("Hi") == (1, "", "alignedserve: the server refuses with 429: spent\n")


def test_ctrl_c_interrupts_the_answer_and_keeps_what_came(script: ScriptedServer) -> None:
    told = json.dumps({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}})
    fine = [piece("fine"), piece(None, "stop"), told, "[DONE]"]
    script.replies = [[piece("Half an"), HOLD, piece(" answer")], fine]
    with _at_a_terminal(script) as screen:
        screen.type("one\n")
        screen.wait_for("Half an")
        screen.ctrl_c()
        screen.wait_for("> ")
        screen.type("two\n")
        screen.wait_for("fine")
        screen.wait_for("(tokens: 1 in the answer, 9 in the conversation)")
    assert _said(script.bodies[1]) == ["user: one", "assistant: Half an", "user: two"]


def test_a_terminal_shows_how_long_it_waits_in_a_line_that_goes(script: ScriptedServer) -> None:
    waits = ["3 before you, about 12 s", HOLD, "2 before you, about 8 s", HOLD]
    script.replies = [full("it is full" * 20, "2"), streamed("fine", waits=waits)]
    with _at_a_terminal(script) as screen:
        screen.type("one\n")
        screen.wait_for("\r\x1b[K" + "it is full" * 20)
        for left_s in (2, 1):
            assert len(screen.wait_for(f"\r\x1b[Kasked again in {left_s} s")) < 80, "a line that wraps would stay"
        for place in ("3 before you, about 12 s", "2 before you, about 8 s"):
            screen.wait_for(f"\r\x1b[K{place}")
            script.hold.set()
        screen.wait_for("\r\x1b[Kfine")


def test_ctrl_c_while_it_waits_gives_the_words_back(script: ScriptedServer) -> None:
    script.replies = [
        full(retry_after="500"),
        streamed("fine", waits=["3 before you, about 12 s", HOLD]),
        streamed("a"),
    ]
    with _at_a_terminal(script) as screen:
        screen.type("one\n")
        for shown in ("asked again in 500 s", "3 before you"):
            screen.wait_for(shown)
            screen.ctrl_c()
            screen.wait_for("> one")
            screen.type(" more\n")
        screen.wait_for("\na\r\n")
    assert [_said(body)[-1] for body in script.bodies] == ["user: one", "user: one more", "user: one more more"]


@contextmanager
def _at_a_terminal(script: ScriptedServer) -> Iterator[_Screen]:
    """Chat at a terminal, from the first prompt to Ctrl-D."""
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "alignedserve.cli.main", "chat", "--url", script.url]
    process = subprocess.Popen(command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    screen = _Screen(ours, process)
    try:
        screen.wait_for("Chatting with first")
        yield screen
        screen.wait_for("> ")
        screen.type("\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


class _Screen:
    """Reads what a program writes to its terminal, and types."""

    def __init__(self, terminal: int, process: subprocess.Popen[bytes]) -> None:
        self._terminal, self._process = terminal, process
        self._unseen = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def ctrl_c(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait_for(self, text: str, limit_s: float = 20) -> str:
        """Read up to and including the next `text`, and return what came before it."""
        while text not in self._unseen:
            assert select.select([self._terminal], [], [], limit_s)[0], f"{text!r} did not come after {self._unseen!r}"
            self._unseen += os.read(self._terminal, 4096).decode(errors="replace")
        before, _, self._unseen = self._unseen.partition(text)
        return before
