"""Write to the pool: requests that have to leave, and the answers of requests that have ended.

    resident ── pages at hand ──▶ evicted (pairs to pages) ──▶ Commit: it waits in the pool
       ├── its prompt is through ──▶ full pages of it ──▶ Keep: the pool holds them for it (keeping.py)
       └── ended ──▶ kept (its answer to pages) ──▶ Keep: for a request that goes on from there
    has to leave, and waits here ──▶ full pages of what has run ──▶ Keep: it goes on from there

Written is only what the pool lacks: the full pages that it holds for a request stay its own. The worker never
waits for pages: it has spare ones at hand (page_writer.py), and does without where there are none.
"""

from __future__ import annotations

from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import CopiedOut, Event, MemberLost, Received
from alignedserve.protocol.messages import SPARE, Attempt, Commit, GiveBack, Keep, Kept, LeasePages, Member
from alignedserve.worker.page_writer import Copy
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running


class PageWriting(CorePart):
    def __init__(self, stores: Stores) -> None:
        self._policy, self._page_size = stores.policy, stores.limits.page_size
        self._pool, self._holds, self._queue = stores.pool, stores.holds, stores.queue
        self._candidates, self._notes, self._decisions = stores.candidates, stores.notes, stores.decisions
        self._outputs, self._names = stores.owners.outputs, stores.names
        self.writer, self._pages = stores.writer, stores.pages
        self._awaited: set[Attempt] = set()  # of which the pool is to say what it holds
        self.num_kept_pages = 0  # of prompts and answers

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(message=LeasePages() as lease):
                self.writer.take_answer(lease)
            case Received(message=GiveBack()):
                return [] if self.target is None else [self.writer.give_back(self.target)]
            case Received(message=Kept(request, attempt)):
                self._awaited.discard((request, attempt))
            case CopiedOut(number):
                copy = self.writer.end_copy(number)
                return [] if copy is None else self._hand_on(copy)
            case MemberLost(member) if member == self._pool.member:
                self._lose_pool()
        return []

    @property
    def target(self) -> Member | None:
        """Return the pool, if it may be written to now."""
        return self.writer.target(self._pool.member)

    def has_pages(self, running: Running) -> bool:
        """Return whether there are pages at hand for all that the pool lacks of a request that has to leave."""
        if self.target is None:
            return False
        if self.writer.is_writing(running):  # its pairs are overwritten meanwhile
            self.writer.forget_parts(running)
        return self.writer.pages_for(running, running.prefix) <= self.writer.num_at_hand(SPARE)

    def write(self, running: Running, saved: tuple[tuple[int, int], ...] = ()) -> Command:
        """Order a copy of the request to pages at hand; `saved` are its tokens without a slot, and their places."""
        assert self.target is not None, "there are pages at hand"
        self._pages.note_in_pool(running)
        return self.writer.begin(running, self.target, running.prefix, SPARE, saved=saved)

    def write_full_pages(self, running: Running, saved: tuple[tuple[int, int], ...] = ()) -> list[Command]:
        """Order a copy of the full pages of a request that waits here from now on, as far as pages are at hand."""
        if self.target is None or self.writer.num_written(running) or running.num_lost:
            return []
        full = running.prefix // self._page_size
        pages = min(full - len(running.known), self.writer.num_at_hand(SPARE))
        if pages <= 0:
            return []
        tokens = (len(running.known) + pages) * self._page_size
        saved = tuple((token, place) for token, place in saved if token < tokens)
        self._pages.note_in_pool(running)
        return [self.writer.begin(running, self.target, tokens, SPARE, saved=saved, stays=True)]

    def awaits(self, running: Running) -> bool:
        """Return whether the pool has been given pages of the request, and has not said yet that it keeps them."""
        return running.key in self._awaited

    def has_answered(self, running: Running) -> bool:
        """Return whether the pool has said all that it holds of a request that has ended; it is to say no more."""
        is_awaited = running.key in self._awaited
        self._awaited.discard(running.key)
        return not is_awaited

    def hand_on_parts(self, running: Running, has_ended: bool = False) -> list[Command]:
        """Give the pages of all written parts of a request to the pool."""
        copy = self.writer.take_parts(running)
        copy.has_ended, copy.stays = has_ended, not has_ended
        return self._hand_on(copy)

    def _hand_on(self, copy: Copy) -> list[Command]:
        """Give the pages of a copy that has ended to the pool, or take them back where it is not wanted any more."""
        if self._pool.member is None or not copy.wanted:
            self.writer.take_back(copy)
            return []
        if copy.has_left and copy.running.known != copy.known:  # the pool has taken them back meanwhile
            self.writer.take_back(copy)
            self._queue.put_back(copy.running)
            return []
        self.writer.hand_on(copy)
        if copy.stays:
            self._awaited.add(copy.running.key)
            return self._pool.send(self._keep(copy, goes_on=True))
        self._holds.discard(copy.running.key)
        return self._pool.send(self._keep(copy) if copy.has_ended else self._commit(copy))

    def _keep(self, copy: Copy, goes_on: bool = False) -> Keep:
        running, tokens = copy.running, (len(copy.known) + len(copy.pages)) * self._page_size
        self.num_kept_pages += len(copy.pages)
        names = self._names.pages_of(running, tokens)[len(copy.known) :] if self._policy.reuse else ()
        return Keep(*running.key, len(copy.known), copy.pages, names, running.request.service, goes_on)

    def _commit(self, copy: Copy) -> Commit:
        running = copy.running
        self._outputs.forget([running.request.id])  # the worker that gets it next has the whole output
        self._notes.note("returned", running.key)
        self._decisions.note(Kind.COMMITTED, running.request, tokens=running.prefix)
        names = self._names.pages_of(running, running.prefix) if self._policy.reuse else ()
        return Commit(running.entry(copy.known + copy.pages, names), len(copy.known))

    def _lose_pool(self) -> None:
        """Compute anew what was on its way to the pool; the pages that it kept for requests are gone."""
        for running in self.writer.lose_pool():
            running.known = ()
            self._queue.put_back(running)
        for running in self._candidates.evicted:
            running.known = ()
        self._holds.clear()
        self._awaited.clear()

    # --- Requests that are being written

    def drop(self, request: str, attempt: int) -> list[Command]:
        self._awaited = {key for key in self._awaited if key[0] != request or key[1] > attempt}
        dropped = self.writer.drop(request, attempt)
        return [command for running in dropped for command in self._holds.release(running.key)]

    def attempts(self) -> list[Attempt]:
        return [copy.running.key for copy in self.writer.copies if copy.wanted and copy.has_left]

    def settled(self) -> set[Attempt]:
        """Return the attempts that have ended, of whose answers the pool will hear."""
        return {copy.running.key for copy in self.writer.copies if copy.has_ended}

    def ask_again(self) -> None:
        self.writer.ask_again()

    @property
    def awaits_answer(self) -> bool:
        return self.writer.awaits_the_pool


def is_writable(running: Running, page_size: int) -> bool:
    """Return whether what is kept of it on the device is what the pages hold that the pool lacks, and of use to it."""
    return not running.blocks and running.has_tokens and running.folded <= len(running.known) * page_size
