"""What a router that has just started waits for before it places anything.

    start ── 2 heartbeats ─▶ announced ── all have said what they have ─▶ rebuilt
    (who is there)           (the roll)   (Declare of owners, Holding of workers and pools)

Whoever is announced says what it has: workers and pools in one frame, owners in several, of which the last says that it
is. When all have, and everything that was declared is held by somebody, the router is rebuilt. Where something is not,
it may have been on its way, from one that had sent it already to one that had not got it yet: SETTLE_S more is for
that. RECOVERY_S is the most, for who does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.core import Role
from alignedserve.protocol.messages import Attempt, Member

GATHER_HEARTBEATS = 2  # intervals
RECOVERY_S = 1.0
SETTLE_S = 0.2


class Recovery:
    def __init__(self, now: float) -> None:
        self._started_at, self._ends_at = now, float("inf")
        self.is_gathering, self.is_on = True, True
        self._awaited: set[str] = set()  # those that were announced and have not said all that they have
        self._held: dict[Attempt, Member] = {}  # attempts that were said to be held before they were declared
        self.took_s: float | None = None  # once it is over

    @property
    def num_held(self) -> int:
        return len(self._held)

    def gathered(self, members: Iterable[Member], now: float) -> float:
        """When it ends at the latest."""
        self.is_gathering = False
        self._awaited = {member.name for member in members}
        self._ends_at = now + RECOVERY_S
        return self._ends_at

    def announced(self, member: Member) -> None:
        if self.is_on and not self.is_gathering:
            self._awaited.add(member.name)

    def heard_all(self, member: str) -> None:
        """That it has; or it has gone."""
        self._awaited.discard(member)

    # --- What is held

    def hold(self, key: Attempt, member: Member) -> None:
        """Its owner may declare it yet. A decode worker's word is the later one."""
        held = self._held.get(key)
        if self.is_on and (held is None or held.role is not Role.DECODE):
            self._held[key] = member

    def holder(self, key: Attempt) -> Member | None:
        return self._held.get(key)

    def ended(self, key: Attempt) -> None:
        self._held.pop(key, None)

    def returned(self, key: Attempt, by: Member) -> None:
        if self._held.get(key) == by:
            del self._held[key]  # the pool says what it holds

    # --- When it is over

    @property
    def have_all_spoken(self) -> bool:
        return self.is_on and not self.is_gathering and not self._awaited

    def settle(self, now: float) -> float | None:
        """When it ends, now that all have spoken; None where that was said before."""
        settled_at = now + SETTLE_S
        if settled_at >= self._ends_at:
            return None
        self._ends_at = settled_at
        return settled_at

    def end(self, now: float) -> None:
        self.is_on, self.took_s = False, now - self._started_at
        self._awaited.clear()
        self._held.clear()
