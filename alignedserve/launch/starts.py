"""Follow the parts that are starting by their signs of life: which one is slowest, and which one stands still.

A part stands still when its sign has not changed for `quiet_s`, however long its start takes in all. A part that waits
for others may stand still as long as anything moves. Before the deployment takes requests, a start also fails when no
part at all moves for `quiet_s`: then all may wait for something that does not come.

    decode-0   reads weights ──────────────▶ measures steps ──▶ runs      its sign changes: it may take an hour
    decode-1   reads weights ──▶ waits for its turn ··············▶       waits for decode-0, which moves
    prefill-0  reads weights, 3.1 of 16.1 GB ····· quiet_s ·····▶ ended
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.signs import Sign, Stage


@dataclass
class _Starting:
    sign: Sign
    moved_at: float


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
    """The newest life of each part that is starting."""

    def __init__(self, quiet_s: float, now: float) -> None:
        self._quiet_s = quiet_s
        self._starting: dict[str, _Starting] = {}
        self._moved_at = now  # when anything moved
        self.is_open = False

    def begin(self, part: str, incarnation: int, now: float) -> None:
        """A life of the part is ordered; its process may have to wait for a place."""
        self._move(Sign(part, incarnation, Stage.PLACE), now)

    def hear(self, sign: Sign, now: float) -> None:
        """Note a sign of a part that is starting. One of an earlier life, or the same again, tells nothing."""
        known = self._starting.get(sign.part)
        if known is None or known.sign.incarnation != sign.incarnation or known.sign == sign:
            return
        self._move(sign, now)
        if sign.stage is Stage.RUNS:
            del self._starting[sign.part]

    def end(self, part: str) -> None:
        """The part's process has ended."""
        self._starting.pop(part, None)

    def open(self) -> None:
        """The deployment takes requests."""
        self.is_open = True

    def _move(self, sign: Sign, now: float) -> None:
        self._starting[sign.part] = _Starting(sign, now)
        self._moved_at = now

    @property
    def is_over(self) -> bool:
        """Return whether nothing is starting."""
        return self.is_open and not self._starting

    @property
    def slowest(self) -> Sign | None:
        """Return the sign of the part that has most before it; one that waits for others is not to blame."""
        signs = [starting.sign for starting in self._starting.values()]
        return min(signs, key=lambda sign: (sign.stage.waits, sign.stage.order, sign.share, sign.part), default=None)

    def still(self, now: float) -> Still | None:
        """Return what has stood still for too long, if anything has."""
        working = [starting for starting in self._starting.values() if not starting.sign.stage.waits]
        stuck = [starting for starting in working if now - starting.moved_at >= self._quiet_s]
        if not stuck and not self.is_open and now - self._moved_at >= self._quiet_s:
            if not self._starting:
                return Still(None, now - self._moved_at)
            stuck = list(self._starting.values())
        if not stuck:
            return None
        longest = min(stuck, key=lambda starting: starting.moved_at)
        return Still(longest.sign, now - longest.moved_at)
