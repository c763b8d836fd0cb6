"""Tests that events encoded in parts read like events encoded whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import FinishReason
from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.gateway.openai.shapes import AnswerShape, make_shape
from alignedserve.gateway.openai.streaming import Chunks, event
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.text.text_model import TextModel
from tests.samples import request

CHAT = {"model": 'a "model" é', "messages": [{"role": "user", "content": "Hi"}], "stream": True}
COMPLETION = {"model": "demo", "prompt": "Hi", "stream": True}
FIELDS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"n": 2},
    {"n": 2, "return_token_ids": True, "stream_options": {"include_usage": True}},
]

texts, tokens = st.text(max_size=8), st.lists(st.integers(0, 200_000), min_size=1, max_size=3).map(tuple)
reasonings = st.builds(AnswerPiece, st.just(""), tokens, st.none(), reasoning=texts)
pieces = st.lists(st.tuples(st.integers(0, 1), st.builds(AnswerPiece, texts, tokens, st.none()) | reasonings))
ends = [(number, AnswerPiece("end", (2,), FinishReason.STOP)) for number in (0, 1)]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@settings(deadline=None, max_examples=30)
@given(said=pieces)
def test_a_stream_is_the_same(
    text: TextModel,
    kind: type[ChatRequest | CompletionRequest],
    fields: dict[str, Any],
    said: list[tuple[int, AnswerPiece]],
) -> None:
    body = kind.model_validate({**(CHAT if kind is ChatRequest else COMPLETION), **fields})

    def shape() -> AnswerShape:
        made = make_shape(body, [request("a"), request("b")], "default", text)
        made.created = 7
        return made

    whole, parts = shape(), shape()
    chunks = Chunks(parts)
    for number, piece in [*said, *ends]:
        if kind is CompletionRequest and piece.reasoning:  # these have none
            continue
        chunk = whole.chunk(number, piece)
        assert chunks.event(number, piece) == (None if chunk is None else event(chunk))
    assert parts.usage_chunk({}) == whole.usage_chunk({})
