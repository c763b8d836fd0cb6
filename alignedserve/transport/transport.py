"""What a worker's hands ask of a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.protocol.messages import Member

Transfer: TypeAlias = SendKv | ReceiveKv
Outcome: TypeAlias = KvSent | KvReceived
Post: TypeAlias = Callable[[Outcome], None]  # to the core, from any thread


class Transport(Protocol):
    @property
    def address(self) -> str:
        """Where peers reach this worker: they learn it through its `Member`. Empty where they cannot."""

    @property
    def num_failed(self) -> int:
        """Transfers, of those that were begun here, whose KV did not arrive."""

    def meet(self, member: Member) -> None:
        """Somebody whom this worker may send to, or receive from."""

    def part_from(self, member: Member) -> None:
        """What is under way with that member has failed, at once."""

    def start(self, transfer: Transfer, post: Post) -> None:
        """Goes on beside the steps; the one event that every transfer ends with is posted."""

    def close(self) -> None: ...


def failed(transfer: Transfer) -> Outcome:
    if isinstance(transfer, SendKv):
        return KvSent(transfer.number, transfer.to, ok=False)
    return KvReceived(transfer.number, transfer.source, intact=False)


class ThroughTheArena:
    """The transport `host`: KV goes from device to device by way of the pool's pages, so nothing is sent."""

    address = ""
    num_failed = 0

    def meet(self, member: Member) -> None: ...

    def part_from(self, member: Member) -> None: ...

    def start(self, transfer: Transfer, post: Post) -> None:
        post(failed(transfer))

    def close(self) -> None: ...
