"""Choose what `alignedserve restart` does next: it replaces the parts of a deployment one after another.

    gateway, worker    a spare starts ──▶ the spare runs ──▶ the part is retired ──▶ it has ended ──▶ the next part
    all others         the part is ended ──▶ it has ended ──▶ its next life runs ──▶ the next part

A worker's spare needs memory beside the worker. Where there is none, `in_place` treats workers as the others: their
streams wait for the next life of a worker, or go on at once where another worker has room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from alignedserve.core import WORKERS, Role

ORDER = [Role.ROUTER, Role.POOL, *WORKERS, Role.GATEWAY, Role.JOBS]


class PartChange(Enum):
    RUNS = 1
    IS_OVER = 2  # a life of the part has ended
    LEFT_OUT = 3  # a spare cannot run, and is not started again


class Act(Enum):
    START_SPARE = 1
    RETIRE = 2  # the spare runs
    END = 3  # the keeper starts the part again
    FINISH = 4
    GIVE_UP = 5


@dataclass(frozen=True)
class Step:
    act: Act
    part: str = ""
    why: str = ""


class Restart:
    """Each method returns what is to be done now, or None as long as the last step is not done."""

    def __init__(self, parts: Iterable[tuple[Role, str]], now: float, in_place: bool = False) -> None:
        self._waiting = deque(sorted(parts, key=lambda part: ORDER.index(part[0])))
        self._began_at, self._in_place = now, in_place
        self._step = Step(Act.FINISH)  # the last one
        self.spare = ""  # that was to start
        self._has_ended = False  # the part that was to end, after which it starts again

    def took_s(self, now: float) -> float:
        return now - self._began_at

    def next(self) -> Step:
        """Return how the next part is replaced."""
        self.spare, self._has_ended = "", False
        if not self._waiting:
            return self._now(Act.FINISH)
        role, part = self._waiting.popleft()
        has_spare = role is Role.GATEWAY or (role in WORKERS and not self._in_place)
        return self._now(Act.START_SPARE if has_spare else Act.END, part)

    def hear(self, change: PartChange, of: str, why: str = "") -> Step | None:
        act, part = self._step.act, self._step.part
        match change:
            case PartChange.RUNS if act is Act.START_SPARE and of == self.spare:
                return self._now(Act.RETIRE, part)
            case PartChange.RUNS if act is Act.END and of == part and self._has_ended:
                return self.next()
            case PartChange.IS_OVER if act is Act.RETIRE and of == part:
                return self.next()
            case PartChange.IS_OVER if act is Act.END and of == part:
                self._has_ended = True
            case PartChange.LEFT_OUT if act is Act.START_SPARE and of == self.spare:
                return self._now(Act.GIVE_UP, part, why)
        return None

    def _now(self, act: Act, part: str = "", why: str = "") -> Step:
        self._step = Step(act, part, why)
        return self._step
