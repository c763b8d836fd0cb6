"""The turn loop around a core: a real process (`Shell`) and a simulated one take the same turns.

    events ──▶ core.handle(event, now) ──▶ commands ─┬─▶ Send       the links
       ▲                                             ├─▶ SetTimer   the timers
       │                                             ├─▶ End        the process ends
       │                                             ├─▶ work       the queue of work, in order
       │                                             └─▶ all else   the hands of the part, at once
       └────── MemberJoined, MemberLost, TimerFired, results of work

A turn hears all events that have arrived, then fires the timers that are due, then begins one piece of work. So the
core knows everything that has happened when it decides what comes next, and work waits only for messages that are
there already.

This file does no IO and reads no clock of its own: `Shell` adds sockets and threads, the simulator's `Process` adds
its agenda and virtual links.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Protocol, TypeAlias, get_args, runtime_checkable

from alignedserve.protocol.commands import Beside, Command, Deliver, End, Send, SetTimer, Work
from alignedserve.protocol.events import Event, MemberJoined, MemberLost, Received, TimerFired
from alignedserve.protocol.membership import Membership
from alignedserve.protocol.messages import ROUTER, Heartbeat, Member, Members, Message

Decide: TypeAlias = Callable[[float], list[Command]]  # a part of what a core does at an event; now is given

_TAKES_TIME: tuple[type, ...] = get_args(Work) + get_args(Beside)


class Core(Protocol):
    """The part of a process that decides."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Return what is to be done after this event."""


@runtime_checkable
class CoreInTwo(Core, Protocol):
    """A core that handles an event in two parts, so that what follows from the first is done before the second."""

    def hear(self, event: Event, now: float) -> list[Command]:
        """Return what the event says; `act` comes next."""

    def act(self, now: float) -> list[Command]:
        """Return what is to be done now, whatever has happened."""


class Hands(Protocol):
    """The actions of a part beside sending messages and setting timers."""

    def meet(self, member: Member) -> None:
        """Prepare for a member that has joined; the core hears of it next."""

    def part_from(self, member: Member) -> None:
        """Drop what was prepared for a member that has gone; the core hears of it next."""

    def perform(self, command: Command) -> Event | None:
        """Perform the command and return its result, if the core is to hear one."""


class NoHands:
    """The hands of a part that only talks. Parts with few commands of their own build on it."""

    def meet(self, member: Member) -> None: ...

    def part_from(self, member: Member) -> None: ...

    def perform(self, command: Command) -> Event | None:
        raise TypeError(f"this part cannot perform {command}")


class TurnClock(Protocol):
    def now(self) -> float:
        """Return the time that the core is told."""

    def until(self, due_at: float, /) -> float:
        """Return the seconds until a timer's due time: zero or less when it is due."""


class TurnLoop(ABC):
    """A core, its hands, its timers and its queue of work. A subclass says how events arrive and messages leave."""

    def __init__(self, core: Core, hands: Hands, membership: Membership, clock: TurnClock) -> None:
        self.core, self.hands = core, hands
        self.alive = True  # False once the process is to end: no further event reaches the core
        self._membership, self._clock = membership, clock
        self._timers: dict[str, float] = {}  # name -> due time, as `_wake_at` returned it
        self._next_timer_at = inf  # no timer is due before this time
        self._work: deque[Command] = deque()  # ordered by the core and not begun

    # --- What differs between a real process and a simulated one

    @abstractmethod
    def _connect(self, member: Member) -> None:
        """Open a link to the member, or keep the present one."""

    @abstractmethod
    def _disconnect(self, name: str) -> None:
        """Close the link to the member of this name."""

    @abstractmethod
    def _send(self, to: str, message: Message) -> None:
        """Send the message; it is lost where there is no link."""

    @abstractmethod
    def _begin(self, work: Command) -> None:
        """Begin a piece of work; its result is an event of a later turn."""

    @abstractmethod
    def _end(self) -> None:
        """End the process after this turn."""

    @abstractmethod
    def _wake_at(self, at: float) -> float:
        """Have a turn taken when the core's clock says `at`, and return that time by the clock that timers are due by.

        In the simulator the two clocks differ: timers due at the same instant fire in the order of their names.
        """

    # --- A turn

    def turn(self, events: Iterable[Event]) -> None:
        """Hear the events that have arrived, fire the timers that are due, begin one piece of work."""
        for event in events:
            self._hear(event)
        if self._next_timer_at < inf:
            self._fire_timers()
        if self._work and self._may_begin():
            self._begin(self._work.popleft())

    def _may_begin(self) -> bool:
        return self.alive

    def _hear(self, event: Event) -> None:
        """Deliver the event now, keep it until its sender is announced, or drop what its sender may not say."""
        match event:
            case Received() if not self._membership.admits(event):
                pass
            case Received(message=Heartbeat(member)):
                self._connect(member)
                self._deliver(event)
            case Received(message=Members(members)):
                self._meet(members)
            case _:
                self._deliver(event)

    def _meet(self, members: tuple[Member, ...]) -> None:
        """Deliver what an announcement changes: each member that has gone, then each new member."""
        for event in self._membership.announced(members):
            match event:
                case MemberLost(member):
                    if member.name != ROUTER:
                        self._disconnect(member.name)
                    self.hands.part_from(member)
                case MemberJoined(member):
                    self._connect(member)
                    self.hands.meet(member)
            self._deliver(event)

    def _fire_timers(self) -> None:
        """Deliver the timers that are due, in the order of their times."""
        until = self._clock.until
        if until(self._next_timer_at) > 0 or not self.alive:
            return
        for _, name in sorted((at, name) for name, at in self._timers.items() if until(at) <= 0):
            del self._timers[name]
            self._deliver(TimerFired(name))
            if not self.alive:
                return
        self._next_timer_at = min(self._timers.values(), default=inf)

    def _deliver(self, event: Event) -> None:
        """Tell the core of the event and perform what it commands. A process that has ended hears nothing more."""
        for decide in self._decisions(event):
            if not self.alive:
                return
            try:
                commands = decide(self._clock.now())
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # also what a library in Rust raises where it panics
                self.perform(self._failed(event, error))
                return
            self.perform(commands)

    def _decisions(self, event: Event) -> Sequence[Decide]:
        """Return how the core handles the event: the commands of each part are performed before the next part."""
        return (partial(self.core.handle, event),)

    def _failed(self, event: Event, error: BaseException) -> Iterable[Command]:
        """Return what to do where the core has failed at an event, or end with the error."""
        raise error

    def perform(self, commands: Iterable[Command]) -> None:
        """Perform commands in their order; commands that take time join the queue of work."""
        perform = self.hands.perform
        for command in commands:
            match command:
                case Deliver():  # the most frequent command: one for each token
                    perform(command)
                case Send(to, message):
                    self._send(to, message)
                case SetTimer(name, at):
                    self._timers[name] = due_at = self._wake_at(at)
                    self._next_timer_at = min(self._next_timer_at, due_at)
                case End():
                    self._end()
                    return
                case _ if isinstance(command, _TAKES_TIME):
                    self._work.append(command)
                case _:
                    perform(command)
