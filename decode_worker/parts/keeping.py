"""The KV that the pool keeps of requests, for them and for others that begin alike.

    through ── pages at hand ──▶ copied beside the steps ──▶ Keep: held while its request decodes
       └── its request has left or ended: no longer wanted (an answer takes what is written with it)
    ended ── pages at hand ──▶ its answer is copied, likewise ──▶ Keep: for requests that go on from there

    leaves next ── memory is short ──▶ its full pages are copied, likewise ──▶ it leaves: only the rest is copied
                                          └── it has ended: handed on with its answer; it left without: forgotten

A request that has to leave then writes only what it has made since, and is not computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alignedserve.core import FinishReason
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.parts.writing import PageWriting, is_writable
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event, MemberLost
from alignedserve.protocol.messages import SPARE
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running

_MOST_AHEAD = 4  # requests that are written ahead; looking for each takes a look at all residents
_LOOK_STEPS = 4  # between two looks: a page is filled in more than that


class PromptKeeping(CorePart):
    """Has the pool keep the full pages of prompts that are through, while their requests decode."""

    def __init__(self, stores: Stores, writing: PageWriting) -> None:
        self._page_size, self._pool, self._here = stores.limits.page_size, stores.pool, stores.here
        self._unread = stores.limits.unread
        self._writing, self._writer = writing, writing.writer
        # Beside steps only what stays where it is can be copied.
        self._is_on = stores.policy.reuse and stores.memory.keeps_places
        self._through: dict[Running, None] = {}  # whose prompts are to be written, in the order of their first tokens
        self._copying: dict[Running, None] = {}

    def add(self, running: Running) -> None:
        """Have the prompt of a request written that decodes from now on."""
        if self._is_on and self._pool.member is not None and self._num_pages(running) > 0:
            self._through[running] = None

    def awaits(self, running: Running) -> bool:
        """Return whether pages of this request are still to be written."""
        return running in self._through or running in self._copying

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case MemberLost(member) if member == self._pool.member:
                self._through.clear()
                self._copying.clear()
        return []

    def _num_pages(self, running: Running) -> int:
        """Return how many full pages of the prompt the pool lacks."""
        num_prompt = len(running.request.tokens)
        if not is_writable(running, self._page_size) or self._unread(num_prompt):
            return 0
        return num_prompt // self._page_size - len(running.known)

    @property
    def num_pages(self) -> int:
        """Return the pages that are wanted at hand."""
        return sum(map(self._num_pages, self._through))

    def keep(self, now: float) -> list[Command]:
        """Hand on what is written, and begin to copy as many prompts as there are pages for."""
        if not self._through and not self._copying:
            return []
        for running in [running for running in self._copying if not self._decodes(running)]:
            del self._copying[running]
            if running not in self._here.kept:
                self._writer.forget_parts(running)
        self._through = {running: None for running in self._through if self._decodes(running)}
        return [*self._hand_on(), *self._begin()]

    def _decodes(self, running: Running) -> bool:
        return self._here.residents.get(running.request.id) is running and not running.num_lost

    def _hand_on(self) -> list[Command]:
        being_written, commands = self._writer.being_written, list[Command]()
        for running in [running for running in self._copying if running not in being_written]:
            del self._copying[running]
            if self._writer.num_written(running):
                commands += self._writing.hand_on_parts(running)
            else:  # the pool has said that it holds other pages than those after which these came: they were forgotten
                self._through[running] = None
        return commands

    def _begin(self) -> list[Command]:
        commands: list[Command] = []
        pool = self._writing.target
        for running in list(self._through):
            pages = self._num_pages(running)
            if pool is None or pages > self._writer.num_at_hand(SPARE):
                break
            del self._through[running]
            if pages > 0:
                self._copying[running] = None
                commands.append(self._writer.begin_part(running, pool, pages, SPARE))
        return commands


class WritingAhead:
    """Has the full pages of requests written that leave next, while they still run.

    An eviction stands between two steps, since the next one needs its pairs: what it copies delays all that decode.
    """

    def __init__(self, stores: Stores, writing: PageWriting, prompts: PromptKeeping) -> None:
        limits, policy = stores.limits, stores.policy
        self._page_size, self._steps = limits.page_size, stores.steps
        self._here, self._memory, self._order = stores.here, stores.memory, stores.order
        self._writing, self._writer, self._prompts = writing, writing.writer, prompts
        gives_back = limits.reach is not None or limits.fold is not None  # pairs of a request that runs: they move
        have_to_leave = policy.grows or policy.swaps
        self._is_on = stores.copies_beside and policy.evict and have_to_leave and not gives_back
        self._looked_at = 0  # number of a step
        self._ahead: dict[Running, None] = {}  # residents whose pages were written ahead
        self.num_pages = 0  # that were written ahead

    def write(self, now: float) -> list[Command]:
        """Begin to copy full pages of the requests that leave next, while spare pages last."""
        if self._ahead:
            self._forget_those_that_are_gone()
        pool, commands = self._writing.target, list[Command]()
        is_due = self._is_on and self._steps.number >= self._looked_at + _LOOK_STEPS
        if pool is None or not is_due or self._memory.num_free >= self._short:
            return []
        self._looked_at = self._steps.number
        for running in self._next_to_leave(now):
            pages = self._num_pages(running)
            if 0 < pages < self._writer.num_at_hand(SPARE):  # a page is left for what it makes from now on
                self._ahead[running] = None
                self.num_pages += pages
                commands.append(self._writer.begin_part(running, pool, pages, SPARE))
        return commands

    def _forget_those_that_are_gone(self) -> None:
        """Forget what was written of requests that left without it, or ended: an answer takes it along."""
        gone = [running for running in self._ahead if self._here.residents.get(running.request.id) is not running]
        for running in gone:
            del self._ahead[running]
            if running not in self._here.kept:
                self._writer.forget_parts(running)

    @property
    def _short(self) -> int:
        """Return the free pairs below which memory is short: one for each decode."""
        return len(self._here.residents)

    def _next_to_leave(self, now: float) -> Iterator[Running]:
        residents, free = [*self._here.residents.values()], self._memory.num_free
        for _ in range(min(_MOST_AHEAD, len(residents) - 1)):
            if free >= self._short:
                return
            leaving = self._order.scheduler.leaving((), residents, now)
            residents.remove(leaving)
            free += self._memory.num_freed((leaving,))
            yield leaving

    def _num_pages(self, running: Running) -> int:
        """Return how many full pages the pool lacks of a request, if these are to be written now."""
        is_busy = self._writer.is_writing(running) or self._prompts.awaits(running) or self._writing.awaits(running)
        if is_busy or running.num_lost or not is_writable(running, self._page_size):
            return 0
        return running.prefix // self._page_size - len(running.known) - self._writer.num_written(running)


class AnswerKeeping:
    """Has the pool keep the full pages of requests that have ended: of their prompts it has most already."""

    def __init__(self, stores: Stores, writing: PageWriting) -> None:
        self._page_size, self._pace, self._steps = stores.limits.page_size, stores.pace, stores.steps
        self._here, self._queue, self._candidates = stores.here, stores.queue, stores.candidates
        self._memory, self._holds, self._writing = stores.memory, stores.holds, writing
        self._writer, self._copies_beside = writing.writer, stores.copies_beside

    def end(self, running: Running, finish: FinishReason) -> list[Command]:
        """Free what a request has that has ended, at once or after its answer is copied to the pool."""
        if finish.has_token and self._is_kept(running):
            self._here.kept.append(running)
            self._memory.hold(running)
            return []
        self._memory.release_after_step(running)
        return self._holds.release(running.key)

    def _is_kept(self, running: Running) -> bool:
        """Return whether there is anything to be kept: of a request that came with KV, what comes after the pages that
        the pool holds. Where a request shares its pairs it would be in another one's way."""
        begins = running.key in self._holds or not running.came_with_kv
        is_whole = self._writing.has_answered(running) and begins and not self._memory.is_shared(running)
        if not (is_whole and self._pace.policy.reuse):
            return False
        return self._num_pages(running) > 0 or self._writer.num_written(running) > 0

    def _num_pages(self, running: Running) -> int:
        """Return the pages to write for the pool to keep: it lacks them, and they are at hand."""
        is_on = self._pace.policy.reuse and self._writing.target is not None
        if not is_on or not is_writable(running, self._page_size) or running.num_lost:
            return 0
        full = running.prefix // self._page_size - len(running.known) - self._writer.num_written(running)
        return min(full, self._writer.num_at_hand(SPARE))

    def keep_answers(self, now: float) -> list[Command]:
        """Copy answers to the pool, and free the pairs of requests of which the pool gets no more.

        An answer is copied beside the steps and keeps its pairs meanwhile, as one does whose prompt is still being
        written. Where decodes may lack these pairs, where another request waits for them and copies beside steps take
        long, or where pairs do not stay where they are, it is copied after the step that is due, and only if the one
        after it will not be late for that.
        """
        writing = [running for running in self._here.kept if self._writer.is_writing(running)]
        begun = self._begin_aside() if self._may_hold_pairs else {}
        ended = [running for running in self._here.kept if not (running in begun or running in writing)]
        self._here.kept = [*writing, *begun]
        return [*begun.values(), *self._end_all(ended, now)]

    @property
    def _may_hold_pairs(self) -> bool:
        """Return whether answers may keep their pairs while they are copied."""
        if not self._memory.keeps_places or self._memory.num_free < len(self._here.residents):
            return False
        return self._copies_beside or not (self._candidates or self._queue.lacks_memory(only_rt=False))

    def _begin_aside(self) -> dict[Running, Command]:
        """Begin to copy answers beside the steps; return the requests whose pages were at hand."""
        begun: dict[Running, Command] = {}
        for running in self._here.kept:
            pages, pool = self._num_pages(running), self._writing.target
            if pool is not None and pages > 0 and not self._writer.is_writing(running):
                begun[running] = self._writer.begin_part(running, pool, pages, SPARE)
                self._memory.pages.note_in_pool(running)
        return begun

    def _end_all(self, ended: Sequence[Running], now: float) -> list[Command]:
        """Hand on what is written of these requests, or copy it after the step that is due, and free their pairs."""
        commands: list[Command] = []
        copied = 0
        for running in ended:
            pages, pool = self._num_pages(running), self._writing.target
            more = pages * self._page_size
            if pool is not None and pages > 0 and self._has_time_for(copied + more, now):
                copied += more
                tokens = (len(running.known) + self._writer.num_written(running) + pages) * self._page_size
                commands.append(self._writer.begin(running, pool, tokens, SPARE, has_ended=True))
                self._memory.pages.note_in_pool(running)
            elif self._writer.num_written(running):
                commands += self._writing.hand_on_parts(running, has_ended=True)
            else:
                commands += self._holds.release(running.key)
            if self._is_in_step(running):  # a step that was planned ahead writes there, behind what is copied
                self._memory.release_after_step(running)
            else:
                self._memory.release(running)  # no step writes there before the copy
        return commands

    def _has_time_for(self, tokens: int, now: float) -> bool:
        """Return whether so many tokens can be copied between the step in flight and the next."""
        if self._steps.running is None:
            return True
        ends_at = now + 2 * self._steps.running.predicted_s + tokens * self._pace.copy_token_s
        promises = (running.promise for running in self._here.residents.values())
        return all(promise.due_at(now) >= ends_at for promise in promises if promise.is_rt)

    def _is_in_step(self, running: Running) -> bool:
        parts = () if self._steps.running is None else self._steps.running.parts
        return any(part.request == running.request.id and running.is_at(part) for part in parts)
