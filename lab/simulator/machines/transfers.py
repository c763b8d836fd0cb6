"""Transfers of KV from one worker's device to another's, in virtual time.

A transfer starts when both ends have begun it: the receiver waits for a number, the sender names it. Between two lives
of workers, transfers run one after the other in the order of their numbers: a receiver that waits for a number that was
passed over gets nothing. A transfer that has begun on one side ends there with an event: by a time-out if need be, and
soon if the other end has died. Its receiver may hold any content then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from alignedserve.lab.simulator.machines.clock import Agenda, Priority
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.events import Event, KvReceived, KvSent

TIMEOUT_S = 4.0  # for the other end to begin; and then for a transfer that stalls
_NOTICED_S = 0.05  # until the other end sees that a process has died


class WrongTransfer(Exception):
    """The KV of a transfer was changed before its end, or was not the KV that the receiver waits for; or a transfer
    was sent after a later one, and so in vain."""


class KvDevice(Protocol):
    """A worker's device, with the KV in its blocks."""

    def read_kv(self, sends: SendKv) -> object: ...

    def begin_receiving(self, receives: ReceiveKv) -> None:
        """Begin to receive; until the transfer has ended, the blocks hold neither old nor new content."""

    def write_kv(self, receives: ReceiveKv, content: object) -> None: ...


@dataclass(frozen=True)
class Mishap:
    """The way in which a transfer goes wrong."""

    ok: bool  # whether its sender takes it for done
    intact: bool  # whether its receiver takes its content for intact
    stalls: bool  # whether it ends by the time-out


@dataclass(eq=False)
class _TransferEnd:
    """One side of a transfer."""

    command: SendKv | ReceiveKv
    device: KvDevice
    post: Callable[[Event], None]
    seconds: float = 0.0  # that the transfer takes
    content: object = None  # of the sender's blocks, when it began
    has_started: bool = False
    is_over: bool = False

    def end(self, went_well: bool) -> None:
        if self.is_over:
            return
        self.is_over = True
        match self.command:
            case SendKv(number, to):
                self.post(KvSent(number, to, went_well))
            case ReceiveKv(number, source):
                self.post(KvReceived(number, source, went_well))


@dataclass(eq=False)
class _TransferChannel:
    """All transfers from one life of a worker to one life of another."""

    sender: str  # their names
    receiver: str
    sends: list[_TransferEnd] = field(default_factory=list)  # those that have begun and not ended, in order
    receives: list[_TransferEnd] = field(default_factory=list)
    is_busy: bool = False

    @property
    def ends(self) -> list[_TransferEnd]:
        return [*self.sends, *self.receives]

    def forget_ended(self) -> None:
        self.sends = [end for end in self.sends if not end.is_over]
        self.receives = [end for end in self.receives if not end.is_over]


