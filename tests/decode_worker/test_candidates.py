"""Candidate requests: taken as there is room, pulled when there is a seat, and before all that the pool hands out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import Due, Entry, PreemptionCause, Sampling, ServiceClass, Slo, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.explain.decisions import Kind
from alignedserve.lab.fuzzing.worker_views import num_preemptions
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.commands import Command, CopyIn, ReceiveKv, RunStep, Send
from alignedserve.protocol.events import CopiedIn, KvReceived, MemberJoined, MemberLost, StepDone
from alignedserve.protocol.figures import ByClass, Preempted
from alignedserve.protocol.messages import (
    ROUTER,
    AskBatch,
    AskDecisions,
    Batch,
    Cancel,
    Decisions,
    Decline,
    Figures,
    Holding,
    Inquire,
    Kept,
    Message,
    Missed,
    Offer,
    Progress,
    Pull,
    Release,
    Retire,
    Spoiled,
)
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import DEFAULT_POLICY, Policy, Room
from alignedserve.worker.requests import Requests
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.request import JoinCandidate, WorkerRequest
from alignedserve.worker.step.states import State
from tests.samples import LIMITS, POOL_MEMBER, ROUTER_MEMBER, entry, member, next_attempt, request, said

PREFILL = replace(member("prefill-0"), transport="there")
IN_A, IN_B, IN_C = (entry(request(name), ()) for name in "abc")
NOTHING_HELD = {"requests": 0, "blocks": 0, "pages": 0, "outputs": 0}
RECEIVES = ReceiveKv(1, "prefill-0.1", (0, 1), (1, 2, 3))


@pytest.fixture
def worker() -> DecodeCore:
    core = decode_core(WorkerSetup(LIMITS, Policy(room=Room.WHOLE), direct=True))
    for neighbour in (POOL_MEMBER, ROUTER_MEMBER, PREFILL):
        core.handle(MemberJoined(neighbour), 0.0)
    return core


def sent(commands: Sequence[Command], to: str) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Send) and command.to == to]


def progress(commands: Sequence[Command], stage: str) -> list[tuple[str, int]]:
    return [
        key for message in sent(commands, ROUTER) if isinstance(message, Progress) for key in getattr(message, stage)
    ]


def offered(worker: DecodeCore, entry: Entry, stays: bool = False) -> list[Command]:
    """`stays` says that it waits at the prefill worker, which has no other way for it."""
    return worker.handle(said("prefill-0", Offer(entry, has_pool=not stays)), 0.0)


def received(worker: DecodeCore, number: int = 1, intact: bool = True) -> list[Command]:
    return worker.handle(KvReceived(number, "prefill-0.1", intact), 0.0)


def test_what_is_offered_is_pulled_and_decoded(worker: DecodeCore) -> None:
    commands = offered(worker, IN_A)
    assert commands[:2] == [RECEIVES, Send("prefill-0", Pull(1, "a", 0))]
    assert progress(commands, "joined") == [("a", 0)]
    assert [type(command) for command in received(worker)][:1] == [RunStep]
    worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
    assert worker.held["requests"] == 0


def test_an_offer_that_comes_after_the_cancel_is_not_taken(worker: DecodeCore) -> None:
    """Both were on their way, on two links: the offer would wait for room, and keep others from it."""
    worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
    assert offered(worker, IN_A) == [Send("prefill-0", Cancel("a", 0))]
    assert worker.held == NOTHING_HELD
    assert Pull(1, "a", 1) in sent(offered(worker, entry(next_attempt(IN_A.request), ())), "prefill-0")


def test_numbers_rise_for_each_life_of_each_sender(worker: DecodeCore) -> None:
    offered(worker, IN_A)
    assert sent(offered(worker, IN_B), "prefill-0") == [Pull(2, "b", 0)]


def test_without_room_it_is_declined_if_its_sender_has_another_way(worker: DecodeCore) -> None:
    """Others wait for a seat, the most urgent first, and the pool is told of no room meanwhile."""
    offered(worker, IN_A)
    offered(worker, IN_B)
    assert sent(offered(worker, IN_C), "prefill-0") == [Decline("c", 0)]
    assert not sent(offered(worker, replace(IN_C, due=None), stays=True), "prefill-0")
    soon = entry(replace(request("d"), slo=replace(IN_A.request.slo, tbt_s=0.01)), ())
    assert offered(worker, soon, stays=True) == []
    assert sorted(worker.here.attempts()) == [(name, 0) for name in "abcd"], "both ends list them"
    commands = received(worker, 1, intact=False)
    assert Pull(3, "d", 0) in sent(commands, "prefill-0")
    assert not any(message.requests for message in sent(commands, "pool-0") if isinstance(message, AskBatch))


def test_nothing_is_taken_from_an_unreachable_worker() -> None:
    core = decode_core(WorkerSetup(LIMITS, Policy(room=Room.WHOLE), direct=True))
    core.handle(MemberJoined(member("prefill-0")), 0.0)
    assert sent(offered(core, IN_A, stays=True), "prefill-0") == [Decline("a", 0)]


def test_nothing_comes_beside_the_steps_where_blocks_are_shared() -> None:
    """Another request might take slots of the blocks that it comes to. What the pool pins still comes before others."""
    core = decode_core(WorkerSetup(LIMITS, Policy(room=Room.GROWING, memory="two_ended"), direct=True))
    for neighbour in (POOL_MEMBER, ROUTER_MEMBER, PREFILL):
        core.handle(MemberJoined(neighbour), 0.0)
    assert sent(offered(core, IN_A, stays=True), "prefill-0") == [Decline("a", 0)]
    pinned = Batch((replace(IN_B, pages=(7,)),), is_pinned=True)
    (copy,) = [command for command in core.handle(said("pool-0", pinned), 0.0) if isinstance(command, CopyIn)]
    assert copy.pages == (7,)


def test_a_pinned_request_of_the_pool_comes_before_its_other_requests(worker: DecodeCore) -> None:
    batch = tuple(replace(entry, pages=(page,)) for entry, page in ((IN_A, 4), (IN_B, 5), (IN_C, 6)))
    worker.handle(said("pool-0", Batch(batch)), 0.0)
    pinned = replace(entry(request("d"), ()), pages=(7,))
    assert not sent(worker.handle(said("pool-0", Batch((pinned,), is_pinned=True)), 0.0), "pool-0")
    worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
    copies = [command.pages for command in worker.handle(CopiedIn(2, intact=True), 0.0) if isinstance(command, CopyIn)]
    assert copies in ([(7,)], []), "its seat may have been taken at once"
    assert ("c", 0) in worker.here.attempts()


class TestSaidAgain:
    def test_an_offer_changes_nothing_while_it_waits_or_comes(self, worker: DecodeCore) -> None:
        offered(worker, IN_A)
        assert offered(worker, IN_A) == []

    def test_of_what_is_here_the_sender_may_let_go(self, worker: DecodeCore) -> None:
        offered(worker, IN_A)
        received(worker)
        assert sent(offered(worker, IN_A), "prefill-0") == [Cancel("a", 0)]

    def test_even_after_its_end(self, worker: DecodeCore) -> None:
        """The prefill worker may believe that nothing arrived, and offers the request again."""
        offered(worker, IN_A)
        received(worker)
        worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        assert sent(offered(worker, IN_A), "prefill-0") == [Cancel("a", 0)]

    def test_a_thousand_attempts_after_its_end(self) -> None:
        """A sender offers an attempt again within seconds, if at all."""
        here, came = Requests(), [entry(request(f"r{number}"), ()) for number in range(1001)]
        for last, one in enumerate(came):
            running = WorkerRequest(one.request, promise(one.request, Policy()), [7])
            candidate = JoinCandidate(running, one, PREFILL, due_at=0.0, since=0.0)
            here.candidates.add(candidate)
            number = here.candidates.begin_transfer(candidate, PREFILL)
            for state in (State.RECEIVING, State.RESIDENT, State.GONE):
                if state is State.RESIDENT:
                    here.candidates.end_transfer(PREFILL.holder, number, intact=True)
                here.move(running, state)
            assert here.candidates.has_come(("r0", 0)) == (last < 1000)
        assert here.candidates.has_come(("r1", 0))

    def test_an_attempt_that_is_over_is_not_taken(self, worker: DecodeCore) -> None:
        offered(worker, entry(next_attempt(IN_A.request, (7,)), (), (7, 8)))
        assert sent(offered(worker, IN_A), "prefill-0") == [Cancel("a", 0)]

    def test_a_pull_where_frames_were_lost(self, worker: DecodeCore) -> None:
        offered(worker, IN_A)
        assert Pull(1, "a", 0) in sent(worker.handle(said("prefill-0", Missed()), 0.0), "prefill-0")

    def test_candidates_are_held_and_known(self, worker: DecodeCore) -> None:
        offered(worker, IN_A)
        assert not progress(worker.handle(said(ROUTER, Inquire((("a", 0),))), 0.0), "unknown")
        (holding,) = sent(worker.handle(said(ROUTER, Missed()), 0.0), ROUTER)
        assert isinstance(holding, Holding)
        assert (holding.attempts, holding.free_blocks) == ((("a", 0),), 6)


def test_a_worker_that_retires_takes_no_offer(worker: DecodeCore) -> None:
    worker.handle(said(ROUTER, Retire("decode-0", 1)), 0.0)
    assert sent(offered(worker, IN_A, stays=True), "prefill-0") == [Decline("a", 0)]


class TestThePoolKeepsItToo:
    def test_then_it_gets_only_what_comes_later_and_is_told_of_the_end(self, worker: DecodeCore) -> None:
        offered(worker, IN_A)
        worker.handle(said("pool-0", Kept("a", 0, (5,))), 0.0)
        received(worker)
        assert Release("a", 0) in sent(worker.handle(said(ROUTER, Cancel("a", 0)), 0.0), "pool-0")

    def test_what_came_with_all_pages_is_not_known_by_those_of_the_prompt_alone(self, worker: DecodeCore) -> None:
        """The pool's word on the prompt comes late, and the pages of the output would not count as the pool's."""
        offered(worker, IN_A)
        offered(worker, IN_B)
        whole = entry(request("c", prompt=8, max_tokens=12), (5, 6), output=range(7, 16))
        worker.handle(said("pool-0", Batch((whole,))), 0.0)
        worker.handle(said("pool-0", Kept("c", 0, (5,))), 0.0)
        worker.handle(said(ROUTER, Cancel("b", 0)), 0.0)
        assert any(isinstance(command, CopyIn) for command in received(worker, 2))
        assert Spoiled((5, 6)) in sent(worker.handle(CopiedIn(1, intact=False), 0.0), "pool-0")

    def test_what_is_here_no_more_it_need_not_keep(self, worker: DecodeCore) -> None:
        assert worker.handle(said("pool-0", Kept("a", 0, (5,))), 0.0) == [Send("pool-0", Release("a", 0))]

    def test_what_did_not_come_is_copied_from_there(self, worker: DecodeCore) -> None:
        offered(worker, IN_A)
        worker.handle(said("pool-0", Batch((replace(IN_A, pages=(5,)),))), 0.0)
        commands = received(worker, intact=False)
        assert CopyIn(1, "pool-0.1", (5,), (0, 1), (1, 2, 3)) in commands
        assert worker.copying == (("a", 0),), "it may be why its worker ends amid the copy"
        assert worker.log.counts.num_failed_transfers == 1
        assert [type(command) for command in worker.handle(CopiedIn(1, intact=True), 0.0)][:1] == [RunStep]
        assert worker.copying == ()

    def test_what_did_not_come_is_not_copied_from_a_pool_that_has_started_again(self, worker: DecodeCore) -> None:
        offered(worker, IN_A)
        worker.handle(said("pool-0", Batch((replace(IN_A, pages=(5,)),))), 0.0)
        worker.handle(MemberLost(POOL_MEMBER), 0.0)
        worker.handle(MemberJoined(replace(POOL_MEMBER, incarnation=2)), 0.0)
        assert sent(received(worker, intact=False), "prefill-0") == [Decline("a", 0, is_failed=True)]

    def test_so_is_what_the_pool_hands_out_meanwhile(self, worker: DecodeCore) -> None:
        """The prefill worker had no memory to keep the request, so the pool hands it out."""
        offered(worker, IN_A)
        worker.handle(said("pool-0", Batch((replace(IN_A, pages=(5,)),), is_pinned=True)), 0.0)
        assert any(isinstance(command, CopyIn) for command in received(worker, intact=False))


class TestFailures:
    def test_what_did_not_come_is_declined(self, worker: DecodeCore) -> None:
        offered(worker, IN_A)
        commands = received(worker, intact=False)
        assert sent(commands, "prefill-0") == [Decline("a", 0, is_failed=True)]
        assert progress(commands, "returned") == [("a", 0)]
        assert worker.held == NOTHING_HELD

    def test_with_its_source_it_is_lost_and_may_be_why(self, worker: DecodeCore) -> None:
        """The router knows the request to be here: else a request that ends each sender would go on for ever."""
        offered(worker, IN_A)
        assert worker.handle(MemberLost(PREFILL), 0.0) == []
        assert worker.held["blocks"] == 2, "the transfer has not ended"
        assert progress(received(worker, intact=False), "cut") == [("a", 0)]
        assert worker.held == NOTHING_HELD

    def test_a_request_that_waits_is_lost_with_its_source(self, worker: DecodeCore) -> None:
        for waiting_entry in (IN_A, IN_B, IN_C):
            offered(worker, waiting_entry, stays=True)
        assert progress(worker.handle(MemberLost(PREFILL), 0.0), "lost") == [("c", 0)]

    def test_cancelled_its_blocks_wait_for_the_end_of_the_transfer(self, worker: DecodeCore) -> None:
        offered(worker, IN_A)
        worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        assert (worker.held["requests"], worker.held["blocks"]) == (0, 2)
        received(worker)
        assert worker.held == NOTHING_HELD

    def test_cancelled_and_received_it_is_not_kept(self, worker: DecodeCore) -> None:
        """What was compiled for it is let go with it."""
        sampling = Sampling(temperature=0.5)
        kept = weakref.ref(sampling)
        offered(worker, entry(replace(IN_A.request, sampling=sampling), ()))
        del sampling
        worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
        assert kept() is not None
        received(worker)
        assert kept() is None


@pytest.mark.parametrize(("source", "waited_s"), [("pool-0", 3.0), ("prefill-0", 0.0)])
def test_the_story_of_a_request_says_how_long_it_waited_in_the_pool(
    worker: DecodeCore, source: str, waited_s: float
) -> None:
    """Before an offer it waited elsewhere, where that is told."""
    arrived = replace(IN_A.request, arrival_at=2.0)
    comes = Offer(entry(arrived, ())) if source == "prefill-0" else Batch((entry(arrived, (5,)),))
    worker.handle(said(source, comes), 5.0)
    (told,) = sent(worker.handle(said("gateway-0", AskDecisions(1, "a"), 1), 5.0), "gateway-0")
    assert isinstance(told, Decisions)
    seconds = {decision.kind: decision.seconds for decision in told.findings.decisions}
    assert seconds[Kind.CANDIDATE] == waited_s


class TestWhoCannotWait:
    """Two documents run and hold all memory, a block each, or all places of the batch."""

    SMALL = WorkerLimits(num_blocks=2, block_size=8, page_size=8, max_step_tokens=8, max_batch=2)

    def busy(self, policy: Policy = DEFAULT_POLICY, limits: WorkerLimits = SMALL) -> DecodeCore:
        core = decode_core(WorkerSetup(limits, policy, direct=True))
        for neighbour in (POOL_MEMBER, ROUTER_MEMBER, PREFILL):
            core.handle(MemberJoined(neighbour), 0.0)
        core.handle(
            said("pool-0", Batch(tuple(self.document(name, page) for name, page in (("d1", 1), ("d2", 2))))), 0.0
        )
        core.handle(CopiedIn(1, intact=True), 0.0)
        core.handle(CopiedIn(2, intact=True), 0.0)
        return core

    def document(self, name: str, page: int) -> Entry:
        return entry(replace(request(name, max_tokens=20), service=ServiceClass.BE, slo=Slo(jct_s=1e5)), (page,))

    def stepped(self, core: DecodeCore, number: int, now: float = 0.01) -> list[Command]:
        return core.handle(StepDone(StepResult(number, (("d1", 7), ("d2", 7))), 0.01), now)

    def test_gets_the_memory_of_a_document_when_the_step_has_ended(self) -> None:
        core = self.busy()
        assert not sent(offered(core, replace(IN_A, due=Due(0.02)), stays=True), "prefill-0"), "a step runs"
        commands = self.stepped(core, 1)
        assert sent(commands, "prefill-0") == [Pull(1, "a", 0)]
        assert num_preemptions(core) == 1
        (step,) = [command for command in commands if isinstance(command, RunStep)]
        assert [decode.request for decode in step.plan.decodes] == ["d1"], "its KV comes beside the steps"

    def test_the_gateways_hear_why_the_document_had_to_leave(self) -> None:
        core = self.busy()
        offered(core, replace(IN_A, due=Due(1.51)), stays=True)
        told = sent(self.stepped(core, 1, now=1.5), ROUTER)
        (load,) = [message.worker for message in told if isinstance(message, Figures) and message.worker is not None]
        assert load.preempted == (Preempted(PreemptionCause.REAL_TIME, ServiceClass.BE, keeps_kv=False, number=1),)
        assert load.running == ByClass(be=1)
        assert load.waiting == ByClass(rt=1, be=1), "the KV of the chat is on its way"

    def test_gets_a_place_where_documents_have_all_and_nobody_leaves(self) -> None:
        core = self.busy(limits=replace(self.SMALL, num_blocks=8))
        assert sent(offered(core, replace(IN_A, due=Due(0.02)), stays=True), "prefill-0") == [Pull(1, "a", 0)]
        assert num_preemptions(core) == 0

    def test_gets_nothing_of_chats(self) -> None:
        core = self.busy()
        offered(core, replace(IN_A, due=Due(0.02)), stays=True)
        offered(core, replace(IN_B, due=Due(0.02)), stays=True)
        offered(core, replace(IN_C, due=Due(0.02)), stays=True)
        assert sent(self.stepped(core, 1), "prefill-0") == [Pull(1, "a", 0), Pull(2, "b", 0)]
        assert num_preemptions(core) == 2
        assert ("c", 0) in core.here.attempts()

    @pytest.mark.parametrize(("due_at", "leaves"), [(60.0, 0), (0.02, 1)])
    def test_other_requests_come_only_when_their_slack_has_run_out(self, due_at: float, leaves: int) -> None:
        core = self.busy()
        chat = replace(entry(request("a"), (3,)), due=Due(due_at))
        core.handle(said("pool-0", Batch((chat,))), 0.0)
        self.stepped(core, 1)
        assert num_preemptions(core) == leaves

    def test_waits_where_nobody_goes_by_promises(self) -> None:
        core = self.busy(Policy(SchedulerName.FCFS))
        offered(core, replace(IN_A, due=Due(0.02)), stays=True)
        self.stepped(core, 1)
        assert num_preemptions(core) == 0
