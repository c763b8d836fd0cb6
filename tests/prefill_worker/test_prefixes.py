"""Prompts that begin as others did: what the pool has is fetched, the rest computed, and nothing is held for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import (
    Chunk,
    CopyCost,
    Due,
    Entry,
    FinishReason,
    KvForm,
    Opening,
    Request,
    Sampling,
    ServiceClass,
    StepPlan,
    StepResult,
)
from alignedserve.cost.fit import Point
from alignedserve.cost.model import Shape
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.fuzzing.worker_views import blocks_of
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, RunStep, Send, SetTimer
from alignedserve.protocol.events import CopiedIn, CopiedOut, MemberJoined, MemberLost, StepDone, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    AskPrefix,
    Cancel,
    Commit,
    GiveBack,
    Inquire,
    LeasePages,
    Output,
    Prefill,
    Prefix,
    Progress,
    Release,
    Spoiled,
    Tokens,
)
from alignedserve.protocol.page_names import chained_hashes
from alignedserve.worker.arriving import ANSWER_S
from alignedserve.worker.part import REFRESH_S
from alignedserve.worker.setup import WorkerSetup
from tests.cost.fitted import cost_of
from tests.prefill_worker.asks import asks, firm, leased, spare
from tests.samples import LIMITS, POOL_MEMBER, STOP, entry, request, said

ROOT = b"model"
SHAPES = [Shape.build([(tokens, 0)] * chunks) for tokens in (1, 2, 4, 8, 16, 32) for chunks in (1, 2)]
LONG = request("long", prompt=19)  # two pages of 8 tokens, and three tokens
NAMES = chained_hashes(LONG.prompt[:16], 8, ROOT)
ASK = Send("pool-0", AskPrefix("long", 0, NAMES))
RELEASE = Send("pool-0", Release("long", 0))
FETCH = CopyIn(1, "pool-0.1", (4, 5), (0, 1, 2, 3), LONG.prompt[:16])


@pytest.fixture
def worker() -> PrefillCore:
    core = PrefillCore(WorkerSetup(LIMITS, root=ROOT))
    core.handle(MemberJoined(POOL_MEMBER), 0.0)
    return core


def prefix(worker: PrefillCore, *pages: int) -> list[Command]:
    return worker.handle(said("pool-0", Prefix("long", 0, pages)), 0.0)


def plans(commands: list[Command]) -> list[StepPlan]:
    return [command.plan for command in commands if isinstance(command, RunStep)]


def gets(worker: PrefillCore, *pages: int) -> list[Command]:
    """Return the copies that these pages allow, which were asked for with the second ask."""
    commands = worker.handle(said("pool-0", leased(pages, 2)), 0.0)
    return [command for command in commands if isinstance(command, CopyOut)]


def fetching(worker: PrefillCore) -> None:
    assert ASK in worker.handle(said(ROUTER, Prefill(LONG)), 0.0)
    assert FETCH in prefix(worker, 4, 5)


def committing(worker: PrefillCore) -> None:
    """Advance LONG until it has all its KV and a first token, and waits for the page of its last three tokens."""
    fetching(worker)
    (plan,) = plans(worker.handle(CopiedIn(1, intact=True), 0.0))
    assert plan.chunks == (Chunk("long", (17, 18, 19), 16, KvForm((0, 1, 2, 3, 4)), Sampling()),)
    first = Tokens((Output("long", 0, 0, (7,), None, opening=Opening(num_cached=16)),))
    assert Send("gateway-0", first) in worker.handle(StepDone(StepResult(1, (("long", 7),))), 0.0)


def test_only_what_is_not_known_is_computed_written_and_leased(worker: PrefillCore) -> None:
    committing(worker)
    assert worker.seats.num_reused_tokens == 16
    assert gets(worker, 9) == [CopyOut(1, "pool-0.1", (0, 1, 2, 3, 4), (9,), LONG.prompt, start=16)]
    whole = Entry(LONG, (7,), (4, 5, 9), Due(LONG.slo.tbt_s), names=NAMES, opening=Opening(num_cached=16))
    assert Send("pool-0", Commit(whole, 2)) in worker.handle(CopiedOut(1), 0.0)


def test_what_takes_less_time_to_compute_is_not_copied_nor_written_again() -> None:
    costs = cost_of([Point(shape, 1e-4 * shape.tokens) for shape in SHAPES])
    worker = PrefillCore(WorkerSetup(LIMITS, cost=costs, copying=CopyCost(token_s=2e-4), root=ROOT))
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    worker.handle(said(ROUTER, Prefill(LONG)), 0.0)
    commands, ran = prefix(worker, 4, 5), 0
    while ran < 19:
        (plan,) = plans(commands)
        assert plan.chunks[0].start == ran
        ran += len(plan.chunks[0].tokens)
        commands = worker.handle(StepDone(StepResult(plan.number, (("long", 7),) if ran == 19 else ())), 0.0)
    assert asks(commands) == [firm(1, 2)]
    assert gets(worker, 9) == [CopyOut(1, "pool-0.1", (0, 1, 2, 3, 4), (9,), LONG.prompt, start=16)]


def test_a_prompt_of_less_than_a_page_and_a_token_is_not_asked_for(worker: PrefillCore) -> None:
    assert plans(worker.handle(said(ROUTER, Prefill(request("a", prompt=8))), 0.0))


def test_a_request_with_a_scored_prompt_computes_all_of_it(worker: PrefillCore) -> None:
    scored = replace(LONG, sampling=Sampling(prompt_logprobs=0))
    assert plans(worker.handle(said(ROUTER, Prefill(scored)), 0.0))


def test_what_is_unknown_is_computed_from_its_first_token_on(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(LONG)), 0.0)
    (plan,) = plans(prefix(worker))
    assert plan.chunks[0].start == 0


def test_a_page_that_is_not_intact_is_computed_and_nobody_else_gets_it(worker: PrefillCore) -> None:
    fetching(worker)
    commands = worker.handle(CopiedIn(1, intact=False), 0.0)
    assert Send("pool-0", Spoiled((4, 5))) in commands
    assert RELEASE in commands
    assert plans(commands)[0].chunks[0].start == 0
    assert worker.seats.num_spoiled_pages == 2


def test_pages_after_which_no_token_could_be_sampled_are_nobodys_beginning(worker: PrefillCore) -> None:
    fetching(worker)
    worker.handle(CopiedIn(1, intact=True), 0.0)
    commands = worker.handle(StepDone(StepResult(1, (), unsampled=("long",))), 0.0)
    end = Tokens((Output("long", 0, 0, (), FinishReason.DOUBT, opening=Opening(num_cached=16)),))
    assert Send("gateway-0", end) in commands
    assert [command for command in commands if command in (RELEASE, Send("pool-0", Spoiled((4, 5))))] == [
        Send("pool-0", Spoiled((4, 5))),
        RELEASE,
    ]


class TestBeforeAStep:
    """A worker hears nothing while a step runs: a chat that misses one by a millisecond waits for its end."""

    def waits(self, worker: PrefillCore, service: ServiceClass = ServiceClass.RT) -> list[Command]:
        """Let LONG and a short prompt come during a step, and return what follows from its end."""
        worker.handle(said(ROUTER, Prefill(request("first", prompt=8))), 0.0)
        worker.handle(said(ROUTER, Prefill(replace(LONG, service=service))), 0.0)
        worker.handle(said(ROUTER, Prefill(request("short", prompt=2))), 0.0)
        return worker.handle(StepDone(StepResult(1, (("first", STOP),))), 0.0)

    def test_the_pool_s_word_on_a_chat_is_waited_for(self, worker: PrefillCore) -> None:
        assert not plans(self.waits(worker))
        (plan,) = plans(prefix(worker))
        assert "long" in [chunk.request for chunk in plan.chunks]

    def test_but_no_longer_than_a_moment(self, worker: PrefillCore) -> None:
        assert SetTimer("answer", ANSWER_S) in self.waits(worker)
        (plan,) = plans(worker.handle(TimerFired("answer"), ANSWER_S))
        assert [chunk.request for chunk in plan.chunks] == ["short"]

    def test_no_word_on_a_document_is_waited_for(self, worker: PrefillCore) -> None:
        (plan,) = plans(self.waits(worker, ServiceClass.BE))
        assert [chunk.request for chunk in plan.chunks] == ["short"]

    def test_known_pages_are_fetched_first(self, worker: PrefillCore) -> None:
        """Their copy comes before the step in any case."""
        self.waits(worker)
        fetches = prefix(worker, 4, 5)
        assert [type(command) for command in fetches if isinstance(command, CopyIn | RunStep)] == [CopyIn]
        (plan,) = plans(worker.handle(CopiedIn(1, intact=True), 0.0))
        assert {chunk.request: chunk.start for chunk in plan.chunks} == {"long": 16, "short": 0}


def test_an_answer_that_was_lost_is_not_waited_for(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(LONG)), 0.0)
    assert not plans(worker.handle(TimerFired("refresh"), REFRESH_S))
    assert plans(worker.handle(TimerFired("refresh"), 2 * REFRESH_S))


def test_pages_held_for_a_leaving_request_are_released(worker: PrefillCore) -> None:
    fetching(worker)
    assert RELEASE in worker.handle(said(ROUTER, Cancel("long", 0)), 0.0)
    assert (worker.held["requests"], worker.held["blocks"]) == (0, 5), "the copy still writes to its blocks"
    assert worker.handle(CopiedIn(1, intact=True), 0.0) == []
    assert not any(worker.held.values())
    assert not worker.here.copies
    assert sorted(blocks_of(worker)) == list(range(LIMITS.num_blocks))


def test_an_answer_for_a_request_that_has_left_is_given_back(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(LONG)), 0.0)
    worker.handle(said(ROUTER, Cancel("long", 0)), 0.0)
    assert prefix(worker, 4, 5) == [RELEASE]


def test_so_is_one_for_a_request_that_was_cancelled_while_its_kv_leaves(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(LONG)), 0.0)
    worker.handle(TimerFired("refresh"), REFRESH_S)
    (plan,) = plans(worker.handle(TimerFired("refresh"), 2 * REFRESH_S))
    worker.handle(StepDone(StepResult(plan.number, (("long", 7),))), 0.0)
    assert gets(worker, 1, 2, 3)
    worker.handle(said(ROUTER, Cancel("long", 0)), 0.0)
    assert prefix(worker, 4, 5) == [RELEASE]


def test_what_was_taken_back_while_the_rest_was_copied_runs_again(worker: PrefillCore) -> None:
    """The pool would have to give up a request whose first pages it lacks."""
    committing(worker)
    gets(worker, 9)
    prefix(worker)
    commands = worker.handle(CopiedOut(1), 0.0)
    assert not [command for command in commands if isinstance(command, Send) and isinstance(command.message, Commit)]
    (again,) = plans(commands)
    assert [chunk.request for chunk in again.chunks] == ["long"]


def test_with_the_pool_go_the_pages_and_not_what_was_fetched(worker: PrefillCore) -> None:
    committing(worker)
    worker.handle(MemberLost(POOL_MEMBER), 0.0)
    assert asks(worker.handle(MemberJoined(POOL_MEMBER), 0.0)) == [firm(3, 3)]


# --- The pool's side


@pytest.fixture
def pool() -> PoolCore:
    """Return a pool that knows the beginning of LONG, in pages 0 and 1 of its four."""
    core = PoolCore(4, 4)
    core.handle(said("prefill-0", firm(3, 1)), 0.0)
    first = replace(entry(replace(LONG, id="first"), (0, 1, 2)), names=NAMES)
    core.handle(said("prefill-0", Commit(first)), 0.0)
    core.handle(said(ROUTER, Cancel("first", 0)), 0.0)
    assert core.held["entries"] == 0
    return core


def held(pool: PoolCore, names: tuple[int, ...] = NAMES, attempt: int = 0, worker: str = "prefill-0") -> Command:
    return pool.handle(said(worker, AskPrefix("long", attempt, names)), 0.0)[0]


def answer(*pages: int, attempt: int = 0) -> Command:
    return Send("prefill-0", Prefix("long", attempt, pages))


def of_long(pages: tuple[int, ...], known: int, attempt: int = 0) -> Commit:
    return Commit(replace(entry(replace(LONG, attempt=attempt), pages), names=NAMES), known)


def test_the_pool_holds_what_it_has_until_the_commit(pool: PoolCore) -> None:
    assert held(pool) == answer(0, 1)
    pool.handle(said("prefill-0", firm(1, 2)), 0.0)
    pool.handle(said("prefill-0", of_long((0, 1, 2), 2)), 0.0)
    assert pool.held["entries"] == 1
    assert pool.pages.pages_of("long") == (0, 1, 2)


def test_it_lets_go_at_a_release_at_the_death_of_the_worker_and_for_a_later_attempt(pool: PoolCore) -> None:
    for let_go in (said("prefill-0", Release("long", 0)), MemberLost(replace(POOL_MEMBER))):
        held(pool)
        if isinstance(let_go, MemberLost):
            break
        pool.handle(let_go, 0.0)
        assert pool.held["entries"] == 0
    assert held(pool, attempt=1) == answer(0, 1, attempt=1)
    assert pool.held["entries"] == 1
    assert held(pool, attempt=0) == answer(), "of an earlier attempt nothing is held"


def test_a_request_that_waits_for_pages_gets_those_that_are_only_held(pool: PoolCore) -> None:
    held(pool)
    commands = pool.handle(said("prefill-1", firm(4, 1)), 0.0)
    assert commands[0] == answer(), "the worker is told"
    assert isinstance(commands[1], Send)
    assert commands[1].to == "prefill-1"


def test_so_does_one_that_had_spare_pages_at_hand_before(pool: PoolCore) -> None:
    """A firm ask gives them back, so nothing else is to be awaited."""
    (lease,) = [command for command in pool.handle(said("prefill-1", spare(1, 1)), 0.0) if isinstance(command, Send)]
    assert isinstance(lease.message, LeasePages)
    held(pool)
    commands = pool.handle(said("prefill-1", firm(4, 2)), 0.0)
    while Send("prefill-1", GiveBack()) in commands:
        commands = pool.handle(said("prefill-1", firm(4, 3)), 0.0)
    assert [command.to for command in commands if isinstance(command, Send)][:2] == ["prefill-0", "prefill-1"]


def test_a_commit_without_its_beginning_is_lost_and_frees_only_its_own_pages(pool: PoolCore) -> None:
    held(pool)
    (lease,) = [command for command in pool.handle(said("prefill-0", firm(1, 2)), 0.0) if isinstance(command, Send)]
    assert isinstance(lease.message, LeasePages)
    pool.handle(said("prefill-0", firm(2, 3, lease.message.pages)), 0.0)
    pool.handle(said("prefill-0", firm(3, 4, lease.message.pages)), 0.0)
    lost = pool.handle(said("prefill-0", of_long((0, 1, *lease.message.pages), 2)), 0.0)
    assert Send(ROUTER, Progress(lost=(("long", 0),))) in lost
    assert sorted(pool.pages.numbers) == [0, 1, 2, 3]
    assert pool.pages.num_leased == 3, "what it leased after that is its own still"


def test_after_lost_frames_the_pool_asks_after_what_it_holds(pool: PoolCore) -> None:
    held(pool)
    assert Send("prefill-0", Inquire((("long", 0),))) in pool.handle(TimerFired("refresh"), REFRESH_S)


def test_spoiled_pages_are_nobodys_beginning(pool: PoolCore) -> None:
    pool.handle(said("prefill-0", Spoiled((0,))), 0.0)
    assert held(pool) == answer()


def test_another_salt_has_nothing_in_common(worker: PrefillCore) -> None:
    salted: Request = replace(LONG, salt="tenant")
    (ask,) = [command for command in worker.handle(said(ROUTER, Prefill(salted)), 0.0) if isinstance(command, Send)][:1]
    assert isinstance(ask.message, AskPrefix)
    assert not set(ask.message.names) & set(NAMES)
