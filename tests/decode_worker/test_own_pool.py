"""A decode worker that runs prompts, with a pool: what that has is not computed again, and what leaves comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from alignedserve.core import FREE_COPIES, NO_OPENING, CopyCost, Request, ServiceClass, StepResult, WorkerLimits
from alignedserve.cost.fit import Point
from alignedserve.cost.model import Shape
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.fuzzing.worker_views import num_evictions, num_preemptions
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, RunStep, Send, SetTimer
from alignedserve.protocol.events import CopiedIn, CopiedOut, Event, MemberJoined, Received, StepDone
from alignedserve.protocol.messages import (
    ROUTER,
    Batch,
    Cancel,
    Commit,
    LeasePages,
    Message,
    Output,
    Prefill,
    Prefix,
    Progress,
    Spoiled,
    Tokens,
)
from alignedserve.scheduling.policy import DEFAULT_POLICY, Chunking, Policy, Room
from alignedserve.worker.setup import WorkerSetup
from tests.cost.fitted import cost_of
from tests.samples import POOL_MEMBER, ROUTER_MEMBER, STOP, entry, member, request, said

SHAPES = [
    Shape.build([(tokens, prefix)] * chunks, prefixes=[8] * decodes)
    for tokens in (1, 2, 4, 8, 16, 32)
    for prefix in (0, 8, 64)
    for chunks in (0, 1, 2)
    for decodes in (0, 1)
    if chunks + decodes
]
LIMITS = WorkerLimits(num_blocks=24, block_size=4, page_size=8, max_step_tokens=32, max_batch=4)
FIRST = request("first", prompt=20, max_tokens=13)
PLAIN = Policy(SchedulerName.FCFS, Chunking.FIXED, Room.GROWING)
TURN = replace(request("turn", max_tokens=2), prompt=(*FIRST.prompt, *[7] * 13, 50, 51))  # goes on where it ended


@dataclass
class Pair:
    """A decode worker and its pool. Messages between them arrive at once; what the worker orders waits for `works`."""

    core: DecodeCore
    pool: PoolCore
    work: list[Command] = field(default_factory=list)
    said: list[object] = field(default_factory=list)  # by either
    ran: Counter[str] = field(default_factory=Counter)  # request -> prompt tokens that were computed
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    delays: Callable[[object], bool] = field(default=lambda _message: False)  # whether a message of the pool is held
    held: list[tuple[str, Message]] = field(default_factory=list)
    now: float = 0.0

    def asks(self, *requests: Request) -> None:
        for asked in requests:
            self.hears(Received(ROUTER, Prefill(replace(asked, arrival_at=self.now)), 1))

    def hears(self, event: Event, by: str = "decode-0") -> None:
        core = self.core if by == "decode-0" else self.pool
        for command in core.handle(event, self.now):
            match command:
                case Send(to, message):
                    self.said.append(message)
                    self._send(by, to, message)
                case RunStep() | CopyIn() | CopyOut():
                    self.work.append(command)
                case SetTimer():
                    self.said.append(command)

    def _send(self, by: str, to: str, message: Message) -> None:
        if isinstance(message, Tokens):
            for output in message.outputs:
                self.outputs.setdefault(output.request, []).append(output)
        if to == "pool-0" or (to == "decode-0" and not self.delays(message)):
            self.hears(Received(by, message, 1), to)
        elif to == "decode-0":
            self.held.append((by, message))

    def lets_go(self) -> None:
        """Let the messages arrive that were held."""
        self.delays = lambda _message: False
        held, self.held = self.held, []
        for by, message in held:
            self.hears(Received(by, message, 1))

    def works(self, intact: bool = True) -> Command:
        """Do one piece of work."""
        self.now += 0.001
        command = self.work.pop(0)
        match command:
            case RunStep(plan):
                for chunk in plan.chunks:
                    self.ran[chunk.request] += len(chunk.tokens)
                parts = (*plan.parts, *plan.draws)
                sampled = [(part.request, 7) for part in parts if part.sampling is not None]
                self.hears(StepDone(StepResult(plan.number, tuple(sampled)), 0.01))
            case CopyIn(number):
                self.hears(CopiedIn(number, intact))
            case CopyOut(number):
                self.hears(CopiedOut(number))
        return command

    def until_idle(self) -> None:
        for _ in range(500):
            if not self.work:
                return
            self.works()
        raise AssertionError("it does not come to an end")

    def count(self, request: str) -> int:
        return sum(len(output.tokens) for output in self.outputs.get(request, ()))

    def cached(self, request: str) -> int:
        return (self.outputs[request][0].opening or NO_OPENING).num_cached


def pair(
    policy: Policy = DEFAULT_POLICY,
    pages: int = 60,
    limits: WorkerLimits = LIMITS,
    copying: CopyCost = FREE_COPIES,
    token_s: float | None = None,
    copies_beside: bool = False,
    direct: bool = False,
) -> Pair:
    """`token_s` is what a prompt token takes by the cost model, where that knows any times."""
    cost = None if token_s is None else cost_of([Point(shape, token_s * shape.tokens) for shape in SHAPES])
    setup = WorkerSetup(limits, policy, cost, copying, root=b"model", direct=direct, copies_beside=copies_beside)
    made = Pair(decode_core(setup), PoolCore(pages, limits.block_size, policy))
    made.hears(MemberJoined(member("decode-0")), "pool-0")
    made.hears(MemberJoined(POOL_MEMBER))
    return made


def be(of: Request) -> Request:
    return replace(of, service=ServiceClass.BE)


def unlike(of: Request, number: int) -> Request:
    """Return the request with a prompt that begins as no other does."""
    return replace(of, prompt=tuple(token + 100 * number for token in of.prompt))


def have_written_over(worker: Pair) -> None:
    """Run a prompt that takes the whole device."""
    worker.asks(unlike(request("large", prompt=95, max_tokens=1), 9))
    worker.until_idle()


class TestHandingOn:
    """A prefill worker that decodes: a request for which a decode worker was named goes there."""

    @pytest.mark.parametrize("service", ServiceClass)
    def test_it_decodes_until_its_prompt_is_in_the_pool_and_goes_on_elsewhere(self, service: ServiceClass) -> None:
        worker, long = pair(), replace(FIRST, max_tokens=60, service=service)
        worker.hears(MemberJoined(member("decode-1")), "pool-0")
        worker.hears(Received(ROUTER, Prefill(long, "decode-1"), 1))
        worker.until_idle()
        (commit,) = [message for message in worker.said if isinstance(message, Commit)]
        assert commit.to == "decode-1"
        assert 1 < len(commit.entry.output) == worker.count("first") < 60, "it has told what it made before it left"
        (batch,) = [message for message in worker.said if isinstance(message, Batch)]
        assert batch.entries[0].output == commit.entry.output
        assert not worker.core.here.attempts()
        assert worker.core.memory.num_free == LIMITS.num_blocks
        assert num_preemptions(worker.core) == 0
        assert [message.returned for message in worker.said if isinstance(message, Progress) if message.returned] == [
            (("first", 0),)
        ]

    def test_one_that_had_to_leave_goes_on_wherever_there_is_room(self) -> None:
        """It was to go to a decode worker that had room when its prompt came."""
        worker = pair(limits=replace(LIMITS, num_blocks=12))
        worker.hears(MemberJoined(member("decode-1")), "pool-0")
        worker.hears(Received(ROUTER, Prefill(be(replace(FIRST, max_tokens=28)), "decode-1"), 1))
        while not worker.count("first"):
            worker.works()
        worker.asks(unlike(request("chat", prompt=40, max_tokens=8), 3))
        worker.until_idle()
        assert worker.count("chat") == 8
        assert worker.count("first") == 28 or [message.to for message in worker.said if isinstance(message, Commit)]

    def test_one_without_a_name_stays(self) -> None:
        worker = pair()
        worker.asks(FIRST)
        worker.until_idle()
        assert worker.count("first") == 13
        assert not [message for message in worker.said if isinstance(message, Commit)]


class TestWhatThePoolHas:
    def test_the_next_turn_finds_prompt_and_answer(self) -> None:
        worker = pair()
        worker.asks(FIRST)
        worker.until_idle()
        have_written_over(worker)
        worker.asks(TURN)
        worker.until_idle()
        assert (worker.ran["first"], worker.ran["turn"]) == (20, len(TURN.prompt) - 32)
        assert (worker.cached("first"), worker.cached("turn")) == (0, 32)
        assert worker.core.seats.num_reused_tokens == 32

    @pytest.mark.parametrize("policy", [DEFAULT_POLICY, PLAIN])
    def test_what_two_prompts_find_is_copied_once(self, policy: Policy) -> None:
        worker = pair(policy)
        worker.asks(FIRST)
        worker.until_idle()
        have_written_over(worker)
        worker.asks(unlike(request("other", prompt=5, max_tokens=1), 5))
        worker.asks(TURN, replace(TURN, id="alike"))  # while a step runs
        worker.until_idle()
        assert worker.core.seats.num_reused_tokens == 32
        assert worker.cached("turn") == worker.cached("alike") == 32
        assert worker.count("turn") == worker.count("alike") == 2

    def test_a_prompt_is_found_while_its_request_decodes(self) -> None:
        worker = pair()
        worker.asks(FIRST)
        while worker.pool.pages.num_stored < 2:
            worker.works()
        worker.asks(replace(FIRST, id="alike"))
        worker.until_idle()
        assert worker.cached("alike") == 16
        assert worker.count("first") == worker.count("alike") == 13

    def test_pages_that_are_not_intact_are_computed_anew_and_the_pool_hears_of_them(self) -> None:
        worker = pair()
        worker.asks(FIRST)
        worker.until_idle()
        have_written_over(worker)
        worker.asks(TURN)
        assert isinstance(worker.works(intact=False), CopyIn)
        worker.until_idle()
        assert (worker.ran["turn"], worker.cached("turn"), worker.count("turn")) == (len(TURN.prompt), 0, 2)
        assert [len(message.pages) for message in worker.said if isinstance(message, Spoiled)] == [4]
        assert worker.core.seats.num_spoiled_pages == 4

    @pytest.mark.parametrize("beside", [False, True])
    @pytest.mark.parametrize("copied_s", [1e-5, 9e-4])
    def test_prompts_whose_beginning_is_copied_do_not_keep_the_worker_busy(self, copied_s: float, beside: bool) -> None:
        """The router hears of what is to be computed, and of the time of copies: of the longer where they overlap."""
        worker = pair(copying=CopyCost(copied_s), token_s=1e-3, copies_beside=beside)
        worker.asks(FIRST)
        worker.until_idle()
        have_written_over(worker)
        worker.asks(unlike(request("other", prompt=5, max_tokens=1), 5))
        worker.asks(*(replace(TURN, id=f"turn-{number}") for number in range(4)))  # while a step runs
        worker.hears(MemberJoined(ROUTER_MEMBER))
        told = [message.backlog for message in worker.said if isinstance(message, Progress)][-1]
        computing_s, copies_s = (5 + 4 * 3) * told.loaded_token_s, 4 * 32 * copied_s
        expected = max(computing_s, copies_s) if beside else computing_s + copies_s
        assert told.prompts_s == told.rt_prompts_s == pytest.approx(expected)
        assert told.copying == CopyCost(copied_s)

    def test_a_step_waits_a_moment_for_the_word_on_a_chat_but_on_no_document(self) -> None:
        for asked, waits in ((TURN, True), (be(TURN), False)):
            worker = pair()
            worker.asks(FIRST)
            worker.works()  # its prompt: a decode comes next
            worker.delays = lambda message: isinstance(message, Prefix)
            worker.asks(asked)
            while worker.work:
                worker.works()
                if worker.work and isinstance(worker.work[0], RunStep):
                    break
            assert bool(worker.work) is not waits
            worker.lets_go()
            worker.until_idle()
            assert worker.count("turn") == 2

    def test_a_prompt_that_is_cancelled_while_it_is_fetched_leaves_nothing(self) -> None:
        worker = pair()
        worker.asks(FIRST)
        worker.until_idle()
        have_written_over(worker)
        worker.asks(TURN)
        worker.hears(Received(ROUTER, Cancel("turn", 0), 1))
        worker.until_idle()
        assert worker.core.held | {"outputs": 0} == dict.fromkeys(worker.core.held, 0)
        assert worker.pool.held["entries"] == 0


def test_what_is_fetched_has_its_blocks_though_no_layer_reads_all_of_it() -> None:
    core = decode_core(WorkerSetup(replace(LIMITS, reach=8), DEFAULT_POLICY))
    core.handle(MemberJoined(POOL_MEMBER), 0.0)
    core.handle(said(ROUTER, Prefill(request("long", prompt=50))), 0.0)
    told = core.handle(said("pool-0", Prefix("long", 0, (0, 1, 2, 3, 4, 5))), 0.0)
    assert [len(command.blocks) for command in told if isinstance(command, CopyIn)] == [12]


def test_a_candidate_copies_only_what_the_device_lacks() -> None:
    core = decode_core(WorkerSetup(LIMITS, root=b"model"))
    core.handle(MemberJoined(POOL_MEMBER), 0.0)
    copies = list[CopyIn]()
    for name, pages in (("one", (1, 2, 3)), ("two", (4, 5, 6))):
        joins = core.handle(said("pool-0", Batch((entry(replace(FIRST, id=name), pages),))), 0.0)
        (copy,) = [command for command in joins if isinstance(command, CopyIn)]
        copies.append(copy)
        (plan,) = [step.plan for step in core.handle(CopiedIn(copy.number, True), 0.0) if isinstance(step, RunStep)]
        core.handle(StepDone(StepResult(plan.number, tuple((part.request, STOP) for part in plan.parts))), 0.0)
    assert [(copy.pages, copy.start) for copy in copies] == [((1, 2, 3), 0), ((6,), 16)]
    assert copies[0].blocks[:4] == copies[1].blocks[:4]


class TestWhatIsQuicker:
    """A worker copies what the pool has of a prompt where that takes less time than computing it."""

    @staticmethod
    def of_next_turn(copying: CopyCost, num_before: int = 95) -> Pair:
        """Run a request, then a prompt of so many tokens that takes its blocks from the last on, then the next turn."""
        worker = pair(copying=copying, token_s=1e-4)
        worker.asks(FIRST)
        worker.until_idle()
        worker.asks(unlike(request("before", prompt=num_before, max_tokens=1), 9))
        worker.until_idle()
        worker.asks(TURN)
        worker.until_idle()
        assert worker.count("turn") == 2
        assert worker.core.held | {"outputs": 0} == dict.fromkeys(worker.core.held, 0)
        return worker

    def test_a_copy_that_takes_less_time_is_made(self) -> None:
        worker = self.of_next_turn(CopyCost(token_s=5e-5))
        assert (worker.cached("turn"), worker.core.seats.num_reused_tokens) == (32, 32)

    def test_what_a_slow_link_would_bring_is_computed(self) -> None:
        worker = self.of_next_turn(CopyCost(token_s=5e-4))
        assert (worker.ran["turn"], worker.cached("turn")) == (len(TURN.prompt), 0)

    def test_a_copy_that_takes_a_while_to_begin_is_made_only_of_many_tokens(self) -> None:
        slow_to_begin = CopyCost(fixed_s=2e-3)
        whole, rest = self.of_next_turn(slow_to_begin), self.of_next_turn(slow_to_begin, num_before=70)
        assert (whole.cached("turn"), whole.core.seats.num_reused_tokens) == (32, 32)
        assert 16 < rest.cached("turn") < 32
        assert rest.core.seats.num_reused_tokens == 0
        assert rest.ran["turn"] == len(TURN.prompt) - rest.cached("turn")


class TestWhatLeaves:
    """Two documents grow until one has to leave: with pages at hand nothing is computed twice."""

    TIGHT = replace(LIMITS, num_blocks=14)
    LONG = (be(request("one", prompt=20, max_tokens=20)), be(unlike(request("two", prompt=20, max_tokens=20), 1)))

    def test_it_comes_back_from_the_pool_as_it_was(self) -> None:
        worker = pair(limits=self.TIGHT)
        worker.asks(*self.LONG)
        worker.until_idle()
        assert num_evictions(worker.core) > 0
        assert worker.ran == Counter(one=20, two=20)
        assert worker.count("one") == worker.count("two") == 20

    def test_several_that_leave_at_once_come_back_as_they_were(self) -> None:
        """Chats take the memory of several documents before the pool can answer another ask for pages."""
        worker = pair(limits=replace(LIMITS, num_blocks=64, max_batch=24), pages=200)
        documents = [be(unlike(request(f"document{at}", prompt=9, max_tokens=8), at)) for at in range(16)]
        worker.asks(*documents)
        while worker.core.memory.free_share > 0.1:
            worker.works()
        chats = [unlike(request(f"chat{at}", prompt=24, max_tokens=2), 20 + at) for at in range(3)]
        worker.asks(*chats)
        worker.until_idle()
        assert num_evictions(worker.core) > 2
        assert worker.ran == Counter({asked.id: len(asked.prompt) for asked in (*documents, *chats)})

    def test_it_goes_on_from_full_pages_where_there_are_too_few_for_all(self) -> None:
        few = pair(limits=self.TIGHT, pages=4)
        few.asks(*self.LONG)
        few.until_idle()
        none = pair(limits=self.TIGHT, policy=Policy(evict=False, reuse=False))
        none.asks(*self.LONG)
        none.until_idle()
        assert num_preemptions(few.core) > num_evictions(few.core)
        assert 40 < few.ran.total() < none.ran.total()
        assert few.count("one") == few.count("two") == 20

    def test_a_document_in_the_midst_of_its_prompt_gives_way_to_a_chat_and_goes_on_from_there(self) -> None:
        worker = pair(limits=replace(LIMITS, num_blocks=14, max_step_tokens=16))
        worker.asks(be(request("document", prompt=50, max_tokens=2)))
        while worker.ran["document"] < 32:
            worker.works()
        worker.asks(unlike(request("chat", prompt=20, max_tokens=4), 1))
        worker.until_idle()
        assert num_preemptions(worker.core) == 1
        assert worker.ran["document"] < 50 + 8 + 16, "at most a part of a page is computed again"
        assert worker.cached("document") == 0, "what it finds when it comes back was computed for it"
        assert worker.count("document") == 2

    @pytest.mark.parametrize("reuse", [True, False])
    def test_it_comes_back_from_the_same_pages_however_often_chats_take_its_place(self, reuse: bool) -> None:
        """The second chat comes while the document is copied back: no token runs that the pool lacks."""
        policy, limits = replace(DEFAULT_POLICY, reuse=reuse), replace(LIMITS, num_blocks=14, max_step_tokens=16)
        worker = pair(policy, limits=limits, copies_beside=True)
        worker.asks(be(request("document", prompt=50, max_tokens=2)))
        while worker.ran["document"] < 32:
            worker.works()
        worker.asks(unlike(request("chat", prompt=40, max_tokens=4), 1))
        while not any(isinstance(command, CopyIn) for command in worker.work):
            worker.works()
        worker.asks(unlike(request("second", prompt=40, max_tokens=4), 2))
        worker.until_idle()
        assert num_preemptions(worker.core) == 2
        assert worker.ran == Counter(document=50, chat=40, second=40)
        assert worker.count("document") == 2

    def test_new_documents_do_not_pass_it_for_ever(self) -> None:
        worker = pair(limits=self.TIGHT)
        worker.asks(self.LONG[0])
        for number in range(160):
            worker.asks(be(unlike(request(f"new{number}", prompt=8, max_tokens=4), number + 2)))
        while worker.count("one") < 20:
            worker.works()
        assert num_evictions(worker.core) > 0
        assert sum(worker.count(f"new{number}") < 4 for number in range(160)) > 10
        worker.until_idle()

    def test_nothing_is_held_at_the_end(self) -> None:
        worker = pair(limits=self.TIGHT, pages=8)
        worker.asks(*self.LONG, FIRST, TURN, *(be(request(f"new{number}", prompt=9)) for number in range(5)))
        worker.until_idle()
        assert {what for what, count in worker.core.held.items() if count} <= {"outputs"}
        assert worker.pool.held["entries"] == 0
        leased = [message for message in worker.said if isinstance(message, LeasePages)]
        assert leased
        assert worker.pool.num_lent_pages == len(worker.core.leased_pages)


def test_a_step_is_shorter_by_the_copies_that_come_before_it() -> None:
    """A document leaves for a chat's next token: the copy of it and the step fit between two tokens together."""
    writer = pair(limits=replace(LIMITS, num_blocks=14))
    core = writer.core
    writer.asks(*TestWhatLeaves.LONG)
    while not num_evictions(core):
        assert core.pool_link.writer.num_between_steps == 0
        writer.works()
    assert core.pool_link.writer.num_between_steps > 0
    writer.until_idle()
    assert core.pool_link.writer.num_between_steps == 0
