"""Chats that are still to come: a step that has just begun must not cost them their first token.

While no chat is here nothing bounds a step, and documents would fill it up to the budget; a chat that arrives in its
middle waits for its end. So a step with documents takes at most a quarter of the spare time of the last 20 chats: of
their time to the first token, less what their prompt takes by itself. For example, a chat with a ttft of 1 s whose
prompt takes 0.2 s has 0.8 s to spare: steps take at most 0.2 s.

Only the last 20 chats count, so that a kind of chat that no longer comes binds no step. Where none came for ten times
the usual interval (10 s at least, 60 s at most), none is expected until the next one. Gain: 6 points of chats in time,
where one comes in 2 s to a CPU and is promised its first token in 0.3 s; for 2 to 3 % of the tokens of documents.

Where the step's requests are of another caller, a chat that comes is not to notice them: `firsts` says how long its
prompt takes by itself, and the scheduler keeps steps with documents to a part of that.

Chats that a prefill worker hands on are to come, too: this worker hears of them at the end of a step, and their next
token is due soon. Gain: up to 10 points, of chats with long prompts beside documents as 1+1.
"""

from __future__ import annotations

from collections import deque
from math import inf

from alignedserve.worker.step.request import WorkerRequest

COUNTED = 20
LONGEST_S, SHORTEST_S = 60.0, 10.0  # without a prompt, before none is expected: they may come in bursts
SHARE = 0.25  # of the time that a chat has to spare
JOINS = 0.65  # of the time between two tokens: the rest is for copies, and for the next step


class ArrivalForecast:
    def __init__(self) -> None:
        self._last: deque[tuple[float, float]] = deque(maxlen=COUNTED)  # when, what it has to spare
        self._bound_s = self._until = inf
        self._joined: deque[tuple[float, float]] = deque(maxlen=COUNTED)  # when, time between two tokens
        self._firsts: dict[str, tuple[float, float]] = {}  # by caller: what its prompts take, until when more may come

    def count(self, prompt: WorkerRequest, prompt_s: float, now: float) -> None:
        """Count a prompt that takes `prompt_s` by itself. A prompt that is late by itself does not bind steps."""
        spare_s = prompt.request.slo.ttft_s - prompt_s
        if not prompt.promise.is_rt or spare_s <= 0:
            return
        caller = prompt.request.caller
        mean_s, _ = self._firsts.get(caller, (prompt_s, now))
        self._firsts[caller] = mean_s + (prompt_s - mean_s) / COUNTED, now + LONGEST_S
        if now >= self._until:
            self._last.clear()
        self._last.append((now, spare_s))
        wait_s = LONGEST_S
        if len(self._last) == COUNTED:
            wait_s = min(LONGEST_S, max(SHORTEST_S, (now - self._last[0][0]) * 10 / (COUNTED - 1)))
        self._until = now + wait_s
        self._bound_s = SHARE * min(spare_s for _, spare_s in self._last)

    def firsts(self, now: float) -> list[tuple[str, float]]:
        """Return the callers whose chats may come, with the mean time of their prompts by themselves."""
        return [(caller, mean_s) for caller, (mean_s, until) in self._firsts.items() if now < until]

    def joined(self, tbt_s: float, now: float) -> None:
        """Count a real-time request that was handed on to this worker."""
        self._joined.append((now, tbt_s))

    def joins_s(self, now: float) -> float:
        """Return the most time that a step with prompts may take, for the requests that are handed on meanwhile."""
        if not self._joined or now > self._joined[-1][0] + LONGEST_S:
            return inf
        return JOINS * min(tbt_s for _, tbt_s in self._joined)

    def bound_s(self, now: float) -> float:
        """Return the most time that a step may take."""
        return self._bound_s if self.are_expected(now) else inf

    def are_expected(self, now: float) -> bool:
        """Return whether more chats may come soon."""
        return now < self._until
