"""Batches of a decode worker: the request that joins next, the batch it runs in, and what is fetched ahead of need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest

from alignedserve.core import CopyCost, Entry, Estimate, ServiceClass, Slo, StepPlan, StepResult
from alignedserve.cost.model import EMPTY
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.papers.names import SchedulerName
from alignedserve.protocol.commands import Command, CopyIn, ReceiveKv, RunStep, Send
from alignedserve.protocol.events import CopiedIn, Event, KvReceived, MemberJoined, MemberLost, StepDone
from alignedserve.protocol.figures import MOST_LENGTHS, DecodeLengths, Lengths
from alignedserve.protocol.form_messages import Prefetch, PrefetchDeclined, Prefetched
from alignedserve.protocol.messages import (
    ROUTER,
    AskBatch,
    Batch,
    Cancel,
    Figures,
    Message,
    Progress,
    Pull,
    Report,
)
from alignedserve.scheduling.policy import Grouping, Policy
from alignedserve.worker.candidates import LEAST_WIDTH
from alignedserve.worker.reporting import some_of
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, POOL_MEMBER, ROUTER_MEMBER, entry, member, request, said
from tests.worker.cores import prefetching_of

PREFILL = replace(member("prefill-0"), transport="there")
ONE_SEAT = replace(LIMITS, max_batch=1)


def document(name: str, page: int, jct_s: float = 1e5) -> Entry:
    new_request = replace(request(name), service=ServiceClass.BE, slo=Slo(jct_s=jct_s))
    return entry(new_request, (page,))


def chat(name: str, page: int) -> Entry:
    return entry(request(name), (page,))


def document_of(name: str, prefix: int) -> Entry:
    new_request = request(name, prompt=prefix)
    return entry(replace(new_request, service=ServiceClass.BE, slo=Slo(jct_s=1e5)), tuple(range(prefix)))


D1, D2, D3, D4 = (document(f"d{number}", 10 + number) for number in range(1, 5))
C1, C2 = chat("c1", 21), chat("c2", 22)


class Worker:
    def __init__(self, policy: Policy = Policy(), direct: bool = True) -> None:  # noqa: B008  (frozen)
        self.core = decode_core(WorkerSetup(ONE_SEAT, policy, direct=direct))
        self.now, self.joined = 0.0, list[int]()  # the first page of each request that joined
        self.hears(MemberJoined(POOL_MEMBER))
        self.hears(MemberJoined(ROUTER_MEMBER))
        if direct:
            self.hears(MemberJoined(PREFILL))

    def hears(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, self.now)
        self.joined += [command.pages[0] for command in commands if isinstance(command, CopyIn)]
        return commands

    def gets(self, *entries: Entry, is_pinned: bool = False, is_dynamic: bool = False) -> list[Command]:
        return self.hears(said("pool-0", Batch(entries, is_pinned, is_dynamic)))

    def next_joins(self) -> list[Command]:
        """Cancel the request that holds the seat, so that the next request joins."""
        [leaving] = self.core.here.with_kv
        return self.hears(said(ROUTER, Cancel(*leaving.key)))


def of_many_seats() -> Worker:
    worker = Worker()
    worker.core = decode_core(WorkerSetup(replace(LIMITS, max_batch=16, num_blocks=1000, max_step_tokens=1000)))
    worker.hears(MemberJoined(POOL_MEMBER))
    return worker


def sent(commands: Sequence[Command], to: str) -> list[Message]:
    return [command.message for command in commands if isinstance(command, Send) and command.to == to]


@pytest.fixture
def worker() -> Worker:
    return Worker()


class TestOrder:
    def test_the_pinned_then_those_of_the_running_batch_then_the_next_batch(self, worker: Worker) -> None:
        worker.gets(D1)
        worker.gets(D2)
        worker.gets(D3, is_dynamic=True)
        worker.gets(C1, is_pinned=True)
        for _ in range(3):
            worker.next_joins()
        assert worker.joined == [11, 21, 13, 12]

    def test_of_candidates_the_request_with_least_to_wait_comes_first(self) -> None:
        """Predicted lengths decide; a request that has waited for an age in its level comes first (ALISE)."""
        worker = Worker(Policy(age_s=10.0))
        long, short, old = (
            replace(waiting, request=replace(waiting.request, max_tokens=400, estimate=Estimate(tokens, 400)))
            for waiting, tokens in zip((D2, D3, D4), (200, 20, 300), strict=True)
        )
        worker.core.pace.learn(StepPlan(0, (), (), 0.0), EMPTY, 1.0, lambda _: None)
        worker.gets(D1)
        worker.gets(old, is_dynamic=True)
        worker.now = 90.0
        worker.gets(long, is_dynamic=True)
        worker.gets(short, is_dynamic=True)
        for _ in range(3):
            worker.next_joins()
        assert worker.joined == [11, 14, 13, 12]

    def test_of_two_candidates_the_one_that_is_late_sooner_with_the_copy_of_its_kv_comes_first(self) -> None:
        """A token takes 10 ms to copy: the short chat has its next token due first, and yet more time to spare."""
        worker = Worker(direct=False)
        worker.core = decode_core(WorkerSetup(replace(ONE_SEAT, num_blocks=100), copying=CopyCost(0.01)))
        worker.hears(MemberJoined(POOL_MEMBER))
        short, long = (
            entry(replace(request(name, prompt), slo=Slo(ttft_s=1.0, tbt_s=tbt_s)), tuple(range(page, page + prompt)))
            for name, prompt, tbt_s, page in (("short", 9, 1.5, 31), ("long", 64, 1.6, 51))
        )
        worker.gets(D1)
        worker.gets(short, is_dynamic=True)
        worker.gets(long, is_dynamic=True)
        worker.next_joins()
        worker.next_joins()
        assert worker.joined == [11, 51, 31]

    def test_first_come_first_served_keeps_the_order_of_arrival(self) -> None:
        worker = Worker(Policy(SchedulerName.FCFS))
        long = replace(D2, request=replace(D2.request, max_tokens=400, estimate=Estimate(200, 400)))
        worker.gets(D1)
        worker.gets(long, is_dynamic=True)
        worker.gets(D3, is_dynamic=True)
        for _ in range(2):
            worker.next_joins()
        assert worker.joined == [11, 12, 13]

    def test_a_chat_of_the_next_batch_comes_before_documents(self, worker: Worker) -> None:
        worker.gets(D1)
        worker.gets(C2, D2)
        worker.gets(D3, is_dynamic=True)
        worker.next_joins()
        assert worker.joined == [11, 22]

    def test_a_batch_that_has_waited_for_half_of_its_time_is_not_kept_waiting(self, worker: Worker) -> None:
        soon = document("soon", 30, jct_s=40.0)
        worker.gets(D1)
        worker.gets(soon)
        worker.gets(D3, D4, is_dynamic=True)
        worker.next_joins()
        worker.now = 39.0
        worker.next_joins()
        assert worker.joined == [11, 13, 30]


@pytest.mark.parametrize(
    ("policy", "given"), [(Policy(), True), (Policy(SchedulerName.FCFS), False)], ids=["default", "fcfs"]
)
def test_the_router_hears_what_documents_would_give_to_chats(policy: Policy, given: bool) -> None:
    worker = Worker(policy)
    worker.gets(replace(D1, request=replace(D1.request, max_tokens=100)))
    worker.hears(CopiedIn(1, intact=True))
    reports: list[Report] = []
    steps = count(1)
    while not reports:
        told = sent(worker.hears(StepDone(StepResult(next(steps), (("d1", 7),)))), ROUTER)
        reports = [message for message in told if isinstance(message, Report)]
    [held] = [len(running.blocks) for running in worker.core.here.occupants()]
    assert reports[0].given_blocks == (held if given else 0)


class TestAsks:
    def asks(self, commands: Sequence[Command]) -> list[AskBatch]:
        return [message for message in sent(commands, "pool-0") if isinstance(message, AskBatch)]

    def test_the_next_batch_before_there_is_room_for_it_and_only_one(self, worker: Worker) -> None:
        [ask] = self.asks(worker.gets(D1))
        assert (ask.requests, ask.wants_batch, ask.ahead) == (0, True, 1)
        [ask] = self.asks(worker.gets(D2))
        assert (ask.requests, ask.wants_batch, ask.ahead) == (0, False, 1)
        assert self.asks(worker.gets(D3, is_dynamic=True)) == [], "it has what it needs"

    def test_no_batch_where_they_do_not_keep_together(self) -> None:
        worker = Worker(Policy(grouping=Grouping.FCFS))
        assert self.asks(worker.gets(D1)) == []

    def test_the_band_is_as_wide_as_the_batch_that_runs(self) -> None:
        worker = of_many_seats()
        worker.gets(document_of("d1", 40), document_of("d2", 340))
        assert self.asks(worker.gets(D2))[-1].band == (40, 340), "it has a seat, and its batch begins"

    def test_the_band_of_those_that_are_alike_is_a_little_wider(self) -> None:
        worker = of_many_seats()
        assert self.asks(worker.gets(document_of("d1", 40)))[-1].band == (40, 40 + LEAST_WIDTH)

    @pytest.mark.parametrize("how", [{"is_pinned": True}, {"is_dynamic": True}])
    def test_guests_make_the_band_no_wider(self, how: dict[str, bool]) -> None:
        """Otherwise all requests that wait in the pool would soon be inside the band."""
        worker = of_many_seats()
        worker.gets(document_of("d1", 400), document_of("d2", 450))
        worker.gets(document_of("guest", 900), **how)
        assert self.asks(worker.gets(document_of("shorter", 3), **how))[-1].band == (400, 400 + LEAST_WIDTH)

    def test_requests_in_the_band_belong_to_it(self) -> None:
        worker = of_many_seats()
        worker.gets(document_of("d1", 40))
        worker.gets(document_of("alike", 60), is_dynamic=True)
        asks = self.asks(worker.hears(said(ROUTER, Cancel("d1", 0))))
        assert asks[-1].band == (60, 60 + LEAST_WIDTH)

    def test_a_request_that_was_in_it_belongs_to_it_however_far_the_others_have_grown_since(self) -> None:
        """Otherwise the band would exclude requests that wait in the pool only for lack of a seat."""
        worker = Worker()
        worker.core = decode_core(WorkerSetup(replace(LIMITS, max_batch=2, num_blocks=1000)))
        worker.hears(MemberJoined(POOL_MEMBER))
        worker.gets(*(replace(waiting, request=replace(waiting.request, max_tokens=1000)) for waiting in (D1, D2)))
        worker.gets(D3, is_dynamic=True)
        worker.hears(CopiedIn(1, intact=True))
        worker.hears(CopiedIn(2, intact=True))
        for number in range(1, 400):
            worker.hears(StepDone(StepResult(number, (("d1", 7), ("d2", 7)))))
        asks = self.asks(worker.hears(said(ROUTER, Cancel("d2", 0))))
        assert worker.joined == [11, 12, 13]
        assert asks[-1].band == (D3.prefix, D3.prefix + LEAST_WIDTH)

    def test_there_is_none_when_the_last_of_the_batch_has_ended(self) -> None:
        worker = of_many_seats()
        worker.gets(document_of("d1", 40))
        worker.gets(document_of("guest", 900), is_dynamic=True)
        assert self.asks(worker.hears(said(ROUTER, Cancel("d1", 0))))[-1].band is None


def test_steps_that_mix_two_batches_are_counted() -> None:
    worker = Worker()
    worker.core = decode_core(WorkerSetup(replace(LIMITS, max_batch=3, num_blocks=12)))
    worker.hears(MemberJoined(POOL_MEMBER))
    worker.gets(D1)
    worker.gets(D3, is_dynamic=True)
    worker.hears(CopiedIn(2, intact=True))
    worker.hears(CopiedIn(1, intact=True))
    worker.hears(StepDone(StepResult(1, (("d3", 7),))))
    assert (sum(worker.core.log.counts.by_batches), worker.core.log.counts.by_batches[-1]) == (2, 0), (
        "it is of the batch that runs"
    )
    worker.gets(D2)
    worker.hears(CopiedIn(3, intact=True))
    commands = worker.core.handle(StepDone(StepResult(2, (("d1", 7), ("d3", 7)))), 1.0)
    assert (sum(worker.core.log.counts.by_batches), worker.core.log.counts.by_batches[-1]) == (3, 1)
    told = [command.message for command in commands if isinstance(command, Send)]
    counted = [message.steps for message in told if isinstance(message, Figures) and message.steps is not None]
    assert [(steps.by_batches, steps.switches) for steps in counted] == [((0, 2, 1), 2)], "the router hears of it"


def test_the_router_hears_which_lengths_run_together() -> None:
    worker = Worker()
    worker.core = decode_core(WorkerSetup(replace(LIMITS, max_batch=3, num_blocks=12)))
    worker.hears(MemberJoined(POOL_MEMBER))
    worker.gets(D1)
    worker.hears(CopiedIn(1, intact=True))
    worker.gets(D2, D3)
    [told] = lengths(worker.core.handle(StepDone(StepResult(1, (("d1", 7),))), 1.0))
    assert told.batch == Lengths((), (D2.prefix, D3.prefix), 0, 2)
    assert told.guests == Lengths((), (D1.prefix + 1,), 0, 1), "it is of the batch before"
    assert told.band is not None
    assert told.band[0] == D2.prefix
    shown = [told.batch, told.guests, told.prompts, told.waiting, told.coming]
    assert sum(group.num_rt + group.num_be for group in shown) == 3


def lengths(commands: list[Command]) -> list[DecodeLengths]:
    told = [command.message for command in commands if isinstance(command, Send)]
    return [message.lengths for message in told if isinstance(message, Figures) and message.lengths is not None]


def test_of_many_lengths_some_are_told_the_shortest_and_the_longest_too() -> None:
    assert some_of([*range(10 * MOST_LENGTHS)])[:: MOST_LENGTHS - 1] == (0, 10 * MOST_LENGTHS - 1)
    assert len(some_of([*range(10 * MOST_LENGTHS)])) == MOST_LENGTHS
    assert some_of([1, 4]) == (1, 4)


class TestPrefetching:
    @pytest.fixture
    def waiting(self) -> Worker:
        """Return a worker whose seat is held by D1, while D2 is on its way to the prefill worker."""
        worker = Worker(Policy(candidate_share=0.2))
        worker.gets(D1)
        commands = worker.gets(D2, D3)
        [prefetch] = sent(commands, "prefill-0")
        assert isinstance(prefetch, Prefetch)
        assert prefetch.entries == (D2,), "a fifth of its memory is one block"
        return worker

    def come(self, worker: Worker, *names: str) -> list[Command]:
        return worker.hears(said("prefill-0", Prefetched(tuple((name, 0) for name in names))))

    def test_what_has_come_is_pulled(self, waiting: Worker) -> None:
        assert sent(self.come(waiting, "d2"), "prefill-0") == []
        commands = waiting.next_joins()
        assert [command.source for command in commands if isinstance(command, ReceiveKv)] == ["prefill-0.1"]
        messages = sent(commands, "prefill-0")
        assert messages[0] == Pull(1, "d2", 0)
        assert [message.entries for message in messages if isinstance(message, Prefetch)] == [(D3,)], (
            "its place is another's"
        )
        assert any(isinstance(command, RunStep) for command in waiting.hears(KvReceived(1, "prefill-0.1", True)))
        assert prefetching_of(waiting.core).num_prefetched == 1

    def test_what_has_not_come_joins_from_the_pool(self, waiting: Worker) -> None:
        commands = waiting.next_joins()
        assert waiting.joined == [11, 12]
        assert Cancel("d2", 0) in sent(commands, "prefill-0")
        assert sent(self.come(waiting, "d2"), "prefill-0") == [Cancel("d2", 0)], "it may not have heard"

    def test_so_does_what_is_let_go(self, waiting: Worker) -> None:
        self.come(waiting, "d2")
        waiting.hears(said("prefill-0", PrefetchDeclined((("d2", 0),))))
        waiting.next_joins()
        assert waiting.joined == [11, 12]

    def test_and_what_was_lost_with_the_prefill_worker(self, waiting: Worker) -> None:
        self.come(waiting, "d2")
        commands = waiting.hears(MemberLost(PREFILL))
        assert not any(message.lost for message in sent(commands, ROUTER) if isinstance(message, Progress))
        waiting.next_joins()
        assert waiting.joined == [11, 12]

    def test_and_what_does_not_arrive(self, waiting: Worker) -> None:
        self.come(waiting, "d2")
        waiting.next_joins()
        waiting.hears(KvReceived(1, "prefill-0.1", False))
        assert waiting.joined == [11, 12]

    def test_it_outlives_the_pool(self, waiting: Worker) -> None:
        self.come(waiting, "d2")
        commands = waiting.hears(MemberLost(POOL_MEMBER))
        assert [message.lost for message in sent(commands, ROUTER) if isinstance(message, Progress)] == [(("d3", 0),)]
        assert any(isinstance(command, ReceiveKv) for command in waiting.next_joins())
        commands = waiting.hears(KvReceived(1, "prefill-0.1", False))
        assert [message.lost for message in sent(commands, ROUTER) if isinstance(message, Progress)] == [(("d2", 0),)]

    def test_a_request_that_leaves_is_not_wanted_there(self, waiting: Worker) -> None:
        commands = waiting.hears(said(ROUTER, Cancel("d2", 0)))
        assert Cancel("d2", 0) in sent(commands, "prefill-0")

    @pytest.mark.parametrize("policy", [Policy(prefetch=False), Policy(candidate_share=0.0)])
    def test_nothing_where_it_is_off(self, policy: Policy) -> None:
        worker = Worker(policy)
        worker.gets(D1)
        assert sent(worker.gets(D2, D3), "prefill-0") == []
