"""The prefill worker's core: runs prompts, emits their first tokens, commits their KV to the pool.

    Prefill ─▶ asking ──▶ waiting ──▶ fetching ──▶ running ──▶ ended (one token was enough)
               (what the  (no pairs)  (known pages    │
               pool knows)            to pairs)       └──▶ committing ──▶ copying ──▶ Commit
                                                           (no pages)     (pairs to pages)

A request that is cancelled, or whose next attempt arrives, leaves from wherever it is. Of one that is
being copied, pairs and pages stay taken until the copy has ended. Pages that nothing waits for go back
to the pool: another worker may be waiting for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from alignedserve.core import Chunk, Decode, StepPlan, StepResult
from alignedserve.cost_fit import OnlineCost
from alignedserve.messages import (
    ROUTER,
    AskPages,
    Attempt,
    Command,
    Commit,
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    Event,
    LeasePages,
    Member,
    Prefix,
    Received,
    Release,
    Send,
    Spoiled,
)
from alignedserve.policy import DEFAULT_POLICY, Policy
from alignedserve.prefill_worker.prefixes import Prefixes
from alignedserve.running import Running, WorkerLimits, units_for
from alignedserve.worker import WorkerCore


@dataclass
class _Copy:
    """To pages of the pool. Of one that nobody wants any more, pairs and pages stay taken until it has ended."""

    running: Running
    known: tuple[int, ...]  # pages of the pool that come before
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
        root: bytes = b"",
    ) -> None:
        """`root` names the model and the layout of its KV: prompts are known again by it and their tokens."""
        super().__init__(limits, policy, cost, copy_token_s)
        self._prefixes = Prefixes(limits.page_size, root)
        self._fetching: dict[int, Running] = {}  # by the number of the copy
        self.num_reused_tokens = 0
        self.num_spoiled_pages = 0
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
            case Received(message=Prefix() as prefix):
                return self._prefix(prefix)
            case CopiedIn(number, intact):
                return self._fetched(self._fetching.pop(number), intact) if number in self._fetching else []
        return super()._happened(event)

    def _go_on(self) -> list[Command]:
        return [*self._copies(), *self._next_step()]

    def _next_step(self) -> list[Command]:
        if self._in_flight is not None:
            return []
        commands: list[Command] = []
        for running in self._first_come():
            if not self._seat(running, running.num_tokens):
                break
            commands += self._seated_now(running)
        while True:
            selection = self._select((), tuple(self._running.values()), seats=len(self._waiting))
            for running in selection.seated:
                commands += self._seated_now(running)
            if selection.chunks or not (selection.seated or self._made_room()):
                return [*commands, *self._begin_step(selection)]

    def _seated_now(self, running: Running) -> list[Command]:
        """It runs, after what the pool knows of it has been fetched."""
        self._waiting.remove(running)
        if running.known and self._pool is not None:
            return [self._fetch(running, self._pool)]
        self._running[running.request.id] = running
        return []

    def _made_room(self) -> bool:
        """Where nothing can run, and nothing else that is under way gives memory back."""
        if len(self._running) < 2 or self._committing or self._copying or self._fetching:
            return False
        self._uncrowd(self._running)
        return True

    def _room_for(self, running: Running) -> int:
        return running.num_tokens

    def _unfinished(self) -> Iterable[Running]:
        return self._seats()  # until it is committed

    # --- What the pool knows of a prompt

    def _prefill(self, running: Running) -> list[Command]:
        ask = self._prefixes.ask(running) if self._policy.reuse and self._pool is not None else None
        if ask is None or self._pool is None:
            return super()._prefill(running)
        return [Send(self._pool.name, ask)]

    def _prefix(self, prefix: Prefix) -> list[Command]:
        running = self._prefixes.answered(prefix)
        if running is not None:
            return super()._prefill(running)
        attempt = (prefix.request, prefix.attempt)
        here = [one for one in (*self._seats(), *self._waiting) if one.key == attempt]
        for one in here:
            if not prefix.pages:
                one.known = ()
        return [] if here else self._let_go(attempt, prefix.pages)

    def _fetch(self, running: Running, pool: Member) -> Command:
        self._copy_number += 1
        self._fetching[self._copy_number] = running
        tokens = running.tokens(0, self._prefixes.tokens_in(running.known))
        pairs = running.pairs[: units_for(len(tokens), self._limits.block_size)]
        return CopyIn(self._copy_number, pool.holder, running.known, pairs, tokens)

    def _fetched(self, running: Running, intact: bool) -> list[Command]:
        """Right or not at all: what is not intact is computed, and nobody else gets it."""
        self._running[running.request.id] = running
        if intact:
            running.prefix = self._prefixes.tokens_in(running.known)
            self.num_reused_tokens += running.prefix
            return []
        pages, running.known = running.known, ()
        self.num_spoiled_pages += len(pages)
        return [] if self._pool is None else [Send(self._pool.name, Spoiled(pages)), *self._let_go(running.key, pages)]

    def _let_go(self, attempt: Attempt, pages: tuple[int, ...]) -> list[Command]:
        """The pool need not keep them for this attempt."""
        return [Send(self._pool.name, Release(*attempt))] if pages and self._pool is not None else []

    def _unknown(self, asker: str, attempts: Sequence[Attempt]) -> list[Command]:
        if asker == ROUTER or self._pool is None:
            return super()._unknown(asker, attempts)
        return [Send(self._pool.name, Release(*attempt)) for attempt in attempts]

    def _stepped(self, plan: StepPlan, result: StepResult) -> list[Command]:
        released: list[Command] = []
        for running, finish in self._emitted(plan.chunks, result):
            del self._running[running.request.id]
            if finish is None:
                self._committing.append(running)
            else:
                self._give(running.pairs)
                self._note("ended", running.key)
                released += self._let_go(running.key, running.known)
        return [*released, *self._outputs.flush()]

    def _seated(self, request: str) -> Running | None:
        return self._running.get(request)

    def _lose(self, ran: Chunk | Decode) -> list[Command]:
        running = self._running.get(ran.request)
        if running is None or running.pairs != ran.pairs:
            return []
        del self._running[ran.request]
        self._give(running.pairs)
        self._outputs.drop(*running.key)
        self._note("lost", running.key)
        return self._let_go(running.key, running.known)

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
            self._copying[self._copy_number] = _Copy(running, running.known, pages, self._pool.holder)
            tokens, start = running.tokens(0, running.prefix), self._prefixes.tokens_in(running.known)
            commands.append(CopyOut(self._copy_number, self._pool.holder, running.pairs, pages, tokens, start))
        return commands + self._ask(self._pool)

    def _wanted_pages(self) -> int:
        """By the first one only: what all want together may be more than there will ever be."""
        if not self._committing:
            return 0
        first = self._committing[0]
        return units_for(first.prefix, self._limits.page_size) - len(first.known)

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
        return self._asked is not None or self._committed or len(self._prefixes) > 0

    def _ask_again(self) -> None:
        """As after an ask for less than nothing: what is needed, and what is given back, is said anew."""
        self._add_waiting(self._prefixes.overdue())
        if self._asked is not None or self._committed:
            self._asked = -1

    def _copied(self, copy: _Copy) -> list[Command]:
        if not copy.wanted or self._pool is None:
            self._give(copy.running.pairs)
            self._lease += copy.pages
            return []
        if copy.running.known != copy.known:  # the pool has taken them back: now all is to be copied
            self._lease += copy.pages
            self._committing.appendleft(copy.running)
            return []
        running = copy.running
        self._give(running.pairs)
        names = self._prefixes.names(running) if self._policy.reuse else ()
        self._committed = True
        self._outputs.forget([running.request.id])  # the decode worker gets the whole output, and keeps it
        return [Send(self._pool.name, Commit(running.entry(copy.known + copy.pages, names), len(copy.known)))]

    def _pool_lost(self) -> None:
        """Its pages are gone; what was being copied to them is copied anew once there is a pool.

        It may come back in the same life, with these pages leased to us still: as an ask would have it lease
        them to others, none is sent before the copies that write to them have ended.
        """
        self._add_waiting(self._prefixes.give_up())
        for running in self._seats():
            running.known = ()
        for running in self._waiting:
            running.known = ()
        self._lease.clear()
        self._asked, self._committed = (-1 if self._asks else None), False  # what it leased to us it is to hear of
        self._copies_before |= {number: copy.pool for number, copy in self._copying.items()}
        again = [copy.running for copy in self._copying.values() if copy.wanted]
        self._committing = deque([*again, *self._committing])
        self._copying = {number: replace(copy, pages=()) for number, copy in self._copying.items() if not copy.wanted}

    # --- What is here

    def _prompts_ahead(self) -> Iterable[Running]:
        return [*self._running.values(), *self._fetching.values(), *self._prefixes.asking]

    def _seats(self) -> list[Running]:
        copied = [copy.running for copy in self._copying.values()]
        return [*self._running.values(), *self._fetching.values(), *self._committing, *copied]

    def _held_attempts(self) -> list[Attempt]:
        copied = [copy.running for copy in self._copying.values() if copy.wanted]
        seated = [*self._running.values(), *self._fetching.values(), *self._committing, *copied]
        return [running.key for running in (*seated, *self._waiting, *self._prefixes.asking)]

    def _drop(self, request: str, attempt: int) -> list[Command]:
        leaving = self._waiting.drop(request, attempt)
        self._is_stuck = False
        for number, one in [*self._fetching.items()]:
            if one.is_of(request, attempt):
                del self._fetching[number]
                self._free(one.pairs)  # work is done in its order: whatever is written there next comes after the copy
                leaving.append(one)
        running = self._running.get(request)
        if running is not None and running.is_of(request, attempt):
            del self._running[request]
            self._free(running.pairs)
            leaving.append(running)
        for one in [one for one in self._committing if one.is_of(request, attempt)]:
            self._committing.remove(one)
            self._free(one.pairs)
            leaving.append(one)
        for copy in self._copying.values():
            if copy.running.is_of(request, attempt):
                copy.wanted = False
                leaving.append(copy.running)
        self._outputs.drop(request, attempt)
        self._prefixes.drop(request, attempt)  # its answer finds nobody here, and what is held for it is released then
        return [command for one in leaving for command in self._let_go(one.key, one.known)]
