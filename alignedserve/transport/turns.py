"""The turns of transfers over NCCL: a GPU takes part in one at a time.

NCCL's user guide ("Using multiple NCCL communicators concurrently") allows a GPU several communicators only if their
operations run at different times, under a lock, in the same order on all ranks: its kernels wait for the other end, and
two that wait for each other never end. So

- a pair of workers has one communicator for both directions;
- a worker sends or receives one transfer at a time, whatever the peer: a single one fills the link. A transfer takes
  the turn of the end whose holder is first in the alphabet, then that of the other, so no circle of ends waits;
- a worker of several ranks has a communicator for its steps already, whose operations cannot wait for a transfer: its
  chunks go over the group, by the CPU's memory. On one machine its KV goes by `ipc`, which needs no communicator.

    first ── turn, communicator 3 ──▶ second     the turn of the first is taken
          ◀── yes | no ──                        so is that of the second; no: communicator 3 broke there
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch._C._distributed_c10d import Store

from alignedserve.engine.device.groups import BrokenGroup, Carrier, Communicator

if TYPE_CHECKING:
    from alignedserve.transport.meeting import Meeting

Make: TypeAlias = Callable[[Store, int], Carrier]  # by its keys and its rank


class PairStore(Store):
    """What two workers tell each other to make a communicator, such as NCCL's id: torch takes it for a store.

    What one of them sets, the other finds in its mailbox; each key is set once.
    """

    def __init__(self, meeting: Meeting, name: str) -> None:
        super().__init__()
        self._meeting, self._name = meeting, name
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else value
        self._meeting.tell(f"{self._name}/{key}", self._values[key])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            if key not in self._values:
                self._values[key] = self._meeting.told(f"{self._name}/{key}", timeout)

    def clone(self) -> PairStore:
        return self


class _Numbered(NamedTuple):
    number: int  # both ends count alike
    carrier: Carrier | None  # None where it broke


class Communicators:
    """The communicators of a worker: one for each peer. NCCL allows only one of them to work at a time."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._turn, self._changing = threading.Lock(), threading.Lock()
        self._of: dict[str, _Numbered] = {}  # holder -> the newest communicator with it

    @contextmanager
    def turn(self, timeout_s: float) -> Iterator[None]:
        """Wait for this worker's turn, and hold it. Raises BrokenGroup where others hold it for too long."""
        if not self._turn.acquire(timeout=timeout_s):
            raise BrokenGroup(f"no turn on this GPU within {timeout_s:g} s: other transfers hold it")
        try:
            yield
        finally:
            self._turn.release()

    def next(self, peer: str, after: int) -> int:
        """Return the number of the communicator to use, above `after`: the one that is there, or a new one."""
        number, carrier = self._newest(peer)
        return number if carrier is not None and number > after else max(number, after) + 1

    def agrees(self, peer: str, number: int) -> bool:
        """Return whether this end has the communicator, or both are to make it."""
        newest, carrier = self._newest(peer)
        return number > newest or (number == newest and carrier is not None)

    @contextmanager
    def of(self, peer: str, number: int, meeting: Meeting) -> Iterator[Carrier]:
        """Yield the communicator, which is closed where the transfer fails; the caller has the turn."""
        newest, carrier = self._newest(peer)
        if carrier is None or newest != number:
            self.close(peer)
            keys = PairStore(meeting, f"{min(peer, meeting.own)}~{max(peer, meeting.own)}/{number}")
            carrier = self._make(keys, 0 if meeting.is_first else 1)
            with self._changing:
                self._of[peer] = _Numbered(number, carrier)
        try:
            yield carrier
        except BaseException:
            self.close(peer)
            raise

    def close(self, peer: str) -> None:
        """Close the communicator with that peer, from any thread: a transfer over it fails."""
        with self._changing:
            number, carrier = self._of.get(peer, _Numbered(0, None))
            self._of[peer] = _Numbered(number, None)
        if carrier is not None:
            carrier.close()

    def forget(self, peer: str) -> None:
        """Close the communicator with a peer that does not come back: another life has another name."""
        self.close(peer)
        with self._changing:
            self._of.pop(peer, None)

    def _newest(self, peer: str) -> _Numbered:
        with self._changing:
            return self._of.get(peer, _Numbered(0, None))


def communicators_on(device: torch.device, ranks: int = 1) -> Communicators | None:
    """Return the communicators of a worker; None where its chunks go over groups."""
    return Communicators(partial(Communicator, device=device)) if device.type == "cuda" and ranks == 1 else None
