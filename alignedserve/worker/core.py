"""A worker's core: an event goes to the parts that a table names for it, then the acts of the turn follow.

The table here has the events that both workers hear alike; each worker's core has the table of its own events, and its
handlers come first (decode_worker/state.py, prefill_worker/state.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from alignedserve.core import OWNERS, Role
from alignedserve.protocol.commands import Command, Send, SetTimer
from alignedserve.protocol.events import Event, LinkGap, MemberJoined, MemberLost, Received, TimerFired
from alignedserve.protocol.messages import (
    Acknowledge,
    AskDecisions,
    Attempt,
    Decisions,
    Inquire,
    Member,
    Missed,
    Resend,
    Reserve,
    Retire,
)
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.log import WorkerLog
from alignedserve.worker.owners import Owners
from alignedserve.worker.pace import Pace
from alignedserve.worker.part import REFRESH, REFRESH_S, Act, CorePart, Events, Handler
from alignedserve.worker.pool import PageWriter, PoolLink
from alignedserve.worker.reporting import Counting, RouterLink
from alignedserve.worker.requests import Requests
from alignedserve.worker.setup import WorkerSetup


def shared_events(core: WorkerCore) -> Events:
    return {
        Resend: (core.owners.resend,),
        Acknowledge: (core.owners.acknowledged,),
        Retire: (core.router.retire, core.counting.retire),
        Reserve: (core.router.reserve,),
        Inquire: (core.router.inquired,),
        Missed: (core.repeats.missed,),
        LinkGap: (core.repeats.link_gap,),
        TimerFired: (core.owners.timer_fired, core.repeats.timer_fired),
        (MemberJoined, Role.ROUTER): (core.router.router_joined, core.counting.router_joined),
        (MemberJoined, Role.POOL): (core.pool_link.joined,),
        (MemberLost, Role.ROUTER): (core.router.router_lost,),
        (MemberLost, Role.POOL): (core.pool_link.lost,),  # last: until then, all parts know which pool was lost
        **{(MemberLost, role): (core.owners.owner_lost,) for role in OWNERS},
    }


class WorkerCore:
    """The core that both workers share: a worker's core makes its parts, and then sets its events and its turn."""

    here: Requests
    memory: DeviceMemory
    owners: Owners
    router: RouterLink
    counting: Counting
    repeats: Repeats

    def __init__(self, setup: WorkerSetup) -> None:
        limits = setup.limits
        self.pace, self.steps, self.log = Pace(setup), StepsInFlight(), WorkerLog()
        self.pool_link = PoolLink(PageWriter(limits.page_size, limits.block_size, setup.root))
        self._events: dict[object, tuple[Handler, ...]] = {}
        self._turn: tuple[Act, ...] = ()

    def _compose(self, events: Events, turn: tuple[Act, ...]) -> None:
        self._events = {AskDecisions: (self._tell_decisions,), **shared_events(self)}
        for kind, handlers in events.items():
            self._events[kind] = (*handlers, *self._events.get(kind, ()))
        self._turn = turn

    def handle(self, event: Event, now: float) -> list[Command]:
        """Let the parts hear the event, then do what there is to do in each turn."""
        self.log.decisions.now = now
        commands = self._hear(event, now)
        for act in self._turn:
            commands += act(now)
        return commands

    def _hear(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        if isinstance(event, Received):
            for handler in self._events.get(type(event.message), ()):
                commands += handler(event.message, event, now) or ()
            return commands
        for handler in self._events.get(type(event), ()):
            commands += handler(event, now) or ()
        if isinstance(event, MemberJoined | MemberLost) and not self._is_strange(event):
            for handler in self._events.get((type(event), event.member.role), ()):
                commands += handler(event, now) or ()
        return commands

    def _is_strange(self, event: MemberJoined | MemberLost) -> bool:
        """Return whether a pool was lost that is not this worker's: an earlier life of it, say."""
        member = event.member
        return isinstance(event, MemberLost) and member.role is Role.POOL and member != self.pool_link.member

    def _tell_decisions(self, ask: AskDecisions, frame: Received, now: float) -> list[Command]:
        """Tell a gateway what this worker remembers of its decisions about a request."""
        return [Send(frame.sender, Decisions(ask.number, now, self.log.decisions.about(ask.request)))]

    @property
    def pool(self) -> Member | None:
        """Return the member whose pages are copied from and to."""
        return self.pool_link.member

    @property
    def attempts(self) -> list[Attempt]:
        """Return all attempts that are here."""
        return self.here.attempts()

    @property
    def outputs(self) -> Mapping[Attempt, bool]:
        """Return the attempts whose outputs are kept, and whether they have ended."""
        return self.owners.outputs.attempts

    @property
    def blocks(self) -> list[int]:
        """Return each block of the device once, as long as all is well."""
        return self.memory.blocks_with(self.here.occupants())

    @property
    def kept_blocks(self) -> Collection[int]:
        """Return the blocks of full pages: nothing is written to them any more."""
        return self.memory.blocks.kept

    @property
    def leased_pages(self) -> tuple[int, ...]:
        """Return the pages of the pool that are leased to this worker. A lease may outlast its request."""
        return self.pool_link.writer.leased


class Repeats(CorePart):
    """Repeats messages when a frame may have been lost: after a while of silence, or as soon as a gap is seen."""

    def __init__(self, here: Requests, pool: PoolLink) -> None:
        self._here, self._pool = here, pool
        self._is_set = False  # the timer

    def timer_fired(self, event: TimerFired, now: float) -> None:
        if event.name == REFRESH:
            self._is_set = False
            self._here.ask_again()

    def missed(self, message: Missed, frame: Received, now: float) -> list[Command]:
        return self._repeat(frame.sender)

    def link_gap(self, event: LinkGap, now: float) -> list[Command]:
        return [Send(event.sender, Missed()), *self._repeat(event.sender)]

    def _repeat(self, to: str) -> list[Command]:
        pool = self._pool.member
        if pool is not None and to == pool.name:
            self._here.ask_again()
            return []
        return self._here.repeat(to)

    def set_timer(self, now: float) -> list[Command]:
        """Set the refresh timer while anything is not answered. One timer at a time: else it would never fire."""
        if self._is_set or not self._here.awaits_answer:
            return []
        self._is_set = True
        return [SetTimer(REFRESH, now + REFRESH_S)]
