"""The prefill worker's core: the decode worker's, where nothing decodes and KV is kept for workers that do.

    Prefill ─▶ waiting ─▶ prompt ─▶ resident ─┬─▶ Commit: to the pool, which makes batches
               (no room)            (first    └─▶ Offer, Pull: to a decode worker (decode_worker/leaving.py)
                                     token)

This core runs where prefill workers do not decode (`prefill.lends` is never); a prefill worker that decodes runs the
decode worker's core as it is. A form adds buffers, which hold KV for decode workers (forms/).
"""

from __future__ import annotations

from alignedserve.core import Role, StepPlan
from alignedserve.decode_worker.running import Stepping
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.decode_worker.state import handlers as handlers_where_requests_decode
from alignedserve.forms.table import parts_of
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import KvReceived, MemberJoined, StepDone
from alignedserve.protocol.messages import Cancel
from alignedserve.schedulers.table import scheduler_of
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.part import Act, Events
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State
from alignedserve.worker.step.view import StepView


def handlers(core: PrefillCore) -> Events:
    """Return which part hears which event: a decode worker's table, where no KV of requests comes."""
    heard = handlers_where_requests_decode(core)
    return {
        **heard,
        Cancel: (*heard[Cancel], core.note_less_to_run),
        StepDone: (*heard[StepDone], core.note_less_to_run),
        KvReceived: (core.forms,),  # no request joins here
        (MemberJoined, Role.PREFILL): (),  # another prefill worker, or this one: neither takes anything
    }


def turn(core: PrefillCore) -> tuple[Act, ...]:
    """Return what the core does after each event, in this order."""
    return (
        core.elsewhere.act,
        core.offering.ask_pending,
        core.seats.seat_all,
        core.leaving.hand_on,
        core.stepping.plan,
        core.keep_answers,
        core.pages.write_ahead,
        core.pages.ask,
        core.rewriting.act,
        core.repeats.set_timer,
        core.router.report,
        core.router.tell,
        core.idle.measure,
        core.router.end,
    )


class PromptStepping(Stepping):
    """The next step of a worker where nothing decodes, also while a step runs.

        step N      prompts ─▶ a c c c c       c is cut, b waits
        step N + 1  planned as if N had ended: c goes on, b gets a seat

    No token of step N changes which prompts run in N + 1, so the scheduler plans the step in full, with the tokens of N
    counted as run. What the end of N may bring is left to a later plan: memory that comes free, and pages that others
    share. Nobody leaves for others while a step runs, so where a document may have to leave for a chat, nothing is
    planned ahead. Where N fails, N + 1 counts for nothing, and its prompts run again.
    """

    # The newest plan that found nothing to run: behind which step, and how many prompts were there.
    _in_vain: tuple[int, int, int] = (0, 0, 0)

    def _plan_ahead(self, step: StepPlan, now: float) -> list[Command]:
        """Plan the step after `step`, which runs, as if `step` had ended."""
        here, memory, waiting = self._here, self._memory, self._queue.waiting
        if not (self._steps.takes_next and self._brings_kv_and_tokens(step)) or self._awaits_full_plan:
            return []
        tried = step.number, len(waiting), len(here.prompts)
        if tried == self._in_vain:
            return []
        at, begins, ran = memory.context(now), memory.context(now + step.predicted_s), self._steps.newest
        if 2 * step.predicted_s > at.max_step_for_arrivals_s:  # a chat that comes would wait for both steps
            return []
        seats = self._limits.max_batch - here.num_seated if self._seats.takes_prompts(now) else 0
        # Made now, while pages that `step` computes are still to come.
        seating = memory.seating(0 if memory.is_crowded else seats, waiting, at)
        seating.displaces = False
        parts = [(prompt, chunk) for chunk in step.chunks if (prompt := here.find(chunk.request)) is not None]
        runs = [(of, len(chunk.tokens)) for of, chunk in parts if of.is_at(chunk) and of.prefix == chunk.start]
        for prompt, tokens in runs:
            prompt.count_as_run(tokens)
        try:
            prompts = [prompt for prompt in here.prompts.values() if prompt.num_ahead]
            if not (prompts or waiting):
                return []
            self._divide()
            selection = self._scheduler.plan(StepView((), prompts, waiting, begins, seating, here.seated, ran))
            for prompt in selection.admitted:
                self._seats.seat(prompt)
            commands = self._seats.fetch()
            if not selection.chunks:
                self._in_vain = tried
            elif not self._awaits_copies:
                self._shares.count(selection, here.running_of)
                self.num_ahead_steps += 1
                commands += self._begin(selection, ())
            return commands
        finally:
            for prompt, tokens in runs:
                prompt.count_as_run(-tokens)

    @property
    def _awaits_full_plan(self) -> bool:
        """Return whether the next plan may do more than one beside a step: one prompt may have to leave for another, a
        finished one waits to leave, or one is to run alone."""
        here = self._here
        moves = self._awaits_copies or self._leaving.ready or here.among(State.ASKING) or here.is_reserved
        return bool(self._steps.is_discarded or moves or self._gives_way)


class PromptMemory(PlainMemory):
    """The memory of a worker where nothing decodes: a prompt gets blocks only for the tokens of the prompt."""

    decodes = False

    def room_for(self, running: WorkerRequest) -> int:
        return self.to_hold(running, running.num_tokens)


class PrefillCore(DecodeCore):
    stepping_kind = PromptStepping

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup, scheduler_of(setup.policy), PromptMemory, parts_of)
        self._events, self._turn = handlers(self), turn(self)

    def note_less_to_run(self, *_: object) -> None:
        """Have the router hear what is left to run, by which it places the next prompts."""
        self.log.notes.has_less_to_run = True
