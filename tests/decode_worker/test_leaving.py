"""A request that must leave a decode worker goes to a prefill worker ahead of need, and comes back unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import Chunk, Entry, Estimate, ServiceClass, Slo, StepPlan, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.fuzzing.worker_views import blocks_of, num_preemptions
from alignedserve.protocol.commands import Command, ReceiveKv, RunStep, Send, SendKv
from alignedserve.protocol.events import CopiedIn, Event, KvReceived, KvSent, MemberJoined, MemberLost, StepDone
from alignedserve.protocol.form_messages import Evict, PrefetchDeclined, Prefetched
from alignedserve.protocol.messages import (
    ROUTER,
    Batch,
    Cancel,
    Message,
    Missed,
    Progress,
    Pull,
)
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.setup import WorkerSetup
from tests.samples import POOL_MEMBER, ROUTER_MEMBER, entry, member, request, said

PREFILL = replace(member("prefill-0"), transport="there")
LIMITS = WorkerLimits(num_blocks=3, block_size=4, page_size=8, max_step_tokens=8, max_batch=3)
THERE = Policy(candidate_share=1.0)
D2 = ("d2", 0)


def document(name: str, page: int) -> Entry:
    new_request = replace(request(name, max_tokens=20), service=ServiceClass.BE, slo=Slo(jct_s=1e5))
    return entry(new_request, (page,))


class Worker:
    """Run a worker with two documents of one block each and a free block: both cannot go on for long."""

    def __init__(self, policy: Policy = THERE, *entries: Entry) -> None:
        self.core = decode_core(WorkerSetup(LIMITS, policy, direct=True))
        self.plan = RunStep(StepPlan(0, ()))
        self.chunks = list[Chunk]()  # chunks that ran
        for neighbour in (POOL_MEMBER, ROUTER_MEMBER, PREFILL):
            self.hears(MemberJoined(neighbour))
        for number, joins in enumerate(entries or (document("d1", 11), document("d2", 12)), 1):
            self.hears(said("pool-0", Batch((joins,), is_dynamic=True)))
            self.hears(CopiedIn(number, intact=True))

    def hears(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, 0.0)
        for command in commands:
            if isinstance(command, RunStep):
                self.plan = command
                self.chunks += command.plan.chunks
        return commands

    def steps(self) -> list[Command]:
        plan = self.plan.plan
        sampled = tuple((part.request, 7) for part in plan.parts if part.sampling is not None)
        return self.hears(StepDone(StepResult(plan.number, sampled), 0.01))

    @property
    def runs(self) -> list[str]:
        return [part.request for part in self.plan.plan.parts]

    def cancels(self, name: str) -> list[Command]:
        return self.hears(said(ROUTER, Cancel(name, 0)))

    def send_d2(self) -> SendKv:
        """Evict D2 up to the point where its KV is being sent, and return the order to send it."""
        [sends] = [command for command in self.hears(said("prefill-0", Pull(1, *D2))) if isinstance(command, SendKv)]
        return sends


def sent(commands: Sequence[Command], to: str) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Send) and command.to == to]


@pytest.fixture
def worker() -> Worker:
    """Return a worker that has asked D2 to leave before the second step."""
    worker = Worker()
    [evict] = sent(worker.steps(), "prefill-0")
    assert isinstance(evict, Evict)
    assert (evict.entry.request.id, evict.entry.pages, evict.entry.prefix) == ("d2", (), 3)
    assert worker.runs == ["d1"]
    return worker


def is_there(worker: Worker) -> None:
    worker.send_d2()
    worker.hears(KvSent(1, "prefill-0.1", ok=True))
    worker.hears(said("prefill-0", Prefetched((D2,))))


def test_it_goes_beside_the_steps_and_is_pulled_when_there_is_room_again(worker: Worker) -> None:
    free = worker.core.memory.free_share
    sends = worker.send_d2()
    assert sends == SendKv(1, "prefill-0.1", sends.blocks, (1, 2, 3))
    assert len(sends.blocks) == 1
    commands = worker.hears(KvSent(1, "prefill-0.1", ok=True))
    assert worker.core.memory.free_share > free
    assert not any(isinstance(command, ReceiveKv) for command in commands), (
        "who has just left does not come back at once"
    )
    assert worker.hears(said("prefill-0", Prefetched((D2,)))) == [], "we know"
    assert sorted(worker.core.here.attempts()) == [("d1", 0), D2], "it is ours all the time"
    worker.steps()
    commands = worker.cancels("d1")
    [receives] = [command for command in commands if isinstance(command, ReceiveKv)]
    assert receives.tokens == (1, 2, 3)
    assert sent(commands, "prefill-0") == [Pull(1, *D2)]
    assert not [message for message in sent(commands, ROUTER) if isinstance(message, Progress) and message.joined]
    worker.steps()
    worker.hears(KvReceived(1, "prefill-0.1", intact=True))
    [decode] = worker.plan.plan.decodes
    assert (decode.request, decode.start, decode.index, decode.kv.blocks) == ("d2", 3, 1, receives.blocks)


def test_it_stays_where_there_is_no_room_for_it_and_is_not_sent_there_again_soon(worker: Worker) -> None:
    worker.hears(said("prefill-0", PrefetchDeclined((D2,))))
    assert not [message for message in sent(worker.steps(), "prefill-0") if isinstance(message, Evict)]
    assert worker.runs == ["d1", "d2"]
    assert num_preemptions(worker.core) == 0, "it has not left"


def test_it_stays_where_sending_fails(worker: Worker) -> None:
    worker.send_d2()
    worker.hears(KvSent(1, "prefill-0.1", ok=False))
    assert worker.core.log.counts.num_failed_transfers == 1
    assert sorted(blocks_of(worker.core)) == [0, 1, 2]
    assert worker.core.held["requests"] == 2


def test_and_where_the_prefill_worker_is_lost_before_or_while_it_is_sent(worker: Worker) -> None:
    worker.send_d2()
    worker.hears(MemberLost(PREFILL))
    worker.hears(KvSent(1, "prefill-0.1", ok=True))
    worker.steps()
    assert worker.runs == ["d1", "d2"]
    spared = Worker()
    spared.steps()
    spared.hears(MemberLost(PREFILL))
    spared.steps()
    assert spared.runs == ["d1", "d2"]


@pytest.mark.parametrize("how", ["let go", "lost", "not intact"])
def test_what_is_there_no_longer_is_computed_anew(worker: Worker, how: str) -> None:
    is_there(worker)
    if how == "let go":
        worker.hears(said("prefill-0", PrefetchDeclined((D2,))))
    if how == "lost":
        worker.hears(MemberLost(PREFILL))
    worker.steps()
    worker.cancels("d1")
    if how == "not intact":
        worker.hears(KvReceived(1, "prefill-0.1", intact=False))
    worker.steps()
    [chunk] = worker.chunks
    assert (chunk.request, chunk.tokens, chunk.start) == ("d2", (1, 2, 3, 7), 0)
    assert worker.core.here.attempts() == [D2]


@pytest.mark.parametrize("how_far", ["asked", "sending", "there"])
def test_nobody_wants_it_any_more(worker: Worker, how_far: str) -> None:
    if how_far == "sending":
        worker.send_d2()
    if how_far == "there":
        is_there(worker)
    taken = worker.core.held["blocks"]
    assert Cancel(*D2) in sent(worker.cancels("d2"), "prefill-0")
    assert worker.core.here.attempts() == [("d1", 0)]
    if how_far == "sending":
        assert worker.core.held["blocks"] == taken, "they are read still"
        worker.hears(KvSent(1, "prefill-0.1", ok=True))
        assert worker.core.held["blocks"] == taken - 1
    assert sorted(blocks_of(worker.core)) == [0, 1, 2]
    worker.cancels("d1")
    worker.steps()
    assert worker.core.held["blocks"] == 0


def test_what_may_have_been_lost_is_said_again_and_heard_once(worker: Worker) -> None:
    [again] = sent(worker.hears(said("prefill-0", Missed())), "prefill-0")
    assert isinstance(again, Evict)
    worker.send_d2()
    assert worker.hears(said("prefill-0", Pull(1, *D2))) == []
    assert sent(worker.hears(said("prefill-0", Missed())), "prefill-0") == []


def test_a_pull_in_vain_is_told_so(worker: Worker) -> None:
    worker.cancels("d2")
    assert SendKv(1, "prefill-0.1", (), ()) in worker.hears(said("prefill-0", Pull(1, *D2)))


def test_a_later_life_of_the_prefill_worker_gets_nothing_that_was_meant_for_the_earlier_one(worker: Worker) -> None:
    assert SendKv(1, "prefill-0.2", (), ()) in worker.hears(said("prefill-0", Pull(1, *D2), 2))


def test_chats_do_not_leave_this_way() -> None:
    worker = Worker(THERE, entry(request("c1", max_tokens=20), (11,)), entry(request("c2", max_tokens=20), (12,)))
    assert sent(worker.steps(), "prefill-0") == []
    assert worker.runs == ["c1", "c2"]


@pytest.mark.parametrize(
    "policy", [replace(THERE, evict=False), replace(THERE, prefetch=False), replace(THERE, candidate_share=0.0)]
)
def test_nobody_leaves_this_way_where_it_is_off(policy: Policy) -> None:
    assert sent(Worker(policy).steps(), "prefill-0") == []


def test_a_request_that_has_longest_to_wait_leaves() -> None:
    """Waiting times follow from predicted lengths."""
    long, short = (
        entry(replace(document(name, at).request, estimate=Estimate(tokens, tokens)), (at,))
        for name, tokens, at in (("d1", 19, 11), ("d2", 3, 12))
    )
    [evict] = sent(Worker(THERE, long, short).steps(), "prefill-0")
    assert isinstance(evict, Evict)
    assert evict.entry.request.id == "d1"
