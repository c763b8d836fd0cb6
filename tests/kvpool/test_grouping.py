"""Grouping of requests for decode workers: aligned batches, urgent requests, and each request exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from alignedserve.core import Entry, ServiceClass, Slo
from alignedserve.kvpool.grouping import (
    DEVICE_SHARE,
    LEAST,
    ByLength,
    InTime,
    SlowestAsk,
    WaitingEntry,
    in_turns,
    waiters,
)
from alignedserve.kvpool.quadtree import STARVING_S
from alignedserve.protocol.messages import AskBatch
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import Handoff, Policy, Room
from alignedserve.scheduling.slo import StepTimes
from tests.conftest import examples
from tests.samples import entry, request

BLOCK = 4
POLICY = Policy(room=Room.WHOLE)
PATIENT = Slo(100.0, 100.0)


def entry_of(name: str, prefix: int, service: ServiceClass = ServiceClass.BE) -> Entry:
    return entry(replace(request(name, prompt=prefix), service=service), (0,))


def waiting(name: str, prefix: int, service: ServiceClass = ServiceClass.BE, since: float = 0.0) -> WaitingEntry:
    entry = entry_of(name, prefix, service)
    return WaitingEntry(entry, promise(entry.request, POLICY, len(entry.output), entry.due), since)


def ask(
    blocks: int = 10_000,
    requests: int = 64,
    band: tuple[int, int] | None = None,
    step_s: float = 0.01,
    all_blocks: int = 10_000,
) -> AskBatch:
    return AskBatch(blocks, requests, StepTimes(step_s, step_s), 0.0, all_blocks, 64, band)


def names(taken: Sequence[WaitingEntry]) -> list[str]:
    return [waiting.id for waiting in taken]


def handed(pool: ByLength, worker: str, room: AskBatch, now: float = 0.0) -> list[WaitingEntry]:
    return pool.next_for(worker, room, now).all


@pytest.fixture
def pool() -> ByLength:
    return ByLength(POLICY, BLOCK)


def fill(pool: ByLength, name: str, prefix: int, count: int) -> None:
    for number in range(count):
        pool.add(waiting(f"{name}{number}", prefix))


def test_memory_of_best_effort_requests_is_for_real_time_requests_alone() -> None:
    rt, be = ServiceClass.RT, ServiceClass.BE
    for service, blocks, rt_blocks, fits in [
        (rt, 0, 5, True),
        (rt, 2, 3, True),
        (rt, 2, 2, False),
        (be, 2, 3, False),
        (be, 5, 0, True),
    ]:
        pool = ByLength(POLICY, BLOCK)
        pool.add(waiting("r", 5 * BLOCK - 5, service))
        room = replace(ask(blocks=blocks, band=(1, 400)), rt_blocks=rt_blocks, wants_batch=False)
        assert bool(handed(pool, "decode-0", room)) is fits, (service, blocks, rt_blocks)


def test_a_batch_is_of_one_length_however_they_came(pool: ByLength) -> None:
    for number in range(LEAST):
        pool.add(waiting(f"short{number}", 20))
        pool.add(waiting(f"long{number}", 300))  # both lengths together are more than a batch may be
    room = ask(requests=LEAST, all_blocks=7_000)
    lengths = [{waiting.entry.prefix for waiting in handed(pool, "decode-0", room)} for _ in range(2)]
    assert sorted(lengths, key=min) == [{20}, {300}]
    assert not len(pool)


def test_a_batch_is_handed_out_whole_before_there_is_room_for_it(pool: ByLength) -> None:
    fill(pool, "r", 100, 50)
    full = ask(blocks=0, requests=0, band=(300, 400))
    assert pool.next_for("decode-0", replace(full, wants_batch=False), 0.0).all == []
    assert len(pool.next_for("decode-0", full, 0.0).batch) == 50


def test_ahead_of_need_a_batch_waits_until_there_are_enough_for_one(pool: ByLength) -> None:
    fill(pool, "r", 100, LEAST - 1)
    full = ask(blocks=0, requests=0, band=(300, 400))
    assert handed(pool, "decode-0", full) == []
    assert len(handed(pool, "decode-0", full, STARVING_S + 1)) == LEAST - 1, "not for ever"
    fill(pool, "s", 100, LEAST - 1)
    assert len(handed(pool, "decode-0", ask(requests=1, band=(300, 400)))) == LEAST - 1, "nor where there is room"


def test_requests_too_few_for_a_batch_belong_to_the_running_batch(pool: ByLength) -> None:
    fill(pool, "few", 100, 3)
    assert len(pool.next_for("decode-0", ask(band=(300, 400)), 0.0).dynamic) == 3
    fill(pool, "few", 100, 3)
    assert len(pool.next_for("decode-0", ask(), 0.0).batch) == 3, "nothing runs there"


def test_no_request_is_in_two_batches_and_no_worker_takes_more_than_its_share(pool: ByLength) -> None:
    handed(pool, "decode-0", ask())
    handed(pool, "decode-1", ask())
    fill(pool, "r", 100, 40)
    taken = handed(pool, "decode-1", ask())
    assert len(taken) == 20
    rest = handed(pool, "decode-0", ask())
    assert len(rest) == 10
    assert not set(names(taken)) & set(names(rest))


def test_some_are_handed_out_ahead_of_others_that_end(pool: ByLength) -> None:
    fill(pool, "alike", 105, 9)
    room = replace(ask(requests=2, band=(100, 110)), ahead=3, wants_batch=False)
    assert len(pool.next_for("decode-0", room, 0.0).dynamic) == 5


def test_requests_as_long_as_the_running_requests_come_first(pool: ByLength) -> None:
    fill(pool, "many", 3000, 50)
    pool.add(waiting("alike", 105))
    found = pool.next_for("decode-0", ask(requests=1, band=(100, 110)), 1.0)
    assert names(found.dynamic) == ["alike"]
    assert names(found.batch) == [f"many{number}" for number in range(5)], "as many as fit"


def test_requests_that_do_not_wait_for_their_batch_go_in_order_whatever_their_lengths() -> None:
    pool = waiters(POLICY, BLOCK)
    for number in range(2 * LEAST):
        pool.add(waiting(f"r{number:02}", (20, 300)[number % 2], since=float(number)))
    room = ask(requests=4, band=(10, 30))
    found = pool.next_for("decode-0", replace(room, ahead=2), 40.0)
    assert names(found.dynamic) == [f"r{number:02}" for number in range(6)], "two of them ahead"
    grouped = waiters(Policy(room=Room.WHOLE, handoff=Handoff.POOL), BLOCK)
    for left in list(pool):
        grouped.add(left)
    assert {waiting.entry.prefix for waiting in grouped.next_for("decode-0", room, 40.0).dynamic} == {20}


def of_caller(
    caller: str, number: int, weight: int = 1, service: ServiceClass = ServiceClass.BE, slo: Slo = PATIENT
) -> WaitingEntry:
    asked = replace(request(f"{caller}{number}"), salt=caller, weight=weight, service=service, slo=slo)
    made = entry(asked, (0,))
    return WaitingEntry(made, promise(made.request, POLICY, len(made.output), made.due), 0.0)


@pytest.mark.parametrize(
    ("weight", "num_out", "handed_out"),
    [(1, 0, ["a0", "b0", "a1", "b1"]), (1, 2, ["b0", "b1", "a0", "b2"]), (3, 0, ["b0", "b1", "a0", "b2"])],
    ids=["in turn", "with two at workers", "by weight"],
)
def test_documents_of_several_callers_take_turns(weight: int, num_out: int, handed_out: list[str]) -> None:
    """A flood of one caller's documents, which came first, is not in the way of another's."""
    out = [of_caller("a", 100 + number).entry.request for number in range(num_out)]
    pool = waiters(POLICY, BLOCK, lambda: out)
    assert type(pool) is InTime
    for caller, of in (("a", 1), ("b", weight)):
        for number in range(10):
            pool.add(of_caller(caller, number, of))
    assert names(pool.next_for("w", ask(requests=4), 0.0).all) == handed_out


def test_a_caller_alone_and_chats_go_as_they_come() -> None:
    chats = [of_caller("a", number, service=ServiceClass.RT) for number in range(3)]
    documents = [of_caller("b", number) for number in range(3)]
    found = [chats[0], *documents, *chats[1:]]
    assert in_turns(found, [document.entry.request for document in documents]) == found


def test_an_urgent_document_waits_for_no_turn() -> None:
    """One that is behind its plan comes before chats that can wait; in its place another key's would pass them."""
    out = [of_caller("a", 9).entry.request]
    pool = waiters(POLICY, BLOCK, lambda: out)
    urgent, chat = of_caller("a", 0, slo=Slo(jct_s=0.001)), of_caller("c", 0, service=ServiceClass.RT)
    for each in (chat, of_caller("a", 1), of_caller("b", 0), urgent):
        pool.add(each)
    assert names(pool.next_for("w", ask(requests=4), 0.5).all) == ["a0", "c0", "b0", "a1"]


