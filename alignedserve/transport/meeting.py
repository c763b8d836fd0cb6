"""The meeting of a channel's two ends, at which they agree on their next group.

Every worker has a mailbox (mailbox.py), whose address its peers learn through its `Member`. Each end of a channel has a
box in its own, for short notes:

    source ── offer 3 ──▶ receiver      the source proposes group 3: later offers have larger numbers
           ◀── accept 3 ──               the receiver is ready
           ── go 3 ──▶                   the source is still ready: both make it (joining.py)
           ◀── past 17 ──▶               an end gave up: it sends or awaits no transfer below 17 any more

So an end that notices a failure alone does not leave the other end waiting, and an end that hears of a transfer seconds
after the other has given it up learns that at once. A group that broke is never used again.
"""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from typing import NamedTuple

from alignedserve.engine.device.groups import BrokenGroup, Group
from alignedserve.transport.joining import SECRET_BYTES, admitted, entered, listening
from alignedserve.transport.mailbox import Mailbox

log = logging.getLogger("alignedserve.transport")

_GIVE_UP_S = 1.0  # for an answer to a note that only spares the other end a wait


class GivenUpByPeer(Exception):
    """The other end has given this transfer up."""


class Direction(NamedTuple):
    """The direction of a channel, as two holders."""

    source: str
    to: str

    def __str__(self) -> str:
        return f"{self.source}>{self.to}"


class NoteKind(str, Enum):
    OFFER = "offer"
    ACCEPT = "accept"
    GO = "go"
    PAST = "past"
    WAKE = "wake"  # a note to this end itself


class Note(NamedTuple):
    says: NoteKind
    number: int

    def pack(self) -> bytes:
        return f"{self.says.value} {self.number}".encode()

    @classmethod
    def read(cls, raw: bytes) -> Note:
        says, _, number = raw.decode().partition(" ")
        return cls(NoteKind(says), int(number))


class Meeting:
    """One end of a channel. Only the channel's thread calls it, except `wake`."""

    def __init__(self, mailbox: Mailbox, peer: str, direction: Direction, is_source: bool, timeout_s: float) -> None:
        """Meet the end whose mailbox is at `peer`."""
        self._mailbox, self._peer, self._direction = mailbox, peer, direction
        self.own, self.peer = direction if is_source else (direction.to, direction.source)
        self.is_first = self.own < self.peer  # of the two, in the order in which they take turns
        self._is_source, self._timeout_s = is_source, timeout_s
        self._own_box, self._other_box = (f"{direction}/{side}" for side in ("source", "to")[:: 1 if is_source else -1])
        self._newest = 0  # number of the newest offer that was heard: an older one may come after it
        self._past = 0  # the other end awaits no transfer below this number
        self._is_over = False

    def offer(self, number: int, deadline: float) -> Group:
        """Make a group as the source. Raises GivenUpByPeer or BrokenGroup where that fails for this transfer."""
        self._refuse_past(number)
        self._mailbox.clear(f"{self._direction}/group/")  # secrets of groups that were given up
        offered = Note(NoteKind.OFFER, time.monotonic_ns())  # larger than those of earlier meetings of the two
        self._post(offered, deadline)
        while (note := self._read(deadline)) != Note(NoteKind.ACCEPT, offered.number):
            self._hear(note)
            self._refuse_past(number)
        self._post(Note(NoteKind.GO, offered.number), deadline)
        return self._make(offered.number, deadline)

    def accept(self, number: int, deadline: float) -> Group:
        """Make a group as the receiver."""
        self._refuse_past(number)
        accepted = 0  # number of the offer
        while (note := self._read(deadline)) != Note(NoteKind.GO, accepted):
            self._hear(note)
            self._refuse_past(number)
            if note.says is NoteKind.OFFER and note.number > self._newest:
                self._newest = accepted = note.number
                self._post(Note(NoteKind.ACCEPT, accepted), deadline)
        return self._make(accepted, deadline)

    def give_up(self, number: int) -> None:
        """Tell the other end, if it can be reached, that transfers below this number are given up."""
        with suppress(BrokenGroup):
            self._post(Note(NoteKind.PAST, number), time.monotonic() + _GIVE_UP_S)

    def wake(self) -> None:
        """End a wait of the channel's thread; any other thread may call this. The meeting is of no use afterwards."""
        self._is_over = True
        self._mailbox.leave(self._own_box, Note(NoteKind.WAKE, 0).pack())

    def tell(self, box: str, what: bytes) -> None:
        """Leave something for the other end."""
        self._mailbox.post(self._peer, box, what, time.monotonic() + self._timeout_s)

    def told(self, box: str, timeout: timedelta | None = None) -> bytes:
        """Wait for what the other end leaves in this box."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        return self._mailbox.take(box, time.monotonic() + timeout_s)

    def _hear(self, note: Note) -> None:
        if note.says is NoteKind.PAST:
            self._past = max(self._past, note.number)
        elif note.says is NoteKind.WAKE and self._is_over:  # else it is of an earlier meeting of the two
            raise BrokenGroup("the channel was closed")

    def _refuse_past(self, number: int) -> None:
        if number < self._past:
            raise GivenUpByPeer

    def _post(self, note: Note, deadline: float) -> None:
        self._mailbox.post(self._peer, self._other_box, note.pack(), deadline)

    def _read(self, deadline: float) -> Note:
        try:
            return Note.read(self._mailbox.take(self._own_box, deadline))
        except ValueError:
            raise BrokenGroup(f"{self._direction}: a note cannot be read") from None

    def _make(self, number: int, deadline: float) -> Group:
        box = f"{self._direction}/group/{number}"
        try:
            if self._is_source:
                secret, host, port = self._mailbox.take(box, deadline).decode().split()
                link = entered((host, int(port)), bytes.fromhex(secret), max(0.1, deadline - time.monotonic()))
            else:
                with listening((self._mailbox.host, 0)) as door:
                    secret = secrets.token_hex(SECRET_BYTES)
                    told = f"{secret} {self._mailbox.host} {door.getsockname()[1]}"
                    self._mailbox.post(self._peer, box, told.encode(), deadline)
                    link = next(admitted(door, bytes.fromhex(secret), deadline))
        except (OSError, ValueError) as error:
            raise BrokenGroup(f"{self._direction}: the two do not connect: {error}") from None
        return Group(link, self._timeout_s)
