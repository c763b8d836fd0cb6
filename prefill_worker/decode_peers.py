"""The decode workers that KV can be sent to, and the KV that they pull: of a prompt that was offered to them, or of a
buffer held for them."""

from __future__ import annotations

from collections import deque

from alignedserve.core import Role
from alignedserve.prefill_worker.buffering import Buffers
from alignedserve.prefill_worker.candidates import Candidates
from alignedserve.prefill_worker.offering import Offers
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event, KvReceived, KvSent, MemberJoined, MemberLost, Received
from alignedserve.protocol.messages import Attempt, Pull, holder
from alignedserve.worker.parts.part import CorePart


class DecodePeers(CorePart):
    """Passes each Pull, and the end of each transfer, to the part that has the KV: a buffer, or else an offer.

    A decode worker may pull KV that it has just sent here before this worker hears that the KV has come: a Pull is a
    message, and the end of a transfer is an event. Such a Pull waits for the event. Those behind it wait too, since
    transfers between two workers run in order.
    """

    def __init__(self, candidates: Candidates, offers: Offers, buffers: Buffers, direct: bool) -> None:
        """`direct` says whether KV goes from device to device."""
        self._candidates, self._offers, self._buffers, self._direct = candidates, offers, buffers, direct
        self._pulls: dict[str, deque[tuple[int, Attempt]]] = {}  # holder of the receiver -> Pulls that wait

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(sender, Pull(number, request, attempt), incarnation):
                return self._take(holder(sender, incarnation), number, (request, attempt))
            case KvReceived(source=source):
                return self._answer(source)
            case KvSent(number, to, ok):
                return self._end(to, number, ok)
            case MemberJoined(member) if member.role is Role.DECODE and self._direct and member.transport:
                self._candidates.meet(member)
            case MemberLost(member) if member.role is Role.DECODE:
                self._pulls.pop(member.holder, None)
                self._buffers.lose_decode(member)
                return self._offers.lose_decode(member)
        return []

    def _take(self, receiver: str, number: int, attempt: Attempt) -> list[Command]:
        if self._candidates.is_late(receiver, number):
            return []
        self._pulls.setdefault(receiver, deque()).append((number, attempt))
        return self._answer(receiver)

    def _answer(self, receiver: str) -> list[Command]:
        """Answer the Pulls of a decode worker in order; stop at the first whose KV is still coming from there."""
        commands, pulls = list[Command](), self._pulls.get(receiver, deque())
        while pulls and not self._buffers.is_coming(pulls[0][1], receiver):
            commands += self._send(receiver, *pulls.popleft())
        return commands

    def _send(self, receiver: str, number: int, attempt: Attempt) -> list[Command]:
        buffer = self._buffers.find(attempt)
        if buffer is not None:
            return self._buffers.send(buffer, receiver, number)
        return self._offers.send(receiver, number, attempt)

    def _end(self, receiver: str, number: int, ok: bool) -> list[Command]:
        buffer = self._buffers.find_sending(receiver, number)
        if buffer is not None:
            self._buffers.end_sending(buffer, ok)
            return []
        return self._offers.end_transfer(receiver, number, ok)
