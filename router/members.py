"""The roll: which members there are, and which members each of them is told of.

    member             is told of
    a gateway          the router, pools, workers, and for `alignedserve status` the other owners
    the job runner     the router, pools, workers
    a worker           the router, the pool, gateways, the job runner, and its peers
    a pool             the router, workers

Each member is told of itself too, and of no others. A pool and a worker know each other only on one node, whose memory
they share. Peers are workers of the other kind, on any node, between which KV has a direct road. So a worker without
one that comes or goes concerns only gateways and its pool, and a thousand workers do not keep a million links.

A router that has just started rebuilds what it knows before it places any request:

    start ── 2 heartbeats ──▶ announced ── every member says what it has ──▶ rebuilt
    (members register)        (the roll)   (Declare by owners, Holding by workers and pools)

Every announced member says what it has: workers and pools in one frame, owners in several, and the last one is
marked. When all have answered, and members hold everything that owners declared, the router is rebuilt. A declared
request that no member holds may have been on its way, sent by a member, and not received yet: the router waits SETTLE_S
more. It waits RECOVERY_S at most, for members that do not answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from alignedserve.core import OWNERS, WORKERS, Role
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import Attempt, Member, Members
from alignedserve.protocol.roads import Road, road_between

_OF_WORKERS = (Role.ROUTER, Role.POOL, *OWNERS)
_OF_OWNERS = (Role.ROUTER, Role.POOL, *WORKERS)
_TOLD_OF: Mapping[Role, tuple[Role, ...]] = MappingProxyType(
    {
        Role.GATEWAY: (*_OF_OWNERS, *OWNERS),
        Role.JOBS: _OF_OWNERS,
        Role.PREFILL: _OF_WORKERS,
        Role.DECODE: _OF_WORKERS,
        Role.POOL: (Role.ROUTER, *WORKERS),
    }
)


class MemberList:
    def __init__(self, router: Member) -> None:
        self._members: dict[Role, dict[str, Member]] = {role: {} for role in Role}  # role -> name -> member
        self._by_name: dict[str, Member] = {}
        self.pools: Mapping[str, str] = {}  # node -> name of its pool
        self.add(router)

    def get(self, name: str) -> Member | None:
        return self._by_name.get(name)

    def members(self, *roles: Role) -> list[Member]:
        return [member for role in roles for member in self._members[role].values()]

    @property
    def others(self) -> list[Member]:
        """Return every member except the router."""
        return [member for role in _TOLD_OF for member in self._members[role].values()]

    def add(self, member: Member) -> None:
        """Add the member, in place of its earlier incarnation if there is one."""
        self._by_name[member.name] = member
        self._members[member.role][member.name] = member
        self._find_pools()

    def remove(self, name: str) -> None:
        del self._members[self._by_name.pop(name).role][name]
        self._find_pools()

    def _find_pools(self) -> None:
        self.pools = {pool.node: pool.name for pool in self._members[Role.POOL].values()}

    # --- Announcements

    def roll_for(self, to: Member) -> Send:
        """Send a member the members that it is told of. The roll does not name a member that was given up for dead."""
        return Send(to.name, self._for(to, self._known_to(to.role)))

    def announce_change(self, member: Member) -> list[Command]:
        """Tell the members that this concerns, and the member itself, that it has come or gone."""
        concerned = [role for role, known in _TOLD_OF.items() if member.role in known]
        others = [send for send in self._announce_to(concerned) if send.to != member.name]
        peers = [self.roll_for(peer) for peer in self._peers(member)]
        return [*others, *peers, *([self.roll_for(member)] if self.get(member.name) == member else [])]

    def announce_all(self) -> list[Send]:
        """Send the roll to every member."""
        return self._announce_to(_TOLD_OF)

    def _announce_to(self, roles: Iterable[Role]) -> list[Send]:
        known = {role: self._known_to(role) for role in roles}
        return [Send(member.name, self._for(member, known[role])) for role in known for member in self.members(role)]

    def _peers(self, member: Member) -> list[Member]:
        """Return the workers of the other kind that KV goes to and from directly."""
        if member.role not in WORKERS or not member.transport:
            return []
        others = [worker for worker in self.members(*WORKERS) if worker.kind is not member.kind]
        return [worker for worker in others if road_between(member, worker) is not Road.HOST]

    def _known_to(self, role: Role) -> tuple[Member, ...]:
        return tuple(self.members(*_TOLD_OF[role]))

    def _for(self, to: Member, known: tuple[Member, ...]) -> Members:
        known = (*(member for member in known if member.name != to.name and _may_know(to, member)), *self._peers(to))
        return Members((*known, to) if self.get(to.name) == to else known)


def _may_know(member: Member, other: Member) -> bool:
    """Return whether two members may know each other: a pool and a worker only where they share their node's memory."""
    roles = {member.role, other.role}
    return member.node == other.node or Role.POOL not in roles or not roles.intersection(WORKERS)


GATHER_HEARTBEATS = 2  # intervals
RECOVERY_S = 1.0
SETTLE_S = 0.2


class Recovery:
    def __init__(self, now: float) -> None:
        self._started_at, self._ends_at = now, float("inf")
        self.is_gathering, self.is_on = True, True
        self._awaited: set[str] = set()  # announced members that have not said yet what they have
        self._held: dict[Attempt, Member] = {}  # attempts that no owner has declared yet
        self.waiting: dict[Attempt, None] = {}  # attempts whose prompts have not begun, as workers said
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
        """Remember which member holds an attempt, as the owner may still declare it.

        Where two members claim the attempt, a decode worker is the later place, and of two decode workers the worker
        that does not lend.
        """
        held = self._held.get(key)
        is_earlier = held is None or held.role is not Role.DECODE or (held.lends and member.role is Role.DECODE)
        if self.is_on and is_earlier:
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
