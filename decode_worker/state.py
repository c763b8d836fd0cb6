"""The decode worker's core: fetches batches from the pool and decodes them; colocated, runs prompts too.

    Batch ───▶ candidate ─▶ joining ───▶ resident ───▶ ended: Release
               (no room)    (pages to      ▲
                             blocks)        │
    Offer ───▶ candidate ─▶ receiving ─────┤  (a request that has to leave becomes a candidate: forms/)
    Prefill ─▶ waiting ────▶ prompt ───────┘
               (no room)    (known pages, then the chunks)

`handlers` says which part hears which event, in which order, and `turn` what follows each event; forms add parts
(forms/), which hear first. Which requests are here is in worker/requests.py, which memory a request may take in
worker/memory.py; a scheduler plans steps (alignedserve/schedulers/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from alignedserve.core import OWNERS, WORKERS, Role
from alignedserve.decode_worker.arriving import Intake
from alignedserve.decode_worker.choices import Choices
from alignedserve.decode_worker.joining import Seats
from alignedserve.decode_worker.leaving import Leaving
from alignedserve.decode_worker.pool_traffic import PagesToWrite, PageWriting
from alignedserve.decode_worker.running import StepEnd, Stepping
from alignedserve.protocol import events, messages
from alignedserve.protocol.commands import Command, Send
from alignedserve.worker.arriving import Arrivals
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.log import WorkerLog
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.offering import Offering
from alignedserve.worker.owners import Outputs
from alignedserve.worker.pace import Pace
from alignedserve.worker.part import Act, Events, FormPart, Forms, Repeats, Worker
from alignedserve.worker.pool import PageWriter, PoolLink
from alignedserve.worker.prompt_queue import PromptQueue
from alignedserve.worker.reporting import RouterLink
from alignedserve.worker.requests import PRESENT, Requests
from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State
from alignedserve.worker.steps import IdleTrials


def handlers(core: DecodeCore) -> Events:
    """Return which part hears which event, in this order."""
    forms = core.forms
    return {
        **dict.fromkeys(forms.kinds, (forms,)),  # events that only forms hear; other lines say where a form hears first
        messages.AskDecisions: (core.tell_decisions,),
        messages.Prefill: (core.arrivals.prefill,),
        events.SyntaxReady: (core.arrivals.syntax_ready, core.intake.syntax_ready),
        messages.Cancel: (core.arrivals.cancel, core.intake.cancel),
        messages.Prefix: (core.arrivals.answered,),
        messages.Batch: (core.intake.take_batch,),
        messages.Offer: (core.intake.consider,),
        messages.Decline: (core.offering.declined,),
        messages.Kept: (core.writing.kept, core.intake.note_copy),
        messages.Pull: (forms, core.offering.pulled),
        messages.LeasePages: (core.writing.leased,),
        messages.GiveBack: (core.writing.give_back,),
        events.CopiedIn: (forms, core.seats.copied_in),
        events.CopiedOut: (core.writing.copied_out,),
        events.KvReceived: (forms, core.seats.received),
        events.KvSent: (forms, core.offering.sent),
        events.StepDone: (
            core.router.rate.step_done,  # before the step's end, while prompts that end with it still count as waiting
            core.idle.step_done,
            core.step_end.step_done,
        ),
        messages.Resend: (core.owners.resend,),
        messages.Acknowledge: (core.owners.acknowledged,),
        messages.Retire: (core.router.retire,),
        messages.Reserve: (core.router.reserve,),
        messages.Inquire: (core.router.inquired,),
        messages.Missed: (core.repeats.missed,),
        events.LinkGap: (core.repeats.link_gap,),
        events.TimerFired: (core.owners.timer_fired, core.repeats.timer_fired),
        (events.MemberJoined, Role.ROUTER): (core.router.router_joined,),
        (events.MemberLost, Role.ROUTER): (core.router.router_lost,),
        **{(events.MemberLost, role): (core.owners.owner_lost,) for role in OWNERS},
        (events.MemberJoined, Role.POOL): (forms, core.pool_link.joined),
        **{(events.MemberJoined, role): (core.intake.peer_joined,) for role in WORKERS},
        **{(events.MemberLost, role): (forms, core.intake.peer_lost, core.offering.peer_lost) for role in WORKERS},
        (events.MemberLost, Role.POOL): (
            core.arrivals.pool_lost,
            core.here.pool_lost,
            core.writing.pool_lost,
            core.intake.pool_lost,
            core.pool_link.lost,  # last: until then, all parts know which pool was lost
        ),
    }


def turn(core: DecodeCore) -> tuple[Act, ...]:
    """Return what the core does after each event, in this order."""
    return (
        core.offering.ask_pending,
        core.seats.seat_all,
        core.stepping.plan,  # also a step for a pause of the running one (pausing.py)
        core.keep_answers,
        core.writing.keep_prompts,
        core.pages.write_ahead,
        # Prompts get seats with a step. Only then the pool is asked to fill the memory that is left; no memory is left
        # where a request had to leave.
        core.intake.ask,
        core.elsewhere.act,
        core.pages.ask,
        core.rewriting.act,
        core.repeats.set_timer,
        core.router.report,
        core.router.report_load,
        core.router.tell,
        core.idle.measure,
        core.router.end,
    )


MakeMemory: TypeAlias = Callable[[Pace, StepsInFlight, Requests, PoolLink, Scheduler], PlainMemory]
MakeParts: TypeAlias = Callable[[Worker, Offering], tuple[FormPart, FormPart]]


class DecodeCore:
    stepping_kind = Stepping

    def __init__(
        self, setup: WorkerSetup, scheduler: Scheduler, make_memory: MakeMemory, make_parts: MakeParts
    ) -> None:
        """`scheduler` plans the steps; by_policy.py chooses scheduler, memory and parts for a policy."""
        limits = setup.limits
        self.pace, self.steps, self.log = Pace(setup), StepsInFlight(setup.look_ahead > 0), WorkerLog()
        self.pool_link = pool = PoolLink(PageWriter(limits.page_size, limits.block_size, setup.root))
        self.here = here = Requests()
        self.memory = memory = make_memory(self.pace, self.steps, here, pool, scheduler)
        if not (scheduler.makes_pauses and memory.runs_amid) or limits.fold is not None:
            self.pace.make_no_pauses()
        # Beside steps only KV that stays in place can be copied.
        memory.copies_beside = setup.copies_beside and memory.keeps_places
        self.queue = PromptQueue(here, memory, self.log.decisions)
        self.owners = Outputs(setup.energy_source)
        worker = Worker(here, self.queue, memory, pool, self.log)
        # Ways to leave
        self.writing = PageWriting(worker, self.owners)
        self.offering = Offering(worker, self.owners)
        self.leaving = Leaving(worker, self.writing, self.offering)
        self.pages = PagesToWrite(worker, self.writing, self.leaving)
        self.rewriting, self.elsewhere = make_parts(worker, self.offering)
        self.forms = Forms(self.rewriting, self.elsewhere)
        # Ways for requests to come
        self.intake = Intake(worker, setup.direct)
        self.seats = Seats(worker, self.leaving)
        self.arrivals = Arrivals(worker)
        # Steps
        choices = Choices(worker, self.seats)
        self.stepping = self.stepping_kind(worker, self.arrivals, self.seats, choices, self.leaving, self.elsewhere)
        self.step_end = StepEnd(worker, choices, self.owners, self.writing, self.pages)
        self.idle = IdleTrials(worker, setup.cost is not None, setup.looks_first)
        self.router = RouterLink(worker, self.owners, self.elsewhere)
        here.drop = self.drop
        links = self.arrivals, self.writing, self.seats, self.offering, self.intake, self.owners, self.router
        self.repeats = Repeats(pool, *links, self.elsewhere)
        self._events, self._turn = handlers(self), turn(self)

    def handle(self, event: events.Event, now: float) -> list[Command]:
        """Let the parts hear the event, then do what there is to do in each turn."""
        return [*self.hear(event, now), *self.act(now)]

    def hear(self, event: events.Event, now: float) -> list[Command]:
        """Let the parts hear the event: a step's tokens go out before the next step is planned."""
        self.log.decisions.now = now
        return self._on_event(event, now)

    def act(self, now: float) -> list[Command]:
        """Do what there is to do in each turn."""
        self.log.decisions.now = now
        return [command for act in self._turn for command in act(now)]

    def _on_event(self, event: events.Event, now: float) -> list[Command]:
        commands: list[Command] = []
        if isinstance(event, events.Received):
            for handler in self._events.get(type(event.message), ()):
                commands += handler(event.message, event, now) or ()
            return commands
        for handler in self._events.get(type(event), ()):
            commands += handler(event, now) or ()
        if isinstance(event, events.MemberJoined | events.MemberLost) and not self._is_strange(event):
            for handler in self._events.get((type(event), event.member.role), ()):
                commands += handler(event, now) or ()
        return commands

    def _is_strange(self, event: events.MemberJoined | events.MemberLost) -> bool:
        """Return whether a pool was lost that is not this worker's: an earlier life of the pool, say."""
        member = event.member
        return isinstance(event, events.MemberLost) and member.role is Role.POOL and member != self.pool_link.member

    def drop(self, request: str, attempt: int) -> list[Command]:
        """Forget the request up to this attempt, in any state, and release what the pool keeps for the request.

        The blocks stay taken while a step, a copy or a transfer may still use them."""
        here = self.here
        self.memory.reconsider()
        dropped = [running for running in here.named(request, *PRESENT) if running.request.attempt <= attempt]
        for running in dropped:
            match running.state:
                case State.JOINING | State.FETCHING | State.RECEIVING:
                    here.move(running, State.ABANDONED)
                case State.DEPARTING:
                    self.offering.drop(running)
                case _:
                    self._forget(running)
        self.writing.drop(request, attempt)
        self.owners.drop(request, attempt)
        self.elsewhere.drop(request, attempt)
        return self.pool_link.holds.release_all(running.key for running in dropped)

    def _forget(self, running: WorkerRequest) -> None:
        """Forget a request that no copy and no transfer uses."""
        before, candidate = running.state, running.candidate
        self.here.move(running, State.GONE)
        if candidate is not None and before is State.CANDIDATE:
            self.here.candidates.forget_copy(candidate)
        elif before in (State.RESIDENT, State.PROMPT):
            self.memory.release_after_step(running)
            self.owners.leave_amid_step(running, self.steps.number)

    def tell_decisions(self, ask: messages.AskDecisions, frame: events.Received, now: float) -> list[Command]:
        """Tell a gateway which decisions about a request this worker remembers."""
        return [Send(frame.sender, messages.Decisions(ask.number, now, self.log.decisions.about(ask.request)))]

    def keep_answers(self, now: float) -> list[Command]:
        """Copy answers to the pool, behind or beside the step that was planned; then use the memory that comes free."""
        memory = self.memory
        if not self.here.kept:
            return []
        num_free, commands = memory.blocks.num_free, self.pages.keep_answers(now)
        if memory.blocks.num_free == num_free:
            return commands
        return [*commands, *self.seats.seat_all(now), *self.stepping.plan(now)]

    # --- What is here

    @property
    def leased_pages(self) -> tuple[int, ...]:
        """Return the pages of the pool that are leased to this worker. A lease may outlast the request."""
        return self.pool_link.writer.leased

    @property
    def copying(self) -> tuple[messages.Attempt, ...]:
        """Return the attempts with a copy from the pool under way."""
        return tuple(running.key for running in self.here.copies.values())

    @property
    def held(self) -> dict[str, int]:
        """Return what is taken now; nothing when no request is open."""
        held = {
            "requests": len(self.here.attempts()),
            "blocks": self.memory.limits.num_blocks - self.memory.blocks.num_free,
            "pages": len(self.pool_link.holds),
            "outputs": self.owners.num_kept,
        }
        return {**held, **self.elsewhere.held}
