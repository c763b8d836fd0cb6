"""What a decode worker writes to the pool: requests that leave, prompts and answers that others may need.

    resident ── pages at hand ──▶ evicted (blocks to pages) ──▶ Commit: waits in the pool
       ├── the prompt has run ──▶ full pages ──▶ Keep: the pool holds them for the request
       └── ended ──▶ kept (answer to pages) ──▶ Keep: for a later request that goes on from there
    has to leave, and waits here ──▶ full pages of what has run ──▶ Keep: goes on from there

Only what the pool lacks is written: the full pages that it holds for a request stay as they are. The worker has spare
pages at hand (worker/pool.py). Where there are none, a request that leaves is recomputed; only where no request decodes
here, requests that have run their prompts wait for pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from alignedserve.core import FinishReason, ServiceClass, units_for
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, CopyOut
from alignedserve.protocol.events import CopiedOut, MemberLost, Received
from alignedserve.protocol.messages import Attempt, Commit, GiveBack, Keep, Kept, LeasePages, Member
from alignedserve.worker.owners import Outputs
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.pool import Copy
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State


class PageWriting(WorkerPart):
    """Orders copies to the pool's pages, and hands pages on to the pool when the copy has ended."""

    def __init__(self, worker: Worker, outputs: Outputs) -> None:
        super().__init__(worker)
        self._outputs, self._page_size = outputs, self._limits.page_size
        self._awaited: set[Attempt] = set()  # the pool has not yet said what it holds of these
        self.num_kept_pages = 0  # of prompts and answers
        # Beside steps only KV that stays in place can be copied.
        self._keeps_prompts = self._policy.reuse and self._memory.keeps_places and self._memory.decodes
        self._prompts: dict[WorkerRequest, None] = {}  # to be written, in the order of first tokens
        self._copying: dict[WorkerRequest, None] = {}  # prompts that are being written

    def leased(self, lease: LeasePages, frame: Received, now: float) -> None:
        self._writer.lease.take_answer(lease)

    def give_back(self, message: GiveBack, frame: Received, now: float) -> list[Command]:
        """Give spare pages back because another worker waits for pages."""
        return [] if self.target is None else self._pool.send(self._writer.lease.give_back(self._writer.in_copies))

    def kept(self, message: Kept, frame: Received, now: float) -> None:
        self._awaited.discard((message.request, message.attempt))

    def copied_out(self, event: CopiedOut, now: float) -> list[Command]:
        copy = self._writer.end_copy(event.number)
        return [] if copy is None else self._hand_on(copy, now)

    @property
    def target(self) -> Member | None:
        """Return the pool, if the worker may write there now."""
        return self._writer.target(self._pool.member)

    def has_pages(self, running: WorkerRequest) -> bool:
        """Return whether the pages at hand are enough for what the pool lacks of a request that has to leave."""
        if self.target is None:
            return False
        if self._writer.is_writing(running):  # the blocks are overwritten meanwhile
            self._writer.forget_parts(running)
        return self._writer.pages_for(running, running.prefix) <= len(self._writer.lease.pages)

    def write(self, running: WorkerRequest) -> CopyOut:
        """Order a copy of the request to pages at hand."""
        assert self.target is not None, "there are pages at hand"
        self._pages.note_in_pool(running)
        return self._writer.begin(running, self.target, running.prefix)

    def write_full_pages(self, running: WorkerRequest) -> list[CopyOut]:
        """Order a copy of the full pages of a request that waits here from now on, while pages are at hand."""
        if self.target is None or self._writer.num_written(running) or running.num_lost:
            return []
        full = running.prefix // self._page_size
        pages = min(full - len(running.known), len(self._writer.lease.pages))
        if pages <= 0:
            return []
        tokens = (len(running.known) + pages) * self._page_size
        self._pages.note_in_pool(running)
        return [self._writer.begin(running, self.target, tokens, stays=True)]

    def write_answer(self, running: WorkerRequest, pages: int, aside: bool) -> CopyOut:
        """Order a copy of the last full pages of a request that has ended: beside the steps, or after a step."""
        self._pages.note_in_pool(running)
        return self.write_next(running, pages, has_ended=not aside)

    def write_next(self, running: WorkerRequest, pages: int, has_ended: bool = False) -> CopyOut:
        """Order a copy of a request's next full pages: beside the steps, or after a step if the request has ended."""
        assert self.target is not None, "there are pages at hand"
        tokens = (len(running.known) + self._writer.num_written(running) + pages) * self._page_size
        return self._writer.begin(running, self.target, tokens, has_ended=has_ended, aside=not has_ended)

    def is_busy(self, running: WorkerRequest) -> bool:
        """Return whether pages of the request are under way, are still to go, or wait for the pool's word."""
        return self._writer.is_writing(running) or running.key in self._awaited or self.awaits(running)

    def has_answered(self, running: WorkerRequest) -> bool:
        """Return whether the pool has answered for a request that has ended; a later answer is not awaited."""
        is_awaited = running.key in self._awaited
        self._awaited.discard(running.key)
        return not is_awaited

    def hand_on_parts(self, running: WorkerRequest, now: float, has_ended: bool = False) -> list[Command]:
        """Give the pages of all written parts of a request to the pool."""
        copy = self._writer.take_parts(running)
        copy.has_ended, copy.stays = has_ended, not has_ended
        return self._hand_on(copy, now)

    def _hand_on(self, copy: Copy, now: float) -> list[Command]:
        """Give the pages of an ended copy to the pool, or take them back where the copy is not wanted any more."""
        if self._pool.member is None or not copy.wanted:
            self._writer.take_back(copy)
            return []
        if copy.has_left and copy.running.known != copy.known:  # the pool has taken those back meanwhile
            self._writer.take_back(copy)
            self._queue.put_back(copy.running)
            return []
        self._writer.lease.note_handed_on()
        if copy.stays:
            self._awaited.add(copy.running.key)
            return self._pool.send(self._keep(copy, goes_on=True))
        self._holds.discard(copy.running.key)
        if copy.has_left:
            self._here.move(copy.running, State.GONE)
        return self._pool.send(self._keep(copy) if copy.has_ended else self._commit(copy, now))

    def _keep(self, copy: Copy, goes_on: bool = False) -> Keep:
        running, tokens = copy.running, (len(copy.known) + len(copy.pages)) * self._page_size
        self.num_kept_pages += len(copy.pages)
        names = self._writer.names.pages_of(running, tokens)[len(copy.known) :] if self._policy.reuse else ()
        return Keep(*running.key, len(copy.known), copy.pages, names, running.request.service, goes_on)

    def _commit(self, copy: Copy, now: float) -> Commit:
        running = copy.running
        self._holds.committed(running.key, now)
        self._outputs.forget([running.request.id])  # the request's next worker has the whole output
        self._notes.note("returned", running.key)
        self._decisions.note(Kind.COMMITTED, running.request, tokens=running.prefix)
        names = self._writer.names.pages_of(running, running.prefix) if self._policy.reuse else ()
        return Commit(running.entry(copy.known + copy.pages, names), len(copy.known), running.decode)

    def pool_lost(self, event: MemberLost, now: float) -> None:
        """Recompute the requests that were on their way to the lost pool; forget the pages that the pool kept."""
        for running in self._writer.lose_pool():
            running.forget_known()
            self._queue.put_back(running)
        self._holds.clear()
        self._awaited.clear()
        self._prompts.clear()
        self._copying.clear()

    # --- Requests that are being written

    def drop(self, request: str, attempt: int) -> None:
        """Hand on nothing more of the request up to this attempt."""
        self._awaited = {key for key in self._awaited if key[0] != request or key[1] > attempt}
        self._writer.drop(request, attempt)

    def ask_again(self) -> None:
        self._writer.lease.ask_again()

    @property
    def awaits_answer(self) -> bool:
        return self._writer.lease.is_awaited

    def num_lacking(self, running: WorkerRequest, tokens: int) -> int:
        """Return how many full pages of the first tokens are still to be written; 0 where none ever is."""
        if not is_writable(running, self._page_size):
            return 0
        return tokens // self._page_size - len(running.known) - self._writer.num_written(running)

    def forget(self, written: dict[WorkerRequest, None], goes_on: Callable[[WorkerRequest], bool]) -> None:
        """Forget the pages of requests that do not go on; the pages of a kept answer still go to the pool."""
        for running in [running for running in written if not goes_on(running)]:
            del written[running]
            if running.state is not State.KEPT:
                self._writer.forget_parts(running)

    # --- Prompts that have run

    def add_prompt(self, running: WorkerRequest) -> None:
        """Have a request's prompt written; the request decodes from now on."""
        if self._keeps_prompts and self._pool.member is not None and self._num_of_prompt(running) > 0:
            self._prompts[running] = None

    def awaits(self, running: WorkerRequest) -> bool:
        """Return whether pages of the prompt are still to be written."""
        return running in self._prompts or running in self._copying

    @property
    def num_of_prompts(self) -> int:
        """Return how many pages of prompts are still to be written."""
        return sum(map(self._num_of_prompt, self._prompts))

    def _num_of_prompt(self, running: WorkerRequest) -> int:
        num_prompt = len(running.request.tokens)
        return 0 if self._limits.unread(num_prompt) else self.num_lacking(running, num_prompt)

    def keep_prompts(self, now: float) -> list[Command]:
        """Hand on what is written, and begin to copy as many prompts as there are pages for.

        Nothing more is written once the request has left. When the request ends, the written pages go to the pool with
        the answer."""
        if not self._prompts and not self._copying:
            return []
        self.forget(self._copying, self._decodes)
        self._prompts = {running: None for running in self._prompts if self._decodes(running)}
        being_written, commands = self._writer.being_written, list[Command]()
        for running in [running for running in self._copying if running not in being_written]:
            del self._copying[running]
            if self._writer.num_written(running):
                commands += self.hand_on_parts(running, now)
            else:  # pages were forgotten, since the pool now holds others before them
                self._prompts[running] = None
        target = self.target
        for running in list(self._prompts):
            pages = self._num_of_prompt(running)
            if target is None or pages > len(self._writer.lease.pages):
                break
            del self._prompts[running]
            if pages > 0:
                self._copying[running] = None
                commands.append(self.write_next(running, pages))
        return commands

    def _decodes(self, running: WorkerRequest) -> bool:
        return self._here.residents.get(running.request.id) is running and not running.num_lost


