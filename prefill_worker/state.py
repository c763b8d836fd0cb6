"""The prefill worker's core: runs prompts, emits their first tokens, commits their KV to the pool.

    Prefill ─▶ waiting ──▶ running ──▶ ended (one token was enough)
               (no pairs)     │
                              └──▶ committing ──▶ copying ──▶ Commit
                                   (no pages)     (pairs to pages)

A request that is cancelled, or whose next attempt arrives, leaves from wherever it is. Of one that is
being copied, pairs and pages stay taken until the copy has ended. Pages that nothing waits for go back
to the pool: another worker may be waiting for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from alignedserve.core import Entry, StepPlan, StepResult
from alignedserve.cost_fit import OnlineCost
from alignedserve.messages import (
    AskPages,
    Attempt,
    Command,
    Commit,
    CopiedOut,
    CopyOut,
    Event,
    LeasePages,
    Member,
    Received,
    Send,
)
from alignedserve.policy import DEFAULT_POLICY, Policy
from alignedserve.running import Running, WorkerLimits, units_for
from alignedserve.worker import WorkerCore


@dataclass
class _Copy:
    """To pages of the pool. Of one that nobody wants any more, pairs and pages stay taken until it has ended."""

    running: Running
    pages: tuple[int, ...]
    pool: str  # its holder
    wanted: bool = True


class PrefillCore(WorkerCore):
    def __init__(
        self,
        limits: WorkerLimits,
        policy: Policy = DEFAULT_POLICY,
        cost: OnlineCost | None = None,
        copy_token_s: float = 0.0,
    ) -> None:
        super().__init__(limits, policy, cost, copy_token_s)
        self._running: dict[str, Running] = {}  # has pairs, in the order of arrival
        self._committing: deque[Running] = deque()  # waits for pages
        self._copying: dict[int, _Copy] = {}
        self._copies_before: dict[int, str] = {}  # still under way, to a pool that was lost: number -> its holder
        self._copy_number = 0
        self._lease: list[int] = []  # pages of the pool that are ours to write to
        self._asks = 0
        self._asked: int | None = None  # pages of the ask that is not answered yet
        self._committed = False  # since the last ask: if a Commit was lost, only an ask frees its pages

    @property
    def held(self) -> dict[str, int]:
        """What is taken now; nothing when no request is open."""
        return {
            "requests": len(self._held_attempts()),
            "pairs": self._limits.num_pairs - self._blocks.num_free,
            "outputs": self._outputs.num_kept,
        }

    @property
    def num_leased_pages(self) -> int:
        """A lease may outlast its request: the next one uses it."""
        return len(self.leased_pages)

    @property
    def leased_pages(self) -> tuple[int, ...]:
        return (*self._lease, *self._pages_in_copies)

    @property
    def _pages_in_copies(self) -> tuple[int, ...]:
        return tuple(page for copy in self._copying.values() for page in copy.pages)

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(message=LeasePages(pages, number)):
                if number == self._asks:  # an earlier ask's pages went back with the later ask
                    self._lease += pages
                    self._asked = None
                return []
            case CopiedOut(number):
                self._copies_before.pop(number, None)
                return self._copied(self._copying.pop(number)) if number in self._copying else []
        return super()._happened(event)

    def _go_on(self) -> list[Command]:
        return [*self._copies(), *self._next_step()]

    def _next_step(self) -> list[Command]:
        if self._in_flight is not None:
            return []
        self._seat_waiting()
        return self._begin_step(self._select((), tuple(self._running.values())))

    def _seat_waiting(self) -> None:
        for running in self._waiting_in_order():
            if not self._seat(running, running.num_tokens):
                return
            self._waiting.remove(running)
            self._running[running.request.id] = running

    def _stepped(self, plan: StepPlan, result: StepResult) -> list[Command]:
        for chunk in plan.chunks:
            running = self._running.get(chunk.request)
            if running is not None and running.pairs == chunk.pairs:  # else a next attempt has its name
                running.advance(chunk)
        for request, token in result.tokens:
            if request in self._running:
                self._first_token(self._running.pop(request), token)
        return [*self._outputs.flush()]

    def _first_token(self, running: Running, token: int) -> None:
        finish = running.emit(token, self._now)
        self._outputs.emit(running.request, running.output, finish)
        if finish is None:
            self._committing.append(running)
        else:
            self._give(running.pairs)
            self._note("ended", running.key)

    # --- To the pool

    def _copies(self) -> list[Command]:
        """Copy orders for those that have pages; pages are asked for where the lease is too small."""
        if self._pool is None or self._pool.holder in self._copies_before.values():
            return []
        commands: list[Command] = []
        while self._committing and (wanted := self._wanted_pages()) <= len(self._lease):
            running = self._committing.popleft()
            pages = tuple(self._lease.pop() for _ in range(wanted))
            self._copy_number += 1
            self._copying[self._copy_number] = _Copy(running, pages, self._pool.holder)
            tokens = running.tokens(0, running.prefix)
            commands.append(CopyOut(self._copy_number, self._pool.holder, running.pairs, pages, tokens))
        return commands + self._ask(self._pool)

    def _wanted_pages(self) -> int:
        """By the first one only: what all want together may be more than there will ever be."""
        return units_for(self._committing[0].prefix, self._limits.page_size) if self._committing else 0

    def _ask(self, pool: Member) -> list[Command]:
        """For all pages that are needed, giving back those at hand: who keeps some and waits for more blocks others."""
        wanted = self._wanted_pages()
        enough = not (wanted or self._lease) if self._asked is None else self._asked >= wanted
        if enough:
            return []
        self._lease.clear()
        self._committed = False
        self._asks += 1
        self._asked = wanted
        return [Send(pool.name, AskPages(wanted, self._asks, self._pages_in_copies))]

    @property
    def _awaits_the_pool(self) -> bool:
        return self._asked is not None or self._committed

    def _ask_again(self) -> None:
        """As after an ask for less than nothing: what is needed, and what is given back, is said anew."""
        if self._awaits_the_pool:
            self._asked = -1

    def _copied(self, copy: _Copy) -> list[Command]:
        self._give(copy.running.pairs)
        if not copy.wanted or self._pool is None:
            self._lease += copy.pages
            return []
        request, output = copy.running.request, tuple(copy.running.output)
        self._committed = True
        self._outputs.forget([request.id])  # the decode worker gets the whole output, and keeps it
        return [Send(self._pool.name, Commit(Entry(request, output, copy.pages, copy.running.promise.due)))]

    def _pool_lost(self) -> None:
        """Its pages are gone; what was being copied to them is copied anew once there is a pool.

        It may come back in the same life, with these pages leased to us still: as an ask would have it lease
        them to others, none is sent before the copies that write to them have ended.
        """
        self._lease.clear()
        self._asked, self._committed = (-1 if self._asks else None), False  # what it leased to us it is to hear of
        self._copies_before |= {number: copy.pool for number, copy in self._copying.items()}
        again = [copy.running for copy in self._copying.values() if copy.wanted]
        self._committing = deque([*again, *self._committing])
        self._copying = {number: replace(copy, pages=()) for number, copy in self._copying.items() if not copy.wanted}

    # --- What is here

    def _prompts_ahead(self) -> Iterable[Running]:
        return self._running.values()

    def _seats(self) -> list[Running]:
        return [*self._running.values(), *self._committing, *(copy.running for copy in self._copying.values())]

    def _held_attempts(self) -> list[Attempt]:
        copied = [copy.running for copy in self._copying.values() if copy.wanted]
        seated = [*self._running.values(), *self._committing, *copied]
        return [running.key for running in (*seated, *self._waiting)]

    def _drop(self, request: str, attempt: int) -> list[Command]:
        self._waiting = [one for one in self._waiting if not one.is_of(request, attempt)]
        self._is_stuck = False
        running = self._running.get(request)
        if running is not None and running.is_of(request, attempt):
            del self._running[request]
            self._free(running.pairs)
        for one in [one for one in self._committing if one.is_of(request, attempt)]:
            self._committing.remove(one)
            self._free(one.pairs)
        for copy in self._copying.values():
            if copy.running.is_of(request, attempt):
                copy.wanted = False
        self._outputs.drop(request, attempt)
        return []
