"""The open requests, and where each of them is.

Submit ─▶ unplaced ─▶ PREFILL ─▶ POOL ─▶ DECODE ─▶ ended
          (no worker)    │         │  ◀────│ (had to leave)
                         └─────────┴────────┴──▶ AttemptLost to the owner, which submits the next
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from alignedserve.core import Request, Role, ServiceClass
from alignedserve.protocol.messages import Attempt, Member, Stages


class Stage(Enum):
    """In the order in which a request passes them."""

    UNPLACED = 0
    PREFILL = 1
    POOL = 2
    DECODE = 3


STAGE_AT = {Role.PREFILL: Stage.PREFILL, Role.POOL: Stage.POOL, Role.DECODE: Stage.DECODE}


@dataclass
class OpenRequest:
    request: Request
    moved_at: float  # when it was last heard of, or inquired after
    stage: Stage = Stage.UNPLACED
    at: str = ""  # the member that has it, when it is placed
    declared: bool = False  # by an owner that has seen an earlier router

    @property
    def key(self) -> Attempt:
        return self.request.id, self.request.attempt


class OpenRequests:
    """Each by its id, with its present attempt."""

    def __init__(self) -> None:
        self._all: dict[str, OpenRequest] = {}
        self._num: Counter[tuple[ServiceClass, Stage]] = Counter()
        self.unplaced: dict[str, OpenRequest] = {}  # of them, in their order

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(self._all.values())

    def get(self, id: str) -> OpenRequest | None:
        return self._all.get(id)

    def current(self, key: Attempt) -> OpenRequest | None:
        one = self._all.get(key[0])
        return one if one is not None and one.request.attempt == key[1] else None

    def is_unknown(self, key: Attempt) -> bool:
        """Neither it nor a later attempt is here."""
        one = self._all.get(key[0])
        return one is None or one.request.attempt < key[1]

    def stages(self, service: ServiceClass) -> Stages:
        return Stages(*(self._num[service, stage] for stage in Stage))

    def add(self, one: OpenRequest) -> None:
        self._all[one.request.id] = self.unplaced[one.request.id] = one
        self._num[one.request.service, one.stage] += 1

    def move(self, one: OpenRequest, to: Member, now: float) -> None:
        self.unplaced.pop(one.request.id, None)
        self._num[one.request.service, one.stage] -= 1
        one.stage, one.at, one.moved_at = STAGE_AT[to.role], to.name, now
        self._num[one.request.service, one.stage] += 1

    def remove(self, one: OpenRequest) -> None:
        self.unplaced.pop(one.request.id, None)
        self._num[one.request.service, one.stage] -= 1
        del self._all[one.request.id]