def is_writable(running: WorkerRequest, page_size: int) -> bool:
    """Return whether the request's KV can be written to the pages that the pool lacks, and whether they are of use."""
    return running.has_tokens and running.kv.can_be_stored_from(len(running.known) * page_size)


_MOST_AHEAD = 4  # requests that are written ahead; each search looks at all residents
_LOOK_STEPS = 4  # between two looks: no page is filled in fewer steps
_LEAVING_SHARE = 8  # of the device's memory, an eighth at most is taken from residents until the pool's next answer
_SWAPPED_SHARE = 2  # the same where requests take memory from others of lower levels
_KEPT_SHARE = 8  # of the device's memory, answers hold an eighth at most while they are copied beside the steps


class LeavingRequests(Protocol):
    """What is needed of the requests that leave (leaving.py), whose pages are written here."""

    def has_use_for_pages(self) -> bool: ...

    def lacks_pages(self) -> WorkerRequest | None: ...


class PagesToWrite(WorkerPart):
    """Chooses full pages of requests that go to the pool, mostly beside the steps, and asks for pages to have at hand.

        prompts that have run     while the requests decode: others may need these pages
        requests that leave next  then only the rest is copied between two steps, and delays the next step
        answers                   of requests that have ended: the pool has most pages of the prompts already

    The worker wants pages at hand for the largest resident, which may leave or end with its next token, for prompts
    that have run, and for several residents where memory is short. Where none decodes here, all prompts are written
    ahead, and all requests will leave.
    """

    def __init__(self, worker: Worker, writing: PageWriting, leaving: LeavingRequests) -> None:
        super().__init__(worker)
        limits, policy, memory = self._limits, self._policy, self._memory
        self._page_size, self._writing, self._lease = limits.page_size, writing, self._writer.lease
        self._leaving = leaving
        self._have_to_leave = policy.grows or policy.swaps  # whether requests do
        leave_beside = memory.copies_beside and policy.evict and self._have_to_leave
        may_be_written = leave_beside if memory.decodes else memory.keeps_places
        self._writes_ahead = may_be_written and not limits.gives_back  # else blocks move
        self._looked_at = 0  # number of a step
        self._ahead: dict[WorkerRequest, None] = {}  # requests with pages that were written ahead
        self.num_ahead = 0  # pages that were written ahead
        self._keeps = policy.reuse or self._have_to_leave  # whether anything of residents is ever written
        self._lacks = (0, 0)  # a step, and the pages that residents may need then
        self._short = limits.num_blocks // (_SWAPPED_SHARE if policy.swaps else _LEAVING_SHARE)
        self._for_several = units_for(self._short * limits.block_size, self._page_size)

    # --- Requests that leave next

    def write_ahead(self, now: float) -> list[Command]:
        """Begin to copy full pages of the requests that leave next, while spare pages last."""
        self._writing.forget(self._ahead, lambda running: self._here.find(running.request.id) is running)
        if self._writing.target is None or not self._writes_ahead or not self._leaving.has_use_for_pages():
            return []
        commands: list[Command] = []
        for running in self._next_to_leave(now) if self._memory.decodes else [*self._here.prompts.values()]:
            is_busy = self._writing.is_busy(running) or running.num_lost
            pages = 0 if is_busy else self._writing.num_lacking(running, running.prefix)
            if 0 < pages < len(self._lease.pages):  # one page is left for the next tokens
                self._ahead[running] = None
                self.num_ahead += pages
                commands.append(self._writing.write_next(running, pages))
        return commands

    def _next_to_leave(self, now: float) -> Iterator[WorkerRequest]:
        residents, free = [*self._here.residents.values()], self._memory.num_free
        short = len(residents)  # memory is short below one free block for each decode
        if self._steps.number < self._looked_at + _LOOK_STEPS or free >= short:
            return
        self._looked_at = self._steps.number
        for _ in range(min(_MOST_AHEAD, short - 1)):
            if free >= short:
                return
            leaving = self._scheduler.leaving((), residents, self._memory.context(now))
            residents.remove(leaving)
            free += self._memory.num_freed((leaving,))
            yield leaving

    # --- Answers

    def end(self, running: WorkerRequest, finish: FinishReason) -> list[Command]:
        """Free the memory of a request that has ended, at once or after the answer is copied to the pool."""
        if finish.has_token and self._is_kept(running):
            self._here.move(running, State.KEPT)
            return []
        self._here.move(running, State.GONE)
        self._memory.release_after_step(running)
        return self._holds.release(running.key)

    def _is_kept(self, running: WorkerRequest) -> bool:
        """Return whether the pool is to keep the answer; if the request came with KV, only behind pages of the pool.

        Where copies are slower than documents end, the pool goes without some answers: otherwise their blocks would
        fill the device, and no document could begin."""
        begins = running.key in self._holds or not running.came_with_kv
        is_known = self._writing.has_answered(running) and begins
        if not (is_known and self._policy.reuse) or (running.request.service is ServiceClass.BE and self._hold_much):
            return False
        return self._num_of_answer(running) > 0 or self._writer.num_written(running) > 0

    def _num_of_answer(self, running: WorkerRequest) -> int:
        """Return how many pages of the answer to write: the pool lacks them, and pages are at hand."""
        if not self._policy.reuse or self._writing.target is None or running.num_lost:
            return 0
        return min(self._writing.num_lacking(running, running.prefix), len(self._lease.pages))

    def keep_answers(self, now: float) -> list[Command]:
        """Copy answers to the pool, and free the blocks of requests that have nothing left to copy.

        An answer is copied beside the steps. Its blocks stay taken meanwhile, and while the prompt is still written. In
        four cases the copy comes after the next step instead, and only if it makes no chat late: decodes may lack the
        blocks; answers hold much; another request waits for blocks, and copies beside steps take long; or blocks do not
        stay in place.
        """
        here, memory, begun, commands = self._here, self._memory, list[WorkerRequest](), list[Command]()
        may_hold_blocks = memory.keeps_places and memory.num_free >= len(here.residents) and not self._hold_much
        if not memory.copies_beside and (here.candidates or self._queue.lacks_memory(only_rt=False)):
            may_hold_blocks = False
        ended = [running for running in self._here.kept if not self._writer.is_writing(running)]
        for running in [*ended] if may_hold_blocks else ():
            if (pages := self._num_of_answer(running)) > 0:
                ended.remove(running)
                begun.append(running)
                commands.append(self._writing.write_answer(running, pages, aside=True))
        for running in begun:
            self._here.put_last(running)
        return [*commands, *self._end_all(ended, now)]

    @property
    def _hold_much(self) -> bool:
        """Return whether prompts wait, and answers hold more memory than their share."""
        most = self._limits.num_blocks // _KEPT_SHARE
        return bool(self._queue.waiting) and sum(len(running.blocks) for running in self._here.kept) > most

    def _end_all(self, ended: Sequence[WorkerRequest], now: float) -> list[Command]:
        """Hand on the written pages of these requests, or copy the rest after the next step; free the blocks."""
        commands: list[Command] = []
        copied = 0
        for running in ended:
            pages = self._num_of_answer(running)
            if pages > 0 and self._has_time_for(copied + pages * self._page_size, now):
                copied += pages * self._page_size
                copy = self._writing.write_answer(running, pages, aside=False)
                commands += (*self._memory.orders(copy, running), copy)
            elif self._writer.num_written(running):
                commands += self._writing.hand_on_parts(running, now, has_ended=True)
            else:
                commands += self._holds.release(running.key)
            self._here.move(running, State.GONE)
            in_step = () if self._steps.running is None else self._steps.running.parts
            if any(part.request == running.request.id and running.is_at(part) for part in in_step):
                self._memory.release_after_step(running)  # a step that is planned ahead writes behind the copied tokens
            else:
                self._memory.release_behind_copy(running)
        return commands

    def _has_time_for(self, tokens: int, now: float) -> bool:
        """Return whether `tokens` can be copied between the step in flight and the next without making a chat late."""
        if self._steps.running is None:
            return True
        ends_at = now + 2 * self._steps.running.predicted_s + tokens * self._pace.copy_token_s
        promises = (running.promise for running in self._here.residents.values())
        return all(promise.due_at(now) >= ends_at for promise in promises if promise.is_rt)

    # --- Pages at hand

    def ask(self, now: float) -> list[Command]:
        """Ask for the pages that are wanted.

        Where no pages are wanted, an earlier ask may have to be repeated: the answer may have been lost, with pages
        that the pool has leased to this worker."""
        if self._writing.target is None:
            return []
        writer = self._writer
        if (first := self._leaving.lacks_pages()) is not None:
            # All such requests together may need more than there ever are.
            for running in writer.written:  # a worker that keeps some pages and waits for more blocks others
                writer.forget_parts(running)
            ask = self._lease.ask_firmly(writer.pages_for(first, first.prefix), writer.in_copies)
        else:
            ask = self._lease.ask_for_spare(self._wanted, writer.in_copies)
        return [] if ask is None else self._pool.send(ask)

    @property
    def _wanted(self) -> int:
        if not (self._keeps if self._memory.decodes else self._leaving.has_use_for_pages()):
            return 0
        is_idle = not self._memory.decodes and self._steps.running is None
        if is_idle or self._lacks[0] != self._steps.number:  # looked at once a step
            self._lacks = (self._steps.number, self._lacking)
        return self._lacks[1] + self._writing.num_of_prompts

    @property
    def _lacking(self) -> int:
        if not self._memory.decodes:
            return sum(self._writer.pages_for(running, running.num_tokens) for running in self._here.seated)
        size = self._page_size
        last = size if self._have_to_leave else 1  # a request that has to leave needs a page for a part of a page, too
        last += self._steps.has_next  # one more token is on its way
        written = self._writer.written
        residents = self._here.residents.values()
        lacking = [  # for each decode in each step: no call is made for a request that is whole
            _lacks(resident, last, size) - written.get(resident, 0)
            if resident in written or resident.kv.dropped or resident.kv.form
            else (resident.prefix + last) // size - len(resident.known)
            for resident in residents
        ]
        prompts = (prompt for prompt in self._here.prompts.values() if is_writable(prompt, size) and self._policy.evict)
        fullest = [prompt.num_tokens // size - len(prompt.known) for prompt in prompts if not prompt.num_lost]
        most = max([*lacking, *fullest], default=0)
        # Where memory is short, several residents may leave before the pool answers the next ask.
        several = self._have_to_leave and self._policy.evict and self._memory.num_free < self._short
        return max(most, min(sum(lacking), most + self._for_several)) if several else most


def _lacks(resident: WorkerRequest, more: int, size: int) -> int:
    """Return the pages that the pool will lack after `more` tokens; 0 where the request is never written."""
    if not is_writable(resident, size):
        return 0
    return (resident.prefix - resident.num_lost + more) // size - len(resident.known)
