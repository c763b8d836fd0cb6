"""Write prompts to the pool, and ask for the pages that they need.

A real-time prompt runs at once, and asks for its pages when it is through. A best-effort one is seated when the pages
for all its KV are leased (next_step.py). Pages that no prompt waits for go back to the pool: another worker may wait
for them.
"""

from __future__ import annotations

from alignedserve.core import ServiceClass, units_for
from alignedserve.prefill_worker.handing_on import Commits, PromptRequests
from alignedserve.prefill_worker.running_prompts import RunningPrompts
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import CopiedOut, MemberLost, Received
from alignedserve.protocol.messages import LeasePages, Member
from alignedserve.worker.arriving import ANSWER_S
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.page_writer import Need
from alignedserve.worker.part import CorePart
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State


class PoolWriting(CorePart):
    def __init__(
        self,
        here: PromptRequests,
        memory: DeviceMemory,
        pool: PoolLink,
        commits: Commits,
        prompts: RunningPrompts,
    ) -> None:
        self._here, self._pool, self._memory, self._writer = here, pool, memory, pool.writer
        self._queue, self._commits, self._prompts, self._known = here.queue, commits, prompts, here.known
        self._asked_for: dict[WorkerRequest, None] = {}  # real-time prompts that run, and for which pages were asked
        self._answered_by = 0.0  # until then the next step waits for pages for a chat that is through

    def leased(self, lease: LeasePages, frame: Received, now: float) -> None:
        if self._writer.take_answer(lease):
            self._memory.reconsider()

    def pool_lost(self, event: MemberLost, now: float) -> None:
        self._asked_for.clear()

    def copied_out(self, event: CopiedOut, now: float) -> list[Command]:
        copy = self._writer.end_copy(event.number)
        if copy is None:
            return []
        return self._commits.end_copy(copy)

    # --- Acts

    def write(self, now: float) -> list[Command]:
        """Copy prompts to the pages that they have; ask for pages where those at hand are too few."""
        pool = self._commits.target
        if pool is None:
            return []
        commands = [command for service in ServiceClass for command in self._write_through(pool, service)]
        commands += self._write_parts(pool)
        for service in ServiceClass:
            asks = self._writer.ask(pool, service, self._need(service))
            if asks and service is ServiceClass.RT:
                self._answered_by = now + ANSWER_S
            commands += asks
        return commands

    @property
    def is_writing_for_chat(self) -> bool:
        """Return whether a part of a chat that is through is still being written: the rest can be written after it."""
        first = self._commits.first(ServiceClass.RT)
        return first is not None and self._writer.is_writing(first)

    @property
    def answered_by(self) -> float:
        """Return until when the next step is to wait for pages for a chat that is through; 0 where none lacks any."""
        is_asked = self._commits.first(ServiceClass.RT) is not None and self._writer.is_awaited(ServiceClass.RT)
        return self._answered_by if is_asked else 0.0

    def _write_through(self, pool: Member, service: ServiceClass) -> list[Command]:
        """Copy the prompts of this class that wait for pages, one after the other."""
        commands: list[Command] = []
        while (running := self._commits.first(service)) is not None and not self._writer.is_writing(running):
            if self._commits.unwritten(running) > self._writer.num_at_hand(service):
                self._give_up_parts(service)
                break
            self._here.move(running, State.LEAVING)
            commands.append(self._writer.begin(running, pool, running.prefix, service))
        return commands

    def _give_up_parts(self, service: ServiceClass) -> None:
        """Take back the pages of parts because a prompt that is through waits for pages.

        A prompt gives up the pages that it has if it does not get the others before that prompt, or would wait too:
        else two prompts could wait for each other. Best-effort prompts that run have all their pages.
        """
        running = self._prompts.running if service is ServiceClass.RT else ()
        for prompt in (*self._commits.waiting, *running):
            if prompt.request.service is service:
                self._writer.forget_parts(prompt)

    def _write_parts(self, pool: Member) -> list[Command]:
        """Copy full pages of prompts that have more to run, so that little is left to write after the last chunk."""
        commands: list[Command] = []
        limits, prompts = self._memory.limits, self._prompts.running
        size = limits.page_size
        for running in prompts:
            service = running.request.service
            if self._commits.first(service) is not None or limits.unread(running.num_tokens):
                continue  # what is at hand is for prompts that are through; the beginnings of others are dropped
            wanted = self._writer.pages_for(running, running.prefix // size * size)
            count = min(wanted, self._writer.num_at_hand(service))
            if count > 0:
                commands.append(self._writer.begin_part(running, pool, count, service))
        self._asked_for = {running: None for running in self._asked_for if running in prompts}
        return commands

    def ask_for_chats(self, now: float) -> list[Command]:
        """Ask for pages for real-time prompts that run now, where others are to run after them.

        If they were asked for when the prompts are through, their KV would wait until another step has ended.
        """
        prompts = self._prompts.running
        new = [running for running in prompts if running.promise.is_rt and running not in self._asked_for]
        pool = self._commits.target
        if not new or pool is None or self._commits.first(ServiceClass.RT) is not None:
            return []
        is_last = not self._queue.waiting and len(new) == len(prompts)
        if is_last and all(running.prefix <= running.num_cached for running in new):
            return []
        wanted = sum(self.pages_for(running) for running in (*self._asked_for, *new))
        asks = self._writer.ask_if_any(pool, ServiceClass.RT, wanted)
        if asks or self._writer.num_at_hand(ServiceClass.RT) >= wanted:
            self._asked_for.update(dict.fromkeys(new))
        return asks

    # --- Needs

    def _need(self, service: ServiceClass) -> Need:
        """Return what the first prompt of this class that is through needs: all prompts together may need more pages
        than there will ever be.

        Where none is through, return what the best-effort prompt that has waited longest for a seat needs. Nothing is
        kept for it while a real-time prompt that is through waits for pages: its seat may be the memory
        of that prompt.
        """
        at_hand, through = self._writer.num_at_hand(service), self._commits.first(service)
        if through is not None:
            wanted = self._commits.unwritten(through)
            return Need(kept=at_hand) if wanted <= at_hand else Need(wanted)  # it may wait for its part alone
        if service is ServiceClass.RT:
            return Need(kept=min(self._promised, at_hand))
        kept, first = self.spoken_for, next(self._queue.waiting.best_effort, None)
        if first is None or self._commits.first(ServiceClass.RT) is not None:
            return Need(kept=kept)
        wanted = self.pages_for(first)
        return Need(kept=at_hand) if wanted <= at_hand - kept else Need(wanted, kept, self._most_pages)

    @property
    def _promised(self) -> int:
        """Return the pages for real-time prompts that run: they were asked for, and may not all have come."""
        return sum(self.pages_for(running) for running in self._asked_for)

    @property
    def _most_pages(self) -> int:
        """Return the pages for the best-effort prompts that wait for a seat, at most as many as the device can fill."""
        limits = self._memory.limits
        most = units_for(limits.num_tokens, limits.page_size)
        wanted = 0
        for running in self._queue.waiting.best_effort:
            wanted += self.pages_for(running)
            if wanted >= most:  # there may be thousands
                return most
        return wanted

    @property
    def spare_pages(self) -> int:
        """Return the pages that are at hand for best-effort prompts, and not for a seated one.

        There are none while a best-effort prompt that is through lacks some.
        """
        if self._pool.member is None or self._commits.first(ServiceClass.BE) is not None:
            return 0
        return self._writer.num_at_hand(ServiceClass.BE) - self.spoken_for

    @property
    def spoken_for(self) -> int:
        """Return the pages of the best-effort prompts that are seated and not through."""
        return sum(self.pages_for(running) for running in self._prompts.seated if not running.promise.is_rt)

    def pages_for(self, running: WorkerRequest) -> int:
        """Return how many pages are to be written once all tokens of a prompt have KV."""
        limits = self._memory.limits
        if unread := limits.unread(running.num_tokens):
            return units_for(running.num_tokens - unread, limits.page_size)
        return self._writer.pages_for(running, running.num_tokens)

    # --- What is here

    def drop(self, request: str, attempt: int) -> list[Command]:
        dropped = self._writer.drop(request, attempt)
        self._here.drop_from((State.LEAVING,), request, attempt, State.ABANDONED)
        return [command for running in dropped for command in self._known.leave(running)]

    def ask_again(self) -> None:
        self._writer.ask_again()

    @property
    def awaits_answer(self) -> bool:
        return self._writer.awaits_the_pool
