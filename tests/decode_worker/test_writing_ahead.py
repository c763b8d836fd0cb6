"""Requests that will leave for lack of memory are written to the pool while they run: little is left to be copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import Request, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.fuzzing.worker_views import num_evictions
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, RunStep
from alignedserve.protocol.events import CopiedOut, MemberJoined, MemberLost
from alignedserve.protocol.messages import ROUTER, AskPages, Batch, Cancel, Commit, Keep, LeasePages
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.setup import WorkerSetup
from tests.decode_worker.test_writing import PAGE, ROOT, Engine, entry
from tests.samples import LIMITS, POOL_MEMBER, request, said

A, B = request("a", prompt=9, max_tokens=60), request("b", prompt=9, max_tokens=60)
ROOMY = replace(LIMITS, num_blocks=14)  # seven blocks for each request


class Worker(Engine):
    """A worker where A and B decode, whose asks for pages are answered. Copies beside steps wait in `aside`."""

    def __init__(
        self,
        *joining: Request,
        copies_beside: bool = True,
        reuse: bool = True,
        pages: Sequence[int] = range(20, 40),
        limits: WorkerLimits = ROOMY,
    ) -> None:
        """`pages` are those of the pool that are free."""
        self.aside, self.ahead, self._pages = list[CopyOut](), list[CopyOut](), pages
        policy = Policy(reuse=reuse)
        super().__init__(decode_core(WorkerSetup(limits, policy, root=ROOT, copies_beside=copies_beside)))
        self.hears(MemberJoined(POOL_MEMBER))
        self.hears(said("pool-0", Batch(tuple(entry(one, 2 * n + 1, 2 * n + 2) for n, one in enumerate(joining)))))

    def tell(self, *commands: Command) -> list[Command]:
        self.aside += [command for command in commands if isinstance(command, CopyOut) and command.aside]
        self.ahead += self.aside
        super().tell(*(command for command in commands if command not in self.aside))
        for command in commands:
            message = getattr(command, "message", None)
            if isinstance(message, AskPages) and message.pages > 0:
                pages, self._pages = self._pages[: message.pages], self._pages[message.pages :]
                self.hears(said("pool-0", LeasePages(tuple(pages), message.number)))
        return list(commands)

    def until_short(self) -> CopyOut:
        """Work until pages of a request are written ahead, and return the order."""
        for _ in range(100):
            if self.aside:
                return self.aside[0]
            self.works()
        raise AssertionError("nothing is written ahead")

    def ends_copies(self) -> None:
        while self.aside:
            self.hears(CopiedOut(self.aside.pop(0).number))

    def until_evicted(self) -> CopyOut:
        for _ in range(100):
            for command in self.work:
                if isinstance(command, CopyOut):
                    return command
            self.works()
            self.ends_copies()
        raise AssertionError("nobody leaves")


def of_two(copies_beside: bool = True, reuse: bool = True) -> Worker:
    return Worker(A, B, copies_beside=copies_beside, reuse=reuse)


@pytest.mark.parametrize("reuse", [True, False])
def test_of_who_leaves_only_the_rest_is_copied_between_steps(reuse: bool) -> None:
    worker = of_two(reuse=reuse)
    ahead = worker.until_short()
    assert (ahead.start, len(ahead.pages)) == (PAGE, 1), "the pool has the first page, and the second is full"
    assert [type(command) for command in worker.work] == [RunStep], "others run, and it does too"
    worker.ends_copies()
    last = worker.until_evicted()
    assert last.start == 2 * PAGE, "what was written ahead is not copied again"
    while not worker.heard(Commit):
        worker.works()
    (commit,) = worker.heard(Commit)
    assert isinstance(commit, Commit)
    assert commit.entry.pages[1:] == (*ahead.pages, *last.pages)
    assert (num_evictions(worker.core), worker.core.pages.num_ahead) == (1, len(ahead.pages))


def test_who_leaves_while_its_pages_are_written_is_copied_whole() -> None:
    """Its blocks are written to by the next step, so the copy beside it may read what others write."""
    worker = of_two()
    ahead = worker.until_short()
    copy = worker.until(CopyOut)
    assert isinstance(copy, CopyOut)
    assert copy.start == PAGE
    assert not set(copy.pages) & set(ahead.pages), "these are at hand again when that copy has ended"
    leased = len(worker.core.leased_pages)
    worker.hears(CopiedOut(ahead.number))
    assert len(worker.core.leased_pages) == leased


def test_pages_of_who_is_cancelled_are_at_hand_again() -> None:
    worker = of_two()
    ahead = worker.until_short()
    worker.ends_copies()
    (running,) = worker.core.pool_link.writer.written
    worker.hears(said(ROUTER, Cancel(*running.key)))
    assert ahead.pages[0] in worker.core.leased_pages
    assert not worker.heard(Keep)


def test_pages_of_who_ends_are_at_hand_again() -> None:
    worker = Worker(*(replace(one, max_tokens=18) for one in (A, B)), reuse=False)
    worker.until_short()
    worker.ends_copies()
    while worker.work:
        worker.works()
    assert not worker.core.pool_link.writer.written


def test_what_was_written_ahead_goes_with_the_pool() -> None:
    worker = of_two()
    worker.until_short()
    worker.ends_copies()
    worker.hears(MemberLost(POOL_MEMBER))
    worker.hears(MemberJoined(replace(POOL_MEMBER, incarnation=2)))
    last = worker.until_evicted()
    to_the_new = [copy for copy in (*worker.ahead, last) if copy.pool == "pool-0.2"]
    assert to_the_new[0].start == 0, "it has nothing of the request"
    assert last in to_the_new


def test_who_leaves_with_a_single_page_at_hand_goes_on_from_that() -> None:
    worker = Worker(A, B, copies_beside=False, pages=[20])
    assert worker.until_evicted().pages == (20,)
    while not worker.heard(Keep):
        worker.works()
    assert num_evictions(worker.core) == 0, "the rest is recomputed"


def test_who_leaves_twice_with_no_page_at_hand_begins_each_time_with_what_the_pool_keeps() -> None:
    """Without reuse no named block of the device tells that the pool has more pages than at the last look."""
    limits = replace(ROOMY, num_blocks=16, max_batch=4)
    three = [replace(A, id=name, max_tokens=36) for name in "abc"]
    worker, copies = Worker(*three, copies_beside=False, reuse=False, pages=(), limits=limits), list[tuple[int, ...]]()
    while worker.work:
        copies += [copy.pages for copy in worker.work[:1] if isinstance(copy, CopyIn)]
        worker.works()
    assert copies == [(1, 2), (3, 4), (5, 6), (3,), (5,), (5,)]


@pytest.mark.parametrize("prompt", [9, 14])  # with the second a page is full when memory gets short
def test_a_worker_that_copies_between_its_steps_writes_nothing_ahead(prompt: int) -> None:
    worker = Worker(A, replace(B, prompt=tuple(range(prompt))), copies_beside=False)
    last = worker.until_evicted()
    assert last.start == PAGE
