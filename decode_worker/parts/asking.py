"""Ask the pool for requests that the decode worker has room for, and for pages to have at hand."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import units_for
from alignedserve.cost.model import Kind
from alignedserve.decode_worker.parts.joining import Joining
from alignedserve.decode_worker.parts.keeping import PromptKeeping
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.parts.taking_in import STOCK, TakingIn
from alignedserve.decode_worker.parts.writing import PageWriting, is_writable
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event, MemberLost, Received
from alignedserve.protocol.messages import AskBatch, Batch
from alignedserve.scheduling.policy import Grouping
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running

_LEAVING_SHARE = 8  # of the device's memory, an eighth at most is taken from residents until the pool's next answer
_SWAPPED_SHARE = 2  # the same where requests take memory from others of lower levels


class BatchAsks(CorePart):
    def __init__(self, stores: Stores, joining: Joining) -> None:
        self._limits, self._pace, self._pool = stores.limits, stores.pace, stores.pool
        self._here, self._candidates, self._batch = stores.here, stores.candidates, stores.batch
        self._memory, self._queue, self._retirement = stores.memory, stores.queue, stores.retirement
        self._joining = joining
        self._is_aligned = stores.policy.grouping is Grouping.ALIGNED  # there are batches that keep together
        self._swaps = stores.policy.swaps  # requests come back that take memory from others
        self._asked: AskBatch | None = None  # what the pool knows of the room here

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(message=Batch()):
                self._asked = None
            case MemberLost(member) if member == self._pool.member:
                self._asked = None
        return []

    def ask(self, now: float) -> list[Command]:
        """Tell the pool of the room here whenever it has changed.

        A worker that had to let a request go has no room until another one ends. Prompts of chats, and requests that
        had to leave and wait here, come before others."""
        if self._pool.member is None or (self._queue.waiting.come_first and not self._swaps):
            return []
        room = self._room
        if room == self._asked or not (_offers(room) or self._withdraws):
            return []
        self._asked = room
        is_starving = self._candidates.is_starving(now)
        return self._pool.send(
            replace(
                room,
                times=self._pace.times,
                copy_token_s=self._pace.copy_token_s,
                all_pairs=self._limits.num_pairs,
                most_requests=self._limits.max_batch,
                band=None if is_starving else self._batch.band(self._here.with_kv),
                cost=self._pace.cost.coefficients[Kind.DECODE],
                wait_s=self._joining.mean_join_s,
            )
        )

    @property
    def _withdraws(self) -> bool:
        """Return whether the pool is to hear that there is less room than it knows of."""
        if self._asked is None:
            return False
        is_closed = self._here.had_shortage or self._retirement.is_retiring or self._retirement.is_reserved
        return is_closed or (self._asked.pairs > 0 and bool(self._memory.lacking()))

    @property
    def _room(self) -> AskBatch:
        """Return the room beyond the candidates: those that wait here did not fit. Real-time requests may fit where
        best-effort ones do not."""
        if self._retirement.is_reserved:
            return AskBatch(0, 0, wants_batch=False)
        if self._here.had_shortage or self._retirement.is_retiring:
            ahead = self._wanted_ahead if self._swaps and not self._retirement.is_retiring else 0
            return AskBatch(0, 0, wants_batch=False, ahead=ahead)
        lacks, num_seated = bool(self._memory.lacking()), self._here.num_seated
        pairs = 0 if lacks or self._candidates else self._memory.num_free
        rt_pairs = self._memory.pairs_for_rt(offered=pairs)
        if rt_pairs and self._candidates.have_rt:
            rt_pairs = 0
        is_open = self._is_aligned and not lacks
        return AskBatch(
            pairs,
            max(0, self._limits.max_batch - num_seated) if pairs + rt_pairs else 0,
            rt_pairs=rt_pairs,
            wants_batch=is_open and not self._candidates.num_in_batch,
            ahead=self._wanted_ahead if is_open or self._swaps else 0,
        )

    @property
    def _wanted_ahead(self) -> int:
        """Return how many candidate requests to ask for, which join as others end.

        More are asked for when half of them have joined."""
        most, here = max(1, self._limits.max_batch // STOCK), self._candidates.num_requests
        return most - here if self._here.num_seated and 2 * here <= most else 0

    def ask_again(self) -> None:
        self._asked = None

    @property
    def awaits_answer(self) -> bool:
        return self._asked is not None


def _offers(room: AskBatch) -> bool:
    return (room.requests > 0 and room.pairs + room.rt_pairs > 0) or room.wants_batch or room.ahead > 0


class PageAsks:
    """Asks for the pages that a resident would be written to if it left, or ended, with its next token: as many as the
    resident needs that would need most, and more where memory is short. And for those of prompts that are through."""

    def __init__(self, stores: Stores, writing: PageWriting, taking_in: TakingIn, prompts: PromptKeeping) -> None:
        self._page_size, self._policy = stores.limits.page_size, stores.policy
        self._here, self._steps, self._memory = stores.here, stores.steps, stores.memory
        self._writing, self._taking_in, self._prompts = writing, taking_in, prompts
        self._have_to_leave = stores.policy.grows or stores.policy.swaps  # whether requests do
        self._keeps = stores.policy.reuse or self._have_to_leave  # whether anything of residents is ever written
        self._lacks = (0, 0)  # step, and the pages that residents may need in it
        self._short = stores.limits.num_pairs // (_SWAPPED_SHARE if stores.policy.swaps else _LEAVING_SHARE)
        self._for_several = units_for(self._short * stores.limits.block_size, self._page_size)

    def ask(self, now: float) -> list[Command]:
        """Ask for the pages that are wanted.

        Where none are, an earlier ask may still have to be repeated: the pool may have leased pages for it, which this
        worker has not got, or has lost with the pool."""
        pool = self._writing.target
        return [] if pool is None else self._writing.writer.ask_for_spare(pool, self._wanted)

    @property
    def _wanted(self) -> int:
        if not (self._keeps or self._taking_in.num_pages):
            return 0
        if self._lacks[0] != self._steps.number:  # looked at once a step
            self._lacks = (self._steps.number, self._lacking)
        return max(self._lacks[1], self._taking_in.num_pages) + self._prompts.num_pages

    @property
    def _lacking(self) -> int:
        size = self._page_size
        last = size if self._have_to_leave else 1  # a request that has to leave needs a page for a part of a page, too
        last += self._steps.has_next  # one more token is on its way
        written = self._writing.writer.written
        residents = self._here.residents.values()
        lacking = [  # for each decode in each step: of one that nothing is missing of, no call is made
            _lacks(resident, last, size) - written.get(resident, 0)
            if resident.dropped or resident.blocks or resident in written
            else (resident.prefix + last) // size - len(resident.known)
            for resident in residents
        ]
        prompts = (prompt for prompt in self._here.prompts.values() if is_writable(prompt, size) and self._policy.evict)
        fullest = [prompt.num_tokens // size - len(prompt.known) for prompt in prompts if not prompt.dropped]
        most = max([*lacking, *fullest], default=0)
        return max(most, min(sum(lacking), most + self._for_several)) if self._several_may_leave else most

    @property
    def _several_may_leave(self) -> bool:
        """Return whether memory is so short that several residents may leave before the pool answers the next ask."""
        return self._have_to_leave and self._policy.evict and self._memory.num_free < self._short


def _lacks(resident: Running, more: int, size: int) -> int:
    """Return the pages that the pool lacks of a request with so many tokens more; 0 where none is written of it."""
    if not is_writable(resident, size):
        return 0
    return (resident.prefix - resident.num_lost + more) // size - len(resident.known)