def test_a_request_that_has_waited_longest_is_in_the_next_batch_whatever_runs(pool: ByLength) -> None:
    now = STARVING_S + 1
    pool.add(waiting("other", 3000))
    for number in range(50):
        pool.add(waiting(f"many{number}", 20, since=now))
    assert "other" in names(handed(pool, "decode-0", ask(requests=1, band=(10, 30)), now))


def test_a_chat_that_cannot_wait_goes_first(pool: ByLength) -> None:
    handed(pool, "decode-0", ask(step_s=0.2))  # a step takes as long as a token may
    fill(pool, "many", 20, 50)
    pool.add(waiting("chat", 3000, ServiceClass.RT))
    assert names(handed(pool, "decode-0", ask(requests=2, step_s=0.2)))[0] == "chat"


def test_a_request_that_cannot_wait_and_does_not_fit_keeps_the_room_that_is_coming(pool: ByLength) -> None:
    handed(pool, "decode-0", ask(step_s=0.2))
    pool.add(waiting("chat", 3000, ServiceClass.RT))
    pool.add(waiting("small", 3))
    assert handed(pool, "decode-0", ask(blocks=10, step_s=0.2)) == []


def test_a_chat_that_could_wait_when_it_came_is_first_once_its_slack_has_run_out(pool: ByLength) -> None:
    """The chat has 0.1875 s for its token; the step of the running requests takes 0.05 s."""
    room = ask(requests=1, step_s=0.05, band=(10, 30))
    handed(pool, "decode-0", room)
    fill(pool, "many", 20, 50)
    pool.add(waiting("chat", 3000, ServiceClass.RT))
    looks_at = pool.looks_at(0.0)
    assert looks_at is not None
    assert 0.05 < looks_at < 0.1875 - 0.05
    assert not pool.pinned
    pool.next_for("decode-0", replace(room, requests=0, wants_batch=False), looks_at - 0.001)
    assert not pool.pinned
    assert names(handed(pool, "decode-0", room, looks_at))[0] == "chat"
    assert pool.looks_at(looks_at) is None, "nobody else has a token due"


