"""Tests that a line of many choices leaves room to chats and other lines, and of what lines cost their key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from alignedserve.core import Estimate
from alignedserve.gateway.access.keys import ANONYMOUS, MOST_OPEN, Caller, Limits
from alignedserve.gateway.access.ledger import JOB_RUNNER, Ledger
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.jobs.answering import LINE_AT_ONCE, Answering, KeyLimited, LineRequest
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.store.job import Endpoint
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, MOST, PATIENT_S, FakeOwner

MANY = 12  # lines; one of them has enough choices for the router to refuse chats beside it


def test_lines_of_many_choices_run_some_at_a_time(text: TextModel) -> None:
    async def answered() -> None:
        go_on = asyncio.Event()
        owner = FakeOwner(go_on, (2,))
        answering = Answering(owner, text, (MODEL,), MOST, RequestMetrics())

        def answer(name: str, num_prompts: int) -> asyncio.Task[dict[str, object]]:
            body = {"model": MODEL, "prompt": [[5]] * num_prompts}
            line = LineRequest(name, Endpoint.COMPLETIONS, body, 60.0, None, ANONYMOUS)
            return asyncio.create_task(answering.answer(line, lambda: None))

        async def opened(number: int) -> None:
            while len(owner.opened) < number:
                await asyncio.sleep(0.001)

        first = answer("first", 1024)
        await opened(LINE_AT_ONCE)
        other = answer("other", 1)
        await opened(LINE_AT_ONCE + 1)
        assert owner.opened[-1].id == "other"
        lines = [answer(f"line{number}", 64) for number in range(MANY)]
        await opened(MOST_OPEN)
        assert len(owner.open_now) == MOST_OPEN
        go_on.set()
        answers = await asyncio.gather(first, other, *lines)
        assert len(owner.opened) == 1024 + 1 + MANY * 64
        assert all(answers)

    asyncio.run(asyncio.wait_for(answered(), PATIENT_S))


def test_a_line_is_as_long_as_its_client_says_or_as_those_before_it(text: TextModel) -> None:
    said, known = {"expected_tokens": 40}, Estimate(10, 12)

    async def opened(said: dict[str, int], estimate: Estimate | None) -> Estimate | None:
        owner = FakeOwner((2,))
        answering = Answering(owner, text, (MODEL,), MOST, RequestMetrics())
        body = {"model": MODEL, "prompt": [5], **said}
        await answering.answer(LineRequest("a", Endpoint.COMPLETIONS, body, 60.0, estimate, ANONYMOUS), lambda: None)
        return owner.opened[0].estimate

    def estimate(said: dict[str, int], known: Estimate | None) -> Estimate | None:
        return asyncio.run(asyncio.wait_for(opened(said, known), PATIENT_S))

    assert (estimate({}, None), estimate({}, known)) == (None, known)
    assert estimate(said, known) == estimate(said, None) != known


def test_a_line_that_asks_for_more_than_is_left_gets_what_is_left(text: TextModel) -> None:
    owner = FakeOwner((5,) * MOST)
    body = {"model": MODEL, "prompt": [5] * 6, "max_tokens": 32_000}
    line = LineRequest("line", Endpoint.COMPLETIONS, body, 60.0, None, ANONYMOUS)
    answer = asyncio.run(Answering(owner, text, (MODEL,), MOST, RequestMetrics()).answer(line, lambda: None))
    assert owner.opened[0].max_tokens == MOST - 6
    assert "the prompt has 6, the output the rest" in next(answer["choices"])["finish_message"]


def test_a_line_costs_its_key_tokens(text: TextModel) -> None:
    """A key with 90 tokens a minute: a line of 3 and at most 80 runs, the next of these must wait, and after the first
    has ended with 1 token the rest is there again. A line of 100 never runs."""
    ledger, caller = Ledger(), Caller("ann", limits=Limits(tokens_per_minute=90))

    async def answered() -> None:
        go_on = asyncio.Event()
        owner = FakeOwner(go_on, (2,))
        answering = Answering(owner, text, (MODEL,), MOST, RequestMetrics(), ledger=ledger)

        async def answer(max_tokens: int) -> dict[str, object]:
            body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": max_tokens}
            line = LineRequest("line", Endpoint.COMPLETIONS, body, 60.0, None, caller)
            return await answering.answer(line, lambda: None)

        first = asyncio.create_task(answer(80))
        while not owner.opened:
            await asyncio.sleep(0.001)
        with pytest.raises(KeyLimited) as limited:
            await answer(80)
        assert 40 < limited.value.retry_after_s <= 60
        go_on.set()
        assert await first
        with ledger.row("ann") as row:
            assert 86 <= row.tokens.left <= 90
        with pytest.raises(ApiError, match="may cost 103 tokens"):
            await answer(100)
        assert await answer(80)

    asyncio.run(asyncio.wait_for(answered(), PATIENT_S))


def test_a_job_whose_key_has_used_its_month_asks_again_soon(text: TextModel) -> None:
    """The keys file may give the key more before the month ends."""
    caller, ledger = Caller("ann", limits=Limits(tokens_per_month=1)), Ledger()
    ledger.budgets.use("ann", 1)
    answering = Answering(FakeOwner((2,)), text, (MODEL,), MOST, RequestMetrics(), ledger=ledger)
    line = LineRequest("line", Endpoint.COMPLETIONS, {"model": MODEL, "prompt": [5]}, 60.0, None, caller)
    with pytest.raises(KeyLimited) as limited:
        asyncio.run(answering.answer(line, lambda: None))
    assert limited.value.retry_after_s <= 60


def test_lines_hold_no_more_log_probabilities_than_their_key_may(text: TextModel) -> None:
    caller = Caller("ann", limits=Limits(most_logprobs=1000))

    async def answered() -> None:
        go_on = asyncio.Event()
        owner = FakeOwner(go_on, (2,))
        answering = Answering(owner, text, (MODEL,), MOST, RequestMetrics(), ledger=Ledger(place=JOB_RUNNER))

        async def answer() -> dict[str, object]:
            body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 100, "logprobs": 5}
            line = LineRequest("line", Endpoint.COMPLETIONS, body, 60.0, None, caller)
            return await answering.answer(line, lambda: None)

        first = asyncio.create_task(answer())
        while not owner.opened:
            await asyncio.sleep(0.001)
        with pytest.raises(KeyLimited):
            await answer()
        go_on.set()
        assert await first
        assert await answer()

    asyncio.run(asyncio.wait_for(answered(), PATIENT_S))


def test_choices_of_a_line_run_in_its_keys_places(text: TextModel) -> None:
    """Lines have the six places of their key. A line that finds none waits, and none is refused for its choices."""
    caller = Caller("ann", limits=Limits(most_open=6))

    async def answered() -> None:
        go_on = asyncio.Event()
        owner = FakeOwner(go_on, (2,))
        answering = Answering(owner, text, (MODEL,), MOST, RequestMetrics(), ledger=Ledger(place=JOB_RUNNER))

        async def answer(**body: object) -> dict[str, Any]:
            line = LineRequest("line", Endpoint.COMPLETIONS, {"model": MODEL, **body}, 60.0, None, caller)
            return await answering.answer(line, lambda: None)

        first = asyncio.create_task(answer(prompt="Hi", n=8))
        while len(owner.open_now) < 6:
            await asyncio.sleep(0.001)
        with pytest.raises(KeyLimited):
            await answer(prompt="Hi")
        assert len(owner.open_now) == 6
        go_on.set()
        assert len(list((await first)["choices"])) == 8
        assert len(list((await answer(prompt="Hi"))["choices"])) == 1

    asyncio.run(asyncio.wait_for(answered(), PATIENT_S))
