"""The answers of requests that have ended: the pool keeps their full pages, for requests that go on from there."""

from __future__ import annotations

from alignedserve.core import FinishReason
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.parts.writing import PageWriting, is_writable
from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import SPARE
from alignedserve.worker.step.running import Running


class AnswerKeeping:
    def __init__(self, stores: Stores, writing: PageWriting) -> None:
        self._page_size, self._pace, self._here, self._steps = (
            stores.limits.page_size,
            stores.pace,
            stores.here,
            stores.steps,
        )
        self._memory, self._holds, self._writing = stores.memory, stores.holds, writing

    def end(self, running: Running, finish: FinishReason) -> list[Command]:
        """Free what a request has that has ended, at once or after its answer is copied to the pool."""
        is_alone = not self._memory.is_shared(running)  # else it would be in another request's way
        if is_alone and finish.has_token and self._num_pages(running) > 0:
            self._here.kept.append(running)
            self._memory.hold(running)
            return []
        self._memory.release_after_step(running)
        return self._holds.release(running.key)

    def _num_pages(self, running: Running) -> int:
        """Return the pages of its answer to keep: the pool has what comes before, and there are pages at hand."""
        if not self._pace.policy.reuse or self._writing.target is None or running.key not in self._holds:
            return 0
        if not is_writable(running):
            return 0
        full = running.prefix // self._page_size - len(running.known)
        return min(full, self._writing.writer.num_at_hand(SPARE))

    def keep_answers(self, now: float) -> list[Command]:
        """Copy answers after the step that is due, and only if the one after it will not be late for that."""
        commands: list[Command] = []
        kept, self._here.kept = self._here.kept, []
        copied = 0
        for running in kept:
            pages, pool = self._num_pages(running), self._writing.target
            more = pages * self._page_size
            if pool is not None and pages > 0 and self._has_time_for(copied + more, now):
                copied += more
                tokens = (len(running.known) + pages) * self._page_size
                commands.append(self._writing.writer.begin(running, pool, tokens, SPARE, has_ended=True))
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
