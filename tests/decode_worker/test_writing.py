"""Writes of a decode worker to the pool: preempted requests and answers, only missing pages, without waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from alignedserve.core import CopyCost, Entry, Request, ServiceClass, StepPlan, StepResult, WorkerLimits
from alignedserve.cost.fit import Point
from alignedserve.cost.model import Shape
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.lab.fuzzing.worker_views import num_evictions, num_preemptions
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, RunStep, Send
from alignedserve.protocol.events import (
    CopiedIn,
    CopiedOut,
    Event,
    KvReceived,
    MemberJoined,
    MemberLost,
    StepDone,
    TimerFired,
)
from alignedserve.protocol.messages import (
    ROUTER,
    AskBatch,
    AskPages,
    Batch,
    Cancel,
    Commit,
    GiveBack,
    Inquire,
    Keep,
    Kept,
    LeasePages,
    Message,
    Offer,
    Prefill,
    Prefix,
    Progress,
    Release,
    Report,
    Spoiled,
    Tokens,
)
from alignedserve.protocol.page_names import chained_hashes
from alignedserve.scheduling.policy import Policy, Room
from alignedserve.worker.part import REFRESH_S
from alignedserve.worker.pool import CROSSING_S
from alignedserve.worker.setup import WorkerSetup
from tests.cost.fitted import cost_of
from tests.samples import LIMITS, POOL_MEMBER, ROUTER_MEMBER, member, request, said

PREFILL = replace(member("prefill-0"), transport="there")
ROOT, PAGE = b"model ", LIMITS.page_size
A, B = request("a", prompt=9, max_tokens=12), request("b", prompt=9, max_tokens=12)
ROOMY = replace(LIMITS, num_blocks=32, max_batch=4)
TIGHT = replace(LIMITS, num_blocks=6)  # three blocks for each request, and no block for a thirteenth token


def entry(of: Request, *pages: int) -> Entry:
    return Entry(of, (7,), pages, names=chained_hashes(of.prompt[:PAGE], PAGE, ROOT))


Kind = TypeVar("Kind", bound=Command)


class Engine:
    """Run what the core orders, with token 7 wherever one is sampled, and keep the messages that the core sends."""

    def __init__(self, core: DecodeCore) -> None:
        self.core, self.said, self.work = core, list[Command](), list[Command]()

    def tell(self, *commands: Command) -> list[Command]:
        self.said += [command for command in commands if isinstance(command, Send)]
        self.work += [command for command in commands if not isinstance(command, Send)]
        return list(commands)

    def hears(self, event: Event) -> list[Command]:
        return self.tell(*self.core.handle(event, 0.0))

    def works(self) -> None:
        """Do one piece of work."""
        match self.work.pop(0):
            case RunStep(StepPlan(number=number) as plan):
                sampled = tuple((part.request, 7) for part in plan.parts if part.sampling is not None)
                self.hears(StepDone(StepResult(number, sampled), 0.001))
            case CopyIn(number):
                self.hears(CopiedIn(number, intact=True))
            case CopyOut(number):
                self.hears(CopiedOut(number))

    def until(self, kind: type[Kind]) -> Kind:
        """Work until the next work is of this kind, and return it undone."""
        for _ in range(100):
            if found := [command for command in self.work if isinstance(command, kind)]:
                return found[0]
            self.works()
        raise AssertionError(f"no {kind.__name__} in a hundred pieces of work")

    def heard(self, kind: type) -> list[object]:
        return [
            command.message for command in self.said if isinstance(command, Send) and isinstance(command.message, kind)
        ]


def engine(policy: Policy, *, pages: tuple[int, ...], limits: WorkerLimits = TIGHT) -> Engine:
    """Return an engine with A and B resident, and these pages leased, or as many of them as the worker asks for."""
    core = decode_core(WorkerSetup(limits, policy, root=ROOT))
    made = Engine(core)
    made.hears(MemberJoined(POOL_MEMBER))
    made.hears(said("pool-0", Batch((entry(A, 1, 2), entry(B, 3, 4)))))
    while not (asked := made.heard(AskPages)) and policy.reuse:
        made.works()
    for ask in asked[:1]:
        assert isinstance(ask, AskPages)
        assert ask.is_spare
        made.hears(said("pool-0", LeasePages(pages[: ask.pages], ask.number)))
    return made


GROWING = Policy(room=Room.GROWING)
SHARED = replace(GROWING, memory="two_ended")


class TestWhoHasToLeave:
    def test_goes_back_to_the_pool_which_gets_only_what_it_lacks(self) -> None:
        worker = engine(GROWING, pages=(20, 21))
        copy = worker.until(CopyOut)
        assert isinstance(copy, CopyOut)
        tokens = (*B.prompt, 7, 7, 7)
        assert (copy.pool, copy.pages, copy.tokens, copy.start) == ("pool-0.1", (20,), tokens, PAGE)
        step = worker.work[worker.work.index(copy) + 1]
        assert isinstance(step, RunStep)
        assert [decode.request for decode in step.plan.decodes] == ["a"]
        assert set(step.plan.decodes[0].kv.blocks) & set(copy.blocks), "what is written there comes after the copy"
        worker.works()
        (commit,) = worker.heard(Commit)
        assert isinstance(commit, Commit)
        assert (commit.num_known, commit.entry.pages, commit.entry.output) == (1, (3, 20), (7, 7, 7, 7))
        assert commit.entry.names == chained_hashes(tokens[:PAGE], PAGE, ROOT)
        assert any(
            message.returned == (("b", 0),) for message in worker.heard(Progress) if isinstance(message, Progress)
        )
        assert num_evictions(worker.core) == 1
        assert not worker.heard(Release), "the pool keeps its first page for it"

    def test_is_not_followed_by_others_before_somebody_ends(self) -> None:
        """The ask for room is withdrawn before the pool has another request to give."""
        worker = engine(GROWING, pages=(20, 21), limits=replace(TIGHT, num_blocks=7, max_batch=3))
        worker.until(CopyOut)
        assert not worker.heard(Commit)
        assert (1, 1) in self.rooms(worker)
        (*_, withdrawn) = worker.heard(AskBatch)
        assert isinstance(withdrawn, AskBatch)
        assert (withdrawn.requests, withdrawn.wants_batch, withdrawn.ahead) == (0, False, 0)
        while not worker.heard(Release) and not worker.heard(Keep):
            assert self.rooms(worker)[-1] == (0, 0)
            worker.works()
        assert self.rooms(worker)[-1] == (7, 3)

    def rooms(self, worker: Engine) -> list[tuple[int, int]]:
        return [
            (message.blocks, message.requests) for message in worker.heard(AskBatch) if isinstance(message, AskBatch)
        ]

    def test_is_recomputed_where_no_page_is_at_hand(self) -> None:
        worker = engine(GROWING, pages=())
        while not num_preemptions(worker.core):
            worker.works()
        assert num_evictions(worker.core) == 0
        assert not worker.heard(Commit)
        assert worker.core.held["requests"] == 2
        assert isinstance(worker.work[0], RunStep), "it waits for nothing"
        while worker.work:
            worker.works()
        assert worker.core.held["requests"] == 0, "not for what the pool knows of it either"

    @pytest.mark.parametrize("policy", [GROWING, SHARED])
    def test_is_recomputed_where_the_pool_dies_before_it_has_it(self, policy: Policy) -> None:
        worker = engine(policy, pages=(20,))
        worker.until(CopyOut)
        worker.hears(MemberLost(POOL_MEMBER))
        while worker.work:
            worker.works()
        assert not worker.heard(Commit)
        assert worker.core.held == {"requests": 0, "blocks": 0, "pages": 0, "outputs": 2}
        assert not worker.core.leased_pages

    @pytest.mark.parametrize("is_on_its_way", [True, False])
    def test_goes_to_a_pool_that_has_started_again_as_a_whole(self, is_on_its_way: bool) -> None:
        worker = engine(GROWING, pages=(20,) if is_on_its_way else ())
        if is_on_its_way:
            worker.until(CopyOut)
        worker.hears(MemberLost(POOL_MEMBER))
        while is_on_its_way and any(isinstance(command, CopyOut) for command in worker.work):
            worker.works()
        worker.hears(MemberJoined(replace(POOL_MEMBER, incarnation=2)))
        num_asks = len(worker.heard(AskPages))
        worker.works()
        while len(asked := worker.heard(AskPages)) == num_asks:
            worker.works()
        assert isinstance(asked[-1], AskPages)
        worker.hears(said("pool-0", LeasePages((30, 31), asked[-1].number), 2))
        copy = worker.until(CopyOut)
        assert isinstance(copy, CopyOut)
        assert (copy.pool, copy.pages[0], copy.start) == ("pool-0.2", 31, 0)

    def test_and_is_cancelled_leaves_nothing_but_a_page_at_hand(self) -> None:
        worker = engine(GROWING, pages=(20,))
        worker.until(CopyOut)
        assert Send("pool-0", Release("b", 0)) in worker.hears(said(ROUTER, Cancel("b", 0)))
        worker.works()
        assert not worker.heard(Commit)
        assert worker.core.leased_pages == (20,)

    def test_is_here_until_the_pool_has_it(self) -> None:
        worker = engine(GROWING, pages=(20,))
        worker.until(CopyOut)
        asked = said("pool-0", Inquire((("b", 0),)))
        assert Send("pool-0", Release("b", 0)) not in worker.hears(asked)
        worker.works()
        answered = worker.core.handle(asked, CROSSING_S + 0.1)
        assert Send("pool-0", Release("b", 0)) in answered, "its Commit may have been lost"

    @pytest.mark.parametrize(
        "said_before",
        [Inquire((("b", 0),)), Kept("b", 0, (3,)), Prefix("b", 0, (3,))],
        ids=["asked", "kept", "of its prompt"],
    )
    def test_and_what_the_pool_said_before_is_not_answered(self, said_before: Message) -> None:
        """It may have handed the request out again by then: a Release would free pages that are being read. Found by
        `alignedserve fuzz --seed 940014408`."""
        worker = engine(GROWING, pages=(20,))
        worker.until(CopyOut)
        worker.works()
        assert worker.heard(Commit)
        assert worker.hears(said("pool-0", said_before)) == []


def test_pages_of_a_copy_that_was_not_intact_are_named_to_the_pool() -> None:
    worker = Engine(decode_core(WorkerSetup(TIGHT, GROWING, root=ROOT)))
    worker.hears(MemberJoined(POOL_MEMBER))
    worker.hears(said("pool-0", Batch((entry(A, 1, 2),))))
    copy = worker.until(CopyIn)
    assert isinstance(copy, CopyIn)
    worker.hears(CopiedIn(copy.number, intact=False))
    assert worker.heard(Spoiled) == [Spoiled((1,))]


class TestAnswers:
    def ended(self, worker: Engine) -> Engine:
        while len(worker.heard(Release)) + len(worker.heard(Keep)) < 2:
            worker.works()
        return worker

    def test_are_kept_from_where_the_pool_has_them_to_their_last_full_page(self) -> None:
        worker = engine(Policy(room=Room.WHOLE), pages=(20,))
        copy = worker.until(CopyOut)
        assert isinstance(copy, CopyOut)
        tokens = (*A.prompt, *[7] * 7)
        assert (copy.pages, copy.tokens, copy.start) == ((20,), tokens, PAGE)
        names = chained_hashes(tokens, PAGE, ROOT)
        assert worker.hears(said("pool-0", Inquire((("a", 0),)))) == [], "the pool will hear of it"
        self.ended(worker)
        assert Keep("a", 0, 1, (20,), names[1:]) in worker.heard(Keep)
        assert worker.core.held["pages"] == 0

    def test_beside_the_steps_where_no_request_waits_for_their_blocks(self) -> None:
        worker = self.of_two(num_blocks=12)
        copy = worker.until(CopyOut)
        assert isinstance(copy, CopyOut)
        assert copy.aside
        held = worker.core.held["blocks"]
        assert not worker.heard(Keep)
        worker.works()  # the step
        worker.works()  # the copy
        assert [type(message) for message in worker.heard(Keep)] == [Keep]
        assert worker.core.held["blocks"] < held, "it kept its blocks until then"

    def test_that_wait_for_their_copies_never_hold_all_memory(self) -> None:
        """Copies beside steps may be slower than documents end: they had all blocks then, and no document began."""
        worker = Engine(decode_core(WorkerSetup(replace(LIMITS, num_blocks=24), copies_beside=True, root=ROOT)))
        for neighbour in (POOL_MEMBER, ROUTER_MEMBER):
            worker.hears(MemberJoined(neighbour))
        documents = [
            replace(request(f"d{at}"), prompt=tuple(range(99 * at, 99 * at + 17)), service=ServiceClass.BE)
            for at in range(12)
        ]
        for document in documents:
            worker.hears(said(ROUTER, Prefill(document)))
            worker.hears(said("pool-0", Prefix(document.id, 0, ())))
        answered = 0
        for _ in range(200):
            asked = [message for message in worker.heard(AskPages) if isinstance(message, AskPages)]
            if len(asked) > answered:
                answered, last = len(asked), asked[-1]
                worker.hears(said("pool-0", LeasePages(tuple(range(100 * answered, 100 * answered + 4)), last.number)))
            if (step := next((work for work in worker.work if isinstance(work, RunStep)), None)) is None:
                break
            worker.work.remove(step)  # and its copies go on and on
            tokens = tuple((part.request, 7) for part in step.plan.parts if part.sampling is not None)
            worker.hears(StepDone(StepResult(step.plan.number, tokens), 0.01))
        told = [message for message in worker.heard(Tokens) if isinstance(message, Tokens)]
        ended = {output.request for tokens in told for output in tokens.outputs if output.finish}
        assert len(ended) == len(documents)

    def test_beside_the_steps_are_forgotten_with_the_pool(self) -> None:
        worker = self.of_two(num_blocks=12)
        worker.until(CopyOut)
        worker.hears(MemberLost(POOL_MEMBER))
        while worker.work:
            worker.works()
        assert not worker.heard(Keep)
        assert worker.core.held == {"requests": 0, "blocks": 0, "pages": 0, "outputs": 2}
        assert not worker.core.leased_pages

    def test_after_the_step_that_is_due_where_memory_is_short(self) -> None:
        worker = self.of_two(num_blocks=9)
        copy = worker.until(CopyOut)
        assert isinstance(copy, CopyOut)
        assert not copy.aside
        assert list(map(type, worker.work)) == [RunStep, CopyOut]

    def test_leave_their_blocks_at_once_to_the_request_that_waits(self) -> None:
        worker = engine(Policy(room=Room.WHOLE), pages=(20,))
        worker.until(CopyOut)
        assert list(map(type, worker.work)) == [CopyOut, CopyIn]

    def test_not_where_the_next_step_would_be_late(self) -> None:
        worker = self.of_two(num_blocks=9, copy_token_s=1.0)
        while not worker.heard(Release):
            worker.works()
        assert worker.heard(Release) == [Release("short", 0)]
        worker.until(CopyOut)  # the copy of the other request: there is no request left that could be late

    def test_of_those_that_end_together_as_many_as_leave_the_others_in_time(self) -> None:
        """The copies come one after the other, and the next step after both."""
        worker = self.of_two(num_blocks=14, copy_token_s=A.slo.tbt_s / PAGE / 1.5, shorts=2)
        while not worker.heard(Release):
            worker.works()
        assert worker.heard(Release) == [Release("short1", 0)]
        assert sum(isinstance(work, CopyOut) for work in worker.work) == 1

    def of_two(self, num_blocks: int, copy_token_s: float = 0.0, shorts: int = 1) -> Engine:
        """Return an engine with a request, and one or `shorts` that end before it."""
        short = [replace(B, id="short" if not number else f"short{number}", max_tokens=8) for number in range(shorts)]
        tight = replace(LIMITS, num_blocks=num_blocks, max_batch=1 + shorts)
        setup = WorkerSetup(tight, Policy(room=Room.WHOLE), copying=CopyCost(copy_token_s), root=ROOT)
        worker = Engine(decode_core(setup))
        worker.hears(MemberJoined(POOL_MEMBER))
        pages = ((2 * number + 3, 2 * number + 4) for number in range(shorts))
        joining = [entry(each, *its) for each, its in zip(short, pages, strict=True)]
        worker.hears(said("pool-0", Batch((entry(A, 1, 2), *joining))))
        while not (asked := worker.heard(AskPages)):
            worker.works()
        assert isinstance(asked[0], AskPages)
        worker.hears(said("pool-0", LeasePages((20, 21)[:shorts], asked[0].number)))
        return worker

    def test_are_kept_from_the_last_full_page_of_a_copy_that_the_pool_was_given_later(self) -> None:
        """The prompt has nine tokens: the ninth is in a page that the answer fills."""
        worker = Engine(decode_core(WorkerSetup(LIMITS, Policy(room=Room.WHOLE), direct=True, root=ROOT)))
        for neighbour in (POOL_MEMBER, PREFILL):
            worker.hears(MemberJoined(neighbour))
        worker.hears(said("prefill-0", Offer(entry(A))))
        worker.hears(KvReceived(1, "prefill-0.1", intact=True))
        worker.hears(said("pool-0", Kept("a", 0, (5, 6))))
        while not (asked := worker.heard(AskPages)):
            worker.works()
        assert isinstance(asked[0], AskPages)
        worker.hears(said("pool-0", LeasePages((20,), asked[0].number)))
        copy = worker.until(CopyOut)
        assert isinstance(copy, CopyOut)
        assert (copy.pages, copy.start) == ((20,), PAGE)

    def test_not_without_reuse(self) -> None:
        worker = self.ended(engine(Policy(reuse=False, room=Room.WHOLE), pages=()))
        assert len(worker.heard(Release)) == 2
        assert not worker.heard(AskPages)

    def test_not_without_a_page_at_hand(self) -> None:
        worker = self.ended(engine(Policy(room=Room.WHOLE), pages=()))
        assert len(worker.heard(Release)) == 2

    def test_not_of_what_the_pool_does_not_have(self) -> None:
        worker = engine(Policy(room=Room.WHOLE), pages=(20,))
        worker.hears(MemberLost(POOL_MEMBER))
        worker.hears(MemberJoined(POOL_MEMBER))
        ask = worker.heard(AskPages)[-1]
        assert isinstance(ask, AskPages)
        worker.hears(said("pool-0", LeasePages((30, 31), ask.number)))
        while worker.work:
            worker.works()
        assert not worker.heard(Keep)
        assert worker.core.leased_pages == (30, 31)

    def test_are_evicted_here_before_what_the_pool_lacks(self) -> None:
        """They can be copied back. What nobody else has is computed again."""
        costs = cost_of([Point(Shape.build([(size, start)]), 1e-3 * size) for size in (1, 16, 64) for start in (0, 32)])
        worker = Engine(decode_core(WorkerSetup(replace(LIMITS, num_blocks=12), Policy(), costs, root=ROOT)))
        for neighbour in (POOL_MEMBER, ROUTER_MEMBER):
            worker.hears(MemberJoined(neighbour))
        document = replace(A, max_tokens=8, service=ServiceClass.BE)
        self.start_of(worker, document)
        self.start_of(worker, replace(document, id="kept", prompt=tuple(range(100, 109))), pages=(20, 21))
        assert len(worker.heard(Keep)) == 1
        self.start_of(worker, replace(document, id="large", prompt=tuple(range(200, 220)), max_tokens=1))
        again = replace(document, id="again", prompt=(*A.prompt, *[7] * 8), max_tokens=1)
        assert self.start_of(worker, again) == 16

    def start_of(self, worker: Engine, document: Request, pages: tuple[int, ...] = ()) -> int:
        """Run a document that comes alone, and return the first token that was computed. Pages are at hand from its
        last step on."""
        worker.hears(said(ROUTER, Prefill(document)))
        worker.hears(said("pool-0", Prefix(document.id, 0, ())))
        starts = list[int]()
        while worker.work:
            match worker.work[0]:
                case RunStep(StepPlan(chunks=(chunk,))):
                    starts.append(chunk.start)
                case RunStep(StepPlan(decodes=(decode,))) if pages and decode.index == document.max_tokens - 1:
                    ask = worker.heard(AskPages)[-1]
                    assert isinstance(ask, AskPages)
                    worker.hears(said("pool-0", LeasePages(pages, ask.number)))
            worker.works()
        return starts[0]


class TestPagesAtHand:
    def test_pages_are_given_back_to_waiting_requests_and_asked_for_again(self) -> None:
        worker = engine(GROWING, pages=(20,))
        again = [AskPages(0, 2, (), is_spare=True), AskPages(1, 3, (), is_spare=True)]
        assert [
            command.message for command in worker.hears(said("pool-0", GiveBack())) if isinstance(command, Send)
        ] == again
        worker.hears(said("pool-0", LeasePages((9,), 2)))
        assert worker.core.leased_pages == (), "the answer to another ask"

    @pytest.mark.parametrize(("look_ahead", "num_tokens"), [(0, 15), (1, 14)])
    def test_one_is_asked_for_before_the_step_that_fills_it(self, look_ahead: int, num_tokens: int) -> None:
        """A worker that plans one step ahead asks one token earlier."""
        setup = WorkerSetup(ROOMY, Policy(room=Room.WHOLE), root=ROOT, look_ahead=look_ahead)
        worker = Engine(decode_core(setup))
        worker.hears(MemberJoined(POOL_MEMBER))
        worker.hears(said("pool-0", Batch((entry(A, 1, 2),))))
        while not worker.heard(AskPages):
            worker.works()
        assert worker.core.here.residents["a"].prefix == num_tokens

    def test_no_more_are_asked_for_than_the_pool_had(self) -> None:
        worker = engine(GROWING, pages=())
        worker.works()
        assert len(worker.heard(AskPages)) == 1

    def test_none_are_asked_for_what_a_request_has_dropped_behind_its_windows(self) -> None:
        worker = Engine(decode_core(WorkerSetup(replace(LIMITS, num_blocks=40, reach=8), GROWING, root=ROOT)))
        worker.hears(MemberJoined(POOL_MEMBER))
        worker.hears(said("pool-0", Batch((entry(replace(A, max_tokens=60), 1, 2),))))
        answered = 0
        while worker.work:
            for ask in (asked := worker.heard(AskPages))[answered:]:
                assert isinstance(ask, AskPages)
                worker.hears(said("pool-0", LeasePages((20 + answered,), ask.number)))
            answered = len(asked)
            worker.works()
        assert worker.core.leased_pages == (20, 21)

    def test_are_asked_for_as_a_whole_for_a_request_that_came_without_its_beginning(self) -> None:
        """The pool lets the pages of such a request go, and a later copy takes others."""
        worker = Engine(decode_core(WorkerSetup(replace(LIMITS, num_blocks=40, reach=12), GROWING, root=ROOT)))
        worker.hears(MemberJoined(POOL_MEMBER))
        long = request("long", prompt=26, max_tokens=40)
        worker.hears(said("pool-0", Batch((Entry(long, (7,), (1, 2), dropped=16),))))
        while not worker.heard(AskPages):
            worker.works()
        assert worker.heard(Release) == [Release("long", 0)]
        assert worker.heard(AskPages) == [AskPages(2, 1, (), is_spare=True)]

    def test_are_asked_for_several_requests_where_an_eighth_of_memory_may_be_taken_before_the_answer(self) -> None:
        """Of 77 blocks nine are an eighth, and five are free: five pages beside that of the request that has most."""
        limits = replace(LIMITS, num_blocks=77, max_batch=9)
        worker = Engine(decode_core(WorkerSetup(limits, GROWING, root=ROOT)))
        worker.hears(MemberJoined(POOL_MEMBER))
        long = [request(f"r{number}", prompt=30, max_tokens=40) for number in range(9)]
        worker.hears(said("pool-0", Batch(tuple(Entry(one, (7,), (1, 2, 3, 4)) for one in long))))
        while not worker.heard(AskPages):
            worker.works()
        assert worker.heard(AskPages) == [AskPages(6, 1, (), is_spare=True)]

    def test_are_for_the_prompt_first_whose_first_token_came_first(self) -> None:
        """Else short prompts that come one after the other would keep a long prompt out of the pool."""
        worker = Engine(decode_core(WorkerSetup(replace(LIMITS, num_blocks=64, max_step_tokens=64), root=ROOT)))
        for neighbour in (POOL_MEMBER, ROUTER_MEMBER):
            worker.hears(MemberJoined(neighbour))
        long, short = tuple(range(25)), tuple(range(100, 109))
        for name, prompt in (("long", long), ("short", short)):
            worker.hears(said(ROUTER, Prefill(replace(request(name, max_tokens=60), prompt=prompt))))
            worker.hears(said("pool-0", Prefix(name, 0, ())))
        written = list[tuple[int, ...]]()
        for pages in ((20, 21), (30, 31)):
            assert not written, "two pages are too few for the long one"
            for _ in range(5):
                worker.works()
            ask = worker.heard(AskPages)[-1]
            assert isinstance(ask, AskPages)
            commands = worker.hears(said("pool-0", LeasePages(pages, ask.number)))
            written += [command.tokens for command in commands if isinstance(command, CopyOut)]
        assert written == [long[: 3 * PAGE], short[:PAGE]]

    def test_an_ask_or_an_answer_that_was_lost_is_said_again(self) -> None:
        core = decode_core(WorkerSetup(TIGHT, GROWING, root=ROOT))
        worker = Engine(core)
        worker.hears(MemberJoined(POOL_MEMBER))
        worker.hears(said("pool-0", Batch((entry(A, 1, 2),))))
        while not worker.heard(AskPages):
            worker.works()
        told = core.handle(TimerFired("refresh"), REFRESH_S)
        assert Send("pool-0", AskPages(1, 2, (), is_spare=True)) in told


@pytest.mark.parametrize("policy", [Policy(room=Room.WHOLE), GROWING])
def test_a_new_pool_has_nothing_of_what_is_here(policy: Policy) -> None:
    worker = engine(policy, pages=(20,))
    worker.hears(MemberLost(POOL_MEMBER))
    assert worker.core.leased_pages == ()
    assert worker.core.held["pages"] == 0


class TestChatsThatAreReported:
    """The router takes a share of late chats for pressure: of chats that are gone it would never end."""

    def reported(self, worker: Engine) -> list[int]:
        """Run all steps and no copy; return how many chats each report had."""
        while steps := [command for command in worker.work if isinstance(command, RunStep)]:
            worker.work.insert(0, worker.work.pop(worker.work.index(steps[0])))
            worker.works()
        return [message.num_rt for message in worker.heard(Report) if isinstance(message, Report)]

    def test_are_none_where_an_answer_is_on_its_way_to_the_pool(self) -> None:
        worker = engine(GROWING, pages=(20, 21, 22, 23), limits=ROOMY)
        worker.until(RunStep)
        assert self.reported(worker)[-1] == 0
        assert worker.core.held["blocks"] > 0, "it is kept until then"

    def test_are_none_when_the_last_is_cancelled_before_a_step(self) -> None:
        worker = engine(replace(GROWING, reuse=False), pages=(), limits=ROOMY)
        worker.until(RunStep)
        worker.hears(said("pool-0", Batch((entry(request("c", prompt=9), 5, 6),))))
        assert self.reported(worker)[-1] == 3, "two wait until the KV of the third is copied"
        for name in "abc":
            worker.hears(said(ROUTER, Cancel(name, 0)))
        assert self.reported(worker)[-1] == 0
