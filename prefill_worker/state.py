"""The prefill worker's core: the decode worker's, where nothing decodes and KV is kept for workers that do.

    Prefill ─▶ waiting ─▶ prompt ─▶ resident ─┬─▶ Commit: to the pool, which makes batches
               (no room)            (first    └─▶ Offer, Pull: to a decode worker (decode_worker/leaving.py)
                                     token)

This core runs where prefill workers do not decode (`schedule.helps` is off); a prefill worker that decodes runs the
decode worker's core as it is. A form adds buffers, which hold KV for decode workers (forms/).
"""

from __future__ import annotations

from alignedserve.core import Role
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.decode_worker.state import handlers as handlers_where_requests_decode
from alignedserve.forms.parts.table import parts_of
from alignedserve.prefill_worker.running import PromptStepping
from alignedserve.protocol.events import KvReceived, MemberJoined, StepDone
from alignedserve.protocol.messages import Cancel
from alignedserve.schedulers.table import scheduler_of
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.part import Act, Events
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.request import WorkerRequest


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
