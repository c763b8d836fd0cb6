"""The processes and the links between them, done virtually.

A `Process` does for its core what the shell does: it delivers what arrives, performs what comes of
that, and does one piece of work between two looks at its inbox. A link keeps the order of its frames,
several links do not; frames travel as the bytes that they are.

A killed process takes with it what lies in its inbox. What is sent to it later is lost, but for the
router, whose address its next life has too: there it waits, as it does in a socket that reconnects.

Each process has its own clock, which may be ahead of the agenda's; what a core says and hears is in its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import inf, log
from random import Random
from typing import Protocol, cast

from alignedserve.commands import (
    Command,
    CompressPage,
    CopyIn,
    CopyOut,
    CopySlots,
    Deliver,
    End,
    ProjectKv,
    ReceiveKv,
    RunStep,
    Send,
    SendKv,
    SetTimer,
)
from alignedserve.core import Role, StepFailure, StepResult
from alignedserve.errors import CastOut
from alignedserve.events import Event, MemberJoined, MemberLost, Received, StepDone, TimerFired
from alignedserve.membership import UNNUMBERED, Heard, Membership
from alignedserve.messages import ROUTER, Died, Heartbeat, Member, Members, Message, Retire
from alignedserve.simulator.clock import Agenda, Priority
from alignedserve.simulator.faults import Fault, Freeze, Kill, Resize
from alignedserve.simulator.transfers import Transfers
from alignedserve.simulator.trouble import Trouble
from alignedserve.wire import Envelope, decode, encode

_MOST_BYTES = 1 << 26
Frame = bytes | Envelope  # the latter where nobody asks for bytes
CAST_OUT_S = 0.5  # until a process that was taken for dead, and ends itself, is back


class Core(Protocol):
    def handle(self, event: Event, now: float) -> list[Command]: ...


class Hands(Protocol):
    def meet(self, member: Member) -> None:
        """A member has joined; the core hears of it next."""

    def part_from(self, member: Member) -> None:
        """A member has gone; the core hears of it next."""

    def begin(self, command: Command) -> float:
        """A piece of work: how long it takes."""

    def finish(self, command: Command, seconds: float) -> Event | None:
        """What came of it, if anybody is to hear of it, and how long it took after all."""

    def perform(self, command: Command) -> None:
        """What takes no time."""

    def transfer(self, command: SendKv | ReceiveKv, transfers: Transfers, process: Process) -> None:
        """Begin it; it goes on beside what comes after it."""


class NoHands:
    """Of a part that only talks."""

    def meet(self, member: Member) -> None: ...

    def part_from(self, member: Member) -> None: ...

    def begin(self, command: Command) -> float:
        raise TypeError(f"this part cannot begin {command}")

    def finish(self, command: Command, seconds: float) -> Event:
        raise TypeError(f"this part cannot finish {command}")

    def perform(self, command: Command) -> None:
        raise TypeError(f"this part cannot perform {command}")

    def transfer(self, command: SendKv | ReceiveKv, transfers: Transfers, process: Process) -> None:
        raise TypeError(f"this part cannot begin {command}")


@dataclass(frozen=True)
class Life:
    """What a process starts with."""

    core: Core
    hands: Hands
    first: list[Command]
    hears_while_busy: bool = False  # its work is done by a thread of its own, as with look_ahead


MakeLife = Callable[["World", Member], Life]


@dataclass(frozen=True)
class Network:
    """Delays in seconds."""

    least_s: float = 1e-4
    spread_s: float = 4e-4  # on average, above that
    heartbeat_s: float = 0.5
    watch_s: float = 0.05  # until the pool sees that a lock is free


class Witness:
    """Sees what happens in a world; this one does nothing about it."""

    def commanded(self, by: Member, command: Command, frame: bytes) -> None:
        """A core has decided this; `frame` says the same in bytes."""

    def handled(self, process: Process) -> None:
        """Its core has taken an event, and what came of that is done."""

    def works(self, process: Process, command: Command) -> None:
        """A piece of work begins, or ends."""


@dataclass
class _Link:
    address: str
    incarnation: int = 0
    sent: int = 0
    last_arrival_at: float = 0.0


class World:
    def __init__(self, seed: int, network: Network = Network(), in_bytes: bool = True) -> None:
        """Frames travel as bytes, and all commands are noted, unless a long run is to save the time."""
        self.agenda, self.in_bytes = Agenda(), in_bytes
        self.is_noted = in_bytes  # whether witnesses hear of commands, and `digest` is of them
        self._network = network
        self._least_s, self._pace = network.least_s, 1 / network.spread_s
        self._draw_share = Random(f"{seed}/delays").random
        self._digest = blake2b(digest_size=16)
        self._makers: dict[str, tuple[Role, MakeLife, str, str]] = {}
        self._lives: dict[str, int] = {}  # name -> its last incarnation
        self._alive: dict[str, Process] = {}
        self._to_router: list[Frame] = []  # while it is away
        self.trouble = Trouble(seed)
        self.befallen: Counter[str] = Counter()  # how many faults of which kind
        self.transfers = Transfers(self.agenda, self._is_alive, self.trouble.mishap)
        self.witnesses: list[Witness] = []
        self.on_death: Callable[[str], None] = lambda _: None
        self.on_gone: Callable[[str], None] = lambda _: None  # for good
        self.on_resize: Callable[[Resize], None] = lambda _: None
        self._retired: set[str] = set()  # who ends once more, and does not come back

    def start(self, name: str, role: Role, make: MakeLife, node: str = "local", transport: str = "") -> None:
        self._makers[name] = (role, make, node, transport)
        self._start(name)

    def _is_alive(self, holder: str) -> bool:
        return any(process.member.holder == holder for process in self._alive.values())

    def alive(self, name: str) -> Process | None:
        return self._alive.get(name)

    @property
    def processes(self) -> Iterable[Process]:
        """All that are alive."""
        return self._alive.values()

    @property
    def digest(self) -> str:
        """Of all commands of all cores, in their order."""
        return self._digest.hexdigest()

    def now_of(self, name: str) -> float:
        """What the clock says that a process of this name starts with."""
        return self.agenda.now + self.trouble.ahead_s(name)

    def note(self, member: Member, command: Command) -> None:
        shown = command.message if isinstance(command, Send) else command
        to = command.to if isinstance(command, Send) else ""
        frame = encode(Envelope(f"{member.holder}>{to}", 0, 0, cast(Message, shown)))
        self._digest.update(frame)
        for witness in self.witnesses:
            witness.commanded(member, command, frame)

    # --- Lives

    def retire(self, name: str) -> None:
        """Its launcher has the router tell it to end; it does not come back, however it ends."""
        self._retired.add(name)
        process = self._alive.get(name)
        if process is None:
            self.on_gone(name)
            return
        self._unnumbered(Envelope("launcher", 0, UNNUMBERED, Retire(name, process.member.incarnation)))

    def welcome(self, name: str) -> None:
        """Another may have had it and gone for good."""
        self._retired.discard(name)

    def end_for_good(self, name: str) -> None:
        """Now."""
        self._retired.add(name)
        if name in self._alive:
            self.end(name, 0.0, seen=True)
        else:
            self.on_gone(name)

    def _start(self, name: str) -> None:
        if name in self._retired or name in self._alive:
            return
        role, make, node, transport = self._makers[name]
        self._lives[name] = incarnation = self._lives.get(name, 0) + 1
        address = name if role is Role.ROUTER else f"{name}#{incarnation}"
        member = Member(name, role, node, incarnation, address, transport)
        process = Process(self, member, make(self, member))
        self._alive[name] = process
        process.begin()
        if role is Role.ROUTER:
            waited, self._to_router = self._to_router, []
            for frame in waited:
                process.arrive(frame)
        else:
            self._beat(process)

    def _beat(self, process: Process) -> None:
        if not process.alive:
            return
        again = self.agenda.now + self._network.heartbeat_s
        self.agenda.at(again, Priority.TIMER, lambda: self._beat(process))
        if process.is_frozen or self.trouble.mutes(process.member.name, self.agenda.now):
            return
        member = process.member
        self._unnumbered(Envelope(member.name, member.incarnation, UNNUMBERED, Heartbeat(member)))

    def watch(self, holder: str, gone: Callable[[], None]) -> None:
        """The lock of a process is free as soon as it has ended, however late others hear of that."""
        if any(process.member.holder == holder for process in self._alive.values()):
            later = self.agenda.now + self._network.watch_s
            return self.agenda.at(later, Priority.TIMER, lambda: self.watch(holder, gone))
        return self.agenda.at(self.agenda.now + self._network.watch_s, Priority.TIMER, gone)

    # --- Links

    def frame(self, envelope: Envelope) -> Frame:
        return encode(envelope) if self.in_bytes else envelope

    def transmit(self, sender: Member, to: str, link: _Link, frame: Frame) -> None:
        now, trouble = self.agenda.now, self.trouble if self.trouble.has_begun else None
        arrival_at = now + self._delay_s()
        if trouble is not None:
            arrival_at += trouble.extra_s(sender.name, to, now)
        if arrival_at < link.last_arrival_at:
            arrival_at = link.last_arrival_at
        link.last_arrival_at = arrival_at
        if trouble is not None and trouble.drops(sender.name, to):
            return
        arrive = partial(self._arrive, link.address, frame)
        self.agenda.at(arrival_at, Priority.FRAME, arrive)
        if trouble is not None and trouble.doubles(sender.name, to):
            self.agenda.at(arrival_at + self._delay_s(), Priority.FRAME, arrive)

    def _arrive(self, address: str, frame: Frame) -> None:
        name = address.partition("#")[0]
        process = self._alive.get(name)
        if process is not None and process.member.address == address:
            process.arrive(frame)
        elif name == ROUTER:
            self._to_router.append(frame)

    def _unnumbered(self, envelope: Envelope) -> None:
        """To the router, which gets it if it is there."""
        frame = self.frame(envelope)

        def arrive() -> None:
            if ROUTER in self._alive:
                self._alive[ROUTER].arrive(frame)

        self.agenda.at(self.agenda.now + self._delay_s(), Priority.FRAME, arrive)

    def _delay_s(self) -> float:
        """`expovariate`, without its call: one for every frame."""
        return self._least_s - log(1.0 - self._draw_share()) / self._pace

    # --- Faults

    def plan(self, faults: Iterable[Fault]) -> None:
        """What is due already, such as a clock that is wrong from the start, befalls at once."""
        for fault in faults:
            if fault.at <= self.agenda.now:
                self._befall(fault)
            else:
                self.agenda.at(fault.at, Priority.FAULT, partial(self._befall, fault))

    def _befall(self, fault: Fault) -> None:
        match fault:
            case Kill(member=member) | Freeze(member=member) if member not in self._alive:
                return
            case Kill(_, member, back_after_s, seen):
                self.end(member, back_after_s, seen)
            case Freeze(at, member, for_s):
                self._alive[member].freeze(at + for_s)
            case Resize():
                self.on_resize(fault)
            case _:
                self.trouble.begin(fault)
        self.befallen[type(fault).__name__] += 1

    def end(self, name: str, back_after_s: float, seen: bool) -> None:
        """A process ends; where its launcher has seen it, the router is told."""
        process = self._alive.pop(name)
        process.alive = False
        member = process.member
        self.transfers.died(member.holder)
        if seen and member.role is not Role.ROUTER:
            self._unnumbered(Envelope("launcher", 0, UNNUMBERED, Died(member.name, member.incarnation)))
        if name in self._retired:
            self.on_gone(name)
        else:
            self.agenda.at(self.agenda.now + back_after_s, Priority.FAULT, lambda: self._start(name))
        self.on_death(name)


class Process:
    """One life of a member: its core, and the shell's part."""

    def __init__(self, world: World, member: Member, life: Life) -> None:
        self.member, self.alive = member, True
        self.core, self.hands, self._first = life.core, life.hands, life.first
        self._world, self._agenda = world, world.agenda
        self._ahead_s = world.trouble.ahead_s(member.name)
        self._membership, self._heard = Membership(member.name, member.incarnation), Heard()
        self._links = {ROUTER: _Link(ROUTER)}
        self._ended_links: dict[str, _Link] = {}
        self._timers: dict[str, float] = {}  # when they are due, by the agenda's clock
        self._next_timer_at = inf  # none is due before that
        self._work: deque[Command] = deque()
        self._inbox: deque[Frame | Event] = deque()
        self._busy = False
        self._hears_while_busy = life.hears_while_busy
        self._failed_step = 0  # the last one that found too little memory
        self._frozen_until = 0.0
        self._aside_until = 0.0  # copies beside the steps take so long

    def begin(self) -> None:
        self._perform(self._first)
        self._turn()

    def arrive(self, frame: Frame) -> None:
        self._inbox.append(frame)
        self._turn()

    def post(self, event: Event) -> None:
        self._inbox.append(event)
        self._turn()

    @property
    def is_frozen(self) -> bool:
        return self._agenda.now < self._frozen_until

    def freeze(self, until: float) -> None:
        """It does nothing, its heart does not beat, and it does not know: as after SIGSTOP."""
        self._frozen_until = until
        self._agenda.at(until, Priority.FAULT, self._turn)

    def _turn(self) -> None:
        """What has arrived, then timers, then one piece of work: as in `Shell.run`."""
        if (self._busy and not self._hears_while_busy) or not self.alive or self._agenda.now < self._frozen_until:
            return
        try:
            while self._inbox and self.alive:
                arrived = self._inbox.popleft()
                for event in self._read(arrived):
                    self._arrived(event)
        except CastOut:
            self._world.end(self.member.name, CAST_OUT_S, seen=True)
            return
        if not self.alive:
            return  # it has ended by itself
        if self._agenda.now >= self._next_timer_at:
            self._fire_timers()
        if self._busy:
            return
        while self.alive and self._work and self._goes_aside(self._work[0]):  # what is before it has been done
            self._begin_aside(self._work.popleft())
        if self.alive and self._work:
            self._begin_work(self._work.popleft())

    def _read(self, arrived: Frame | Event) -> Sequence[Event]:
        if isinstance(arrived, bytes):
            arrived = decode(arrived, _MOST_BYTES)
        return self._heard.events(arrived) if isinstance(arrived, Envelope) else [arrived]

    def _begin_work(self, command: Command) -> None:
        self._busy = True
        if self._world.witnesses:
            self._witness_work(command)
        now = self._agenda.now
        seconds, trouble = self.hands.begin(command), self._world.trouble
        if trouble.has_begun:
            seconds *= trouble.work_takes(self.member.name, now)
        self._agenda.at(now + seconds, Priority.WORK, partial(self._finish_work, command, seconds))

    @staticmethod
    def _goes_aside(command: Command) -> bool:
        return isinstance(command, SendKv | ReceiveKv) or (isinstance(command, CopyOut | CopyIn) and command.aside)

    def _begin_aside(self, command: Command) -> None:
        """It goes on beside what comes after it: transfers as the links allow, copies one after the other."""
        if isinstance(command, SendKv | ReceiveKv):
            self.hands.transfer(command, self._world.transfers, self)
            return
        now = max(self._agenda.now, self._aside_until)
        seconds = self.hands.begin(command) * self._world.trouble.work_takes(self.member.name, self._agenda.now)
        self._aside_until = now + seconds
        self._witness_work(command)
        self._agenda.at(self._aside_until, Priority.WORK, lambda: self._finish_aside(command, seconds))

    def _finish_aside(self, command: Command, seconds: float) -> None:
        if not self.alive:
            return
        if self.is_frozen:
            self._agenda.at(self._frozen_until, Priority.WORK, lambda: self._finish_aside(command, seconds))
            return
        self._witness_work(command)
        if (event := self.hands.finish(command, seconds)) is not None:
            self.post(event)

    def _finish_work(self, command: Command, seconds: float) -> None:
        if not self.alive:
            return
        if self.is_frozen:
            self._agenda.at(self._frozen_until, Priority.WORK, lambda: self._finish_work(command, seconds))
            return
        self._busy = False
        if self._world.witnesses:
            self._witness_work(command)
        if (event := self._outcome(command, seconds)) is not None:
            self._inbox.append(event)  # behind what came meanwhile, which is then known to whoever decides what is next
        self._turn()

    def _outcome(self, command: Command, seconds: float) -> Event | None:
        trouble = self._world.trouble
        if trouble.has_begun and isinstance(command, RunStep):
            plan = command.plan
            goes_on = any(one.token is None for one in plan.decodes) and self._failed_step == plan.number - 1
            if goes_on or not trouble.has_memory(self.member.name, plan.num_tokens, self._agenda.now):
                self._failed_step = plan.number
                return StepDone(StepResult(plan.number, (), failure=StepFailure("a fault")), seconds)
        return self.hands.finish(command, seconds)

    def _witness_work(self, command: Command) -> None:
        for witness in self._world.witnesses:
            witness.works(self, command)

    def _fire_timers(self) -> None:
        now = self._agenda.now
        for _, name in sorted((at, name) for name, at in self._timers.items() if at <= now):
            del self._timers[name]
            self._deliver(TimerFired(name))
            if not self.alive:
                return
        self._next_timer_at = min(self._timers.values(), default=inf)

    def _arrived(self, event: Event) -> None:
        match event:
            case Received(message=Heartbeat(member)):
                self._connect(member)
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
                        self._disconnect(member.name)
                    self.hands.part_from(member)
                case MemberJoined(member):
                    self._connect(member)
                    self.hands.meet(member)
            self._deliver(event)

    def _connect(self, member: Member) -> None:
        known = self._links.get(member.name)
        if known is None or (known.address != member.address and known.incarnation <= member.incarnation):
            self._disconnect(member.name)
            before = self._ended_links.pop(member.name, None)
            sent = before.sent if before is not None and before.address == member.address else 0
            self._links[member.name] = _Link(member.address, member.incarnation, sent)

    def _disconnect(self, name: str) -> None:
        """A link that is made anew counts on, but is another connection: its frames may overtake those before."""
        if (link := self._links.pop(name, None)) is not None:
            self._ended_links[name] = link

    def _deliver(self, event: Event) -> None:
        self._perform(self.core.handle(event, self._agenda.now + self._ahead_s))
        for witness in self._world.witnesses:
            witness.handled(self)

    def _perform(self, commands: Iterable[Command]) -> None:
        note, perform = self._world.is_noted, self.hands.perform
        for command in commands:
            if note:
                self._world.note(self.member, command)
            match command:
                case Deliver():  # one for each token
                    perform(command)
                case Send(to, message):
                    self._send(to, message)
                case End():
                    self._world.end(self.member.name, 0.0, seen=True)
                    return
                case SetTimer(name, at):
                    self._timers[name] = due_at = at - self._ahead_s
                    self._next_timer_at = min(self._next_timer_at, due_at)
                    self._agenda.at(due_at, Priority.TIMER, self._turn)
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
                    perform(command)

    def _send(self, to: str, message: Message) -> None:
        link = self._links.get(to)
        if link is None:
            return
        link.sent += 1
        envelope = Envelope(self.member.name, self.member.incarnation, link.sent, message)
        self._world.transmit(self.member, to, link, self._world.frame(envelope))
