"""Rebuild the knowledge of a router that has just started, before it places any request.

    start ── 2 heartbeats ──▶ announced ── every member says what it has ──▶ rebuilt
    (members register)        (the roll)   (Declare by owners, Holding by workers and pools)

Every announced member says what it has: workers and pools in one frame, owners in several, of which the last one is
marked. When all have answered, and members hold everything that owners declared, the router is rebuilt. A declared
request that no member holds may have been on its way, from a member that had sent it to one that had not received it
yet: the router waits SETTLE_S more for it. It waits RECOVERY_S at most, for members that do not answer.
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
        self._awaited: set[str] = set()  # announced members that have not said yet what they have
        self._held: dict[Attempt, Member] = {}  # attempts that no owner has declared yet
        self.took_s: float | None = None  # set when the recovery is over

    @property
    def num_held(self) -> int:
        return len(self._held)

    def gathered(self, members: Iterable[Member], now: float) -> float:
        """Begin to wait for what these members have, and return when the recovery ends at the latest."""
        self.is_gathering = False
        self._awaited = {member.name for member in members}
        self._ends_at = now + RECOVERY_S
        return self._ends_at

    def announced(self, member: Member) -> None:
        if self.is_on and not self.is_gathering:
            self._awaited.add(member.name)

    def heard_all(self, member: str) -> None:
        """Await nothing more of this member: it has said what it has, or it is gone."""
        self._awaited.discard(member)

    # --- What is held

    def hold(self, key: Attempt, member: Member) -> None:
        """Remember which member holds an attempt, as its owner may still declare it.

        Where two members claim the attempt, a decode worker is the later place.
        """
        held = self._held.get(key)
        if self.is_on and (held is None or held.role is not Role.DECODE):
            self._held[key] = member

    def holder(self, key: Attempt) -> Member | None:
        return self._held.get(key)

    def lost(self, member: str) -> None:
        """Forget what a member held whose life has ended: what owners declare of it is lost."""
        self._held = {key: holder for key, holder in self._held.items() if holder.name != member}

    def ended(self, key: Attempt) -> None:
        self._held.pop(key, None)

    def returned(self, key: Attempt, by: Member) -> None:
        if self._held.get(key) == by:
            del self._held[key]  # the pool says itself what it holds

    # --- The end

    @property
    def have_all_spoken(self) -> bool:
        return self.is_on and not self.is_gathering and not self._awaited

    def settle(self, now: float) -> float | None:
        """Return when the recovery ends, now that all have answered; None where that was returned before."""
        settled_at = now + SETTLE_S
        if settled_at >= self._ends_at:
            return None
        self._ends_at = settled_at
        return settled_at

    def end(self, now: float) -> list[Attempt]:
        """End the recovery, and return the attempts that are held and that no owner can declare any more.

        These are none where a member has not answered: it may be an owner that is only slow.
        """
        held = [] if self._awaited else list(self._held)
        self.is_on, self.took_s = False, now - self._started_at
        self._awaited.clear()
        self._held.clear()
        return held
