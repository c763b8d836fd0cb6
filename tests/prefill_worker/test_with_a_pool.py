"""A prefill worker beside a pool of few pages, whatever fails: no prompt stays for ever, and nothing is left of one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from alignedserve.core import ServiceClass, StepResult
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.fuzzing.worker_views import blocks_of
from alignedserve.papers.names import SchedulerName
from alignedserve.papers.policy import PaperPolicy
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import CopyIn, CopyOut, RunStep, Send, SendKv
from alignedserve.protocol.events import (
    CopiedIn,
    CopiedOut,
    Event,
    KvSent,
    LinkGap,
    MemberJoined,
    MemberLost,
    StepDone,
    TimerFired,
)
from alignedserve.protocol.messages import (
    ROUTER,
    Cancel,
    Commit,
    Decline,
    GiveBack,
    Message,
    Offer,
    Prefill,
    Progress,
    Pull,
)
from alignedserve.scheduling.policy import Chunking, Handoff, Policy, Room
from alignedserve.scheduling.slo import Late
from alignedserve.worker.setup import WorkerSetup
from tests.conftest import examples
from tests.samples import LIMITS as SMALL
from tests.samples import member, request, said

LIMITS = replace(SMALL, num_blocks=16, max_batch=4)
PREFILL, DECODE = "prefill-0", replace(member("decode-0"), transport="there")
policies = st.builds(
    PaperPolicy,
    st.sampled_from(SchedulerName),
    chunking=st.sampled_from(Chunking),
    room=st.sampled_from(Room),
    late=st.sampled_from(Late),
    handoff=st.sampled_from(Handoff),
    long_prompt=st.sampled_from([8, 4096]),
    reuse=st.booleans(),
).filter(lambda policy: policy.problem is None)


class Node(RuleBasedStateMachine):
    """Frames between the worker and its pool arrive at once or are lost; what the worker orders waits for `works`."""

    @initialize(policy=policies, pages=st.integers(4, 6))
    def begin(self, policy: Policy, pages: int) -> None:
        self.worker = PrefillCore(WorkerSetup(LIMITS, policy, direct=True))
        self.policy, self.pages, self.life = policy, pages, 0
        self.pool: PoolCore | None = None
        self.work, self.lost = list[Event](), set[str]()  # the ends of what was ordered; who is to miss a frame
        self.names, self.over, self.committed = list[str](), set[str](), set[str]()
        self.pulls, self.declined = dict[int, str](), set[str]()
        self.hears(MemberJoined(DECODE))
        self.pool_comes_or_goes()

    def hears(self, event: Event, by: str = PREFILL) -> None:
        core = self.worker if by == PREFILL else self.pool
        for command in () if core is None else core.handle(event, 0.0):
            match command:
                case RunStep(plan):
                    parts = (*plan.parts, *plan.draws)  # draws: of other choices of a prompt
                    sampled = tuple((part.request, 7) for part in parts if part.sampling is not None)
                    self.work.append(StepDone(StepResult(plan.number, sampled)))
                case CopyOut(number):
                    self.work.append(CopiedOut(number))
                case CopyIn(number):
                    self.work.append(CopiedIn(number, intact=bool(number % 4)))
                case SendKv(number, to):
                    self.work.append(KvSent(number, to, ok=bool(number % 3)))
                case Send("decode-0", Offer(entry)):
                    self.work.append(self.answer(entry.request.id))
                case Send(_, Progress(cut=cut)):  # its owner starts the next attempt
                    self.over |= {name for name, _ in cut}
                case Send(to, message) if to in (PREFILL, "pool-0"):
                    self.arrives(by, to, message)

    def answer(self, name: str) -> Event:
        """Return the decode worker's answer to an offer: it declines some once."""
        if int(name[1:]) % 3 == 0 and name not in self.declined:
            self.declined.add(name)
            return said("decode-0", Decline(name, 0))
        self.pulls[len(self.pulls) + 1] = name
        return said("decode-0", Pull(len(self.pulls), name, 0))

    def arrives(self, by: str, to: str, message: Message) -> None:
        if isinstance(message, Commit):
            self.over.add(message.entry.request.id)
            self.committed.add(message.entry.request.id)
        if to in self.lost:
            self.lost.remove(to)
            self.hears(LinkGap(by), to)
        else:
            self.hears(said(by, message, 1 if by == PREFILL else self.life), to)

    @rule(service=st.sampled_from(ServiceClass), prompt=st.integers(1, 24), decode=st.sampled_from(["", "decode-0"]))
    def prompt(self, service: ServiceClass, prompt: int, decode: str) -> None:
        self.names.append(f"r{len(self.names)}")
        asked = replace(request(self.names[-1], prompt, max_tokens=50), service=service)
        self.hears(said(ROUTER, Prefill(asked, decode)))

    @rule(places=st.lists(st.integers(0, 2), max_size=4))
    def works(self, places: list[int]) -> None:
        for place in places:
            if self.work:
                self.does(min(place, len(self.work) - 1))

    def does(self, place: int) -> None:
        ended = self.work.pop(place)
        if isinstance(ended, KvSent) and ended.ok:
            self.over.add(self.pulls[ended.number])
        self.hears(ended)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.over.add(name)
        for core in (PREFILL, "pool-0"):
            self.hears(said(ROUTER, Cancel(name, 0)), core)

    @rule()
    def those_in_the_pool_end(self) -> None:
        for name in self.committed:
            self.hears(said(ROUTER, Cancel(name, 0)), "pool-0")
        self.committed.clear()

    @rule(to=st.sampled_from([PREFILL, "pool-0"]))
    def a_frame_is_lost(self, to: str) -> None:
        self.lost.add(to)

    @rule()
    def a_while_passes(self) -> None:
        for core in (PREFILL, "pool-0"):
            self.hears(TimerFired("refresh"), core)

    @rule()
    def pool_comes_or_goes(self) -> None:
        if self.pool is None:
            self.pool, self.life = PoolCore(self.pages, LIMITS.block_size, self.policy), self.life + 1
            self.hears(MemberJoined(member(PREFILL)), "pool-0")
            self.hears(MemberJoined(member("pool-0", self.life)))
        else:
            self.pool = None
            self.hears(MemberLost(member("pool-0", self.life)))

    @rule()
    def decode_worker_is_lost(self) -> None:
        self.hears(MemberLost(DECODE))
        self.hears(MemberJoined(DECODE))

    @invariant()
    def each_block_is_there_once(self) -> None:
        assert sorted(blocks_of(self.worker)) == list(range(LIMITS.num_blocks))

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        self.lost.clear()
        if self.pool is None:
            self.pool_comes_or_goes()
        for _ in range(1000):
            if self.work:
                self.does(0)
            elif self.worker.here.attempts():
                self.those_in_the_pool_end()
                self.a_while_passes()
        assert self.over == set(self.names)
        assert self.worker.held["requests"] == self.worker.held["blocks"] == self.worker.held["pages"] == 0
        assert self.pool is not None
        self.those_in_the_pool_end()
        self.a_while_passes()
        assert not self.pool.held["unanswered asks"]
        self.hears(said("pool-0", GiveBack(), self.life))
        assert set(self.worker.leased_pages) <= set(range(self.pages))


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
