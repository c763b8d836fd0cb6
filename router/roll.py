"""The roll: which members there are, and which members each of them is told of.

    member             is told of
    a gateway          the router, pools, workers, and for `alignedserve status` the other owners
    the job runner     the router, pools, workers
    a worker           the router, the pool, gateways, the job runner, and its peers
    a pool             the router, workers

Each member is told of itself too, and of no others. A pool and a worker know each other only on one node, whose memory
they share. Peers are workers of the other kind, on any node, where both have a transport for KV. So a worker without a
transport that comes or goes concerns only gateways and its pool, and a thousand workers do not keep a million links.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from alignedserve.core import OWNERS, WORKERS, Role
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import Member, Members

_OF_WORKERS = (Role.ROUTER, Role.POOL, *OWNERS)
_OF_OWNERS = (Role.ROUTER, Role.POOL, *WORKERS)
_PEERS: Mapping[Role, Role] = MappingProxyType({Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL})
_TOLD_OF: Mapping[Role, tuple[Role, ...]] = MappingProxyType(
    {
        Role.GATEWAY: (*_OF_OWNERS, *OWNERS),
        Role.JOBS: _OF_OWNERS,
        Role.PREFILL: _OF_WORKERS,
        Role.DECODE: _OF_WORKERS,
        Role.POOL: (Role.ROUTER, *WORKERS),
    }
)


class Roll:
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
        role = _PEERS.get(member.role)
        return [peer for peer in self.members(role) if peer.transport] if role is not None and member.transport else []

    def _known_to(self, role: Role) -> tuple[Member, ...]:
        return tuple(self.members(*_TOLD_OF[role]))

    def _for(self, to: Member, known: tuple[Member, ...]) -> Members:
        known = (*(member for member in known if member.name != to.name and _may_know(to, member)), *self._peers(to))
        return Members((*known, to) if self.get(to.name) == to else known)


def _may_know(member: Member, other: Member) -> bool:
    """Return whether two members may know each other: a pool and a worker only where they share their node's memory."""
    roles = {member.role, other.role}
    return member.node == other.node or Role.POOL not in roles or not roles.intersection(WORKERS)
