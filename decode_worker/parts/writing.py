"""Write to the pool: requests that have to leave, and the answers of requests that have ended.

    resident ── pages at hand ──▶ evicted (pairs to pages) ──▶ Commit: it waits in the pool again
       └── ended ──▶ kept (its answer to pages) ──▶ Keep: for a request that goes on from there

Written is only what the pool lacks: the full pages of the entry as it was handed out stay its own. The worker never
waits for pages: it has spare ones at hand (page_writer.py), and does without where there are none.
"""

from __future__ import annotations

from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import CopiedOut, Event, MemberLost, Received
from alignedserve.protocol.messages import SPARE, Attempt, Commit, GiveBack, Keep, LeasePages, Member
from alignedserve.worker.page_writer import Copy
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running


class PageWriting(CorePart):
    def __init__(self, stores: Stores) -> None:
        self._policy, self._page_size = stores.policy, stores.limits.page_size
        self._roster, self._pool, self._holds, self._queue = stores.roster, stores.pool, stores.holds, stores.queue
        self._candidates, self._notes = stores.candidates, stores.notes
        self._outputs, self._names = stores.owners.outputs, stores.names
        self.writer = stores.writer
        self.num_kept_pages = 0  # of answers

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(message=LeasePages() as lease):
                self.writer.take_answer(lease)
            case Received(message=GiveBack()):
                return [] if self.target is None else [self.writer.give_back(self.target)]
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
        """Return whether there are pages at hand for all that the pool lacks of the request."""
        if self.target is None:
            return False
        return self.writer.pages_for(running, running.prefix) <= self.writer.num_at_hand(SPARE)

    def write(self, running: Running, saved: tuple[tuple[int, int], ...] = ()) -> Command:
        """Order a copy of the request to pages at hand; `saved` are its tokens without a slot, and their places."""
        assert self.target is not None, "there are pages at hand"
        return self.writer.begin(running, self.target, running.prefix, SPARE, saved=saved)

    def _hand_on(self, copy: Copy) -> list[Command]:
        """Give the pages of a copy that has ended to the pool, or take them back where it is not wanted any more."""
        if self._pool.member is None or not copy.wanted:
            self.writer.take_back(copy)
            return []
        self.writer.hand_on(copy)
        self._holds.discard(copy.running.key)
        return self._pool.send(self._keep(copy) if copy.has_ended else self._commit(copy))

    def _keep(self, copy: Copy) -> Keep:
        running, tokens = copy.running, (len(copy.known) + len(copy.pages)) * self._page_size
        self.num_kept_pages += len(copy.pages)
        names = self._names.pages_of(running, tokens)[len(copy.known) :]
        return Keep(*running.key, len(copy.known), copy.pages, names)

    def _commit(self, copy: Copy) -> Commit:
        running = copy.running
        self._outputs.forget([running.request.id])  # the worker that gets it next has the whole output
        self._notes.note("returned", running.key)
        names = self._names.pages_of(running, running.prefix) if self._policy.reuse else ()
        return Commit(running.entry(copy.known + copy.pages, names), len(copy.known))

    def _lose_pool(self) -> None:
        """Compute anew what was on its way to the pool; the pages that it kept for requests are gone."""
        for running in self.writer.lose_pool():
            self._queue.put_back(running)
        for running in (*self._roster.occupants(), *self._queue.waiting, *self._candidates.evicted):
            running.known = ()
        self._holds.clear()

    # --- Requests that are being written

    def drop(self, request: str, attempt: int) -> list[Command]:
        dropped = self.writer.drop(request, attempt)
        return [command for running in dropped for command in self._holds.release(running.key)]

    def attempts(self) -> list[Attempt]:
        return [copy.running.key for copy in self.writer.copies if copy.wanted and not copy.has_ended]

    def settled(self) -> set[Attempt]:
        """Return the attempts that have ended, of whose answers the pool will hear."""
        return {copy.running.key for copy in self.writer.copies if copy.has_ended}

    def ask_again(self) -> None:
        self.writer.ask_again()

    @property
    def awaits_answer(self) -> bool:
        return self.writer.awaits_the_pool


def is_writable(running: Running) -> bool:
    """Return whether what is kept of it on the device is what its pages hold."""
    return not running.blocks
