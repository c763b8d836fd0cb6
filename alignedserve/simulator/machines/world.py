"""The processes and the links between them, done virtually: who is alive, what is under way, what goes wrong.

A link keeps the order of its frames, several links do not; frames travel as the bytes that they are. What is sent to a
process that has been killed is lost, but for the router, whose address its next life has too: there it waits, as it
does in a socket that reconnects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import log
from random import Random
from typing import cast

from alignedserve.core import Role
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.membership import UNNUMBERED
from alignedserve.protocol.messages import ROUTER, Died, Heartbeat, Member, Message, Retire
from alignedserve.protocol.wire import Envelope, encode
from alignedserve.simulator.machines.clock import Agenda, Priority
from alignedserve.simulator.machines.faults import Fault, Freeze, Kill, Resize
from alignedserve.simulator.machines.process import Frame, Process, ProcessSetup, VirtualLink
from alignedserve.simulator.machines.transfers import SimulatedTransfers
from alignedserve.simulator.machines.trouble import Trouble

MakeSetup = Callable[["World", Member], ProcessSetup]


@dataclass(frozen=True)
class NetworkDelays:
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


class World:
    def __init__(self, seed: int, network: NetworkDelays = NetworkDelays(), in_bytes: bool = True) -> None:
        """Frames travel as bytes, and all commands are noted, unless a long run is to save the time."""
        self.agenda, self.in_bytes = Agenda(), in_bytes
        self.is_noted = in_bytes  # whether witnesses hear of commands, and `digest` is of them
        self._network = network
        self._least_s, self._pace = network.least_s, 1 / network.spread_s
        self._draw_share = Random(f"{seed}/delays").random
        self._digest = blake2b(digest_size=16)
        self._makers: dict[str, tuple[Role, MakeSetup, str, str]] = {}
        self._lives: dict[str, int] = {}  # name -> its last incarnation
        self._alive: dict[str, Process] = {}
        self._to_router: list[Frame] = []  # while it is away
        self.trouble = Trouble(seed)
        self.befallen: Counter[str] = Counter()  # how many faults of which kind
        self.transfers = SimulatedTransfers(self.agenda, self._is_alive, self.trouble.mishap)
        self.witnesses: list[Witness] = []
        self.on_death: Callable[[str], None] = lambda _: None
        self.on_gone: Callable[[str], None] = lambda _: None  # for good
        self.on_resize: Callable[[Resize], None] = lambda _: None
        self._retired: set[str] = set()  # who ends once more, and does not come back

    def start(self, name: str, role: Role, make: MakeSetup, node: str = "local", transport: str = "") -> None:
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

    def transmit(self, sender: Member, to: str, link: VirtualLink, frame: Frame) -> None:
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
