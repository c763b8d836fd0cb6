"""The seats of a decode worker: prompts that wait here are seated, and requests that are not wanted any more leave."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event, Received, StepDone
from alignedserve.protocol.messages import Attempt, Expect
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.selection import first_come


class Seats(CorePart):
    def __init__(self, stores: Stores) -> None:
        self._roster = stores.roster
        self._limits, self._policy, self._here, self._memory = stores.limits, stores.policy, stores.here, stores.memory
        self._queue, self._order, self._holds, self._notes = stores.queue, stores.order, stores.holds, stores.notes

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case StepDone():
                self._memory.step_ended()
            case Received(message=Expect(request=request)):
                if (resident := self._here.residents.get(request)) is not None:
                    self._order.moved(resident)
        return []

    def admit(self, prompt: Running, now: float) -> list[Command]:
        """Let a new prompt wait for a seat."""
        self._queue.admit(prompt, now)
        return []

    def named(self, request: str) -> list[Running]:
        """Return the requests of this name that have block pairs."""
        return [running for running in self._roster.occupants() if running.request.id == request]

    def seat(self, prompt: Running) -> None:
        """Count a prompt that has its pairs among those that may be in a step."""
        self._queue.waiting.remove(prompt)
        self._here.prompts[prompt.request.id] = prompt
        self._notes.note("joined", prompt.key)

    def seat_prompts(self, now: float) -> None:
        """Seat waiting prompts in their order, as far as there is room, where the step's choice does not seat them."""
        for prompt in self._first_come():
            is_blocked = not prompt.promise.is_rt and bool(self._memory.lacking())
            if is_blocked or not self._order.packer.has_seat(self._here.num_seated):
                break
            if not self._memory.seat_prompt(prompt, self._queue.waiting, now):
                break
            self.seat(prompt)

    def _first_come(self) -> Iterator[Running]:
        """Yield waiting prompts that are seated without being chosen, in their order.

        No prompt overtakes the first one that does not wait for a page: otherwise a large prompt could wait for ever.
        Yield none while nothing has changed."""
        waiting = self._queue.waiting
        if not first_come(self._policy, waiting):
            return
        next_pages = self._memory.next_pages(waiting)
        while not self._memory.is_stuck:
            first = self._order.packer.first(waiting, lambda prompt: not next_pages.holds_up(prompt))
            if first is None:
                return
            yield first
            next_pages.add(first)

    def has_seat(self, running: Running) -> bool:
        """Return whether there is a seat for the request, free or of a best-effort request that it may displace."""
        if self._here.num_seated < self._limits.max_batch:
            return True
        displaces = self._policy.precedence.may_displace(running.promise.is_rt)
        others = len(self._here.best_effort) if displaces else 0
        return self._here.num_seated - others < self._limits.max_batch

    # --- Requests that are here

    def drop(self, request: str, attempt: int) -> list[Command]:
        commands: list[Command] = []
        for running in self._here.take(request, attempt):
            self._memory.release_after_step(running)
            commands += self._holds.release(running.key)
        return commands

    def attempts(self) -> list[Attempt]:
        return [running.key for running in self.occupants()]

    def occupants(self) -> list[Running]:
        return [*self._here.seated, *self._here.joining.values()]
