"""Tests of several choices of a prompt and several prompts of a body: each is a request of its own, all form one
answer."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest

from alignedserve.core import FinishReason, Request, ServiceClass, Slo
from alignedserve.gateway.generation import Generation
from alignedserve.gateway.openai.promises import ServicePromise
from alignedserve.gateway.openai.reading import AnswerReader
from alignedserve.gateway.openai.requests import Origin, make_requests
from alignedserve.gateway.openai.shapes import make_shape
from alignedserve.gateway.openai.strict import parse_body
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.gateway.openai.writing import json_parts
from alignedserve.owner.client import Delivered, Overloaded
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, MOST, FakeOwner, Gateway, data_lines, ids_of

WORDS = ["one", " two", " three", " four", " five", " six"]


class OwnOwner(FakeOwner):
    """An owner that says another word to each request, so that a test can tell which answer belongs to which
    request."""

    def __init__(self, text: TextModel, *more: Any) -> None:
        super().__init__()
        self._text, self._more = text, more

    def steps_of(self, request: Request) -> tuple[Any, ...]:
        place = int(request.id.rpartition("-")[2]) if request.id.count("-") > 1 else 0
        return (ids_of(self._text, WORDS[place]), *self._more, self._text.eos_ids)


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(text, OwnOwner(text))


def choices_of(answer: Any) -> list[tuple[int, str]]:
    choices = answer.json()["choices"]
    return [
        (choice["index"], choice["message"]["content"] if "message" in choice else choice["text"]) for choice in choices
    ]


def streamed(answer: Any) -> dict[int, str]:
    written: dict[int, str] = {}
    for chunk in data_lines(answer)[:-1]:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            written[choice["index"]] = written.get(choice["index"], "") + text
    return written


def test_a_prompt_has_several_choices(gateway: Gateway) -> None:
    answer = gateway.chat(n=3, temperature=1, seed=5)
    assert choices_of(answer) == [*enumerate(WORDS[:3])]
    first, *further = gateway.owner.opened
    assert len({request.id for request in gateway.owner.opened}) == 3
    assert [request.sampling.seed for request in (first, *further)] == [5, 6, 7], "each draws by itself"
    assert {request.prompt for request in further} == {first.prompt}
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(first.prompt), "a prompt counts once"
    outputs = [len(ids_of(gateway.text, word)) + 1 for word in WORDS[:3]]
    assert usage["completion_tokens"] == sum(outputs)


def test_seeds_go_round(gateway: Gateway) -> None:
    gateway.chat(n=2, seed=2**63 - 1)
    assert [request.sampling.seed for request in gateway.owner.opened] == [2**63 - 1, -(2**63)]


@pytest.mark.parametrize("prompt", [["a b", "c", "d e f"], [[5, 6], [7], [8, 9, 10]]])
def test_a_body_has_several_prompts(gateway: Gateway, prompt: Any) -> None:
    answer = gateway.complete(prompt=prompt, n=2, echo=True)
    opened = gateway.owner.opened
    assert [request.prompt for request in opened[::2]] == [request.prompt for request in opened[1::2]]
    echoed = [gateway.text.decode(request.prompt) for request in opened]
    assert choices_of(answer) == [*enumerate(text + word for text, word in zip(echoed, WORDS, strict=True))]
    assert answer.json()["usage"]["prompt_tokens"] == sum(len(request.prompt) for request in opened[::2])


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_all_are_streamed_together(gateway: Gateway, route: str) -> None:
    answer = getattr(gateway, route)(n=4, stream=True, stream_options={"include_usage": True})
    assert streamed(answer) == dict(enumerate(WORDS[:4]))
    chunks = data_lines(answer)[:-1]
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert finishes.count("stop") == 4
    assert chunks[-1]["choices"] == []
    whole = getattr(gateway, route)(n=4).json()["usage"]
    assert chunks[-1]["usage"] == whole


def test_of_what_waits_there_is_the_request_alone(text: TextModel) -> None:
    """A thousand prompts in five kilobytes are run some at a time: those that wait take little memory."""
    body = {"model": MODEL, "prompt": [[5]] * 1024}
    asked = parse_body(CompletionRequest, json.dumps(body).encode())
    requests = make_requests(asked, PROMISE, ORIGIN, text, 256)
    meter: Any = None  # nothing runs, so nothing is measured
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        held = Generation(OwnOwner(text), requests, AnswerReader.each(asked, text, requests), meter, meter, at_once=8)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held is not None
    assert (after - before) / len(requests) < 100, "bytes of each, beside its request"


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_usage_may_go_on(gateway: Gateway, route: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = data_lines(getattr(gateway, route)(n=2, stream=True, stream_options=options))[:-1]
    said = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert said == sorted(said)
    assert chunks[-2]["usage"] == chunks[-1]["usage"]
    assert all(chunk["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"] for chunk in chunks)


def test_tables_of_several_are_their_own(gateway: Gateway) -> None:
    answer = gateway.complete(prompt=[[5, 6], [7, 8, 9]], echo=True, logprobs=1, max_tokens=1).json()
    tables = [choice["logprobs"] for choice in answer["choices"]]
    assert [len(table["tokens"]) for table in tables] == [3, 4]
    assert [table["text_offset"][0] for table in tables] == [0, 0]
    assert all(table["token_logprobs"][0] is None for table in tables)


def test_a_refused_choice_refuses_all_choices(text: TextModel) -> None:
    class Full(OwnOwner):
        def steps_of(self, request: Request) -> tuple[Any, ...]:
            if request.id.endswith("-2"):
                return (Overloaded("the queue is full", 3),)
            return (asyncio.Event(),)

    gateway = Gateway(text, Full(text))
    refused = gateway.chat(n=4)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
    assert len(gateway.owner.cancelled) == 4
    assert gateway.owner.open_now == set()


def test_a_fault_of_a_choice_ends_the_stream_with_an_error(text: TextModel) -> None:
    class Breaks(OwnOwner):
        def steps_of(self, request: Request) -> tuple[Any, ...]:
            word = ids_of(text, WORDS[0])
            return (word, Overloaded("no worker is left", 1)) if request.id.endswith("-1") else (word, asyncio.Event())

    gateway = Gateway(text, Breaks(text))
    *_, error, done = data_lines(gateway.chat(n=2, stream=True))
    assert "no worker is left" in error["error"]["message"]
    assert done == "[DONE]"
    assert gateway.owner.open_now == set()


def test_a_choice_that_waited_for_others_and_breaks_off_is_not_opened_again(text: TextModel) -> None:
    """One that is refused waits until it is admitted; of this one a word has been sent."""

    class Refuses(OwnOwner):
        def steps_of(self, request: Request) -> tuple[Any, ...]:
            word = ids_of(text, WORDS[0])
            num_opened = sum(opened.id == request.id for opened in self.opened)
            if not request.id.endswith("-1") or num_opened > 2:
                return (word, self._text.eos_ids)
            return (Overloaded("full", 0),) if num_opened == 1 else (word, Overloaded("no worker is left", 0))

    gateway = Gateway(text, Refuses(text), at_once=1)
    *_, error, done = data_lines(gateway.chat(n=2, stream=True))
    assert "no worker is left" in error["error"]["message"]
    assert done == "[DONE]"
    assert len(gateway.owner.opened) == 3


def test_a_stop_string_ends_a_single_choice(text: TextModel) -> None:
    gateway = Gateway(text, OwnOwner(text, ids_of(text, " and more")))
    answer = gateway.chat(n=2, stop=" two")
    assert choices_of(answer) == [(0, "one and more"), (1, "")]
    assert gateway.owner.cancelled == [gateway.owner.opened[1].id]


def test_the_gauge_counts_each(gateway: Gateway) -> None:
    gateway.chat(n=3)
    assert gateway.metric('alignedserve:num_requests_open{class="rt"}') == 0
    assert gateway.metric('alignedserve:time_to_first_token_seconds_count{class="rt"}') == 3


# --- Without HTTP: callers that read bodies from elsewhere


PROMISE = ServicePromise(ServiceClass.BE, Slo(), "flex")
ORIGIN = Origin("req-line1", "jobs", 7.0)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, b'{"model": "demo", "n": 2, "messages": [{"role": "user", "content": "Hi"}], "logprobs": true}'),
        (CompletionRequest, b'{"model": "demo", "prompt": ["a", "b"], "echo": true, "logprobs": 1, "stop": "wo"}'),
    ],
)
def test_a_body_is_answered_without_a_client(text: TextModel, kind: Any, body: bytes) -> None:
    asked = parse_body(kind, body)
    requests = make_requests(asked, PROMISE, ORIGIN, text, 256)
    assert [request.id for request in requests] == ["req-line1", "req-line1-1"]
    assert {(request.owner, request.arrival_at, request.service) for request in requests} == {
        ("jobs", 7.0, ServiceClass.BE)
    }
    gateway = Gateway(text, OwnOwner(text))
    delivered = [asyncio.run(_all(gateway.owner, request)) for request in requests]
    pieces = [AnswerReader(asked, text).read(delivery) for delivery in delivered]
    shape = make_shape(asked, requests, "flex", text)
    for number, piece in enumerate(pieces):
        assert list(shape.add(number, piece))
    answer = json.loads(b"".join(json_parts(shape.whole())))
    usual = gateway.ask("POST", f"/v1/{'chat/' * (kind is ChatRequest)}completions", content=body).json()
    assert answer["choices"] == usual["choices"]
    assert answer["usage"] == usual["usage"]
    assert (answer["model"], answer["service_tier"]) == (MODEL, "flex")


async def _all(owner: FakeOwner, request: Request) -> Delivered:
    parts = [delivered async for delivered in owner.open(request)]
    return Delivered(
        tuple(token for part in parts for token in part.tokens),
        parts[-1].finish,
        tuple(logprob for part in parts for logprob in part.logprobs),
        parts[0].opening,
    )


def test_a_reader_says_when_enough_has_come(text: TextModel) -> None:
    asked = parse_body(CompletionRequest, b'{"model": "demo", "prompt": "a", "stop": "wo"}')
    (request,) = make_requests(asked, PROMISE, ORIGIN, text, 256)
    reader = AnswerReader(asked, text)
    assert reader.read(Delivered(ids_of(text, "one"), None)).finish is None
    piece = reader.read(Delivered(ids_of(text, " two and more"), None))
    assert (piece.text, piece.finish) == (" t", FinishReason.STOP)
    shape = make_shape(asked, [request], "flex", text)
    assert not list(shape.add(0, piece))
    assert next(shape.whole()["choices"])["finish_reason"] == "stop"


class TestAnOutputThatFillsTheContext:
    """The engine ends the output at `max_tokens`, which is the rest of the context if the client names no limit."""

    @pytest.fixture
    def gateway(self, text: TextModel) -> Gateway:
        class Fills(FakeOwner):
            def steps_of(self, request: Request) -> tuple[Any, ...]:
                return ((5,) * request.max_tokens, FinishReason.LENGTH)

        return Gateway(text, Fills())

    def test_says_which_length_that_was(self, gateway: Gateway) -> None:
        choice = gateway.chat().json()["choices"][0]
        (request,) = gateway.owner.opened
        assert choice["finish_reason"] == "length"
        assert f"maximum context length is {request.most_tokens} tokens" in choice["finish_message"]
        assert f"the prompt has {len(request.prompt)}," in choice["finish_message"]

    def test_says_so_to_who_asked_for_more_than_is_left(self, gateway: Gateway) -> None:
        choice = gateway.chat(max_tokens=32_000).json()["choices"][0]
        assert f"maximum context length is {MOST} tokens" in choice["finish_message"]

    def test_says_so_with_the_last_chunk_of_a_stream(self, gateway: Gateway) -> None:
        choices = [chunk["choices"][0] for chunk in data_lines(gateway.chat(stream=True))[:-1]]
        assert [choice["finish_reason"] for choice in choices if "finish_message" in choice] == ["length"]

    def test_says_nothing_where_the_client_has_named_the_length(self, gateway: Gateway) -> None:
        assert "finish_message" not in gateway.chat(max_tokens=3).json()["choices"][0]
        assert "finish_message" not in gateway.complete().json()["choices"][0]
