"""The meeting of a channel's two ends, at which they agree on their next group.

Every worker opens a store (`Rendezvous`), whose address its peers learn through its `Member`. Each end of a channel has
an inbox in its own store, for short notes:

    source ── offer 3 ──▶ receiver      the source proposes group 3
           ◀── accept 3 ──               the receiver is ready
           ── go 3 ──▶                   the source is still ready: both make it, with keys in the receiver's store
           ◀── past 17 ──▶               an end gave up: it sends or awaits no transfer below 17 any more

So an end that notices a failure alone does not leave the other end waiting, and an end that hears of a transfer seconds
after the other has given it up learns that at once. A group that broke is never used again.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, TCPStore

from alignedserve.engine.device.groups import BrokenGroup, Group

log = logging.getLogger("alignedserve.transport")

_BACKLOG = 128  # most connections that wait to be accepted


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

    def pack(self) -> str:
        return f"{self.says.value} {self.number}"

    @classmethod
    def read(cls, raw: bytes) -> Note:
        says, _, number = raw.decode().partition(" ")
        return cls(NoteKind(says), int(number))


class Rendezvous:
    """The store of this worker, which listens on this address only."""

    def __init__(self, host: str) -> None:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.bind((host, 0))
        listening.listen(_BACKLOG)
        self.host, self.port = host, int(listening.getsockname()[1])
        self._store = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def client(self, timeout_s: float) -> TCPStore:
        """Return a separate connection, since a wait blocks all users of a connection."""
        return _client(self.host, self.port, timeout_s)

    def leave(self, key: str, note: Note) -> None:
        """Leave a note for this worker itself; any thread may call this."""
        with self._lock, suppress(RuntimeError):
            self._store.set(key, note.pack())


class Meeting:
    """One end of a channel. Only the channel's thread calls it, except `wake`."""

    def __init__(
        self, rendezvous: Rendezvous, peer: str, direction: Direction, is_source: bool, timeout_s: float
    ) -> None:
        """Meet the end whose store is at `peer`."""
        self._rendezvous, self._peer, self._direction = rendezvous, peer, direction
        self.own, self.peer = direction if is_source else (direction.to, direction.source)
        self.is_first = self.own < self.peer  # of the two, in the order in which they take turns
        self._rank, self._timeout_s = (0 if is_source else 1), timeout_s
        self._own_side, self._other_side = ("source", "to") if is_source else ("to", "source")
        self._inbox: TCPStore | None = None
        self._outbox: TCPStore | None = None
        self._num_read = self._num_posted = self._num_offers = 0
        self._past = 0  # the other end awaits no transfer below this number

    def offer(self, number: int, deadline: float) -> Group:
        """Make a group as the source. Raises GivenUpByPeer or BrokenGroup where that fails for this transfer."""
        self._refuse_past(number)
        self._num_offers += 1
        offered = Note(NoteKind.OFFER, self._num_offers)
        self._post(offered)
        while (note := self._read(deadline)) != Note(NoteKind.ACCEPT, offered.number):
            self._hear(note)
            self._refuse_past(number)
        self._post(Note(NoteKind.GO, offered.number))
        return self._make(offered.number, deadline)

    def accept(self, number: int, deadline: float) -> Group:
        """Make a group as the receiver."""
        self._refuse_past(number)
        accepted = 0  # number of the newest offer
        while (note := self._read(deadline)) != Note(NoteKind.GO, accepted):
            self._hear(note)
            self._refuse_past(number)
            if note.says is NoteKind.OFFER:
                accepted = note.number
                self._post(Note(NoteKind.ACCEPT, accepted))
        return self._make(accepted, deadline)

    def give_up(self, number: int) -> None:
        """Tell the other end, if it can be reached, that transfers below this number are given up."""
        with suppress(BrokenGroup):
            self._post(Note(NoteKind.PAST, number))

    def wake(self) -> None:
        """End a wait of the channel's thread; any other thread may call this. The meeting is of no use afterwards."""
        for number in (self._num_read, self._num_read + 1):  # the thread may be between the two
            self._rendezvous.leave(self._key(self._own_side, number), Note(NoteKind.WAKE, 0))

    def store_of_first(self) -> TCPStore:
        """Connect to the store of the end that is first."""
        return self._rendezvous.client(self._timeout_s) if self.is_first else _connect(self._peer, self._timeout_s)

    def _hear(self, note: Note) -> None:
        if note.says is NoteKind.PAST:
            self._past = max(self._past, note.number)
        elif note.says is NoteKind.WAKE:
            raise BrokenGroup("the channel was closed")

    def _refuse_past(self, number: int) -> None:
        if number < self._past:
            raise GivenUpByPeer

    def _key(self, side: str, number: int) -> str:
        return f"{self._direction}/{side}/{number}"

    def _post(self, note: Note) -> None:
        try:
            if self._outbox is None:
                self._outbox = _connect(self._peer, self._timeout_s)
            self._outbox.set(self._key(self._other_side, self._num_posted), note.pack())
        except (RuntimeError, OSError) as error:
            self._outbox = None
            raise BrokenGroup(f"{self._direction}: the store at {self._peer} cannot be reached") from error
        self._num_posted += 1

    def _read(self, deadline: float) -> Note:
        key, left = self._key(self._own_side, self._num_read), deadline - time.monotonic()
        if left <= 0:
            raise BrokenGroup(f"{self._direction}: no answer within {self._timeout_s:g} s")
        try:
            self._inbox = self._inbox or self._rendezvous.client(self._timeout_s)
            self._inbox.wait([key], timedelta(seconds=left))
            note = Note.read(self._inbox.get(key))
            self._inbox.delete_key(key)
        except (RuntimeError, ValueError):
            self._inbox = None  # after a time-out a late answer may still come
            raise BrokenGroup(f"{self._direction}: no answer within {self._timeout_s:g} s") from None
        self._num_read += 1
        return note

    def _make(self, number: int, deadline: float) -> Group:
        store = self._outbox if self._rank == 0 else self._inbox
        assert store is not None, "notes were exchanged over it"
        left = max(0.1, deadline - time.monotonic())
        keys, host = PrefixStore(f"{self._direction}/group/{number}", store), self._rendezvous.host
        return Group(keys, self._rank, host, left)


def _connect(address: str, timeout_s: float) -> TCPStore:
    host, _, port = address.rpartition(":")
    # A worker that has ended refuses at once; torch would try again, and log a lot.
    socket.create_connection((host, int(port)), timeout_s).close()
    return _client(host, int(port), timeout_s)


def _client(host: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
