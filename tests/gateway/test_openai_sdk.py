"""Tests with OpenAI's own client: it reads what we send, and raises the errors that we mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from alignedserve.gateway.access.keys import key_ring
from alignedserve.owner.client import Overloaded
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, PATIENT_S, FakeOwner, Gateway

HELLO = "Hello, naïve 😀!"
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def sdk(gateway: Gateway, key: str = "key") -> AsyncIterator[AsyncOpenAI]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(gateway.app)) as http:
        yield AsyncOpenAI(api_key=key, base_url="http://localhost/v1", http_client=http, max_retries=0)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work(), PATIENT_S)

    asyncio.run(limited())


@pytest.fixture
def gateway(text: TextModel, hello: tuple[int, ...]) -> Gateway:
    return Gateway(text, FakeOwner(*((token,) for token in hello)), keys=key_ring("key", None))


def test_it_chats(gateway: Gateway, hello: tuple[int, ...]) -> None:
    async def chats() -> None:
        async with sdk(gateway) as client:
            answer = await client.chat.completions.create(**ASKED)
            assert answer.choices[0].message.content == HELLO
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(hello)
            again = [*ASKED["messages"], answer.choices[0].message]
            assert await client.chat.completions.create(model=MODEL, messages=again)

    run(chats)


def test_it_streams(gateway: Gateway, hello: tuple[int, ...]) -> None:
    async def streams() -> None:
        async with sdk(gateway) as client:
            stream = await client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == len(hello)

    run(streams)


def test_it_completes(gateway: Gateway) -> None:
    async def completes() -> None:
        async with sdk(gateway) as client:
            answer = await client.completions.create(model=MODEL, prompt="Hi")
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (HELLO, "stop")
            stream = await client.completions.create(model=MODEL, prompt="Hi", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == HELLO

    run(completes)


def test_it_reads_log_probabilities(gateway: Gateway, hello: tuple[int, ...]) -> None:
    async def reads() -> None:
        async with sdk(gateway) as client:
            answer = await client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2)
            assert answer.choices[0].logprobs is not None
            content = answer.choices[0].logprobs.content or []
            assert [entry.logprob for entry in content] == [-1.0 - at for at in range(len(hello))]
            assert [len(entry.top_logprobs) for entry in content] == [2] * len(hello)
            written = b"".join(bytes(entry.bytes or ()) for entry in content[:-1])  # the last entry ends the output
            assert written.decode() == answer.choices[0].message.content == HELLO
            stream = await client.chat.completions.create(**ASKED, logprobs=True, stream=True)
            streamed = [chunk.choices[0].logprobs async for chunk in stream]
            again = [entry.logprob for logprobs in streamed if logprobs for entry in logprobs.content or ()]
            assert again == [entry.logprob for entry in content]
            completion = await client.completions.create(model=MODEL, prompt="Hi", logprobs=1, echo=True)
            table = completion.choices[0].logprobs
            assert table is not None
            assert len(table.tokens or ()) == len(table.token_logprobs or ()) == len(table.text_offset or ())

    run(reads)


def test_it_lists_models(gateway: Gateway) -> None:
    async def lists() -> None:
        async with sdk(gateway) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            assert (await client.models.retrieve(MODEL)).id == MODEL

    run(lists)


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        (
            {"messages": [{"role": "user", "content": "7" * 1000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        ({"temperature": 3}, openai.BadRequestError, "invalid_value"),
        ({"top_logprobs": 2}, openai.BadRequestError, "invalid_value"),
        ({"audio": {"voice": "x", "format": "mp3"}}, openai.BadRequestError, "unsupported_parameter"),
    ],
)
def test_it_raises_what_we_mean(
    gateway: Gateway, changes: dict[str, Any], error: type[openai.APIStatusError], code: str
) -> None:
    async def raises() -> None:
        async with sdk(gateway) as client:
            with pytest.raises(error) as raised:
                await client.chat.completions.create(**{**ASKED, **changes})
            assert raised.value.code == code
            assert raised.value.request_id is not None

    run(raises)


def test_it_knows_a_wrong_key(gateway: Gateway) -> None:
    async def raises() -> None:
        async with sdk(gateway, key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    run(raises)


@pytest.mark.parametrize(
    ("fault", "error"),
    [(Overloaded("the queue is full", 1), openai.RateLimitError), (KeyError("x"), openai.InternalServerError)],
)
def test_the_error_class_says_which_side_is_at_fault(
    text: TextModel, fault: Exception, error: type[openai.APIStatusError]
) -> None:
    async def raises() -> None:
        async with sdk(Gateway(text, FakeOwner(fault))) as client:
            with pytest.raises(error):
                await client.chat.completions.create(**ASKED)

    run(raises)


def test_it_raises_what_breaks_a_stream(text: TextModel) -> None:
    async def raises() -> None:
        async with sdk(Gateway(text, FakeOwner((5,), Overloaded("no worker is left", 1)))) as client:
            stream = await client.chat.completions.create(**ASKED, stream=True)
            with pytest.raises(openai.APIError, match="no worker is left"):
                async for _ in stream:
                    pass

    run(raises)