def first_of(pool: ByLength) -> str:
    """Return which of a chat and requests as long as the running gets the only place, and empty the pool."""
    fill(pool, "many", 20, 50)
    pool.add(waiting("chat", 3000, ServiceClass.RT))
    first = names(handed(pool, "decode-1", ask(requests=1, band=(10, 30))))[0]
    for left_over in list(pool):
        pool.remove(left_over.id)
    return first


def test_a_chat_can_wait_again_when_the_slow_worker_is_faster_or_gone(pool: ByLength) -> None:
    assert first_of(pool) != "chat"
    handed(pool, "decode-0", ask(step_s=0.2))
    assert first_of(pool) == "chat"
    handed(pool, "decode-0", ask())
    assert first_of(pool) != "chat"
    handed(pool, "decode-0", ask(step_s=0.2))
    assert first_of(pool) == "chat"
    pool.forget_worker("decode-0")
    assert first_of(pool) != "chat"


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.none() | st.floats(0, 9)),
        max_size=30,
    )
)
def test_the_slowest_ask_is_that_of_the_slowest_worker_there_is(told: list[tuple[str, float | None]]) -> None:
    slowest, asks = SlowestAsk(), dict[str, float]()
    for worker, step_s in told:
        if step_s is None:
            slowest.forget(worker)
            asks.pop(worker, None)
        else:
            slowest.heard(worker, ask(step_s=step_s))
            asks[worker] = step_s
        assert slowest.ask.times.most_s == max(asks.values(), default=0.0)


