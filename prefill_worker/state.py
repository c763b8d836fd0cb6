"""The prefill worker's core: runs prompts, emits their first tokens, commits their KV to the pool.

    Prefill ─▶ asking ──▶ waiting ──▶ fetching ──▶ running ──▶ ended (one token was enough)
               (what the  (no        (known pages   ├──▶ departing ── Pull ──▶ gone (handing_on.py)
               pool knows) blocks)    to blocks)    │       └── Decline ─┐
                                                    └──▶ through ◀───────┴─▶ leaving ──▶ Commit
                                                         (no pages)          (blocks to pages)

A request that is cancelled, or whose next attempt arrives, leaves from wherever it is. The blocks and pages of a
request that is being copied stay taken until the copy has ended.

A real-time prompt runs at once, and asks for its pages when it is through. A best-effort one is seated when the pages
for all its KV are leased: while the arena has none for its class, it waits without a place on the device. Should they
be gone when it is through (the pool was lost, or took back what it held of the prompt), it waits where it is, but gives
its place to a real-time prompt that lacks room, and is recomputed. Where there is no pool it needs no pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.core import Role
from alignedserve.forms.pool.worker_part import PageRewriting
from alignedserve.prefill_worker.buffering import Buffers, DecodePeers
from alignedserve.prefill_worker.handing_on import Commits, Offers, PromptRequests
from alignedserve.prefill_worker.running import NextStep, RunningPrompts
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import (
    CopiedIn,
    CopiedOut,
    KvReceived,
    KvSent,
    MemberJoined,
    MemberLost,
    StepDone,
    SyntaxReady,
)
from alignedserve.protocol.messages import Cancel, Decline, Evict, Expect, LeasePages, Prefetch, Prefill, Prefix, Pull
from alignedserve.scheduling.promise import Promise
from alignedserve.worker.arriving import Arrivals, Expectations, Fetching, Prefixes, PromptQueue
from alignedserve.worker.core import Repeats, WorkerCore
from alignedserve.worker.device import DeviceMemory, blocks_for
from alignedserve.worker.owners import Owners
from alignedserve.worker.part import Act, Events
from alignedserve.worker.reporting import Counting, RouterLink
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State
from alignedserve.worker.steps import IdleTrials, PromptRate, StepEnd


def events(core: PrefillCore) -> Events:
    """Return which part hears which event, in which order (the rest of the events: alignedserve/worker/core.py)."""
    return {
        Prefill: (core.arrivals.prefill,),
        SyntaxReady: (core.arrivals.syntax_ready,),
        Expect: (core.arrivals.expect, core.expectations.expect),
        Cancel: (core.arrivals.cancel, core.prompts.cancelled),
        Prefix: (core.prefixes.answered,),
        LeasePages: (core.commits.leased,),
        Decline: (core.offers.offering.declined,),
        Prefetch: (core.buffers.prefetch,),
        Evict: (core.buffers.evict,),
        Pull: (core.peers.pulled,),
        CopiedIn: (core.fetching.copied_in, core.buffers.copied_in),
        CopiedOut: (core.commits.copied_out,),
        KvReceived: (core.buffers.received, core.peers.received),
        KvSent: (core.peers.sent,),
        StepDone: (
            core.rate.step_done,  # before the step's end: what is through then was still waiting
            core.idle.step_done,
            core.step_end.step_done,
        ),
        **core.rewriting.events,
        MemberJoined: (core.offers.members_changed,),
        MemberLost: (core.offers.members_changed,),
        (MemberJoined, Role.DECODE): (core.peers.joined,),
        (MemberLost, Role.DECODE): (core.peers.lost,),
        (MemberLost, Role.POOL): (core.prefixes.pool_lost, core.here.pool_lost, core.commits.pool_lost),
    }


def turn(core: PrefillCore) -> tuple[Act, ...]:
    """Return what the core does after each event, in this order."""
    return (
        core.step.make_place,
        core.offers.offering.ask_pending,
        core.buffers.announce_again,
        core.offers.offer_all,
        core.commits.write,
        core.step.begin,
        core.commits.ask_for_chats,
        core.rewriting.act,
        core.repeats.set_timer,
        core.router.report,
        core.counting.tell,
        core.idle.measure,
        core.router.end,
    )


class PrefillCore(WorkerCore):
    here: PromptRequests

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        pace, steps, log, pool, policy = self.pace, self.steps, self.log, self.pool_link, setup.policy
        self.here = here = PromptRequests()
        self.memory = memory = DeviceMemory(setup.limits, steps, blocks_for(setup.limits, pace))
        memory.connect(pool.writer, pace)
        self.owners = owners = Owners(memory)
        here.queue = queue = PromptQueue(here, memory, pace, log.decisions, pool.holds)
        self.prefixes = prefixes = Prefixes(here, pool, queue, policy.reuse)
        self.arrivals = Arrivals(here, policy, log.decisions, prefixes.admit)
        self.expectations = Expectations(policy, queue, self._named, self._pass_on)
        self.commits = commits = Commits(here, memory, pool, log, owners)
        self.offers = offers = Offers(here, memory, pool, log, owners, commits)
        self.prompts = prompts = RunningPrompts(here, memory, pool, log, owners, commits)
        self.buffers = buffers = Buffers(here, memory, pool, log)
        self.peers = DecodePeers(here, offers.offering, buffers, setup.direct)
        self.fetching = Fetching(here, queue, memory, pool, log)
        self.step = NextStep(here, memory, pool, log, prefixes, self.fetching, commits, offers, buffers)
        self.step_end = StepEnd(memory, pace, queue, prompts, log)
        self.rate = PromptRate(pace, steps, queue, lambda: here.unfinished, lambda: prefixes.asking)
        self.idle = IdleTrials(memory, pace, here, setup.cost is not None)
        self.rewriting, self.repeats = PageRewriting(pool, pace, steps, here), Repeats(here, pool)
        self.router = RouterLink(here, memory, pool, log, self.owners, self.rate)
        self.counting = Counting(here, log, memory, pace, queue, here.prompts.values, self._coming)
        here.enlist(
            *(self.arrivals, prompts, queue, prefixes, commits, offers.offering, self.buffers, owners, self.router)
        )
        self._compose(events(self), turn(self))

    def _named(self, _request: str) -> Iterable[WorkerRequest]:
        """Return all requests that are here and do not wait for room, whatever their names are."""
        return [*self.here.occupants(), *self.prefixes.asking]

    def _coming(self) -> list[Promise]:
        """Return the promises to prompts that ask the pool for their beginning, or fetch it."""
        return [running.promise for running in self.here.of(State.ASKING, State.FETCHING)]

    def _pass_on(self, told: Expect, _now: float) -> list[Command]:
        """Tell the pool of a request that has gone on."""
        return self.pool_link.send(told)

    @property
    def blocks(self) -> list[int]:
        return [*super().blocks, *self.buffers.blocks]

    @property
    def held(self) -> dict[str, int]:
        """Return what is taken now; nothing when no request is open."""
        return {
            "requests": len(self.here.attempts()),
            "blocks": self.memory.limits.num_blocks - self.memory.num_free,
            "pages": len(self.pool_link.holds),
            "outputs": self.owners.outputs.num_kept,
            "written parts": self.pool_link.writer.num_with_parts,
            "buffers": len(self.buffers),
        }

    @property
    def num_buffered_blocks(self) -> int:
        """Return how many blocks hold KV for decode workers."""
        return self.buffers.num_blocks

    @property
    def most_buffered_blocks(self) -> int:
        return self.buffers.most_blocks
