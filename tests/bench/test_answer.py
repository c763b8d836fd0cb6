"""Tests of the reader of streamed answers: which tokens it counts, when they came, and what it says of failures."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.lab.bench.answer import Counted, StreamedAnswer, StreamReader
from alignedserve.lab.loads.records.records import RequestOutcome

DONE = b"data: [DONE]\n\n"


def piece(text: str = "", ids: list[int] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish} | ({} if ids is None else {"token_ids": ids})
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def usage(completion: int, prompt: int = 7, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    told = {"completion_tokens": completion, "prompt_tokens": prompt, "prompt_tokens_details": details}
    return b"data: " + json.dumps({"choices": [], "usage": told}).encode() + b"\n\n"


def read(*parts: bytes, status: int = 200, broke: str | None = None) -> StreamedAnswer:
    """Return the answer whose parts came a second apart."""
    reader = StreamReader()
    reader.begin(status, 0.0)
    for at, part in enumerate(parts, 1):
        reader.read(part, float(at))
    return reader.answer(float(len(parts)), broke)


def test_ids_are_counted_where_they_are_told() -> None:
    answer = read(piece("a", [5]), piece("", [6, 7]), piece("b", [8], "stop"), usage(4, cached=3), DONE)
    assert answer.failure is None
    assert (answer.ids, answer.text, list(answer.token_at)) == ((5, 6, 7, 8), "ab", [1.0, 2.0, 2.0, 3.0])
    assert (answer.counted, answer.num_prompt, answer.num_cached) == (Counted.IDS, 7, 3)


def test_without_ids_the_usage_counts_and_its_tokens_are_spread_over_the_pieces() -> None:
    more = read(piece("a b"), piece("c d"), piece("e", finish="stop"), usage(5), DONE)
    assert (more.counted, list(more.token_at)) == (Counted.USAGE, [1.0, 1.0, 2.0, 2.0, 3.0])
    fewer = read(piece("a"), piece("b"), piece("c"), piece("d", finish="stop"), usage(2), DONE)
    assert list(fewer.token_at) == [1.0, 4.0]


def test_without_either_a_piece_of_text_is_a_token() -> None:
    answer = read(piece(""), piece("a"), piece("b", finish="length"), DONE)
    assert (answer.counted, list(answer.token_at), answer.num_prompt) == (Counted.PIECES, [2.0, 3.0], None)


def test_pieces_of_a_chat_are_read_whatever_they_hold() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "yes"},
        {"tool_calls": [{"index": 0}]},
    ]
    parts = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    answer = read(*(f"data: {part}\n\n".encode() for part in parts), DONE)
    assert (list(answer.token_at), answer.text) == ([2.0, 3.0, 4.0], "hmyes")


@given(st.lists(st.integers(1, 400), max_size=20))
def test_it_does_not_matter_where_the_stream_is_cut(cuts: list[int]) -> None:
    whole = piece("a", [5]) + b": a comment\r\n\r\n" + piece("é", [6, 7]) + piece("", [], "stop") + usage(3) + DONE
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    answer = read(*(whole[begin:end] for begin, end in pairwise(places)))
    assert (answer.failure, answer.ids, answer.text, len(answer.token_at)) == (None, (5, 6, 7), "aé", 3)


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (429, {"error": {"message": "no more", "type": "rate_limit", "code": None}}, "429 rate_limit", "no more"),
        (404, {"error": {"message": "no x", "code": "model_not_found"}}, "404 model_not_found", "no x"),
        (401, {"error": "Unauthorized"}, "401", "Unauthorized"),
        (422, {"detail": "bad"}, "422", "bad"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_the_server_said(status: int, body: Any, kind: str, text: str) -> None:
    failure = read(json.dumps(body).encode()[:9], json.dumps(body).encode()[9:], status=status).failure
    assert failure is not None
    assert (failure.outcome, failure.status) == (RequestOutcome.REFUSED, status)
    assert (failure.kind, failure.text) == (kind, text)


def test_a_refusal_that_is_no_json() -> None:
    failure = read(b"<h1>Bad\ngateway</h1>", status=502).failure
    assert failure is not None
    assert (failure.kind, failure.text) == ("502", "<h1>Bad gateway</h1>")
    assert read(b"", status=500).failure is not None


def test_what_is_not_whole_is_broken() -> None:
    error = b'data: {"error": {"message": "logits were not finite"}}\n\n'
    found = [
        read(piece("a", [5]), broke="the server closed the connection").failure,
        read(piece("a", [5])).failure,
        read(piece("a", [5]), error, DONE).failure,
        read(b"data: {nonsense\n\n", DONE).failure,
        StreamReader().answer(1.0, "no connection to x:1").failure,
    ]
    assert all(failure is not None and failure.outcome is RequestOutcome.BROKEN for failure in found)
    assert [failure.kind for failure in found if failure] == [
        "the answer broke off",
        "the answer ended early",
        "error in the stream",
        "error in the stream",
        "no answer",
    ]


def test_an_answer_that_has_ended_is_whole_whatever_happens_to_the_connection_then() -> None:
    assert read(piece("a", [5], "stop"), broke="the server closed the connection").failure is None
