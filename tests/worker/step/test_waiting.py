"""Prompts that wait: where they stand among those that are seated, and among those that have their KV in the pool."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest

from alignedserve.core import KEY_SALT_SIZE, NO_KV, ServiceClass
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.page_names import chained_hashes
from alignedserve.scheduling.dues import TokenPromise, Yielding, promise
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Late, StepTimes
from alignedserve.worker.step.blocks import NamedBlocks
from alignedserve.worker.step.device_pages import DevicePages
from alignedserve.worker.step.ranks import RankedRequests
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.waiting_prompts import WaitingPrompts
from tests.calls import calls_of
from tests.samples import request
from tests.worker.step.test_selection import NOW, TIMES, chat, document, moment, waits

BY_ARRIVAL = Policy(SchedulerName.FCFS)


@pytest.mark.parametrize(
    ("policy", "output", "comes_first"),
    [(Policy(), [], False), (Policy(), [7], True), (BY_ARRIVAL, [], True), (BY_ARRIVAL, [7], True)],
)
def test_a_document_that_lost_its_seat_comes_first_where_it_gets_the_next_one(
    policy: Policy, output: list[int], comes_first: bool
) -> None:
    """Where promises decide, a prompt without output waits for all shorter ones. A document that could have gone on
    waited for such a prompt, and stood still for 38 s."""
    asked = replace(request("document", prompt=40), service=ServiceClass.BE)
    waiting = WaitingPrompts(policy)
    waiting.add_first(WorkerRequest(asked, promise(asked, policy, len(output)), output))
    assert waiting.come_first is comes_first


@pytest.mark.parametrize("of", [lambda name: chat(name, 0.8), document])
def test_a_request_that_lost_its_seat_waits_before_all_others_of_its_class(of: Callable[[str], WorkerRequest]) -> None:
    """The first of a class is the one for which memory is counted, and whose wait the router hears of."""
    waiting, (first, again) = WaitingPrompts(Policy()), map(of, ("first", "again"))
    waiting.add(first)
    waiting.add_first(again)
    assert [*waiting] == [again, first]
    assert [*waiting.real_time, *waiting.best_effort] == [again, first]


@pytest.mark.parametrize("left_s", [-0.5, 0.01, 0.8])
@pytest.mark.parametrize("of", [chat, lambda name, left_s: document(name, jct_s=1000 * left_s)])
def test_a_prompt_that_waits_is_ranked_as_one_that_is_seated(
    of: Callable[[str, float], WorkerRequest], left_s: float
) -> None:
    prompt, at = of("prompt", left_s), moment(Policy(late=Late.DROP_LAST))
    waiting = waits([prompt], at)
    waiting.refresh(NOW, TIMES, at.chunk)
    [[waits_at, _]], [[seated_at, _]] = waiting.in_order(NOW, TIMES.most_s), RankedRequests([prompt], at)
    assert waits_at == pytest.approx(seated_at)


def test_what_a_prompt_fetches_counts_no_more_once_the_prompt_has_a_seat() -> None:
    """The router hears how long copies take that wait: these would count twice, and for ever."""
    prompt, waiting = document("fetched", 64), WaitingPrompts(Policy())
    prompt.fetched_to = 48
    waiting.add(prompt)
    assert [*waiting.fetched] == [prompt]
    waiting.remove(prompt)
    assert not waiting.fetched


def test_a_prompt_fetches_no_more_what_another_has_computed_here_meanwhile() -> None:
    """The router would count the time of a copy that nobody makes."""
    prompt, store = document("fetched", 9), NamedBlocks(4)
    prompt.kv, prompt.known, names = NO_KV, (5, 6), chained_hashes(prompt.request.prompt[:8], 4)
    waiting = WaitingPrompts(Policy(), DevicePages(store, 4, 4, lambda _prompt, tokens: names[: tokens // 4]))
    waiting.add(prompt)
    assert [*waiting.fetched] == [prompt]
    blocks = store.take(2)
    assert blocks is not None
    store.publish(names, blocks)
    waiting.look(prompt)
    assert not waiting.fetched


def test_a_caller_waits_for_nothing_once_its_chats_have_seats() -> None:
    """Where one caller waits alone, nothing is divided (caller_shares.py)."""
    waiting, first, second, other = WaitingPrompts(Policy()), chat("a", 1.0), chat("b", 1.0), chat("c", 1.0, salt="bob")
    for prompt in (first, second, other):
        waiting.add(prompt)
    waiting.remove(first)
    waiting.remove(other)
    assert [*waiting.callers] == [first.request.caller]
    waiting.remove(second)
    assert not waiting.callers


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_prompt_keeps_its_place_while_its_promise_changes(number: int) -> None:
    """A request that had been put back was served after all others of its key once it had yielded to another key."""
    waiting, prompts = WaitingPrompts(BY_ARRIVAL), [chat(name, 0.8) for name in ("put back", "again", "first", "next")]
    for prompt in prompts[2:]:
        waiting.add(prompt)
    for prompt in reversed(prompts[:2]):
        waiting.add_first(prompt)
    kept, was_first = prompts[number].promise, waiting.come_first
    assert isinstance(kept, TokenPromise)
    for new in (Yielding(kept), kept):
        waiting.set_promise(prompts[number], new)
        assert prompts[number].promise is new
        assert [*waiting] == prompts
        assert [running for _, running in waiting.in_order(NOW, TIMES.most_s)] == prompts
        assert waiting.come_first is was_first
        assert [*waiting.real_time] == [prompt for prompt in prompts if prompt.promise.is_rt]
        assert [*waiting.best_effort] == [prompt for prompt in prompts if not prompt.promise.is_rt]


@pytest.mark.parametrize("in_between", [False, True])
def test_prompts_that_yield_stand_among_documents_by_arrival(in_between: bool) -> None:
    waiting = WaitingPrompts(BY_ARRIVAL)
    prompts = [each for at in range(3) for each in (chat(f"chat {at}", 0.8), document(f"document {at}"))]
    for prompt in prompts:
        waiting.add(prompt)
    for prompt in (prompts[4], prompts[0]):
        assert isinstance(prompt.promise, TokenPromise)
        waiting.set_promise(prompt, Yielding(prompt.promise))
        if in_between:
            assert prompt in waiting.best_effort
    assert [*waiting.real_time] == [prompts[2]]
    waiting.remove(prompts[1])
    assert [*waiting.best_effort] == [prompts[0], *prompts[3:]]


def test_no_prompt_is_filed_again_while_no_step_has_been_measured() -> None:
    """Function calls are counted. A worker without a profile takes steps to need no time until the first has ended."""
    waiting = WaitingPrompts(Policy())
    for number in range(200):
        waiting.add(chat(f"c{number}", 0.8))
    waiting.refresh(NOW, StepTimes(), 16)
    assert calls_of(lambda: waiting.refresh(NOW, StepTimes(), 16)) < 100


def test_callers_that_have_gone_leave_nothing() -> None:
    """Each key is a caller, and a worker may run for months. The order looks at what each caller has."""
    at = moment(Policy())
    waiting = waits([document("stays")], at)

    def come_and_go(callers: range) -> int:
        for caller in callers:
            leaves = document("leaves")
            leaves.request = replace(leaves.request, salt=f"{caller:0{KEY_SALT_SIZE}}")
            waiting.add(leaves)
            waiting.refresh(NOW, TIMES, at.chunk)
            waiting.remove(leaves)
            assert len([*waiting.in_order(NOW, TIMES.most_s)]) == 1
        return sum(type(held) is list for held in gc.get_objects())

    assert come_and_go(range(200)) + 500 > come_and_go(range(200, 1200))
