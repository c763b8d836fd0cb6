"""Who is there, and who is told of whom.

    a gateway                   is told of    the router, the pool, workers, and for `alignedserve status` other owners
    the job runner                            the router, the pool, workers
    a worker                                  the router, the pool, gateways, the job runner; its peers
    a pool                                    the router, workers

Each is told of itself too, and of nobody else. A pool and workers know each other on one node only, whose memory they
share. Peers are workers of the other kind, on any node, where both have a transport for KV.
So a worker without one that comes or goes is news to gateways and the pool alone, and a thousand of them do not keep a
million links.
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
        self._members: dict[Role, dict[str, Member]] = {role: {} for role in Role}  # each by its name
        self._role_of: dict[str, Role] = {}
        self.add(router)

    def get(self, name: str) -> Member | None:
        role = self._role_of.get(name)
        return None if role is None else self._members[role][name]

    def of(self, *roles: Role) -> list[Member]:
        return [member for role in roles for member in self._members[role].values()]

    @property
    def others(self) -> list[Member]:
        """All but the router."""
        return [member for role in _TOLD_OF for member in self._members[role].values()]

    def add(self, member: Member) -> None:
        """In the place of its life before."""
        self._role_of[member.name] = member.role
        self._members[member.role][member.name] = member

    def remove(self, name: str) -> None:
        del self._members[self._role_of.pop(name)][name]

    # --- Who is told

    def told(self, to: Member) -> Send:
        """Whom it is to know. One that was taken for dead is not named to itself."""
        return Send(to.name, self._for(to, self._known_to(to.role)))

    def news(self, of: Member) -> list[Command]:
        """It has come or gone: to those who are told of it, and to itself."""
        concerned = [role for role, known in _TOLD_OF.items() if of.role in known]
        told = [send for send in self._told_to(concerned) if send.to != of.name]
        peers = [self.told(peer) for peer in self._peers(of)]
        return [*told, *peers, *([self.told(of)] if self.get(of.name) == of else [])]

    def all_told(self) -> list[Send]:
        return self._told_to(_TOLD_OF)

    def _told_to(self, roles: Iterable[Role]) -> list[Send]:
        known = {role: self._known_to(role) for role in roles}
        return [Send(member.name, self._for(member, known[role])) for role in known for member in self.of(role)]

    def _peers(self, of: Member) -> list[Member]:
        role = _PEERS.get(of.role)
        return [one for one in self.of(role) if one.transport] if role is not None and of.transport else []

    def _known_to(self, role: Role) -> tuple[Member, ...]:
        return tuple(self.of(*_TOLD_OF[role]))

    def _for(self, to: Member, known: tuple[Member, ...]) -> Members:
        known = (*(one for one in known if one.name != to.name and _may_share(to, one)), *self._peers(to))
        return Members((*known, to) if self.get(to.name) == to else known)


def _may_share(one: Member, other: Member) -> bool:
    """Of a pool and a worker only where they share their node's memory."""
    roles = {one.role, other.role}
    return one.node == other.node or Role.POOL not in roles or not roles.intersection(WORKERS)
