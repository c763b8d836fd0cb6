"""The pool as a worker knows it: which member it is, and for which requests it keeps pages."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import MemberJoined, MemberLost
from alignedserve.protocol.messages import Attempt, Member, Message, Release, Spoiled
from alignedserve.worker.page_writer import PageWriter
from alignedserve.worker.part import CorePart


class PoolLink(CorePart):
    """The member whose pages this worker copies from and to. It hears of a lost pool after all other parts."""

    def __init__(self, writer: PageWriter) -> None:
        self.member: Member | None = None
        self.writer, self.holds = writer, PoolHolds(self)

    def joined(self, event: MemberJoined, now: float) -> None:
        self.member = event.member

    def lost(self, event: MemberLost, now: float) -> None:
        self.member = None

    def send(self, message: Message) -> list[Command]:
        """Send the message to the pool; return no command where there is no pool."""
        return [] if self.member is None else [Send(self.member.name, message)]

    def tell_spoiled(self, pages: tuple[int, ...]) -> list[Command]:
        """Tell the pool that these pages do not hold what their names say, or may not."""
        return self.send(Spoiled(pages)) if pages else []


class PoolHolds:
    """The requests whose pages the pool keeps for this worker until it releases them."""

    def __init__(self, pool: PoolLink) -> None:
        self._pool = pool
        self._attempts: dict[str, Attempt] = {}  # request -> its attempt

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, attempt: Attempt) -> bool:
        return self._attempts.get(attempt[0]) == attempt

    @property
    def attempts(self) -> set[Attempt]:
        return set(self._attempts.values())

    def add(self, attempt: Attempt) -> None:
        self._attempts[attempt[0]] = attempt

    def discard(self, attempt: Attempt) -> None:
        """Forget the pages of this attempt: the pool has a newer entry of it."""
        if attempt in self:
            del self._attempts[attempt[0]]

    def release(self, attempt: Attempt, to: str = "") -> list[Command]:
        """Tell the pool that this attempt needs its pages no longer here, where it keeps any. `to` is the worker that
        has the attempt from now on."""
        if self._pool.member is None or attempt not in self:
            return []
        del self._attempts[attempt[0]]
        return self._pool.send(Release(*attempt, to))

    def release_all(self, attempts: Iterable[Attempt]) -> list[Command]:
        return [command for attempt in attempts for command in self.release(attempt)]

    def clear(self) -> None:
        self._attempts.clear()
