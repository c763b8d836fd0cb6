"""Tests that clients write down what they see, with servers that they make up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import pytest

from tests.chaos.oracle import Call, History, anomalies, read
from tests.chaos.recording import Client, Question, Recorder
from tests.end_to_end.client import Wanted

CHAT = Question.of_chat([{"role": "user", "content": "hi"}], 2)
WANTED = Question.of(Wanted((1, 2), 2, stream=True))
CHUNKS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "token_ids": []}], "prompt_token_ids": [4, 5]},
    {"choices": [{"delta": {"content": "a"}, "token_ids": [7]}]},
    {"choices": [{"delta": {"content": "b"}, "token_ids": [8], "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}},
]
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
REFUSAL = {"error": {"message": "later", "type": "service_unavailable_error", "param": None, "code": "not_ready"}}


class Broken(httpx.AsyncByteStream):
    """Sends some bytes, and is cut off."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content
        raise httpx.ReadError("cut")


def streamed(chunks: Sequence[object] = CHUNKS, end: str = "data: [DONE]\n\n") -> bytes:
    return ("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end).encode()


def sse(content: bytes) -> httpx.Response:
    return httpx.Response(200, headers=EVENTS, content=content)


Serve = Callable[[httpx.Request], httpx.Response]


def record(path: Path, serve: Serve, *questions: Question) -> History:
    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(serve), base_url="http://x") as http:
            client = Client(http, recorder)
            for question in questions:
                await client.ask(question)

    recorder = Recorder(path / "history.jsonl")
    asyncio.run(ask())
    recorder.close()
    return read(recorder.path)


def the_call(history: History) -> Call:
    (call,) = history.calls
    return call


def test_a_stream_is_written_piece_by_piece(tmp_path: Path) -> None:
    history = record(tmp_path, lambda _: sse(streamed()), CHAT)
    call = the_call(history)
    assert [(piece["text"], piece["tokens"]) for piece, _ in call.pieces] == [("a", [7]), ("b", [8])]
    assert (call.answer.finish, call.end["done"], call.end["completion_tokens"]) == ("length", True, 2)
    assert (call.asked["model"], call.asked["sampling"], call.asked["max_tokens"]) == ("demo", "greedy", 2)
    assert history.limited == {"limited"}
    assert anomalies(history) == []


@pytest.mark.parametrize(
    ("serve", "outcome"),
    [
        (lambda _: httpx.Response(200, headers=EVENTS, stream=Broken(streamed(CHUNKS[:2], end="data: {"))), "broken"),
        (lambda _: httpx.Response(503, json=REFUSAL, headers={"retry-after": "2"}), "refused"),
        (lambda _: httpx.Response(502, text="<html>"), "failed"),
        (lambda _: sse(streamed([*CHUNKS[:2], {"error": {"message": "m", "type": "t", "code": "c"}}])), "failed"),
    ],
)
def test_what_goes_wrong_is_written_too(tmp_path: Path, serve: Serve, outcome: str) -> None:
    assert the_call(record(tmp_path, serve, CHAT)).outcome == outcome


def test_a_server_that_is_away_or_silent_is_written_too(tmp_path: Path) -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    def keep_silent(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("silent")

    assert the_call(record(tmp_path, refuse, CHAT)).outcome == "away"
    assert {anomaly.kind for anomaly in anomalies(record(tmp_path, keep_silent, CHAT))} == {"no end"}


def test_the_same_question_has_one_name() -> None:
    assert WANTED.name == Question.of(Wanted((1, 2), 2, stream=False, logprobs=True, tier="flex")).name
    others = [Wanted((1, 2), 3, stream=True), Wanted((1, 3), 2, stream=True), Wanted((1, 2), 2, True, ignore_eos=True)]
    assert len({WANTED.name, CHAT.name, *(Question.of(other).name for other in others)}) == 5
