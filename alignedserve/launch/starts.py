"""Follow the parts by their signs of life: which one is slowest to start, and which one stands still or is silent.

A part stands still when its sign has not changed for `quiet_s`, however long its start takes in all. One that waits for
its turn says so again and again. Two may stand still: one that waits for a place, which has no process yet, and a rank
that waits for the others, unless all ranks of its worker wait for one another. Before the deployment takes requests, a
start also fails when no part at all moves for `quiet_s`: then all may wait for something that does not come.

    decode-0   reads weights ──────────────▶ measures steps ──▶ runs      its sign changes: it may take an hour
    decode-1   reads weights ──▶ waits for its turn ──────────────▶       says again and again that it waits
    prefill-0  reads weights, 3.1 of 16.1 GB ····· quiet_s ·····▶ ended

A part that runs goes on giving signs while its loops turn (shell/loop_watch.py). One that is silent for longer than
its own watch would wait cannot end itself: it was stopped, or code that is not Python keeps Python's lock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from alignedserve.protocol.messages import worker_of
from alignedserve.signs import Sign, Stage

SILENT = 4 / 3  # of `still_s`, until a part that runs is silent for too long
_MOST_PASSED_S = 4.0  # between two looks: in more than that the launcher stood still itself


@dataclass
class _Watched:
    sign: Sign
    moved_at: float  # of a part that starts
    silent_s: float = 0.0  # of a part that runs

    @property
    def runs(self) -> bool:
        return self.sign.stage is Stage.RUNS


@dataclass(frozen=True)
class Still:
    """What stands still: a part with its last sign, or, without one, a deployment in which no part is starting."""

    sign: Sign | None
    for_s: float

    def __str__(self) -> str:
        if self.sign is None:
            return f"no request is taken though no part is starting, and nothing has moved for {self.for_s:.0f} s"
        amount = f" ({self.sign.amount})" if self.sign.amount else ""
        return f"{self.sign.part} {self.sign.stage.value}{amount}, and nothing has moved there for {self.for_s:.0f} s"


class Starts:
    """The newest life of each part that starts or runs."""

    def __init__(self, quiet_s: float, now: float, still_s: float = math.inf) -> None:
        self._quiet_s, self._silent_s = quiet_s, SILENT * still_s
        self._watched: dict[str, _Watched] = {}
        self._looked_at = now  # at what runs
        self._moved_at = now  # when anything moved
        self.is_open = False  # whether the deployment takes requests

    def begin(self, part: str, incarnation: int, now: float) -> None:
        """A life of the part is ordered; its process may have to wait for a place."""
        self._watched[part] = _Watched(Sign(part, incarnation, Stage.PLACE), now)
        self._moved_at = now

    def hear(self, sign: Sign, now: float) -> None:
        """Note a sign of a part. One of an earlier life, or the same again of a part that starts, tells nothing."""
        known = self._watched.get(sign.part)
        if known is None or known.sign.incarnation != sign.incarnation:
            return
        known.silent_s = 0.0
        if known.runs or known.sign == sign:
            return
        says_that_it_waits = sign.stage.waits and known.sign.stage is sign.stage
        if not says_that_it_waits:
            self._moved_at = now
        known.sign, known.moved_at = sign, now

    def end(self, part: str) -> None:
        """The part's process has ended, or is ended."""
        self._watched.pop(part, None)

    def _starting(self) -> list[_Watched]:
        return [part for part in self._watched.values() if not part.runs]

    def silent(self, now: float) -> tuple[str, float] | None:
        """Return the part that has been silent for longest, and for how long, if that is too long: it is to be ended,
        and returned again if it is there much later."""
        most_s = min(_MOST_PASSED_S, self._silent_s / 4)
        passed_s, self._looked_at = min(now - self._looked_at, most_s), now
        running = [part for part in self._watched.values() if part.runs]
        for part in running:
            part.silent_s += passed_s
        longest = max(running, key=lambda part: part.silent_s, default=None)
        if longest is None or longest.silent_s < self._silent_s:
            return None
        silent_s, longest.silent_s = longest.silent_s, 0.0
        return longest.sign.part, silent_s

    @property
    def is_over(self) -> bool:
        """Return whether nothing is starting."""
        return self.is_open and not self._starting()

    @property
    def slowest(self) -> Sign | None:
        """Return the sign of the part that has most before it; one that waits for others is not to blame."""
        signs = [part.sign for part in self._starting()]
        return min(signs, key=lambda sign: (sign.stage.waits, sign.stage.order, sign.share, sign.part), default=None)

    def still(self, now: float) -> Still | None:
        """Return what has stood still for too long, if anything has."""
        starting = self._starting()
        stuck = [part for part in starting if now - self._moves_since(part, now) >= self._quiet_s]
        if not stuck and not self.is_open and now - self._moved_at >= self._quiet_s:
            if not starting:
                return Still(None, now - self._moved_at)
            stuck = starting
        if not stuck:
            return None
        longest = min(stuck, key=lambda part: part.moved_at)
        return Still(longest.sign, now - longest.moved_at)

    def _moves_since(self, part: _Watched, now: float) -> float:
        """Return when the part last moved, or `now` of one that waits for a place or for other ranks. Where all ranks
        of a worker wait for one another, return when the last of them moved."""
        if part.sign.stage not in (Stage.PLACE, Stage.RANKS):
            return part.moved_at
        worker = worker_of(part.sign.part)
        ranks = [other for other in self._starting() if worker_of(other.sign.part) == worker]
        if any(other.sign.stage is not Stage.RANKS for other in ranks):
            return now
        return max(other.moved_at for other in ranks)