class SimulatedTransfers:
    """All transfers of a simulated world."""

    def __init__(
        self,
        agenda: Agenda,
        is_alive: Callable[[str], bool],
        mishap: Callable[[str, str], Mishap | None],
        timeout_s: float = TIMEOUT_S,
        late_end_s: float = 0.0,
    ) -> None:
        """`is_alive` takes a holder; `mishap` says how the next transfer between two members goes wrong, if it does.

        A receiver hears of the end `late_end_s` after its sender, or just before it where that is 0."""
        self._agenda, self._is_alive, self._mishap = agenda, is_alive, mishap
        self._timeout_s, self._late_end_s = timeout_s, late_end_s
        self._channels: dict[tuple[str, str], _TransferChannel] = {}
        self._newest: dict[tuple[str, str], int] = {}  # (holder that sends, holder that receives) -> number last sent
        self.num_done = 0

    def send(self, me: str, command: SendKv, seconds: float, device: KvDevice, post: Callable[[Event], None]) -> None:
        key = (me, command.to)
        if command.number <= self._newest.get(key, 0):
            raise WrongTransfer(f"{me} sends transfer {command.number} to {command.to} after {self._newest[key]}")
        self._newest[key] = command.number
        self._begin(key, command.to, _TransferEnd(command, device, post, seconds, device.read_kv(command)))

    def receive(self, me: str, command: ReceiveKv, device: KvDevice, post: Callable[[Event], None]) -> None:
        device.begin_receiving(command)
        self._begin((command.source, me), command.source, _TransferEnd(command, device, post))

    def died(self, holder: str) -> None:
        """End the transfers of a life that has died; their other ends see it soon."""
        for key in [key for key in self._channels if holder in key]:
            for end in self._channels.pop(key).ends:
                self._later(_NOTICED_S, partial(end.end, False))

    def _begin(self, key: tuple[str, str], other: str, end: _TransferEnd) -> None:
        if not self._is_alive(other):
            self._later(_NOTICED_S, partial(end.end, False))
            return
        if key not in self._channels:
            sender, receiver = (holder.rpartition(".")[0] for holder in key)
            self._channels[key] = _TransferChannel(sender, receiver)
        channel = self._channels[key]
        (channel.sends if isinstance(end.command, SendKv) else channel.receives).append(end)
        self._later(self._timeout_s, partial(self._give_up, channel, end))
        self._start_next(channel)

    def _give_up(self, channel: _TransferChannel, end: _TransferEnd) -> None:
        if not end.has_started:
            end.end(False)
            self._start_next(channel)

    def _start_next(self, channel: _TransferChannel) -> None:
        """Start the first transfer that both ends have begun, and end those that were passed over.

        An end may begin its next transfer as soon as it hears, so this looks again after each event."""
        channel.forget_ended()
        while channel.sends and channel.receives and not channel.is_busy:
            send, receive = channel.sends[0], min(channel.receives, key=lambda end: end.command.number)
            if receive.command.number < send.command.number:
                receive.end(False)
            elif receive.command.number > send.command.number:
                send.end(False)
            else:
                self._start(channel, send, receive)
            channel.forget_ended()

    def _start(self, channel: _TransferChannel, send: _TransferEnd, receive: _TransferEnd) -> None:
        channel.is_busy = send.has_started = receive.has_started = True
        mishap = self._mishap(channel.sender, channel.receiver)
        seconds = self._timeout_s if mishap is not None and mishap.stalls else send.seconds
        self._later(seconds, partial(self._end, channel, send, receive, mishap))

    def _end(self, channel: _TransferChannel, send: _TransferEnd, receive: _TransferEnd, mishap: Mishap | None) -> None:
        if send.is_over or receive.is_over:  # a worker has died
            self._go_on(channel)
            return
        ok, intact = self._arrived(send, receive, mishap)
        if not self._late_end_s:
            receive.end(intact)
        send.end(ok)
        if self._late_end_s:
            self._later(self._late_end_s, partial(self._close, channel, receive, intact))
        else:
            self._close(channel, receive, intact)

    def _close(self, channel: _TransferChannel, receive: _TransferEnd, intact: bool) -> None:
        receive.end(intact)
        self._go_on(channel)

    def _go_on(self, channel: _TransferChannel) -> None:
        channel.is_busy = False  # not before both ends have heard: what hears first may begin the next transfer at once
        self._start_next(channel)

    def _arrived(self, send: _TransferEnd, receive: _TransferEnd, mishap: Mishap | None) -> tuple[bool, bool]:
        """Write what has come, and return what the two ends take it for: sent, and intact."""
        sends, receives = send.command, receive.command
        assert isinstance(sends, SendKv)
        assert isinstance(receives, ReceiveKv)
        is_there = bool(sends.blocks)
        if is_there and send.device.read_kv(sends) != send.content:
            raise WrongTransfer(f"the KV that transfer {sends.number} to {sends.to} sends was changed meanwhile")
        ok, intact = (True, is_there) if mishap is None else (mishap.ok, mishap.intact and is_there)
        if intact:
            if sends.tokens != receives.tokens:
                raise WrongTransfer(
                    f"transfer {sends.number} to {sends.to} sends other tokens than its receiver waits for"
                )
            receive.device.write_kv(receives, send.content)
            self.num_done += 1
        return ok, intact

    def _later(self, seconds: float, happen: Callable[[], None]) -> None:
        self._agenda.at(self._agenda.now + seconds, Priority.WORK, happen)
