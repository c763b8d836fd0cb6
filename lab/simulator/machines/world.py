"""The simulated world: processes, the links between them, frames under way, and faults.

A link keeps the order of its frames, and frames of different links overtake each other; frames travel as bytes, as on a
real link. A frame to a killed process is lost, unless the process is the router: its next life has the same address, so
the frame waits for it, as in a socket that reconnects.
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
from alignedserve.lab.simulator.machines.clock import Agenda, Priority
from alignedserve.lab.simulator.machines.faults import Fault, Forge, Freeze, HangLoop, HangStep, Kill, Resize
from alignedserve.lab.simulator.machines.forging import forgeries
from alignedserve.lab.simulator.machines.process import Frame, Process, ProcessSetup, VirtualLink, Witness
from alignedserve.lab.simulator.machines.transfers import SimulatedTransfers
from alignedserve.lab.simulator.machines.trouble import Trouble
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Received
from alignedserve.protocol.membership import UNNUMBERED
from alignedserve.protocol.messages import LAUNCHER, ROUTER, Died, Heartbeat, Life, Member, Message, Retire, Started
from alignedserve.protocol.wire import Envelope, encode

MakeSetup = Callable[["World", Member], ProcessSetup]


@dataclass(frozen=True)
class NetworkDelays:
    """Delays in seconds."""

    least_s: float = 1e-4
    spread_s: float = 4e-4  # on average, above that
    heartbeat_s: float = 0.5
    watch_s: float = 0.05  # until the pool sees that a lock is free
    late_end_s: float = 0.0  # by which the receiver of a transfer hears of its end after the sender, and never before


class World:
    """Processes, links, faults and the agenda that drives them."""

    def __init__(self, seed: int, network: NetworkDelays = NetworkDelays(), in_bytes: bool = True) -> None:
        """Make an empty world.

        With `in_bytes` frames travel as bytes, and all commands are noted; long runs do without, to save time.
        """
        self.agenda, self.in_bytes = Agenda(), in_bytes
        self.is_noted = in_bytes  # whether witnesses hear of commands, and `digest` covers them
        self._network = network
        self._least_s, self._pace = network.least_s, 1 / network.spread_s
        self._draw_share = Random(f"{seed}/delays").random
        self._digest = blake2b(digest_size=16)
        self._makers: dict[str, tuple[Role, MakeSetup, str, str, bool]] = {}
        self._newest: dict[str, Life] = {}  # name -> its newest life
        self._alive: dict[str, Process] = {}
        self._to_router: list[Frame] = []  # frames that wait while the router is away
        self.trouble = Trouble(seed)
        self.fault_counts: Counter[str] = Counter()  # kind of fault -> how many have begun
        self.transfers = SimulatedTransfers(
            self.agenda, self._is_alive, self.trouble.mishap, late_end_s=network.late_end_s
        )
        self.witnesses: list[Witness] = []
        self.on_death: Callable[[str], None] = lambda _: None
        self.on_gone: Callable[[str], None] = lambda _: None  # a member that does not come back
        self.on_resize: Callable[[Resize], None] = lambda _: None
        self._retired: set[str] = set()  # members that do not come back when they end

    def start(
        self, name: str, role: Role, make: MakeSetup, node: str = "local", transport: str = "", lends: bool = False
    ) -> None:
        self._makers[name] = (role, make, node, transport, lends)
        self._start(name)

    def _is_alive(self, holder: str) -> bool:
        return any(process.member.holder == holder for process in self._alive.values())

    def alive(self, name: str) -> Process | None:
        return self._alive.get(name)

    @property
    def processes(self) -> Iterable[Process]:
        """Return all processes that are alive."""
        return self._alive.values()

    @property
    def digest(self) -> str:
        """Return the digest of all commands of all cores, in order."""
        return self._digest.hexdigest()

    def now_of(self, name: str) -> float:
        """Return the time on the clock of this member's machine."""
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
        """Let the launcher have the router tell a member to end; it does not come back, however it ends."""
        self._retired.add(name)
        process = self._alive.get(name)
        if process is None:
            self.on_gone(name)
            return
        self._say_to_router(Retire(name, process.member.incarnation))

    def welcome(self, name: str) -> None:
        """Let the name be used again: an earlier member may have had it and gone for good."""
        self._retired.discard(name)

    def end_for_good(self, name: str) -> None:
        """End a member at once; it does not come back."""
        self._retired.add(name)
        if name in self._alive:
            self.end(name, 0.0, seen=True)
        else:
            self.on_gone(name)

    def _start(self, name: str) -> None:
        if name in self._retired or name in self._alive:
            return
        if self.agenda.now < self.trouble.starts_at:
            self.agenda.at(self.trouble.starts_at, Priority.FAULT, lambda: self._start(name))
            return
        role, make, node, transport, lends = self._makers[name]
        incarnation = self._begin_life(name, role)
        address = name if role is Role.ROUTER else f"{name}#{incarnation}"
        member = Member(name, role, node, incarnation, address, transport, lends)
        process = Process(self, member, make(self, member))
        self._alive[name] = process
        process.begin()
        if role is Role.ROUTER:
            waited, self._to_router = self._to_router, []
            for frame in waited:
                process.arrive(frame)
        else:
            beat = self.frame(Envelope(member.name, member.incarnation, UNNUMBERED, Heartbeat(member)))
            self._beat(process, beat)

    def _begin_life(self, name: str, role: Role) -> int:
        """Return the incarnation of a member's next life. The launcher tells the router of it before it starts it."""
        before = self._newest.get(name)
        self._newest[name] = life = Life(name, role, before.incarnation + 1 if before is not None else 1)
        if ROUTER in self._alive:
            self._alive[ROUTER].post(Received(LAUNCHER, Started((life,))))
        return life.incarnation

    @property
    def lives(self) -> Iterable[Life]:
        """Return the newest life of each member that was ever started."""
        return self._newest.values()

    def _beat(self, process: Process, beat: Frame) -> None:
        """Send the heartbeat to the router, and again after each interval."""
        if not process.alive:
            return
        again = self.agenda.now + self._network.heartbeat_s
        self.agenda.at(again, Priority.TIMER, partial(self._beat, process, beat))
        name, now = process.member.name, self.agenda.now
        if process.is_frozen or self.trouble.mutes(name, now) or self.trouble.is_cut(name, ROUTER, now):
            return
        self._reach_router(lambda router: router.arrive(beat))

    def watch(self, holder: str, gone: Callable[[], None]) -> None:
        """Call `gone` after the holder's process has ended: its lock is free then, however late others hear of it."""
        then = partial(self.watch, holder, gone) if self._is_alive(holder) else gone
        self.agenda.at(self.agenda.now + self._network.watch_s, Priority.TIMER, then)

    # --- Links

    def frame(self, envelope: Envelope) -> Frame:
        return encode(envelope) if self.in_bytes else envelope

    def transmit(self, sender: Member, to: str, link: VirtualLink, frame: Frame) -> None:
        now, trouble = self.agenda.now, self.trouble if self.trouble.has_begun else None
        arrival_at = now + self._delay_s()
        if trouble is not None:
            arrival_at += trouble.extra_s(sender.name, to, now)
            arrival_at = max(arrival_at, trouble.waits_until(sender.name, to))
        if arrival_at < link.last_arrival_at:
            arrival_at = link.last_arrival_at
        link.last_arrival_at = arrival_at
        if trouble is not None and trouble.drops(sender.name, to, now):
            return
        arrive = partial(self._arrive, link.address, frame)
        self.agenda.at(arrival_at, Priority.FRAME, arrive)
        if trouble is not None and trouble.doubles(sender.name, to):
            self.agenda.at(arrival_at + self._delay_s(), Priority.FRAME, arrive)

    def forge(self, to: str, envelope: Envelope) -> None:
        """Let a frame reach a member that some process with the keys of the parts made, whatever it calls itself."""
        if to in self._alive:
            self._alive[to].arrive(self.frame(envelope))

    def _arrive(self, address: str, frame: Frame) -> None:
        name = address.partition("#")[0]
        process = self._alive.get(name)
        if process is not None and process.member.address == address:
            process.arrive(frame)
        elif name == ROUTER:
            self._to_router.append(frame)

    def _say_to_router(self, message: Message) -> None:
        """Let the launcher say this to the router, on its own connection."""
        self._reach_router(lambda router: router.post(Received(LAUNCHER, message)))

    def _reach_router(self, hear: Callable[[Process], None]) -> None:
        """Have the router hear an unnumbered frame; it is lost if the router is away when it arrives."""

        def arrive() -> None:
            if ROUTER in self._alive:
                hear(self._alive[ROUTER])

        self.agenda.at(self.agenda.now + self._delay_s(), Priority.FRAME, arrive)

    def _delay_s(self) -> float:
        """Draw a frame's delay like `expovariate`, but without that call, as it would be made for every frame."""
        return self._least_s - log(1.0 - self._draw_share()) / self._pace

    # --- Faults

    def plan(self, faults: Iterable[Fault]) -> None:
        """Plan faults; a fault that is due already, such as a clock that is wrong from the start, begins at once."""
        for fault in faults:
            if fault.at <= self.agenda.now:
                self._begin_fault(fault)
            else:
                self.agenda.at(fault.at, Priority.FAULT, partial(self._begin_fault, fault))

    def _begin_fault(self, fault: Fault) -> None:
        match fault:
            case Kill(member=member) | Freeze(member=member) | HangLoop(member=member) | HangStep(member=member) if (
                member not in self._alive
            ):
                return
            case HangStep(member=member) if not self._alive[member].is_working:
                return
            case Kill(_, member, back_after_s, seen):
                self.end(member, back_after_s, seen)
            case Freeze(at, member, for_s):
                self._alive[member].freeze(at + for_s)
            case HangLoop(at, member, still_s, back_after_s):
                self._alive[member].hang_loop()
                self.end_later(self._alive[member], at + still_s, back_after_s)
            case HangStep(at, member, still_s, back_after_s):
                self._alive[member].hang_work()
                self.end_later(self._alive[member], at + still_s, back_after_s)
            case Resize():
                self.on_resize(fault)
            case Forge(_, member):
                for frame in forgeries(Role(member.partition("-")[0]), self.lives):
                    self.forge(member, frame)
            case _:
                self.trouble.begin(fault)
        self.fault_counts[type(fault).__name__] += 1

    def end_later(self, process: Process, at: float, back_after_s: float) -> None:
        """Have the watch of a process end it then, unless it has ended otherwise."""

        def end() -> None:
            if process.alive:
                self.end(process.member.name, back_after_s, seen=True)

        self.agenda.at(at, Priority.FAULT, end)

    def end(self, name: str, back_after_s: float, seen: bool) -> None:
        """End a process; if its launcher has seen the end, it tells the router."""
        process = self._alive.pop(name)
        process.alive = False
        member = process.member
        self.transfers.died(member.holder)
        if seen and member.role is not Role.ROUTER:
            died = partial(self._say_to_router, Died(member.name, member.incarnation))
            if self.agenda.now < self.trouble.ends_are_told_at:
                self.agenda.at(self.trouble.ends_are_told_at, Priority.FAULT, died)
            else:
                died()
        if name in self._retired:
            self.on_gone(name)
        else:
            self.agenda.at(self.agenda.now + back_after_s, Priority.FAULT, lambda: self._start(name))
        self.on_death(name)
