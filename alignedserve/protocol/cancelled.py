"""What was cancelled: a message about it, which was on its way meanwhile, may come later than the order to drop it."""

from __future__ import annotations

from alignedserve.protocol.messages import Attempt

_MOST_REMEMBERED = 10_000  # requests; messages are on their way for seconds


class Cancelled:
    """The attempts that a part was told to drop: an attempt is among them where it, or a later one, was cancelled."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}  # request -> newest attempt that was cancelled

    def add(self, request: str, attempt: int) -> None:
        self._newest[request] = max(attempt, self._newest.pop(request, attempt))  # what was cancelled last comes last
        if len(self._newest) > _MOST_REMEMBERED:
            del self._newest[next(iter(self._newest))]

    def __contains__(self, attempt: Attempt) -> bool:
        request, number = attempt
        return self._newest.get(request, -1) >= number
