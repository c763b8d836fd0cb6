"""A prefill worker that decodes hands a request on directly: its KV goes from its device to the other worker's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import Role, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.fuzzing.worker_views import holds_of
from alignedserve.protocol.commands import Command, RunStep, Send, SendKv
from alignedserve.protocol.events import (
    Event,
    KvReceived,
    KvSent,
    LinkGap,
    MemberJoined,
    MemberLost,
    StepDone,
    TimerFired,
)
from alignedserve.protocol.messages import (
    ROUTER,
    Attempt,
    Cancel,
    Decline,
    Kept,
    Message,
    Offer,
    Prefill,
    Progress,
    Pull,
    Release,
)
from alignedserve.scheduling.policy import Handoff, Policy
from alignedserve.worker.setup import WorkerSetup
from tests.decode_worker.test_own_pool import FIRST, pair
from tests.samples import LIMITS, POOL_MEMBER, ROUTER_MEMBER, entry, member, request, said
from tests.worker.cores import prefetching_of

A = request("a", max_tokens=20)
A0 = ("a", 0)
DECODE = replace(member("decode-0"), transport="there")
LENDER = replace(member("prefill-0"), role=Role.DECODE, lends=True, transport="here")


class Worker:
    """A prefill worker that decodes, without a pool unless one is told of; `a` decodes there for `decode-0`."""

    def __init__(self, policy: Policy = Policy(), limits: WorkerLimits = LIMITS) -> None:  # noqa: B008  (frozen)
        self.core = decode_core(WorkerSetup(limits, policy, direct=True))
        self.runs = list[str]()
        for neighbour in (ROUTER_MEMBER, DECODE):
            self.hears(MemberJoined(neighbour))

    def hears(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, 0.0)
        for command in commands:
            if isinstance(command, RunStep):
                self.step = command.plan
                self.runs = [part.request for part in command.plan.parts]
        return commands

    def steps(self) -> list[Command]:
        self.runs = []
        sampled = tuple((part.request, 7) for part in self.step.parts if part.sampling is not None)
        return self.hears(StepDone(StepResult(self.step.number, sampled), 0.01))

    def offers(self) -> list[Command]:
        """Run the prompt; return what is said when it is through."""
        self.hears(said(ROUTER, Prefill(A, "decode-0")))
        return self.steps()

    def is_pulled(self, number: int = 1) -> list[Command]:
        return self.hears(said("decode-0", Pull(number, *A0)))

    def has_sent(self, ok: bool = True, number: int = 1) -> list[Command]:
        return self.hears(KvSent(number, "decode-0.1", ok))

    def is_declined(self, is_failed: bool = False) -> list[Command]:
        return self.hears(said("decode-0", Decline(*A0, is_failed)))

    @property
    def is_empty(self) -> bool:
        return not any(self.core.held.values())


@pytest.fixture
def worker() -> Worker:
    return Worker()


def sent(commands: Sequence[Command], to: str) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Send) and command.to == to]


def noted(commands: Sequence[Command], stage: str) -> list[Attempt]:
    told = [message for message in sent(commands, ROUTER) if isinstance(message, Progress)]
    return [attempt for progress in told for attempt in getattr(progress, stage)]


IN_A = Offer(entry(A, ()))


def test_it_is_offered_pulled_and_gone(worker: Worker) -> None:
    assert sent(worker.offers(), "decode-0") == [IN_A]
    assert worker.runs == [], "what is sent does not change"
    assert worker.is_pulled() == [SendKv(1, "decode-0.1", (0,), (1, 2, 3))]
    assert worker.core.held["blocks"] == 1, "until it is sent"
    worker.has_sent()
    assert worker.is_empty, "the other worker has the output, too"


def test_a_declined_request_decodes_here_and_is_not_offered_again(worker: Worker) -> None:
    worker.offers()
    worker.is_declined()
    assert worker.runs == ["a"]
    assert not sent(worker.steps(), "decode-0")
    assert worker.runs == ["a"]


@pytest.mark.parametrize("policy", [Policy(handoff=Handoff.POOL), Policy(handoff=Handoff.ROOM)])
def test_a_worker_that_is_not_reached_gets_no_offer(policy: Policy) -> None:
    worker = Worker(policy)
    if policy.handoff is Handoff.ROOM:
        worker.hears(MemberLost(DECODE))
    assert not sent(worker.offers(), "decode-0")
    assert worker.runs == ["a"]


class TestFailures:
    @pytest.mark.parametrize(
        ("num_failed", "has_pool", "is_offered"), [(2, True, True), (3, True, False), (3, False, True)]
    )
    def test_a_road_that_fails_again_and_again_is_left_for_the_pool(
        self, worker: Worker, num_failed: int, has_pool: bool, is_offered: bool
    ) -> None:
        """Each time costs a request its time-out. Found by `alignedserve fuzz --seed 970016518`."""
        if has_pool:
            worker.hears(MemberJoined(POOL_MEMBER))
        for _ in range(num_failed):
            worker.hears(said("decode-0", Decline("gone", 0, is_failed=True)))
        assert bool(sent(worker.offers(), "decode-0")) is is_offered

    def test_the_next_life_of_its_other_end_has_a_road_of_its_own(self, worker: Worker) -> None:
        worker.hears(MemberJoined(POOL_MEMBER))
        for _ in range(3):
            worker.hears(said("decode-0", Decline("gone", 0, is_failed=True)))
        for event in (MemberLost(DECODE), MemberJoined(replace(DECODE, incarnation=2))):
            worker.hears(event)
        assert sent(worker.offers(), "decode-0")

    def test_after_a_failed_transfer_it_is_offered_again(self, worker: Worker) -> None:
        """Whether it came, only the other worker knows: if it did, both would decode it."""
        worker.offers()
        worker.is_pulled()
        assert sent(worker.has_sent(ok=False), "decode-0") == [IN_A]
        assert worker.runs == []
        assert not sent(worker.hears(said("decode-0", Cancel(*A0))), "decode-0"), "it goes on there"
        assert worker.is_empty

    @pytest.mark.parametrize("declines_first", [True, False])
    def test_if_nothing_came_it_goes_on_here_and_the_router_hears_where_it_is(
        self, worker: Worker, declines_first: bool
    ) -> None:
        worker.offers()
        worker.is_pulled()
        commands = worker.is_declined(is_failed=True) if declines_first else worker.has_sent(ok=False)
        assert worker.runs == []
        commands += worker.has_sent(ok=False) if declines_first else worker.is_declined(is_failed=True)
        assert worker.runs == ["a"]
        assert noted(commands, "joined") == [A0]

    def test_so_it_does_where_only_its_own_end_went_well(self, worker: Worker) -> None:
        worker.offers()
        worker.is_pulled()
        worker.is_declined(is_failed=True)
        worker.has_sent(ok=True)
        assert worker.runs == ["a"]

    def test_what_is_gone_and_did_not_come_is_lost(self, worker: Worker) -> None:
        worker.offers()
        worker.is_pulled()
        worker.has_sent()
        assert noted(worker.is_declined(is_failed=True), "lost") == [A0]

    def test_the_first_that_the_lost_worker_did_not_answer_is_given_up(self, worker: Worker) -> None:
        """It may have ended at that offer, as the next worker would. It had not come to the second one."""
        worker.offers()
        worker.hears(said(ROUTER, Prefill(request("b", max_tokens=20), "decode-0")))
        assert len(sent(worker.steps(), "decode-0")) == 1
        assert noted(worker.hears(MemberLost(DECODE)), "cut") == [A0]
        assert worker.runs == ["b"]
        worker.hears(said(ROUTER, Cancel("b", 0)))
        worker.steps()
        assert worker.is_empty

    def test_in_mid_transfer_it_waits_for_its_end(self, worker: Worker) -> None:
        worker.offers()
        worker.is_pulled()
        worker.hears(MemberLost(DECODE))
        assert worker.runs == []
        worker.has_sent(ok=False)
        assert worker.runs == ["a"]

    @pytest.mark.parametrize("is_sent", [False, True])
    def test_cancelled_its_blocks_wait_for_the_end_of_a_transfer(self, worker: Worker, is_sent: bool) -> None:
        worker.offers()
        if is_sent:
            worker.is_pulled()
        worker.hears(said(ROUTER, Cancel(*A0)))
        assert (worker.core.held["requests"], worker.core.held["blocks"]) == (0, is_sent)
        if is_sent:
            worker.has_sent()
        assert worker.is_empty

    def test_a_repeated_pull_is_not_served(self, worker: Worker) -> None:
        worker.offers()
        assert worker.is_pulled()
        assert worker.is_pulled() == []

    def test_an_offer_that_is_not_answered_is_said_again(self, worker: Worker) -> None:
        worker.offers()
        assert sent(worker.hears(TimerFired("refresh")), "decode-0") == [IN_A]
        assert IN_A in sent(worker.hears(LinkGap("decode-0")), "decode-0")
        worker.is_pulled()
        assert IN_A not in sent(worker.hears(LinkGap("decode-0")), "decode-0")


def test_the_pool_holds_for_the_other_worker_what_it_held_here() -> None:
    """So the answer is kept behind the prompt, and the next turn finds both."""
    worker, there = pair(direct=True), replace(member("decode-1"), transport="there")
    worker.hears(MemberJoined(there), "pool-0")
    worker.hears(MemberJoined(there))
    worker.hears(said(ROUTER, Prefill(replace(FIRST, max_tokens=60), "decode-1")))
    worker.until_idle()
    (offer,) = [message for message in worker.said if isinstance(message, Offer)]
    assert len(offer.entry.output) > 1, "it decoded until the pool had its prompt"
    worker.hears(said("decode-1", Pull(1, "first", 0)))
    worker.hears(KvSent(1, "decode-1.1", ok=True))
    assert worker.pool.held_for == {"decode-1": {("first", 0)}}
    kept = [message for message in worker.said if isinstance(message, Kept)]
    assert kept[-1].pages == kept[0].pages != ()
    assert not holds_of(worker.core)
    worker.hears(MemberLost(there), "pool-0")
    assert not worker.pool.held_for


class TestTheOtherWorker:
    """A decode worker that a prefill worker which decodes, too, offers a request to."""

    @pytest.fixture
    def worker(self) -> Worker:
        worker = Worker()
        for neighbour in (LENDER, POOL_MEMBER):
            worker.hears(MemberJoined(neighbour))
        return worker

    def test_it_pulls_and_goes_on(self, worker: Worker) -> None:
        assert sent(worker.hears(said("prefill-0", IN_A)), "prefill-0") == [Pull(1, *A0)]
        worker.hears(KvReceived(1, "prefill-0.1", intact=True))
        assert worker.runs == ["a"]

    def test_it_declines_while_it_is_reserved_or_full(self, worker: Worker) -> None:
        worker.core.here.is_reserved = True
        assert sent(worker.hears(said("prefill-0", IN_A)), "prefill-0") == [Decline(*A0)]

    def test_the_first_pages_alone_are_not_taken_for_all_of_it(self, worker: Worker) -> None:
        long = entry(replace(A, prompt=tuple(range(1, 10))), ())
        worker.hears(said("prefill-0", Offer(long)))
        worker.hears(said("pool-0", Kept(*A0, (3,))))
        commands = worker.hears(KvReceived(1, "prefill-0.1", intact=False))
        assert sent(commands, "prefill-0") == [Decline(*A0, is_failed=True)]
        assert sent(commands, "pool-0")[0] == Release(*A0)

    def test_it_asks_one_that_decodes_for_no_room(self, worker: Worker) -> None:
        """Its memory is for requests of its own: nothing is prefetched there, and nothing leaves for there."""
        assert prefetching_of(worker.core).holders == []
