"""Best-effort prompts wait for pages before they have a place on the device; no real-time prompt waits behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from alignedserve.core import Request, ServiceClass, StepResult
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyOut, RunStep, Send
from alignedserve.protocol.events import CopiedOut, MemberJoined, MemberLost, StepDone, TimerFired
from alignedserve.protocol.messages import ROUTER, AskPages, Cancel, Commit, LeasePages, Message, Prefill
from alignedserve.scheduling.policy import Chunking, Policy, Room, SchedulerName
from alignedserve.scheduling.slo import Late
from alignedserve.worker.setup import WorkerSetup
from tests.conftest import examples
from tests.samples import LIMITS, POOL_MEMBER, member, request, said

RT, BE = ServiceClass.RT, ServiceClass.BE


def best_effort(name: str, prompt: int = 3) -> Request:
    return replace(request(name, prompt), service=BE)


@pytest.fixture(
    params=[
        Policy(reuse=False),
        Policy(reuse=False),
        Policy(SchedulerName.FCFS, reuse=False),
        Policy(SchedulerName.FCFS, Chunking.FIXED, reuse=False),
        Policy(SchedulerName.FCFS, Chunking.NONE, reuse=False),
        Policy(chunking=Chunking.NONE, reuse=False),
        Policy(room=Room.CHUNKS, reuse=False),
    ],
    ids=["default", "in_order", "by_arrival", "first_come", "whole_first_come", "whole", "chunks"],
)
def worker(request: pytest.FixtureRequest) -> PrefillCore:
    core = PrefillCore(WorkerSetup(LIMITS, request.param))
    core.handle(MemberJoined(POOL_MEMBER), 0.0)
    return core


def told(worker: PrefillCore, request: Request) -> list[Command]:
    return worker.handle(said(ROUTER, Prefill(request)), 0.0)


def sent(commands: list[Command]) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Send)]


def ran(commands: list[Command]) -> list[str]:
    """Return the requests in the step that begins."""
    return [chunk.request for command in commands if isinstance(command, RunStep) for chunk in command.plan.chunks]


def leased(worker: PrefillCore, number: int, *pages: int, service: ServiceClass = BE) -> list[Command]:
    return worker.handle(said("pool-0", LeasePages(pages, number, service)), 0.0)


def stepped(worker: PrefillCore, number: int, *names: str) -> list[Command]:
    return worker.handle(StepDone(StepResult(number, tuple((name, 7) for name in names))), 0.0)


def test_a_prompt_is_seated_when_its_pages_are_leased(worker: PrefillCore) -> None:
    commands = told(worker, best_effort("a", prompt=9))
    assert sent(commands) == [AskPages(2, 1, (), BE, most=2)]
    assert (ran(commands), worker.held["blocks"]) == ([], 0)
    assert ran(leased(worker, 1, 5, 6)) == ["a"]


def test_a_real_time_prompt_does_not_wait_for_prompts_that_wait_for_pages(worker: PrefillCore) -> None:
    for number in range(5):
        told(worker, best_effort(f"flex{number}"))
    commands = told(worker, request("chat"))
    assert ran(commands) == ["chat"]
    assert AskPages(0, 1, most=1) in sent(commands), "and asks for pages of its own class, to have them in time"
    assert AskPages(1, 2) in sent(stepped(worker, 1, "chat")), "and for those without which it cannot go on"


def test_no_more_pages_are_asked_for_than_the_device_has_room_for(worker: PrefillCore) -> None:
    for number in range(12):
        told(worker, best_effort(f"flex{number}", prompt=2))
    assert ran(leased(worker, 1, 5)) == ["flex0"]
    assert AskPages(1, 2, (5,), BE, most=4) in sent(stepped(worker, 1, "flex0"))


def test_all_that_have_pages_run_together(worker: PrefillCore) -> None:
    for name in "abcd":
        told(worker, best_effort(name, prompt=2))
    assert ran(leased(worker, 1, 5)) == ["a"]
    assert AskPages(1, 2, (5,), BE, most=3) in sent(stepped(worker, 1, "a"))
    assert ran(leased(worker, 2, 6, 7)) == ["b", "c"]


def test_the_pages_of_a_seated_prompt_are_kept_and_other_pages_go_back(worker: PrefillCore) -> None:
    told(worker, best_effort("a"))
    told(worker, best_effort("b"))
    leased(worker, 1, 5, 6)
    worker.handle(said(ROUTER, Cancel("b", 0)), 0.0)
    assert worker.pool_link.writer.leased_for(BE) == (5,)
    leased(worker, 2)
    assert CopyOut(1, "pool-0.1", (0,), (5,), (1, 2, 3)) in stepped(worker, 1, "a")


def test_a_prompt_without_its_pages_gives_its_place_to_a_real_time_prompt_and_is_computed_anew(
    worker: PrefillCore,
) -> None:
    told(worker, best_effort("flex", prompt=20))
    leased(worker, 1, 1, 2, 3)
    for number in (1, 2):
        stepped(worker, number)
    worker.handle(MemberLost(POOL_MEMBER), 0.0)
    stepped(worker, 3, "flex")
    assert worker.held["blocks"] == 5
    again = worker.handle(MemberJoined(member("pool-0", 2)), 0.0)
    assert AskPages(3, 2, (), BE) in sent(again), "it is through, and waits with its KV on the device"
    assert ran(told(worker, request("chat", prompt=16))) == ["chat"]
    stepped(worker, 4)
    assert worker.log.counts.num_preemptions == 1, "at the latest with the chunk that lacks memory"
    (ask,) = [
        message
        for message in sent(stepped(worker, 5, "chat"))
        if isinstance(message, AskPages) and message.service is RT
    ]
    assert ask.pages == 2
    (chat,) = [command for command in leased(worker, ask.number, 7, 8, service=RT) if isinstance(command, CopyOut)]
    worker.handle(CopiedOut(chat.number), 0.0)
    assert ran(leased(worker, 2, 1, 2, 3)) == ["flex"]
    for number in (6, 7, 8):
        commands = stepped(worker, number, *(["flex"] if number == 8 else []))
        for part in [command for command in commands if isinstance(command, CopyOut) and command.aside]:
            worker.handle(CopiedOut(part.number), 0.0)
    (copy,) = [command for command in commands if isinstance(command, CopyOut)]
    assert copy.tokens == (*range(1, 21), 7), "with the token that its client has"
    (commit,) = [message for message in sent(worker.handle(CopiedOut(copy.number), 0.0)) if isinstance(message, Commit)]
    assert commit.entry.output == (7, 7)


policies = st.builds(
    Policy,
    st.sampled_from(SchedulerName),
    chunking=st.sampled_from(Chunking),
    room=st.sampled_from(Room),
    late=st.sampled_from(Late),
    long_prompt=st.sampled_from([8, 4096]),
    reuse=st.just(False),
).filter(lambda policy: policy.problem is None)


class Pausing(RuleBasedStateMachine):
    """A worker and a pool that has pages only now and then; the pool may be lost and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.core = PrefillCore(WorkerSetup(LIMITS))
        self.number = 0
        self.services: dict[str, ServiceClass] = {}
        self.plan: RunStep | None = None
        self.copies: list[CopyOut] = []
        self.asks: dict[ServiceClass, AskPages] = {}
        self.committed: set[str] = set()
        self.next_page, self.life, self.is_there = 0, 1, True

    @initialize(policy=policies)
    def begin(self, policy: Policy) -> None:
        self.core = PrefillCore(WorkerSetup(LIMITS, policy))
        self.take(self.core.handle(MemberJoined(member("pool-0", self.life)), 0.0))

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case RunStep():
                    self.plan = command
                case CopyOut():
                    self.copies.append(command)
                case Send(message=AskPages() as ask):
                    self.asks[ask.service] = ask
                case Send(message=Commit(entry)):
                    self.committed.add(entry.request.id)

    @rule(service=st.sampled_from([RT, BE]), prompt=st.integers(1, 30))
    def prompt(self, service: ServiceClass, prompt: int) -> None:
        self.number += 1
        name = f"r{self.number}"
        self.services[name] = service
        self.take(told(self.core, replace(request(name, prompt, max_tokens=50), service=service)))

    @precondition(lambda self: self.plan is not None)
    @rule()
    def step(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan.plan, None
        sampled = tuple((chunk.request, 7) for chunk in plan.chunks if chunk.sampling is not None)
        self.take(self.core.handle(StepDone(StepResult(plan.number, sampled)), 0.0))

    @precondition(lambda self: self.copies)
    @rule()
    def copy(self) -> None:
        self.take(self.core.handle(CopiedOut(self.copies.pop(0).number), 0.0))

    @precondition(lambda self: self.asks and self.is_there)
    @rule(service=st.sampled_from([RT, BE]))
    def lease(self, service: ServiceClass) -> None:
        ask = self.asks.pop(service, None)
        if ask is not None:
            pages = tuple(range(self.next_page, self.next_page + max(ask.pages, ask.most)))
            self.next_page += len(pages)
            self.take(leased(self.core, ask.number, *pages, service=service))

    @precondition(lambda self: self.services)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.services)))
        self.committed.add(name)
        self.take(self.core.handle(said(ROUTER, Cancel(name, 0)), 0.0))

    @rule()
    def pool_goes_or_comes(self) -> None:
        if self.is_there:
            self.take(self.core.handle(MemberLost(member("pool-0", self.life)), 0.0))
            self.asks.clear()
            self.life += 1
        else:
            self.take(self.core.handle(MemberJoined(member("pool-0", self.life)), 0.0))
        self.is_there = not self.is_there

    @invariant()
    def each_block_is_there_once(self) -> None:
        assert sorted(self.core.blocks) == list(range(LIMITS.num_blocks))

    def teardown(self) -> None:
        """Check that everything goes on once there are pages again, and that no accepted request is missing."""
        if not self.is_there:
            self.pool_goes_or_comes()
        for _ in range(2_000):
            if self.plan is not None:
                self.step()
            elif self.copies:
                self.copy()
            elif self.asks:
                self.lease(next(iter(self.asks)))
            else:
                break
        self.take(self.core.handle(TimerFired("refresh"), 0.0))
        assert self.committed == set(self.services)
        assert self.core.held["requests"] == self.core.held["blocks"] == 0


TestPausing = Pausing.TestCase
TestPausing.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
