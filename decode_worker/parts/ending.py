"""Give the requests of a decode worker what a step brought them: tokens, their end, or the loss of an attempt."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.core import Chunk, Decode, FinishReason, StepPlan, StepResult
from alignedserve.decode_worker.memory.folding import Folding
from alignedserve.decode_worker.parts.keeping import AnswerKeeping, PromptKeeping
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command
from alignedserve.worker.step.running import Running


class StepOutcome:
    """The requests that may be in a step, as `StepEnd` knows them (step_end.Runs)."""

    def __init__(self, stores: Stores, prompts: PromptKeeping, keeping: AnswerKeeping) -> None:
        self._here, self._memory, self._owners, self._pool = stores.here, stores.memory, stores.owners, stores.pool
        self._holds, self._notes, self._counts = stores.holds, stores.notes, stores.counts
        self._prompts, self._keeping, self._decisions = prompts, keeping, stores.decisions
        self._dropping = stores.dropping
        self._folding = Folding(stores.memory, stores.here, stores.queue, stores.writer, prompts.awaits)

    def find(self, request: str) -> Running | None:
        """Return the request of this name that may be in a step."""
        return self._here.find(request)

    def end_step(self, plan: StepPlan, result: StepResult, began_at: float, now: float) -> list[Command]:
        """Give requests their tokens; prompts that are through become residents."""
        here, released = self._here, list[Command]()
        prompts = here.prompts
        find: Callable[[str], Running | None] = here.find if prompts else here.residents.get  # mostly the second
        for running, finish in self._owners.emitted(plan.parts, result, find, began_at, now):
            if prompts and (request := running.request.id) in prompts:
                here.residents[request] = prompts.pop(request)
                if finish is None:
                    self._decisions.note(Kind.JOINED, running.request, "", len(running.output), len(here.residents))
                    self._prompts.add(running)
            if finish is not None:
                released += self._end(running, finish)
        released += self._holds.release_all(self._dropping.take_let_go())
        # Behind the step in flight, and before whatever is ordered for the pairs that come free.
        return [*self._folding.fold(), *released, *self._owners.flush()]

    def _end(self, running: Running, finish: FinishReason) -> list[Command]:
        self._here.remove(running)
        self._notes.note_end(running)
        self._counts.count_end(running)
        self._decisions.note(Kind.ENDED, running.request, tokens=len(running.output), why=finish.value)
        is_doubtful = finish is FinishReason.DOUBT and running.key in self._holds
        spoiled = self._pool.tell_spoiled(running.known) if is_doubtful else []
        return [*spoiled, *self._keeping.end(running, finish)]

    def lose(self, ran: Chunk | Decode) -> list[Command]:
        """Give up the attempt that this was to run a part of, if it is still here."""
        running = self._here.find(ran.request)
        if running is None or not running.is_at(ran):
            return []
        self._here.remove(running)
        self._memory.release_after_step(running)
        self._owners.outputs.drop(*running.key)
        self._notes.note("lost", running.key)
        self._decisions.note(Kind.LOST, running.request, why="the device has too little memory for a single token")
        return self._holds.release(running.key)
