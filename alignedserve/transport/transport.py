"""The interface of a transport, as the hands of a worker use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.protocol.messages import Member

Transfer: TypeAlias = SendKv | ReceiveKv
Outcome: TypeAlias = KvSent | KvReceived
Post: TypeAlias = Callable[[Outcome], None]  # delivers an event to the core, from any thread


class Transport(Protocol):
    @property
    def address(self) -> str:
        """Return where peers reach this worker, which they learn through its `Member`; empty where they cannot."""

    @property
    def num_failed(self) -> int:
        """Return how many transfers that began here failed."""

    def meet(self, member: Member) -> None:
        """Note a member that this worker may send to or receive from."""

    def part_from(self, member: Member) -> None:
        """Fail all transfers with that member at once."""

    def start(self, transfer: Transfer, post: Post) -> None:
        """Start a transfer, which runs beside the steps and posts exactly one event at its end."""

    def close(self) -> None: ...


def failed(transfer: Transfer) -> Outcome:
    if isinstance(transfer, SendKv):
        return KvSent(transfer.number, transfer.to, ok=False)
    return KvReceived(transfer.number, transfer.source, intact=False)


class ThroughTheArena:
    """The transport `host`: KV travels through the pool's pages, so this sends nothing."""

    address = ""
    num_failed = 0

    def meet(self, member: Member) -> None: ...

    def part_from(self, member: Member) -> None: ...

    def start(self, transfer: Transfer, post: Post) -> None:
        post(failed(transfer))

    def close(self) -> None: ...
