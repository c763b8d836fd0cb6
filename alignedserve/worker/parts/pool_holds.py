"""The requests whose pages the pool keeps for this worker until it releases them."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.protocol.commands import Command
from alignedserve.protocol.messages import Attempt, Release
from alignedserve.worker.parts.pool_link import PoolLink


class PoolHolds:
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

    def release(self, attempt: Attempt) -> list[Command]:
        """Tell the pool that this attempt needs its pages no longer, where it keeps any."""
        if self._pool.member is None or attempt not in self:
            return []
        del self._attempts[attempt[0]]
        return self._pool.send(Release(*attempt))

    def release_all(self, attempts: Iterable[Attempt]) -> list[Command]:
        return [command for attempt in attempts for command in self.release(attempt)]

    def clear(self) -> None:
        self._attempts.clear()
