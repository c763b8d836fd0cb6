"""Real-time requests that are still to come: a step that has just begun must not cost them their first token.

While none is here nothing bounds a step, and best-effort prompts would fill it up to the budget. Who comes in its
middle waits for its end. So no step takes more than half of the time to a first token that was asked for lately.
"""

from __future__ import annotations

from math import inf

from alignedserve.running import Running

LATELY_S = 60.0
SHARE = 0.5  # of the time to a first token: the other half is for the prompt itself


class Coming:
    def __init__(self) -> None:
        self._ttft_s, self._came_at = inf, -inf

    def came(self, prompt: Running, now: float) -> None:
        if prompt.promise.is_rt:
            self._ttft_s, self._came_at = min(self._known_s(now), prompt.request.slo.ttft_s), now

    def bound_s(self, now: float) -> float:
        """The most that a step may take."""
        return SHARE * self._known_s(now)

    def _known_s(self, now: float) -> float:
        return self._ttft_s if now < self._came_at + LATELY_S else inf
