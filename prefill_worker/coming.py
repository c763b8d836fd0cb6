"""Real-time requests that are still to come: a step that has just begun must not cost them their first token.

While none is here nothing bounds a step, and best-effort prompts would fill it up to the budget. Who comes in its
middle waits for its end. So no step takes more than a share of what the prompts that came lately left of the time to
their first token. How much of it they need is not known beforehand: they wait for each other, and run in pieces beside
chats that decode. So the share falls whenever a first token was late, and rises a little with each that was in time.
"""

from __future__ import annotations

from math import inf

from alignedserve.running import Running

LATELY_S = 60.0
MOST, LEAST = 0.5, 0.125  # the share
AFTER_LATE, AFTER_IN_TIME = 0.7, 1.02  # what it is multiplied by: it stands still where one in twenty is late


class Coming:
    def __init__(self) -> None:
        self._spare_s, self._came_at, self._share = inf, -inf, MOST

    def came(self, prompt: Running, prompt_s: float, now: float) -> None:
        """By itself the prompt takes so long. Whom that makes late is not waited for."""
        spare_s = prompt.request.slo.ttft_s - prompt_s
        if prompt.promise.is_rt and spare_s > 0:
            self._spare_s, self._came_at = min(self._known_s(now), spare_s), now

    def began(self, left_s: float) -> None:
        """A first token came so long before it was due."""
        factor = AFTER_LATE if left_s < 0 else AFTER_IN_TIME
        self._share = min(MOST, max(LEAST, factor * self._share))

    def bound_s(self, now: float) -> float:
        """The most that a step may take."""
        return self._share * self._known_s(now)

    def _known_s(self, now: float) -> float:
        return self._spare_s if now < self._came_at + LATELY_S else inf
