"""Remember which attempts were cancelled. A message about one of them may arrive after the Cancel, by another link."""

from __future__ import annotations

from alignedserve.protocol.messages import Attempt

MOST_REMEMBERED = 10_000  # requests; a message is on its way for seconds


class CancelledAttempts:
    """Holds each attempt that a part was told to drop, and every earlier attempt at the same request."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}  # request -> newest attempt that was cancelled

    def add(self, request: str, attempt: int) -> None:
        self._newest[request] = max(attempt, self._newest.pop(request, attempt))  # what was cancelled last comes last
        if len(self._newest) > MOST_REMEMBERED:
            del self._newest[next(iter(self._newest))]

    def __contains__(self, attempt: Attempt) -> bool:
        request, number = attempt
        return self._newest.get(request, -1) >= number
