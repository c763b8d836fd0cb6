"""Copies that a prefill worker holds for decode workers: in memory that no prompt needs, and all of it given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from alignedserve.core import Entry, StepResult, WorkerLimits
from alignedserve.lab.fuzzing.worker_views import blocks_of
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, ReceiveKv, RunStep, Send, SendKv
from alignedserve.protocol.events import (
    CopiedIn,
    CopiedOut,
    Event,
    KvReceived,
    KvSent,
    MemberJoined,
    MemberLost,
    StepDone,
)
from alignedserve.protocol.form_messages import Evict, Prefetch, PrefetchDeclined, Prefetched
from alignedserve.protocol.messages import (
    ROUTER,
    AskPages,
    Cancel,
    LeasePages,
    Message,
    Missed,
    Prefill,
    Pull,
)
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.setup import WorkerSetup
from tests.conftest import examples
from tests.samples import POOL_MEMBER, ROUTER_MEMBER, entry, member, request, said

LIMITS = WorkerLimits(num_blocks=10, block_size=4, page_size=8, max_step_tokens=64, max_batch=4)
HALF = Policy(candidate_share=0.5, reuse=False)
DECODE = replace(member("decode-0"), transport="there")


def waits(name: str, prompt: int = 8, page: int = 5) -> Entry:
    return entry(request(name, prompt=prompt), (page, page + 1))


IN_A, IN_B, IN_C = waits("a", page=5), waits("b", page=7), waits("c", page=9)  # two blocks each


@pytest.fixture
def worker() -> PrefillCore:
    core = PrefillCore(WorkerSetup(LIMITS, HALF, direct=True))
    for neighbour in (POOL_MEMBER, ROUTER_MEMBER, DECODE):
        core.handle(MemberJoined(neighbour), 0.0)
    return core


def prefetched(worker: PrefillCore, *entries: Entry, now: float = 0.0) -> list[Command]:
    some = Prefetch(entries, tuple(float(place) for place, _ in enumerate(entries)))
    return worker.handle(said("decode-0", some), now)


def sent(commands: Sequence[Command], to: str = "decode-0") -> list[Message]:
    return [command.message for command in commands if isinstance(command, Send) and command.to == to]


def copies(commands: Sequence[Command]) -> list[CopyIn]:
    return [command for command in commands if isinstance(command, CopyIn)]


def come(worker: PrefillCore, *entries: Entry) -> None:
    for copy in copies(prefetched(worker, *entries)):
        worker.handle(CopiedIn(copy.number, intact=True), 0.0)


def test_it_is_copied_beside_the_steps_and_can_be_pulled_once_it_is_here(worker: PrefillCore) -> None:
    [copy] = copies(prefetched(worker, IN_A))
    assert (copy.pages, copy.pool, copy.aside, len(copy.blocks)) == ((5, 6), "pool-0.1", True, 2)
    assert SendKv(1, "decode-0.1", (), ()) in worker.handle(said("decode-0", Pull(1, "a", 0)), 0.0), "not all is here"
    assert sent(worker.handle(CopiedIn(copy.number, intact=True), 0.0)) == [Prefetched((("a", 0),))]
    assert SendKv(2, "decode-0.1", copy.blocks, copy.tokens) in worker.handle(said("decode-0", Pull(2, "a", 0)), 0.0)
    worker.handle(KvSent(2, "decode-0.1", ok=True), 0.0)
    assert not any(worker.held.values())


def test_they_have_no_more_than_their_share_and_what_has_no_room_is_said(worker: PrefillCore) -> None:
    commands = prefetched(worker, IN_A, IN_B, IN_C)
    assert [copy.pages for copy in copies(commands)] == [(5, 6), (7, 8)]
    assert sent(commands) == [PrefetchDeclined((("c", 0),))]
    assert prefetched(worker, IN_A) == [], "said again"


def test_what_is_not_intact_is_let_go(worker: PrefillCore) -> None:
    [copy] = copies(prefetched(worker, IN_A))
    assert sent(worker.handle(CopiedIn(copy.number, intact=False), 0.0)) == [PrefetchDeclined((("a", 0),))]
    assert not any(worker.held.values())


def test_prompts_get_the_memory_of_what_has_longest_to_wait(worker: PrefillCore) -> None:
    come(worker, IN_A, IN_B)
    long = request("p", prompt=4 * 8, max_tokens=2)
    assert sent(worker.handle(said(ROUTER, Prefill(long)), 0.0)) == [PrefetchDeclined((("b", 0),))]
    assert worker.held["buffers"] == 1


def test_blocks_that_are_sent_or_written_to_stay_taken_until_that_has_ended(worker: PrefillCore) -> None:
    come(worker, IN_A)
    [copy] = copies(prefetched(worker, IN_B))
    worker.handle(said("decode-0", Pull(1, "a", 0)), 0.0)
    for name in "ab":
        worker.handle(said("decode-0", Cancel(name, 0)), 0.0)
    assert worker.held["buffers"] == 2
    assert sent(worker.handle(CopiedIn(copy.number, intact=True), 0.0)) == [], "nobody wants it"
    worker.handle(KvSent(1, "decode-0.1", ok=False), 0.0)
    assert not any(worker.held.values())


def test_it_says_again_what_is_here_until_somebody_takes_it(worker: PrefillCore) -> None:
    come(worker, IN_A)
    assert sent(worker.handle(said("decode-0", Missed()), 0.0)) == [Prefetched((("a", 0),))]
    assert sorted(blocks_of(worker)) == list(range(10))


def test_a_decode_worker_that_is_lost_needs_nothing_any_more(worker: PrefillCore) -> None:
    come(worker, IN_A, IN_B)
    worker.handle(MemberLost(DECODE), 0.0)
    assert not any(worker.held.values())
    assert sent(prefetched(worker, IN_C)) == [PrefetchDeclined((("c", 0),))], "it cannot be reached"


def evicted(worker: PrefillCore, entry: Entry) -> list[Command]:
    return worker.handle(said("decode-0", Evict(replace(entry, pages=()), 3.0)), 0.0)


class TestEvicted:
    def test_it_is_pulled_held_and_sent_back(self, worker: PrefillCore) -> None:
        commands = evicted(worker, IN_A)
        [receives] = [command for command in commands if isinstance(command, ReceiveKv)]
        assert (receives.number, receives.source, len(receives.blocks)) == (1, "decode-0.1", 2)
        assert sent(commands) == [Pull(1, "a", 0)]
        assert sent(worker.handle(KvReceived(1, "decode-0.1", intact=True), 0.0)) == [Prefetched((("a", 0),))]
        back = worker.handle(said("decode-0", Pull(1, "a", 0)), 0.0)
        assert SendKv(1, "decode-0.1", receives.blocks, receives.tokens) in back
        worker.handle(KvSent(1, "decode-0.1", ok=True), 0.0)
        assert not any(worker.held.values())

    def test_a_pull_that_comes_before_the_end_is_known_is_heard_then(self, worker: PrefillCore) -> None:
        """The decode worker knows first that the KV has come, and its Pull may overtake the event that says so here."""
        [receives] = [command for command in evicted(worker, IN_A) if isinstance(command, ReceiveKv)]
        assert worker.handle(said("decode-0", Pull(1, "a", 0)), 0.0) == []
        back = worker.handle(KvReceived(1, "decode-0.1", intact=True), 0.0)
        assert SendKv(1, "decode-0.1", receives.blocks, receives.tokens) in back
        worker.handle(KvSent(1, "decode-0.1", ok=True), 0.0)
        assert not any(worker.held.values())

    def test_later_pulls_wait_behind_an_early_one(self, worker: PrefillCore) -> None:
        """A receiver gives up a transfer when a later one is sent before it."""
        come(worker, IN_B)
        evicted(worker, IN_A)
        for number, name in ((1, "a"), (2, "b")):
            assert worker.handle(said("decode-0", Pull(number, name, 0)), 0.0) == []
        back = worker.handle(KvReceived(1, "decode-0.1", intact=True), 0.0)
        assert [command.number for command in back if isinstance(command, SendKv)] == [1, 2]

    @pytest.mark.parametrize("is_cancelled", [False, True])
    def test_an_early_pull_of_what_did_not_come_or_is_not_wanted_brings_nothing(
        self, worker: PrefillCore, is_cancelled: bool
    ) -> None:
        evicted(worker, IN_A)
        worker.handle(said("decode-0", Pull(1, "a", 0)), 0.0)
        if is_cancelled:
            worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        back = worker.handle(KvReceived(1, "decode-0.1", intact=is_cancelled), 0.0)
        assert SendKv(1, "decode-0.1", (), ()) in back
        assert not any(worker.held.values())

    def test_what_was_said_is_said_again(self, worker: PrefillCore) -> None:
        evicted(worker, IN_A)
        assert evicted(worker, IN_A) == [Send("decode-0", Pull(1, "a", 0))]
        worker.handle(KvReceived(1, "decode-0.1", intact=True), 0.0)
        assert evicted(worker, IN_A) == [Send("decode-0", Prefetched((("a", 0),)))]

    def test_without_room_it_is_let_go(self, worker: PrefillCore) -> None:
        come(worker, IN_B, IN_C)
        assert sent(evicted(worker, IN_A)) == [PrefetchDeclined((("a", 0),))]

    def test_what_does_not_come_is_let_go(self, worker: PrefillCore) -> None:
        evicted(worker, IN_A)
        commands = worker.handle(KvReceived(1, "decode-0.1", intact=False), 0.0)
        assert sent(commands) == [PrefetchDeclined((("a", 0),))]
        assert not any(worker.held.values())

    def test_blocks_are_written_to_until_the_transfer_has_ended(self, worker: PrefillCore) -> None:
        evicted(worker, IN_A)
        worker.handle(said("decode-0", Cancel("a", 0)), 0.0)
        assert worker.held["buffers"] == 1
        assert sent(worker.handle(KvReceived(1, "decode-0.1", intact=True), 0.0)) == []
        assert not any(worker.held.values())

    def test_copies_leave_before_what_would_have_to_be_computed(self, worker: PrefillCore) -> None:
        come(worker, IN_B)
        evicted(worker, IN_A)
        worker.handle(KvReceived(1, "decode-0.1", intact=True), 0.0)
        long = request("p", prompt=4 * 8, max_tokens=2)
        assert sent(worker.handle(said(ROUTER, Prefill(long)), 0.0)) == [PrefetchDeclined((("b", 0),))]

    def test_a_copy_of_before_it_ran_gives_way(self, worker: PrefillCore) -> None:
        come(worker, IN_A)
        longer = replace(IN_A, output=(7, 7))
        [receives] = [command for command in evicted(worker, longer) if isinstance(command, ReceiveKv)]
        assert len(receives.tokens) == 9
        assert worker.held["buffers"] == 1


class Machine(RuleBasedStateMachine):
    """Prefetches, pulls, cancels and prompts in any order, with work that ends in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.core = PrefillCore(WorkerSetup(LIMITS, HALF, direct=True))
        self.pending: list[Event] = []  # events that end the work that is under way
        self.numbers = self.pulls = self.pages = 0
        self.names: list[str] = []
        for neighbour in (POOL_MEMBER, ROUTER_MEMBER, DECODE):
            self.hears(MemberJoined(neighbour))

    def hears(self, event: Event) -> None:
        for command in self.core.handle(event, 0.0):
            match command:
                case CopyIn(number):
                    self.pending.append(CopiedIn(number, intact=bool(number % 5)))
                case CopyOut(number):
                    self.pending.append(CopiedOut(number))
                case ReceiveKv(number, source):
                    self.pending.append(KvReceived(number, source, intact=bool(number % 3)))
                case SendKv(number, to):
                    self.pending.append(KvSent(number, to, ok=bool(number % 4)))
                case RunStep(plan):
                    sampled = tuple((part.request, 7) for part in plan.parts if part.sampling is not None)
                    self.pending.append(StepDone(StepResult(plan.number, sampled)))
                case Send("pool-0", AskPages() as ask):
                    pages = tuple(range(100 + self.pages, 100 + self.pages + ask.pages))
                    self.pages += ask.pages
                    self.pending.append(said("pool-0", LeasePages(pages, ask.number)))

    @rule(prompt=st.integers(1, 12), count=st.integers(1, 4))
    def prefetch(self, prompt: int, count: int) -> None:
        some = [waits(f"e{self.numbers + index}", prompt) for index in range(count)]
        self.numbers += count
        self.names += [entry.request.id for entry in some]
        self.hears(said("decode-0", Prefetch(tuple(some), tuple(float(index) for index in range(count)))))

    @rule(prompt=st.integers(1, 12))
    def evict(self, prompt: int) -> None:
        self.numbers += 1
        self.names.append(f"e{self.numbers}")
        self.hears(said("decode-0", Evict(replace(waits(self.names[-1], prompt), pages=()), 1.0)))

    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        if self.names:
            self.pulls += 1
            self.hears(said("decode-0", Pull(self.pulls, data.draw(st.sampled_from(self.names)), 0)))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.names:
            self.hears(said("decode-0", Cancel(data.draw(st.sampled_from(self.names)), 0)))

    @rule(prompt=st.integers(1, 30))
    def prompt(self, prompt: int) -> None:
        self.numbers += 1
        self.names.append(f"p{self.numbers}")
        self.hears(said(ROUTER, Prefill(request(f"p{self.numbers}", prompt=prompt, max_tokens=4))))

    @rule(data=st.data())
    def works(self, data: st.DataObject) -> None:
        if self.pending:
            self.hears(self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1))))

    @rule()
    def decode_worker_is_lost(self) -> None:
        self.hears(MemberLost(DECODE))
        self.hears(MemberJoined(DECODE))

    @invariant()
    def each_block_is_there_once(self) -> None:
        assert sorted(blocks_of(self.core)) == list(range(LIMITS.num_blocks))

    @invariant()
    def buffers_have_no_more_than_their_share(self) -> None:
        assert len(self.core.elsewhere.blocks) <= LIMITS.num_blocks // 2

    def teardown(self) -> None:
        for name in self.names:
            self.hears(said(ROUTER, Cancel(name, 0)))
        while self.pending:
            self.hears(self.pending.pop(0))
        assert self.core.held["blocks"] == self.core.held["buffers"] == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
