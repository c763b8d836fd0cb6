"""Gather what a gateway hears of the deployment: members that come and go, and the figures that parts report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from alignedserve.core import Role
from alignedserve.dashboard.picture import (
    JobsPicture,
    PartPicture,
    Picture,
    PoolPicture,
    QueuePicture,
    RequestsPicture,
    WorkerPicture,
)
from alignedserve.protocol.figures import DecodeLengths
from alignedserve.protocol.messages import Figures, Member

FORGOTTEN_S = 900.0  # after which a part that has gone is no longer shown


@dataclass(frozen=True, slots=True)
class _SeenPart:
    member: Member
    is_here: bool
    since: float
    is_again: bool = False  # it was seen in an earlier life, or gone


class DeploymentView:
    """Remembers what parts of the deployment told last. Times are handed in; `hear` may be called by another thread."""

    def __init__(self) -> None:
        self._parts: dict[str, _SeenPart] = {}
        self._told: dict[str, Figures] = {}  # part -> its newest figures
        self._queues: QueuePicture | None = None
        self._router_at: float | None = None

    def hear(self, figures: Figures, now: float) -> None:
        """Take figures that a part reports."""
        if figures.rt is not None and figures.be is not None:
            self._queues, self._router_at = QueuePicture(figures.rt, figures.be), now
        self._told[figures.member] = figures

    def look(self, members: Iterable[Member], now: float) -> None:
        """Note who is there now, and who has gone since the last look. A worker that was to go is forgotten at once."""
        here = {member.name: member for member in members}
        for name, member in here.items():
            seen = self._parts.get(name)
            if seen is None or not seen.is_here or seen.member != member:
                # Its figures may be here before it is seen.
                self._parts[name] = _SeenPart(member, True, now, is_again=seen is not None)
        for name, seen in [*self._parts.items()]:
            if name in here:
                continue
            if seen.is_here:
                self._gone(seen, now)
            elif now - seen.since > FORGOTTEN_S:
                del self._parts[name]

    def _gone(self, seen: _SeenPart, now: float) -> None:
        name = seen.member.name
        if _is_retiring(self._told.pop(name, Figures())):
            del self._parts[name]
        else:
            self._parts[name] = replace(seen, is_here=False, since=now)

    def picture(
        self, at: float, state: str, models: tuple[str, ...], requests: RequestsPicture, jobs: JobsPicture | None = None
    ) -> Picture:
        """Return the picture of this moment."""
        return Picture(
            at=at,
            state=state,
            models=models,
            parts=self.parts,
            router_at=self._router_at,
            queues=self._queues,
            workers=self.workers,
            pools=self.pools,
            requests=requests,
            jobs=jobs,
        )

    @property
    def router_at(self) -> float | None:
        return self._router_at

    @property
    def queues(self) -> QueuePicture | None:
        return self._queues

    @property
    def parts(self) -> tuple[PartPicture, ...]:
        """Return the parts by role, and by name; those of the last minutes that have gone are among them."""
        order = list(Role)
        seen = sorted(self._parts.values(), key=lambda part: (order.index(part.member.role), part.member.name))
        return tuple(map(self._part, seen))

    @property
    def workers(self) -> tuple[WorkerPicture, ...]:
        """Return the decode workers that are there; those that never had a request have told nothing."""
        here = (part.member for part in self._parts.values() if part.is_here and part.member.role is Role.DECODE)
        return tuple(self._worker(member.name) for member in sorted(here, key=lambda member: member.name))

    def _worker(self, name: str) -> WorkerPicture:
        told = self._told.get(name, Figures())
        used = 0.0 if told.worker is None else told.worker.used
        return WorkerPicture(name, told.lengths or DecodeLengths(), used)

    @property
    def pools(self) -> tuple[PoolPicture, ...]:
        told = sorted([*self._told.items()], key=lambda item: item[0])
        return tuple(
            PoolPicture(name, figures.usage, figures.holders) for name, figures in told if figures.usage is not None
        )

    def _part(self, seen: _SeenPart) -> PartPicture:
        member, told = seen.member, self._told.get(seen.member.name, Figures())
        since = seen.since
        if told.process is not None and not seen.is_again:  # else it may be told by an earlier life
            since = min(since, told.process.started_at)
        state = member.name, member.role, member.node, member.incarnation, seen.is_here, since
        return PartPicture(*state, seen.is_again, _is_retiring(told), told.slowdown)


def _is_retiring(told: Figures) -> bool:
    return told.worker is not None and told.worker.is_retiring
