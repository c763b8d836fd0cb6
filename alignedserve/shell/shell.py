"""The shell of every part: delivers events to a core, performs its commands, reads the clock.

links ──▶ events ──▶ core.handle(event, now) ──▶ commands ──▶ links, timers, the part's own hands
             ▲                                                              │
             └───────────────── what came of them ──────────────────────────┘
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from alignedserve.errors import WireError
from alignedserve.protocol.commands import (
    Command,
    CompressPage,
    CopyIn,
    CopyOut,
    CopySlots,
    End,
    ProjectKv,
    ReceiveKv,
    RunStep,
    Send,
    SendKv,
    SetTimer,
)
from alignedserve.protocol.events import Event, MemberJoined, MemberLost, Post, Received, TimerFired, Unsent
from alignedserve.protocol.membership import Membership
from alignedserve.protocol.messages import ROUTER, Heartbeat, Member, Members, Message
from alignedserve.shell import journal
from alignedserve.shell.clock import Clock
from alignedserve.shell.links import LinkFull, Links

log = logging.getLogger("alignedserve.shell")


class Core(Protocol):
    def handle(self, event: Event, now: float) -> list[Command]: ...


class Hands(Protocol):
    """What a part can do beside sending messages and setting timers."""

    def meet(self, member: Member) -> None:
        """A member has joined; the core hears of it next."""

    def part_from(self, member: Member) -> None:
        """A member has gone; the core hears of it next."""

    def perform(self, command: Command) -> Event | None:
        """Do it, and say what came of it."""

    def perform_aside(self, command: Command, post: Post) -> bool:
        """Begin it, to go on beside all else; what comes of it is posted, and what breaks off. False where it is to be
        performed."""


class NoHands:
    def meet(self, member: Member) -> None: ...

    def part_from(self, member: Member) -> None: ...

    def perform(self, command: Command) -> Event | None:
        raise TypeError(f"this part cannot perform {command}")

    def perform_aside(self, command: Command, post: Post) -> bool:
        return False


class Shell:
    def __init__(self, core: Core, links: Links, clock: Clock, hands: Hands | None = None) -> None:
        self._core, self._links, self._clock = core, links, clock
        self._hands: Hands = hands or NoHands()
        self._membership = Membership(links.name, links.incarnation)
        self._timers: dict[str, float] = {}
        self._work: deque[Command] = deque()  # what takes time: one piece between two looks at the inbox
        self._posted: deque[Event | Exception] = deque()  # by other threads
        self._stopped = threading.Event()

    def run(self, first: Iterable[Command] = ()) -> None:
        """Until `stop`, or CastOut. Work waits for nothing but the messages that are there already."""
        self._perform(first)
        while not self._stopped.is_set():
            self._hear(0.0 if self._work else self._patience_s())
            self._fire_timers()
            if self._work:
                self._begin(self._work.popleft())

    def _hear(self, patience_s: float | None) -> None:
        for event in self._links.receive(patience_s):
            self._arrived(event)
        while self._posted:
            posted = self._posted.popleft()
            if isinstance(posted, Exception):
                raise posted
            self._deliver(posted)

    def _begin(self, work: Command) -> None:
        """In its turn, though some go on beside what comes after them. What came meanwhile is heard before what came of
        it: whoever decides what is next knows all of it, and nobody waits for a step more."""
        if self._hands.perform_aside(work, self.post):
            return
        done = self._hands.perform(work)
        if done is not None:
            self._hear(0.0)
            self._deliver(done)

    def post(self, posted: Event | Exception) -> None:
        """Deliver an event of this process, or end with an exception; from any thread."""
        self._posted.append(posted)
        self._links.wake()

    def stop(self) -> None:
        """From any thread."""
        self._stopped.set()
        self._links.wake()

    def _patience_s(self) -> float | None:
        return min(self._timers.values()) - self._clock.now() if self._timers else None

    def _fire_timers(self) -> None:
        due = sorted((at, name) for name, at in self._timers.items() if at <= self._clock.now())
        for _, name in due:
            del self._timers[name]
            self._deliver(TimerFired(name))

    def _arrived(self, event: Event) -> None:
        match event:
            case Received(message=Heartbeat(member)):
                self._links.connect(member.name, member.address, member.incarnation)
                self._deliver(event)
            case Received(sender, Members(members)) if sender == ROUTER:
                self._meet(members)
            case Received() if not self._membership.admits(event):
                pass
            case _:
                self._deliver(event)

    def _meet(self, members: tuple[Member, ...]) -> None:
        for event in self._membership.announced(members):
            match event:
                case MemberLost(member):
                    if member.name != ROUTER:
                        self._links.disconnect(member.name)
                    self._hands.part_from(member)
                case MemberJoined(member):
                    self._links.connect(member.name, member.address, member.incarnation)
                    self._hands.meet(member)
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        self._perform(self._core.handle(event, self._clock.now()))

    def _perform(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Send(to, message):
                    journal.note(to, message)
                    self._send(to, message)
                case SetTimer(name, at):
                    self._timers[name] = at
                case End():
                    self.stop()
                case (
                    RunStep()
                    | CopyOut()
                    | CopyIn()
                    | CopySlots()
                    | ProjectKv()
                    | CompressPage()
                    | SendKv()
                    | ReceiveKv()
                ):
                    self._work.append(command)
                case _:
                    self._hands.perform(command)

    def _send(self, to: str, message: Message) -> None:
        try:
            self._links.send(to, message)
        except LinkFull as error:
            log.error("%s", error)  # the number that it left out is the receiver's LinkGap
        except WireError as error:
            log.error("%s", error)
            self._deliver(Unsent(to, message, str(error)))