def test_a_request_that_was_handed_out_to_a_lost_worker_waits_again(pool: ByLength) -> None:
    fill(pool, "r", 100, 3)
    taken = handed(pool, "decode-0", ask())
    pool.back(taken)
    assert sorted(names(list(pool))) == ["r0", "r1", "r2"]
    pool.forget_worker("decode-0")
    assert len(handed(pool, "decode-1", ask())) == 3


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = ByLength(POLICY, BLOCK)
        self.here: set[str] = set()
        self.out: dict[str, list[WaitingEntry]] = {"decode-0": [], "decode-1": []}
        self.now, self.number = 0.0, 0

    @rule(prefix=st.integers(1, 400), service=st.sampled_from(ServiceClass))
    def commit(self, prefix: int, service: ServiceClass) -> None:
        self.number += 1
        name = f"r{self.number}"
        self.pool.add(waiting(name, prefix, service, self.now))
        self.here.add(name)

    @rule(
        worker=st.sampled_from(["decode-0", "decode-1"]),
        blocks=st.integers(1, 300),
        requests=st.integers(1, 8),
        band=st.none() | st.tuples(st.integers(1, 200), st.integers(0, 50)).map(lambda of: (of[0], of[0] + of[1])),
        ahead=st.integers(0, 3),
        wants_batch=st.booleans(),
    )
    def asks(
        self, worker: str, blocks: int, requests: int, band: tuple[int, int] | None, ahead: int, wants_batch: bool
    ) -> None:
        room = replace(ask(blocks, requests, band, all_blocks=300), ahead=ahead, wants_batch=wants_batch)
        found = self.pool.next_for(worker, room, self.now)
        taken = found.all
        assert len(found.pinned) <= requests
        assert self._blocks(found.pinned) <= blocks
        if not wants_batch:
            assert len(taken) <= requests + ahead
            assert not found.batch
        assert len(found.batch) == 1 or self._blocks(found.batch) <= DEVICE_SHARE * 300
        assert set(names(taken)) <= self.here, "handed out once"
        self.here -= set(names(taken))
        self.out[worker] += taken

    def _blocks(self, some: Sequence[WaitingEntry]) -> int:
        return sum(-(-waiting.entry.request.most_tokens // BLOCK) for waiting in some)

    @rule(worker=st.sampled_from(["decode-0", "decode-1"]))
    def is_lost(self, worker: str) -> None:
        self.pool.forget_worker(worker)
        self.pool.back(self.out[worker])
        self.here |= set(names(self.out[worker]))
        self.out[worker] = []

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.here:
            name = data.draw(st.sampled_from(sorted(self.here)))
            assert self.pool.remove(name) is not None
            self.here.discard(name)

    @rule(seconds=st.floats(0.0, 60.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def all_that_wait_are_here(self) -> None:
        assert {waiting.id for waiting in self.pool} == self.here

    def teardown(self) -> None:
        """Check that a worker with all its room gets all requests in the end."""
        for _ in range(len(self.here)):
            self.here -= set(names(handed(self.pool, "decode-0", ask(300, 64, all_blocks=300), self.now)))
        assert not self.here


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
