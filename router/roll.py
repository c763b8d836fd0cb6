"""Who is there, and who is told of whom.

    a gateway   is told of   the router, the pool, workers
    a worker                 the router, the pool, gateways
    a pool                   the router, workers

Each is told of itself too. No worker has a word for another of its kind, nor for one of the other kind unless they can
send KV to each other. So where they cannot, a worker that comes or goes is news to gateways and the pool alone, and a
thousand of them do not keep a million links. Whom a worker is told of of the other kind, that one it can reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from alignedserve.core import Role
from alignedserve.messages import Command, Member, Members, Send

_WORKERS = (Role.PREFILL, Role.DECODE)
_OF_WORKERS = (Role.ROUTER, Role.POOL, Role.GATEWAY)
_PEERS: Mapping[Role, Role] = MappingProxyType({Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL})
_TOLD_OF: Mapping[Role, tuple[Role, ...]] = MappingProxyType(
    {
        Role.GATEWAY: (Role.ROUTER, Role.POOL, *_WORKERS),
        Role.PREFILL: _OF_WORKERS,
        Role.DECODE: _OF_WORKERS,
        Role.POOL: (Role.ROUTER, *_WORKERS),
    }
)


class Roll:
    def __init__(self, router: Member, workers_meet: bool = False) -> None:
        """`workers_meet`: prefill and decode workers are told of each other."""
        met = {one: (*_OF_WORKERS, other) for one, other in _PEERS.items()}
        self._told_of: Mapping[Role, tuple[Role, ...]] = {**_TOLD_OF, **met} if workers_meet else _TOLD_OF
        self._members: dict[Role, dict[str, Member]] = {role: {} for role in Role}  # each by its name
        self._role_of: dict[str, Role] = {}
        self.add(router)

    def get(self, name: str) -> Member | None:
        role = self._role_of.get(name)
        return None if role is None else self._members[role][name]

    def of(self, *roles: Role) -> list[Member]:
        return [member for role in roles for member in self._members[role].values()]

    def add(self, member: Member) -> None:
        """In the place of its life before."""
        self._role_of[member.name] = member.role
        self._members[member.role][member.name] = member

    def remove(self, name: str) -> None:
        del self._members[self._role_of.pop(name)][name]

    # --- Who is told

    def told(self, to: Member) -> Command:
        """Whom it is to know. One that was taken for dead is not named to itself."""
        return Send(to.name, self._for(to, self._known_to(to.role)))

    def news(self, of: Member) -> list[Command]:
        """It has come or gone: to those who are told of it, and to itself."""
        concerned = [role for role, known in self._told_of.items() if of.role in known]
        return [*self._told_to(concerned), *([self.told(of)] if self.get(of.name) == of else [])]

    def all_told(self) -> list[Command]:
        return self._told_to(self._told_of)

    def _told_to(self, roles: Iterable[Role]) -> list[Command]:
        known = {role: self._known_to(role) for role in roles}
        return [Send(member.name, self._for(member, known[role])) for role in known for member in self.of(role)]

    def _known_to(self, role: Role) -> tuple[Member, ...]:
        return tuple(self.of(*self._told_of[role]))

    def _for(self, to: Member, known: tuple[Member, ...]) -> Members:
        return Members((*known, to) if self.get(to.name) == to else known)
