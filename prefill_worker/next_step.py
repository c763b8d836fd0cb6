"""The next step of a prefill worker: which prompts get seats, and which chunks run."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.core import ServiceClass
from alignedserve.prefill_worker.buffering import Buffers
from alignedserve.prefill_worker.committing import Commits
from alignedserve.prefill_worker.offering import Offers
from alignedserve.prefill_worker.pool_writing import PoolWriting
from alignedserve.prefill_worker.running_prompts import RunningPrompts
from alignedserve.prefill_worker.seating import PoolSeating
from alignedserve.protocol.commands import Command
from alignedserve.scheduling.policy import Room
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.parts.step_end import begin_step
from alignedserve.worker.step.chunks import chunk_of
from alignedserve.worker.step.limits import Selection
from alignedserve.worker.step.ranks import last
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.selection import first_come, select


class NextStep:
    def __init__(
        self,
        common: Common,
        queue: PromptQueue,
        prompts: RunningPrompts,
        commits: Commits,
        offers: Offers,
        buffers: Buffers,
        writing: PoolWriting,
    ) -> None:
        self._policy, self._roster, self._steps, self._pace = common.policy, common.roster, common.steps, common.pace
        self._memory, self._writer, self._queue, self._prompts = common.memory, common.writer, queue, prompts
        self._commits, self._offers, self._buffers, self._writing = commits, offers, buffers, writing
        self.num_preemptions = 0

    def make_place(self, now: float) -> list[Command]:
        """Let buffers and written candidates go where the prompt that has waited longest lacks memory."""
        if not self._queue.waiting:
            return []
        pairs = self._queue.pairs_for_first
        return [*self._buffers.make_place(pairs), *self._offers.make_place(pairs)]

    def begin(self, now: float) -> list[Command]:
        """Begin the next step if none is in flight."""
        if self._steps.running is not None:
            return []
        commands = self._seat_first_come()
        while True:
            selection = self._select(now)
            commands += self._seat(selection.seated, selection.unseated)
            # Where all that were seated are fetched first, others may run.
            if selection.chunks or selection.decodes or not (selection.seated or self._make_room(now)):
                break
        # What is computed anew has a token of output; where that alone is left, it is chosen as a decode.
        selection.chunks += tuple(chunk_of(running, 1) for running in selection.decodes)
        return [*commands, *begin_step(self._steps, selection)]

    def _select(self, now: float) -> Selection:
        waiting = self._queue.waiting
        seating = self._seating(0 if self._memory.is_crowded else len(waiting))
        return select((), tuple(self._prompts.running), waiting, self._pace.moment(now), seating)

    def _seat_first_come(self) -> list[Command]:
        """Seat prompts that need not be chosen, as far as there is room. No prompt overtakes the first for memory."""
        prompts = first_come(self._policy, self._queue.waiting)
        if self._memory.is_stuck or not prompts:
            return []
        seating = self._seating(len(self._queue.waiting))
        for running in prompts:
            if not seating.may_seat(running):
                continue
            if not seating.most(running, running.num_ahead):
                break
            seating.take(running, running.num_ahead)
        self._memory.is_stuck = True  # until memory or pages come
        return self._seat(seating.seated, seating.unseated)

    def _seat(self, seated: Iterable[Running], unseated: Iterable[Running]) -> list[Command]:
        """Let the seated prompts run; the prompts that made room for them are computed anew."""
        commands = self._prompts.seat(seated)
        for running in unseated:
            self._commits.waiting.remove(running)
            self._writer.forget_parts(running)
            running.prefix = 0
            self.num_preemptions += 1
            self._queue.waiting.add(running)
        return commands

    def _seating(self, seats: int) -> PoolSeating:
        """Return what a choice may take of the device, for so many prompts more."""
        return PoolSeating(
            self._memory.blocks,
            self._memory.limits.num_pairs,
            self._memory.limits.block_size,
            seats,
            self._policy.room is Room.CHUNKS,
            _tokens_of,
            self._has_long,
            spare_pages=self._writing.spare_pages if self._queue.waiting else 0,
            needs_pages=not self._offers.needs_no_pool,
            pages_for=self._writing.pages_for,
            idle=[running for running in self._commits.waiting if not running.promise.is_rt],
        )

    def _has_long(self) -> bool:
        """Whether a long prompt is unfinished here: until it is committed."""
        return any(running.num_tokens >= self._policy.long_prompt for running in self._roster.occupants())

    def _make_room(self, now: float) -> bool:
        """Take the pairs of the last prompt where nothing can run, and nothing under way gives memory back."""
        if self._prompts.is_fetching or self._writer.copies:
            return False
        prompts = [*self._prompts.running]
        if self._commits.waiting:
            # A real-time prompt that is through may lack the very pages that are kept for best-effort prompts, which
            # have memory for a part of their tokens and lack what it has.
            prompts = [running for running in prompts if not running.promise.is_rt]
            if not prompts or self._commits.first(ServiceClass.RT) is None:
                return False
        elif len(prompts) < 2:
            return False
        self._prompts.crowd_out(last(prompts, self._pace.moment(now)))
        self.num_preemptions += 1
        return True


def _tokens_of(running: Running) -> int:
    """Return how many tokens a prompt gets pairs for when it is seated as a whole."""
    return running.num_tokens
