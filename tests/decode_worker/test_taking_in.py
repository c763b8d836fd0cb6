"""Documents of a node without a pool, which find no seat: they come in to wait in this node's pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import Entry, ServiceClass, Slo, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, ReceiveKv, RunStep, Send, SendKv
from alignedserve.protocol.events import CopiedOut, Event, KvReceived, MemberJoined, MemberLost, StepDone, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    SPARE,
    AskPages,
    Batch,
    Cancel,
    Commit,
    Decline,
    GiveBack,
    LeasePages,
    Message,
    Offer,
    Progress,
    Pull,
)
from alignedserve.scheduling.policy import DEFAULT_POLICY, Policy, Room
from alignedserve.worker.setup import WorkerSetup
from tests.samples import POOL_MEMBER, ROUTER_MEMBER, entry, member, request, said

PREFILL = replace(member("prefill-0"), transport="there")
LIMITS = WorkerLimits(num_blocks=16, block_size=4, page_size=8, max_step_tokens=8, max_batch=2)
PROMPT = 9
D = ("d", 0)


def document(name: str) -> Entry:
    return entry(replace(request(name, PROMPT, 6), service=ServiceClass.BE, slo=Slo(jct_s=1e5)), ())


class Worker:
    """Run a worker with A and B in its two seats, and C, which joins next."""

    def __init__(self, policy: Policy = DEFAULT_POLICY) -> None:
        self.core = decode_core(WorkerSetup(LIMITS, policy, direct=True))
        self.plan = RunStep(None)  # type: ignore[arg-type]
        self.asked = AskPages(0)  # the newest ask for pages
        for neighbour in (POOL_MEMBER, ROUTER_MEMBER, PREFILL):
            self.hears(MemberJoined(neighbour))
        for number, name in enumerate("ab", 1):
            self.is_offered(document(name))
            self.hears(KvReceived(number, "prefill-0.1", intact=True))
        assert not self.is_pulled(self.is_offered(document("c")))

    def hears(self, event: object) -> list[Command]:
        commands = self.core.handle(event, 0.0)  # type: ignore[arg-type]
        self.plan = next((command for command in commands if isinstance(command, RunStep)), self.plan)
        self.asked = next(
            (message for message in sent(commands, "pool-0") if isinstance(message, AskPages)), self.asked
        )
        return commands

    def is_offered(self, entry: Entry, has_pool: bool = False) -> list[Command]:
        return self.hears(said("prefill-0", Offer(entry, has_pool=has_pool)))

    def steps(self) -> list[Command]:
        plan = self.plan.plan
        return self.hears(StepDone(StepResult(plan.number, tuple((part.request, 7) for part in plan.parts)), 0.01))

    def is_pulled(self, commands: list[Command]) -> list[str]:
        return [message.request for message in sent(commands, "prefill-0") if isinstance(message, Pull)]

    def gets_pages(self, *pages: int) -> list[Command]:
        """Lease these pages to the worker, in answer to its newest ask."""
        assert self.asked.is_spare
        assert self.asked.pages >= len(pages)
        return self.hears(said("pool-0", LeasePages(pages, self.asked.number, SPARE)))


def sent(commands: list[Command], to: str) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Send) and command.to == to]


def progress(commands: list[Command], stage: str) -> list[tuple[str, int]]:
    return [
        key for message in sent(commands, ROUTER) if isinstance(message, Progress) for key in getattr(message, stage)
    ]


@pytest.fixture
def worker() -> Worker:
    return Worker()


def is_coming(worker: Worker) -> list[Command]:
    """Offer D, which has no seat, and lease the worker pages for it."""
    assert not worker.is_pulled(worker.is_offered(document("d"))), "there are no pages at hand"
    return worker.gets_pages(20, 21)


def test_it_is_pulled_without_a_seat_and_committed_to_the_pool(worker: Worker) -> None:
    commands = is_coming(worker)
    assert worker.is_pulled(commands) == ["d"]
    assert progress(commands, "joined") == [D], "from now on it is lost with us"
    [receives] = [command for command in commands if isinstance(command, ReceiveKv)]
    assert len(receives.tokens) == PROMPT
    free = worker.core.memory.free_share
    [copy] = [
        command for command in worker.hears(KvReceived(3, "prefill-0.1", intact=True)) if isinstance(command, CopyOut)
    ]
    assert (copy.pages, copy.blocks, copy.tokens) == ((21, 20), receives.blocks, receives.tokens)
    assert worker.core.memory.free_share > free, "its blocks are free behind the copy"
    assert D in worker.core.attempts
    commands = worker.hears(CopiedOut(copy.number))
    [commit] = [message for message in sent(commands, "pool-0") if isinstance(message, Commit)]
    assert (commit.entry.request.id, commit.entry.output, commit.entry.pages) == ("d", document("d").output, (21, 20))
    assert progress(commands, "returned") == [D]
    assert D not in worker.core.attempts
    assert worker.core.taking_in.num_taken_in == 1


def test_a_chat_joins_and_next_joiners_on_a_node_with_a_pool_stay(worker: Worker) -> None:
    chat = replace(document("d"), request=request("d", PROMPT, 6))
    assert worker.is_pulled(worker.is_offered(chat)) == ["d"]
    commands = worker.hears(KvReceived(3, "prefill-0.1", intact=True))
    assert not any(isinstance(command, CopyOut) for command in commands), "it is here, and not on its way to the pool"
    assert sorted(worker.core.attempts) == [(name, 0) for name in "abcd"]
    assert sent(worker.is_offered(document("e"), has_pool=True), "prefill-0") == [Decline("e", 0)]


def test_without_pages_at_hand_it_waits_where_it_is(worker: Worker) -> None:
    assert not worker.is_pulled(worker.is_offered(document("d")))
    assert not worker.is_pulled(worker.gets_pages(20)), "one is too few"
    assert D in worker.core.attempts


def test_blocks_that_others_are_about_to_need_are_left_to_them(worker: Worker) -> None:
    """A, B and C have some blocks, and D needs as many as are left."""
    spare = worker.core.memory.blocks.num_free
    taken = worker.core.memory.blocks.take(spare - 3)
    assert taken is not None
    assert not worker.is_pulled(is_coming(worker)), "A and B need two within some steps"
    worker.core.memory.blocks.give(taken)
    assert worker.is_pulled(worker.steps()) == ["d"]


def test_a_request_without_its_pages_is_computed_anew(worker: Worker) -> None:
    is_coming(worker)
    worker.hears(said("pool-0", GiveBack()))
    commands = worker.hears(KvReceived(3, "prefill-0.1", intact=True))
    assert not [command for command in commands if isinstance(command, CopyOut)]
    assert D in worker.core.attempts
    for name in "abc":
        worker.hears(said(ROUTER, Cancel(name, 0)))
    worker.steps()
    assert [chunk.request for chunk in worker.plan.plan.chunks] == ["d"]


def test_a_request_that_does_not_arrive_and_that_a_new_pool_has_takes_no_seat(worker: Worker) -> None:
    """It has blocks for its prompt alone: with memory for the whole output it would have decoded beyond them."""
    is_coming(worker)
    worker.hears(said("pool-0", Batch((replace(document("d"), pages=(5, 6)),))))
    commands = worker.hears(KvReceived(3, "prefill-0.1", intact=False))
    assert not [command for command in commands if isinstance(command, CopyIn)]
    for name in "abc":
        worker.hears(said(ROUTER, Cancel(name, 0)))
    worker.steps()
    assert [chunk.request for chunk in worker.plan.plan.chunks] == ["d"]


@pytest.mark.parametrize("intact", [True, False])
def test_a_request_that_is_cancelled_while_it_comes_leaves_nothing(worker: Worker, intact: bool) -> None:
    is_coming(worker)
    before = worker.core.memory.free_share
    worker.hears(said(ROUTER, Cancel(*D)))
    commands = worker.hears(KvReceived(3, "prefill-0.1", intact))
    assert not [command for command in commands if isinstance(command, CopyOut)]
    assert worker.core.memory.free_share > before
    assert D not in worker.core.attempts


def test_what_does_not_come_is_offered_anew_by_its_worker(worker: Worker) -> None:
    is_coming(worker)
    commands = worker.hears(KvReceived(3, "prefill-0.1", intact=False))
    assert sent(commands, "prefill-0") == [Decline(*D, is_failed=True)]
    assert progress(commands, "returned") == [D]


@pytest.mark.parametrize("events", [[TimerFired("refresh")], [MemberLost(POOL_MEMBER), MemberJoined(POOL_MEMBER)]])
def test_pages_that_nothing_is_written_to_any_more_go_back(events: list[Event]) -> None:
    """This policy writes nothing else. The answer was lost, or the pool was away and came back in the same
    life, with the pages leased to this worker still (fuzz seed 83000836)."""
    worker = Worker(Policy(reuse=False, room=Room.WHOLE))
    worker.is_offered(document("d"))
    worker.hears(said(ROUTER, Cancel(*D)))
    for event in events:
        worker.hears(event)
    assert worker.asked == AskPages(0, 2, (), SPARE, is_spare=True)


def test_its_pool_is_lost_on_the_way(worker: Worker) -> None:
    """D has arrived by then, and is recomputed without occupying another request's place."""
    is_coming(worker)
    worker.hears(MemberLost(POOL_MEMBER))
    commands = worker.hears(KvReceived(3, "prefill-0.1", intact=True))
    assert not [command for command in commands if isinstance(command, CopyOut | SendKv)]
    assert D in worker.core.attempts
