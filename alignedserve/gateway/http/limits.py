"""How much each caller may have: requests and tokens in a minute, requests open at once.

A request is taken when its head has been read, its prompt when it has become tokens, its output as it comes. A caller
is let in while it has any tokens left: so over a long time it gets its rate, and at most what is open more than that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.access.ledger import Bucket, Ledger
from alignedserve.gateway.openai.errors import limited

LUMP = 64  # tokens of output that are taken together


class Tab:
    """Of one HTTP request: what its caller takes by it, and the place that it has until it ends."""

    def __init__(self, ledger: Ledger, caller: Caller, now: Callable[[], float] = time.monotonic) -> None:
        self._ledger, self.caller, self._limits, self._now = ledger, caller, caller.limits, now
        self._is_seated = False
        self._tokens = 0  # not taken yet

    def enter(self) -> None:
        """Takes a request; raises where there is none left."""
        per_minute = self._limits.requests_per_minute
        if per_minute is None:
            return
        with self._ledger.row(self.caller.id) as row:
            row.requests.fill(per_minute, self._now())
            wait_s = row.requests.wait_s(1, per_minute)
            if not wait_s:
                row.requests.left -= 1
        if wait_s:
            raise limited(f"{per_minute} requests in a minute", wait_s)

    def sit(self) -> None:
        """Takes a place for a request for tokens; raises where there is none, or no token is left."""
        self._check_tokens()
        most = self._limits.most_open
        if most is None:
            return
        with self._ledger.row(self.caller.id) as row:
            self._is_seated = row.num_open < most
            row.open_at[self._ledger.place] += self._is_seated
        if not self._is_seated:
            raise limited(f"{most} requests open at once", 1.0)

    def take(self, tokens: int) -> None:
        """Of a prompt or an output."""
        if self._limits.tokens_per_minute is not None:
            self._tokens += tokens
            if self._tokens >= LUMP:
                self._settle()

    def close(self) -> None:
        if self._tokens:
            self._settle()
        if self._is_seated:
            self._is_seated = False
            with self._ledger.row(self.caller.id) as row:
                row.open_at[self._ledger.place] -= 1

    def headers(self) -> dict[str, str]:
        """OpenAI's names and its way of writing times; of what has a limit."""
        limits = {"requests": self._limits.requests_per_minute, "tokens": self._limits.tokens_per_minute}
        if limits == {"requests": None, "tokens": None}:
            return {}
        shown: dict[str, str] = {}
        with self._ledger.row(self.caller.id) as row:
            for name, bucket in (("requests", row.requests), ("tokens", row.tokens)):
                if (per_minute := limits[name]) is not None:
                    bucket.fill(per_minute, self._now())
                    shown |= _shown(name, bucket, per_minute)
        return shown

    def _check_tokens(self) -> None:
        per_minute = self._limits.tokens_per_minute
        if per_minute is None:
            return
        with self._ledger.row(self.caller.id) as row:
            row.tokens.fill(per_minute, self._now())
            wait_s = row.tokens.wait_s(1, per_minute)
        if wait_s:
            raise limited(f"{per_minute} tokens in a minute", wait_s)

    def _settle(self) -> None:
        per_minute, tokens = self._limits.tokens_per_minute, self._tokens
        assert per_minute is not None
        self._tokens = 0
        with self._ledger.row(self.caller.id) as row:
            row.tokens.fill(per_minute, self._now())
            row.tokens.left -= tokens


def _shown(name: str, bucket: Bucket, per_minute: int) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(per_minute),
        f"x-ratelimit-remaining-{name}": str(max(0, math.floor(bucket.left))),
        f"x-ratelimit-reset-{name}": written(bucket.wait_s(per_minute, per_minute)),
    }


def written(seconds: float) -> str:
    """6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{f'{minutes}m' if minutes else ''}{rest / 1000:.10g}s"
