"""Tests of the core of a load test: what it asks and when, and what it records, with servers that are written here."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from typing import TypeAlias

import pytest

from alignedserve.core import ServiceClass
from alignedserve.lab.bench.answer import AskFailure, Counted, StreamedAnswer
from alignedserve.lab.bench.core import (
    FIELDS,
    AskServer,
    Command,
    Dialect,
    HangUp,
    LoadTest,
    Wake,
)
from alignedserve.lab.bench.wording import IdWording, Wording, WordWording
from alignedserve.lab.loads.records.records import RequestOutcome, RunRecord
from alignedserve.lab.loads.workload import Load
from alignedserve.lab.loads.workload.spec import read_workload

Event: TypeAlias = Callable[[float], list[Command]]
TTFT_S, TBT_S = 0.2, 0.05
BUSY = AskFailure(RequestOutcome.REFUSED, "429", "too many", 429)


def answer(at: float, num: int, failure: AskFailure | None = None) -> StreamedAnswer:
    """Return the answer of a server with steady times to a request that was asked then."""
    token_at = array("d", (at + TTFT_S + TBT_S * number for number in range(num)))
    ids = tuple(range(5000, 5000 + num))
    return StreamedAnswer(at + TTFT_S + TBT_S * max(0, num - 1), failure, token_at, Counted.IDS, ids, "w " * num, 9, 2)


class Server:
    """Answers what a test asks, in virtual time."""

    def __init__(self, test: LoadTest, failure: Callable[[AskServer], AskFailure | None] = lambda _: None) -> None:
        self._test, self._failure = test, failure
        self._agenda: list[tuple[float, int, str, Event]] = [(0.0, 0, "", test.begin)]  # of a request that is answered
        self._serial = count(1)
        self.asked: list[tuple[float, AskServer]] = []

    def run(self, until: float = 1e9) -> RunRecord:
        while self._agenda and self._agenda[0][0] <= until:
            now, _, _, event = heapq.heappop(self._agenda)
            for command in event(now):
                self._perform(command, now)
        return self._test.record()

    def _perform(self, command: Command, now: float) -> None:
        match command:
            case Wake(at, then):
                self._add(max(at, now), then)
            case AskServer(request, _, body):
                self.asked.append((now, command))
                failure = self._failure(command)
                given = answer(now, 0 if failure else body["max_tokens"], failure)
                self._add(given.ended_at, partial(self._test.end, request, given), request)
            case HangUp(request):
                self._agenda = [item for item in self._agenda if item[2] != request]
                heapq.heapify(self._agenda)
                broke = AskFailure(RequestOutcome.BROKEN, "the answer broke off", "its client left")
                self._add(now, partial(self._test.end, request, answer(now - TTFT_S, 1, broke)), request)

    def _add(self, at: float, event: Event, request: str = "") -> None:
        heapq.heappush(self._agenda, (at, next(self._serial), request, event))


def load_test(workload: str, wording: Wording | None = None, refused: frozenset[str] = frozenset()) -> LoadTest:
    load = Load(read_workload(workload), ["bench"], 0)
    return LoadTest(load, wording or IdWording(Random(1)), Dialect("m", refused))


def test_requests_are_asked_at_their_times_with_their_lengths_and_promises() -> None:
    test = load_test("sizes:prompt=12,output=3,rate=2,cv=0,num_requests=4,ttft_s=0.5,tbt_s=0.1")
    server = Server(test)
    record = server.run()
    assert [at for at, _ in server.asked] == [0.5, 1.0, 1.5, 2.0]
    body = server.asked[0][1].body
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("m", 3, True, True)
    assert body["slo"] == {"ttft_ms": 500, "tbt_ms": 100}
    assert len(body["prompt"]) == 12
    assert [request.token_at[0] - request.arrival_at for request in record.requests] == pytest.approx([TTFT_S] * 4)
    assert {request.outcome for request in record.requests} == {RequestOutcome.FINISHED}
    assert record.duration_s == pytest.approx(1.5 + TTFT_S + 2 * TBT_S)
    assert test.is_over
    assert test.progress().attained == 1.0


def test_best_effort_requests_are_asked_as_flex_within_their_window() -> None:
    server = Server(load_test("sizes:service=be,prompt=9,output=2,jct_s=60,arrivals=closed,in_flight=2,num_requests=4"))
    record = server.run()
    assert {(ask.body["service_tier"], ask.body["slo"]["jct_ms"]) for _, ask in server.asked} == {("flex", 60_000)}
    assert [at for at, _ in server.asked] == pytest.approx([0, 0, TTFT_S + TBT_S, TTFT_S + TBT_S]), "lots of two"
    assert {request.service for request in record.requests} == {ServiceClass.BE}


def test_a_turn_has_the_servers_own_answer_in_it() -> None:
    server = Server(load_test("sizes:prompt=9,output=3,turns=2,think_s=4,num_requests=1,rate=1,cv=0,system=5"))
    server.run()
    (first_at, first), (second_at, second) = server.asked
    assert second.body["prompt"][:14] == first.body["prompt"]
    assert second.body["prompt"][14:17] == [5000, 5001, 5002]
    assert len(second.body["prompt"]) == 14 + 3 + 9
    assert second_at - first_at == pytest.approx(TTFT_S + 2 * TBT_S + 4)


def test_a_turn_in_words_has_the_servers_text_in_it() -> None:
    workload = "sizes:prompt=9,output=3,turns=2,think_s=4,num_requests=1,rate=1"
    server = Server(load_test(workload, WordWording(Random(1))))
    server.run()
    first, second = (ask.body["messages"] for _, ask in server.asked)
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[0] == first[0]
    assert second[1]["content"] == "w w w "
    assert [len(message["content"].split()) for message in second] == [9, 3, 9]


def test_each_run_has_prompts_of_its_own_that_share_as_much() -> None:
    def prompts(draw: int) -> list[list[int]]:
        server = Server(load_test("sizes:prompt=20,output=1,num_requests=2,rate=1,system=10", IdWording(Random(draw))))
        server.run()
        return [ask.body["prompt"] for _, ask in server.asked]

    one, other = prompts(1), prompts(2)
    assert one != other
    assert one == prompts(1)
    for first, second in (one, other):
        assert first[:10] == second[:10]
        assert first[10:] != second[10:]


def test_failures_are_counted_by_kind_and_are_misses() -> None:
    test = load_test("sizes:prompt=9,output=2,rate=1,cv=0,num_requests=4")
    server = Server(test, lambda ask: BUSY if ask.request.endswith(("-1", "-2")) else None)
    record = server.run()
    outcomes = [request.outcome.value for request in record.requests]
    assert outcomes == ["finished", "refused", "refused", "finished"]
    assert {kind: len(found) for kind, found in test.failures.items()} == {"429": 2}
    assert test.progress().attained == 0.5


def test_a_failed_turn_ends_its_conversation() -> None:
    server = Server(load_test("sizes:prompt=9,output=2,turns=3,num_requests=2,rate=1"), lambda _: BUSY)
    assert len(server.run().requests) == 2


def test_a_client_without_patience_leaves_with_what_it_got() -> None:
    test = load_test("sizes:prompt=9,output=100,num_requests=1,rate=1,leaving_share=1,patience_s=0.5")
    (request,) = Server(test).run().requests
    assert request.outcome is RequestOutcome.LEFT
    assert len(request.token_at) == 1
    assert test.failures == {}
    assert test.is_over


def test_a_client_whose_request_has_ended_does_not_leave() -> None:
    test = load_test("sizes:prompt=9,output=2,num_requests=1,rate=1,leaving_share=1,patience_s=1000")
    server = Server(test)
    (request,) = server.run().requests
    assert request.outcome is RequestOutcome.FINISHED
    assert len(server.asked) == 1


def test_what_is_open_when_a_test_is_interrupted_is_left_out() -> None:
    record = Server(load_test("sizes:prompt=9,output=10,rate=1,cv=0,num_requests=9")).run(until=3.1)
    assert [request.outcome for request in record.requests] == [RequestOutcome.FINISHED] * 2
    assert "interrupted: 1 requests that were open are left out" in record.notes


def test_a_client_that_is_too_slow_is_told() -> None:
    test = load_test("sizes:prompt=9,output=1,rate=1,cv=0,num_requests=1")
    (wake,) = test.begin(0.0)
    assert isinstance(wake, Wake)
    (ask,) = wake.then(wake.at + 0.3)
    assert isinstance(ask, AskServer)
    test.end(ask.request, answer(1.3, 1), 1.5)
    record = test.record()
    assert record.notes == ("the client asked up to 300 ms later than the workload says: its processor was busy",)
    assert record.requests[0].arrival_at == 1.3, "what the server gave counts from when it was asked"


def test_a_server_is_not_asked_with_fields_that_it_refuses() -> None:
    dialect = Dialect("m").without("Unknown parameter: 'return_token_ids'.")
    assert dialect.refused == {"return_token_ids"}
    assert dialect.without("extra inputs are not permitted").refused == FIELDS.keys()
    server = Server(load_test("sizes:service=be,prompt=9,output=1,num_requests=1", refused=frozenset(FIELDS)))
    record = server.run()
    assert server.asked[0][1].body.keys() == {"model", "prompt", "max_tokens", "temperature", "stream"}
    assert len(record.notes) == len(FIELDS)
