"""Who goes to which decode worker: aligned batches, those who cannot wait, and nobody twice or never."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from alignedserve.core import Entry, ServiceClass
from alignedserve.cost import Coefficients
from alignedserve.kvpool.grouping import LEAST, Aligned, SlowestAsk, Waiting
from alignedserve.kvpool.quadtree import STARVING_S
from alignedserve.messages import AskBatch
from alignedserve.policy import Policy
from alignedserve.promise import promise
from alignedserve.slo import StepTimes
from tests.samples import entry, request

BLOCK = 4
COST = Coefficients(fixed=1.0, bubble=1e-4)
POLICY = Policy()


def entry_of(name: str, prefix: int, service: ServiceClass = ServiceClass.BE) -> Entry:
    return entry(replace(request(name, prompt=prefix), service=service), (0,))


def waiting(name: str, prefix: int, service: ServiceClass = ServiceClass.BE, since: float = 0.0) -> Waiting:
    one = entry_of(name, prefix, service)
    return Waiting(one, promise(one.request, POLICY, len(one.output), one.due), since)


def ask(
    pairs: int = 10_000,
    requests: int = 64,
    band: tuple[int, int] | None = None,
    step_s: float = 0.01,
    all_pairs: int = 10_000,
) -> AskBatch:
    return AskBatch(pairs, requests, StepTimes(step_s, step_s), 0.0, all_pairs, 64, band, COST)


def names(taken: Sequence[Waiting]) -> list[str]:
    return [one.id for one in taken]


@pytest.fixture
def pool() -> Aligned:
    return Aligned(POLICY, BLOCK)


def fill(pool: Aligned, name: str, prefix: int, count: int) -> None:
    for number in range(count):
        pool.add(waiting(f"{name}{number}", prefix))


def test_memory_that_best_effort_requests_have_is_for_real_time_ones_alone() -> None:
    rt, be = ServiceClass.RT, ServiceClass.BE
    for service, pairs, rt_pairs, fits in [
        (rt, 0, 5, True),
        (rt, 2, 3, True),
        (rt, 2, 2, False),
        (be, 2, 3, False),
        (be, 5, 0, True),
    ]:
        pool = Aligned(POLICY, BLOCK)
        pool.add(waiting("r", 5 * BLOCK - 5, service))
        room = replace(ask(pairs=pairs), rt_pairs=rt_pairs)
        assert bool(pool.next_for("decode-0", room, 0.0)) is fits, (service, pairs, rt_pairs)


def test_a_batch_is_of_one_length_however_they_came(pool: Aligned) -> None:
    for number in range(LEAST):
        pool.add(waiting(f"short{number}", 20))
        pool.add(waiting(f"long{number}", 300))  # both together are more than a batch may be
    room = ask(requests=LEAST, all_pairs=7_000)
    lengths = [{one.entry.prefix for one in pool.next_for("decode-0", room, 0.0)} for _ in range(2)]
    assert sorted(lengths, key=min) == [{20}, {300}]
    assert not len(pool)


def test_what_is_set_apart_follows_as_room_becomes_free(pool: Aligned) -> None:
    fill(pool, "r", 100, 50)
    first = pool.next_for("decode-0", ask(requests=10), 0.0)
    then = pool.next_for("decode-0", ask(requests=64, band=(100, 100)), 0.0)
    assert len(first) == 10
    assert len(then) == 40
    assert not set(names(first)) & set(names(then))


def test_no_request_is_in_two_batches_and_an_idle_worker_takes_from_another(pool: Aligned) -> None:
    fill(pool, "r", 100, 40)
    pool.next_for("decode-0", ask(requests=1), 0.0)  # the others are set apart for it
    taken = pool.next_for("decode-1", ask(), 0.0)
    assert len(taken) == 20, "half of what another has before it"
    rest = pool.next_for("decode-0", ask(band=(100, 100)), 0.0)
    assert len(rest) == 19
    assert not set(names(taken)) & set(names(rest))


def test_those_as_long_as_the_running_ones_come_first(pool: Aligned) -> None:
    fill(pool, "many", 3000, 50)
    pool.add(waiting("alike", 105))
    assert names(pool.next_for("decode-0", ask(requests=1, band=(100, 110)), 1.0)) == ["alike"]


def test_a_batch_is_not_filled_up_for_ever(pool: Aligned) -> None:
    now, one_more = STARVING_S + 1, ask(requests=1, band=(100, 110))
    pool.add(waiting("other", 3000))
    pool.add(waiting("alike", 105, since=now))
    taken = names(pool.next_for("decode-0", one_more, now))
    pool.add(waiting("alike too", 105, since=now))
    assert "other" in taken + names(pool.next_for("decode-0", one_more, now))


def test_a_chat_that_cannot_wait_goes_first(pool: Aligned) -> None:
    pool.next_for("decode-0", ask(step_s=0.2), 0.0)  # its steps take as long as a token may
    fill(pool, "many", 20, 50)
    pool.add(waiting("chat", 3000, ServiceClass.RT))
    assert names(pool.next_for("decode-0", ask(requests=2, step_s=0.2), 0.0))[0] == "chat"


def test_who_cannot_wait_and_does_not_fit_keeps_the_room_that_is_coming(pool: Aligned) -> None:
    pool.next_for("decode-0", ask(step_s=0.2), 0.0)
    pool.add(waiting("chat", 3000, ServiceClass.RT))
    pool.add(waiting("small", 3))
    assert pool.next_for("decode-0", ask(pairs=10, step_s=0.2), 0.0) == []


def first_of(pool: Aligned) -> str:
    """Of a chat and others as long as those that run, who gets the one place; after that nobody waits."""
    fill(pool, "many", 20, 50)
    pool.add(waiting("chat", 3000, ServiceClass.RT))
    first = names(pool.next_for("decode-1", ask(requests=1, band=(10, 30)), 0.0))[0]
    for one in list(pool):
        pool.remove(one.id)
    return first


def test_a_chat_can_wait_again_when_the_slow_worker_is_faster_or_gone(pool: Aligned) -> None:
    assert first_of(pool) != "chat"
    pool.next_for("decode-0", ask(step_s=0.2), 0.0)
    assert first_of(pool) == "chat"
    pool.next_for("decode-0", ask(), 0.0)
    assert first_of(pool) != "chat"
    pool.next_for("decode-0", ask(step_s=0.2), 0.0)
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


def test_what_was_set_apart_for_a_lost_worker_is_for_everybody(pool: Aligned) -> None:
    fill(pool, "r", 100, 40)
    pool.next_for("decode-0", ask(requests=1), 0.0)
    pool.forget_worker("decode-0")
    assert len(pool.next_for("decode-1", ask(), 0.0)) == 39


def test_who_was_handed_out_to_a_lost_worker_waits_again(pool: Aligned) -> None:
    fill(pool, "r", 100, 3)
    taken = pool.next_for("decode-0", ask(), 0.0)
    pool.back(taken)
    assert sorted(names(list(pool))) == ["r0", "r1", "r2"]
    assert len(pool.next_for("decode-1", ask(), 0.0)) == 3


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Aligned(POLICY, BLOCK)
        self.here: set[str] = set()
        self.out: dict[str, list[Waiting]] = {"decode-0": [], "decode-1": []}
        self.now, self.number = 0.0, 0

    @rule(prefix=st.integers(1, 400), service=st.sampled_from(ServiceClass))
    def commit(self, prefix: int, service: ServiceClass) -> None:
        self.number += 1
        name = f"r{self.number}"
        self.pool.add(waiting(name, prefix, service, self.now))
        self.here.add(name)

    @rule(
        worker=st.sampled_from(["decode-0", "decode-1"]),
        pairs=st.integers(1, 300),
        requests=st.integers(1, 8),
        band=st.none() | st.tuples(st.integers(1, 200), st.integers(0, 50)).map(lambda of: (of[0], of[0] + of[1])),
    )
    def asks(self, worker: str, pairs: int, requests: int, band: tuple[int, int] | None) -> None:
        taken = self.pool.next_for(worker, ask(pairs, requests, band, all_pairs=300), self.now)
        assert len(taken) <= requests
        assert sum(-(-one.entry.request.most_tokens // BLOCK) for one in taken) <= pairs
        assert set(names(taken)) <= self.here, "handed out once"
        self.here -= set(names(taken))
        self.out[worker] += taken

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
        assert {one.id for one in self.pool} == self.here

    def teardown(self) -> None:
        """A worker with all its room gets them all in the end."""
        for _ in range(len(self.here)):
            self.here -= set(names(self.pool.next_for("decode-0", ask(300, 64, all_pairs=300), self.now)))
        assert not self.here


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
