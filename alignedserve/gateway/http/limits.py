"""Hold each caller to its limits: requests and tokens in a minute, requests open at once.

A request counts when its head has been read, its prompt when it has become tokens, and its output as it arrives. A
caller may begin a request while it has any tokens left. So over a long time it gets its rate, and at most its open
requests more than that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.access.ledger import Bucket, Ledger
from alignedserve.gateway.openai.errors import rate_limited

LUMP = 64  # tokens of output that are written to the ledger together


class Tab:
    """The share of its caller's limits that an HTTP request takes, and its place among the caller's open requests."""

    def __init__(self, ledger: Ledger, caller: Caller, now: Callable[[], float] = time.monotonic) -> None:
        self._ledger, self.caller, self._limits, self._now = ledger, caller, caller.limits, now
        self._has_place = False
        self._tokens = 0  # taken, but not yet written to the ledger

    def enter(self) -> None:
        """Take a request from the caller's limit; raise if none is left."""
        per_minute = self._limits.requests_per_minute
        if per_minute is None:
            return
        with self._ledger.row(self.caller.id) as row:
            row.requests.fill(per_minute, self._now())
            wait_s = row.requests.wait_s(1, per_minute)
            if not wait_s:
                row.requests.left -= 1
        if wait_s:
            raise rate_limited(f"{per_minute} requests in a minute", wait_s)

    def take_place(self) -> None:
        """Take a place for a request for tokens; raise if no place or no token is left."""
        self._check_tokens()
        most = self._limits.most_open
        if most is None:
            return
        with self._ledger.row(self.caller.id) as row:
            self._has_place = row.num_open < most
            row.open_at[self._ledger.place] += self._has_place
        if not self._has_place:
            raise rate_limited(f"{most} requests open at once", 1.0)

    def take(self, tokens: int) -> None:
        """Take tokens of a prompt or an output from the caller's limit."""
        if self._limits.tokens_per_minute is not None:
            self._tokens += tokens
            if self._tokens >= LUMP:
                self._write_tokens()

    def close(self) -> None:
        if self._tokens:
            self._write_tokens()
        if self._has_place:
            self._has_place = False
            with self._ledger.row(self.caller.id) as row:
                row.open_at[self._ledger.place] -= 1

    def headers(self) -> dict[str, str]:
        """Return the headers for the caller's limits, with OpenAI's names and its way of writing times."""
        limits = {"requests": self._limits.requests_per_minute, "tokens": self._limits.tokens_per_minute}
        if limits == {"requests": None, "tokens": None}:
            return {}
        headers: dict[str, str] = {}
        with self._ledger.row(self.caller.id) as row:
            for name, bucket in (("requests", row.requests), ("tokens", row.tokens)):
                if (per_minute := limits[name]) is not None:
                    bucket.fill(per_minute, self._now())
                    headers |= _limit_headers(name, bucket, per_minute)
        return headers

    def _check_tokens(self) -> None:
        per_minute = self._limits.tokens_per_minute
        if per_minute is None:
            return
        with self._ledger.row(self.caller.id) as row:
            row.tokens.fill(per_minute, self._now())
            wait_s = row.tokens.wait_s(1, per_minute)
        if wait_s:
            raise rate_limited(f"{per_minute} tokens in a minute", wait_s)

    def _write_tokens(self) -> None:
        per_minute, tokens = self._limits.tokens_per_minute, self._tokens
        assert per_minute is not None
        self._tokens = 0
        with self._ledger.row(self.caller.id) as row:
            row.tokens.fill(per_minute, self._now())
            row.tokens.left -= tokens


def _limit_headers(name: str, bucket: Bucket, per_minute: int) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(per_minute),
        f"x-ratelimit-remaining-{name}": str(max(0, math.floor(bucket.left))),
        f"x-ratelimit-reset-{name}": format_time(bucket.wait_s(per_minute, per_minute)),
    }


def format_time(seconds: float) -> str:
    """Return a time as OpenAI writes it: 6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{f'{minutes}m' if minutes else ''}{rest / 1000:.10g}s"
