"""Asks for pages: no ask overtakes another, and spare pages keep nobody waiting."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alignedserve.core import ServiceClass
from alignedserve.kvpool.state import PoolCore
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import (
    AskPages,
    AskPrefix,
    Cancel,
    Commit,
    GiveBack,
    LeasePages,
    Message,
    Prefix,
)
from alignedserve.scheduling.policy import Grouping, Policy
from tests.conftest import examples
from tests.samples import entry, request, said

RT, BE = ServiceClass.RT, ServiceClass.BE
NUM_PAGES = 8
WORKERS = st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1"])


class Asking(RuleBasedStateMachine):
    """Let workers ask for pages, for requests that wait or to have spare ones, and give spare ones back when told."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PoolCore(NUM_PAGES, 4)
        self.has: dict[str, list[int]] = {}  # worker -> its pages
        self.firm: dict[str, AskPages] = {}  # worker -> its ask that is not answered, in the order of arrival
        self.spare: dict[str, AskPages] = {}
        self.untold: set[str] = set()  # workers with spare pages that were not told to give them back
        self.told: set[str] = set()
        self.number = 0

    def ask(self, worker: str, pages: int, num_kept: int, *, is_spare: bool) -> None:
        self.has[worker] = self.has.get(worker, [])[:num_kept]
        self.number += 1
        ask = AskPages(pages, self.number, tuple(self.has[worker]), is_spare=is_spare)
        asks, others = (self.spare, self.firm) if is_spare else (self.firm, self.spare)
        others.pop(worker, None)
        asks[worker] = ask
        if not (is_spare and pages):
            self.untold.discard(worker)
            self.told.discard(worker)
        for command in self.pool.handle(said(worker, ask), 0.0):
            match command:
                case Send(to, LeasePages(leased, number)):
                    self.answered(to, leased, number)
                case Send(to, GiveBack()):
                    self.untold.remove(to)
                    self.told.add(to)

    def answered(self, worker: str, pages: tuple[int, ...], number: int) -> None:
        if self.firm:
            first, ask = next(iter(self.firm.items()))
            assert (worker, len(pages), number) == (first, ask.pages, ask.number)
            del self.firm[first]
        else:
            wanting = [waiting for waiting, ask in self.spare.items() if ask.pages]
            ask = self.spare.pop(worker)
            assert (number, len(pages) <= ask.pages) == (ask.number, True)
            if pages:
                assert worker == wanting[0]
                self.untold.add(worker)
        self.has[worker] += pages

    @rule(worker=WORKERS, pages=st.integers(0, NUM_PAGES))
    def waits(self, worker: str, pages: int) -> None:
        self.ask(worker, pages, 0, is_spare=False)

    @rule(worker=WORKERS, pages=st.integers(1, NUM_PAGES), num_kept=st.integers(0, NUM_PAGES))
    def has_spare_ones(self, worker: str, pages: int, num_kept: int) -> None:
        self.ask(worker, pages, num_kept, is_spare=True)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def gives_back(self, data: st.DataObject) -> None:
        self.ask(data.draw(st.sampled_from(sorted(self.told))), 0, 0, is_spare=True)

    @invariant()
    def who_waits_lacks_pages_that_others_were_asked_for(self) -> None:
        if self.firm:
            assert next(iter(self.firm.values())).pages > self.pool.pages.num_free
            assert not self.untold

    @invariant()
    def a_page_has_one_worker(self) -> None:
        pages = [page for worker in self.has.values() for page in worker]
        assert len(set(pages)) == len(pages) == self.pool.num_lent_pages

    def teardown(self) -> None:
        while self.firm:
            num_waiting = len(self.firm)
            for worker in [worker for worker in self.has if worker not in self.firm]:
                self.ask(worker, 0, 0, is_spare=True)
            assert len(self.firm) < num_waiting


TestAsking = Asking.TestCase
TestAsking.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)


class TestHeldPrefixes:
    """What a prompt holds while it waits for room is taken back for whoever waits for pages."""

    def said_to(self, pool: PoolCore, worker: str, message: Message) -> list[Command]:
        return [command for command in pool.handle(said(worker, message), 0.0) if isinstance(command, Send)]

    def holding(self, *prompts: tuple[str, ServiceClass, tuple[int, ...]]) -> PoolCore:
        """Return a pool of eight pages, four of them idle but for those that these prompts hold."""
        pool, names = PoolCore(8, 4, Policy(grouping=Grouping.FCFS)), (1, 2, 3, 4)
        self.said_to(pool, "prefill-9", AskPages(4, 1))
        self.said_to(pool, "prefill-9", Commit(replace(entry(request("before"), (0, 1, 2, 3)), names=names)))
        self.said_to(pool, "router", Cancel("before", 0))
        for name, service, known in prompts:
            (answer,) = self.said_to(pool, "prefill-0", AskPrefix(name, 0, known, service))
            assert answer == Send("prefill-0", Prefix(name, 0, tuple(page - 1 for page in known)))
        return pool

    def test_of_best_effort_are_taken_back_first(self) -> None:
        pool = self.holding(("flex", BE, (1, 2, 3, 4)), ("chat", RT, (1, 2)))
        taken, lease = self.said_to(pool, "prefill-1", AskPages(5, 1))
        assert taken == Send("prefill-0", Prefix("flex", 0, ()))
        assert lease == Send("prefill-1", LeasePages((4, 5, 6, 7, 3), 1))
        assert pool.kept == {"chat"}

    def test_of_the_same_class_the_newest_first(self) -> None:
        pool = self.holding(("a", RT, (1, 2)), ("b", RT, (1, 2, 3, 4)))
        taken, _ = self.said_to(pool, "prefill-1", AskPages(5, 1))
        assert taken == Send("prefill-0", Prefix("b", 0, ()))
        assert pool.kept == {"a"}

    def test_stay_where_spare_pages_can_come_back(self) -> None:
        pool = self.holding(("chat", RT, (1, 2, 3, 4)))
        self.said_to(pool, "decode-0", AskPages(2, 1, is_spare=True))
        assert self.said_to(pool, "prefill-1", AskPages(4, 1)) == [Send("decode-0", GiveBack())]
        assert pool.kept == {"chat"}
        given = self.said_to(pool, "decode-0", AskPages(0, 2, is_spare=True))
        assert Send("prefill-1", LeasePages((4, 5, 6, 7), 1)) in given
