"""Hold each caller to its limits: requests and tokens in a minute, requests and log-probabilities at once.

    head read     a request of the minute, a place, and whether a token is left, of its budgets too; nothing of what
                  only looks or brings: models, files, batches
    body read     a place for each other choice, all log-probabilities and all tokens that the body may cost, of its
                  budgets as many as are left
    choices end   the tokens that it did not use come back; a body that was refused has used none
    answer ends   the places and the log-probabilities come back; the budgets count what was used, and hold no more

A body that sets no limit of output tokens may cost as much as the model's context. It takes USUAL_TOKENS for each
choice before it begins and the rest as they arrive, and all of its choices together get a minute's worth at most. Where
none is left, they end as at a limit: many such bodies together cost what is left, and not a minute's worth each.

Other work of a gateway costs a token for about 50 µs, taken as the work is done. A body pays a minute's worth of it at
most, so that no text or file is too large for its caller for ever.

Lines of batches take the places that bodies leave, and wait for them. Bodies do not count the places of lines: no batch
keeps the chats of its caller out.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal, TypeVar

from alignedserve.core import Request
from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.access.ledger import JOB_RUNNER, Bucket, CallerRow, Ledger
from alignedserve.gateway.openai.errors import ApiError, no_room, rate_limited, try_later

USUAL_TOKENS = 1024  # of an output without a limit, and at most this part of a minute's worth:
USUAL_PART = 8
REFUSALS = range(400, 500)  # statuses with which a body has computed nothing, if it has no output
REFUSALS_PER_S, REFUSALS_AT_ONCE = 50, 100  # of a caller; the answers to those beyond wait, each at most
REFUSAL_WAIT_S = 5.0
BYTES_PER_S, BYTES_AT_ONCE = 16 << 20, 4 << 20  # of a caller's files, at each gateway
LEAST_PIECE = 16 << 10
# Of the event loop's time, for a caller's bodies that take longer than LOOP_FREE_S to parse: fewer than one chat of
# twenty comes meanwhile.
LOOP_SHARE, LOOP_AT_ONCE_S, LOOP_FREE_S = 0.04, 0.04, 0.001
MOST_CHOICES = 32_768  # of all bodies of a gateway: each takes up to 4 KB of it, also where nobody has a key
MOST_HELD_BACK = 1024  # of all callers: each has a connection
LUMP = 64  # tokens of output that are written to the ledger together, beyond those that were taken before
# What a token pays for of other work, each about 50 µs: a tokenizer takes 1 to 3 µs a token, an upload 8 µs a KiB.
# Other servers count tokens for nothing, or for a request of the minute, however long the text is.
CONVERTED_TOKENS = 16  # that are counted, or converted from or to text
FILE_BYTES = 4 << 10
TRIAL_S = 50e-6  # of a processor, for the trial of a grammar
# A row of a list costs the event loop about 10 µs. So do LOOK_BYTES of a kept response.
MOST_ROWS = 100_000  # of a caller in a minute, at each gateway
LOOK_BYTES = 4 << 10

T = TypeVar("T")


class CallerQuota:
    """The share of the caller's limits that an HTTP request takes: places among the open requests, and tokens."""

    def __init__(self, ledger: Ledger, caller: Caller, now: Callable[[], float] = time.monotonic) -> None:
        self._ledger, self.caller, self._limits, self._now = ledger, caller, caller.limits, now
        self._places = self._choices = 0
        self._logprobs = 0  # that are held
        self._logprobs_each, self._foreseen = 0, 0  # of a token; tokens still to come whose log-probabilities are held
        self._taken = self._used = 0  # tokens: taken from the ledger, and used of these or beyond these
        self._worked = 0.0  # tokens that other work costs, before they are rounded and limited
        self._tried = 0  # tokens used for trials, which a refusal does not give back
        self._held = 0  # tokens of its caller's budgets that it holds: used ones, and some to come
        self._counted = 0  # tokens that these budgets have counted
        self.is_over = False  # whether a limit of its caller was reached

    def enter(self) -> None:
        """Take a request of the minute from the caller's limit, for a body to generate or tokenise; raise if none is
        left. As at OpenAI, a look takes none: else a caller that asks for a batch each second would have no chats
        left."""
        per_minute = self._limits.requests_per_minute
        if per_minute is None:
            return
        self._take("requests", per_minute, least=1, cost=1)

    def _take(self, what: Literal["requests", "tokens"], per_minute: int, least: float, cost: float) -> None:
        """Take `cost` from what this minute has left; where less than `least` is left, take nothing and raise."""
        with self._ledger.row(self.caller.id) as row:
            bucket = row.requests if what == "requests" else row.tokens
            bucket.fill(per_minute, self._now())
            wait_s = bucket.wait_s(least, per_minute)
            if not wait_s:
                bucket.left -= cost
        if wait_s:
            raise self._over(f"{per_minute} {what} in a minute", wait_s)

    def _over(self, limit: str, wait_s: float) -> ApiError:
        self.is_over = True
        return rate_limited(limit, wait_s)

    def admit(self) -> None:
        """Take a place for a request before the body is read; raise if no place or token is left."""
        self.need_token()
        self.hold_places(1)

    def need_token(self) -> None:
        """Raise if no token is left."""
        if self._limits.has_budget:
            with self._ledger.row(self.caller.id) as row:
                left = self._left_of_budgets(row)
            if left < 1:
                raise self._over_budget(1)
        self._take_tokens(0, least=1)

    def _left_of_budgets(self, row: CallerRow) -> int:
        return self._ledger.budgets.left(self.caller.id, self._limits) - sum(row.held_at)

    def _over_budget(self, tokens: int) -> ApiError:
        """Return the error of a caller whose budgets have fewer than these tokens, or whose open bodies hold them."""
        if (over := self._ledger.budgets.over(self.caller.id, self._limits, tokens)) is None:
            return self._over("its budget of tokens, and its open requests hold the rest", 1.0)
        self.is_over = True
        budget, wait_s = over  # no client tries for hours
        has = "has used its" if tokens == 1 else f"has fewer than {tokens} tokens left of its"
        message = f"this API key {has} {budget}: there are more in {math.ceil(wait_s / 3600)} h"
        return try_later(429, message, "insufficient_quota", wait_s, headers={"x-should-retry": "false"})

    def hold_places(self, number: int) -> None:
        """Hold this many places until the answer has ended; raise if the caller has fewer left."""
        most = self._limits.most_open
        if most is not None and number > most:
            message = f"the body asks for {number} choices, and this API key may have {most} open at once: "
            raise ApiError(400, message + "send it in parts", code="beyond_key_limit")
        if self.hold_up_to(number, least=number) < number:
            raise self._over(f"{most} requests open at once", 1.0)
        self.hold_choices(number)

    def hold_choices(self, number: int) -> None:
        """Count what this body holds of the gateway's memory until its answer has ended; raise if that is too much."""
        if not self._ledger.choices.take(self.caller, number - self._choices, MOST_CHOICES):
            raise no_room(self.caller, "choices")
        self._choices = number

    def hold_up_to(self, most: int, least: int = 0) -> int:
        """Hold as many places as are left, but no more than `most`, and return their number; hold no more than before
        where fewer than `least` are left."""
        if self._limits.most_open is None:
            return most
        with self._ledger.row(self.caller.id) as row:
            lines = 0 if self._ledger.place == JOB_RUNNER else row.open_at[JOB_RUNNER]
            free = min(most - self._places, self._limits.most_open - (sum(row.open_at) - lines))
            if free > 0 and self._places + free >= least:
                row.open_at[self._ledger.place] += free
                self._places += free
        return self._places

    def hold_logprobs(self, requests: Sequence[Request], has_limit: bool, is_streamed: bool = False) -> None:
        """Hold the log-probabilities that the answer to these requests may have, until the answer ends; raise if the
        caller's other answers leave too few. A stream has sent them already; but those of prompts come together."""
        top = requests[0].sampling.logprobs
        if top is None:
            return
        prompts = sum(len(request.prompt) for request in requests if request.sampling.prompt_logprobs is not None)
        if not is_streamed:
            most = [request.max_tokens for request in requests]
            self._foreseen = sum(most if has_limit else (min(tokens, USUAL_TOKENS) for tokens in most))
            self._logprobs_each = 0 if has_limit else 1 + top
        number, limit = (prompts + self._foreseen) * (1 + top), self._limits.logprobs_at_once
        if number and self._ledger.logprobs[self.caller.id] + number > limit:
            message = f"answers that one caller has open may have {limit} log-probabilities together: "
            message += "try again in 1 s, stream, or ask for fewer"
            raise try_later(429, message, "rate_limit_exceeded", param="logprobs")
        self._hold_logprobs(number)

    def _hold_logprobs(self, number: int) -> None:
        self._ledger.logprobs[self.caller.id] += number
        self._logprobs += number

    def pay(self, requests: Sequence[Request], prompt_tokens: int, has_limit: bool) -> tuple[Request, ...]:
        """Take the tokens that the requests of a body may cost, and return the requests as they may run.

        `has_limit` says whether the client limits their outputs. Raise if the tokens are not left now, or if even a
        whole minute has too few."""
        if requests[0].sampling.prompt_logprobs is not None:  # each choice computes the prompt, and logits of all of it
            prompt_tokens = sum(2 * len(request.prompt) for request in requests)
        self._used += prompt_tokens
        requests = self._within_budgets(requests, has_limit)
        per_minute = self._limits.tokens_per_minute
        if per_minute is None:
            return tuple(requests)
        if has_limit:
            self._take_tokens(prompt_tokens + sum(request.max_tokens for request in requests))
            return tuple(requests)
        most = max(1, (per_minute - prompt_tokens) // len(requests))
        limited = tuple(replace(request, max_tokens=min(request.max_tokens, most)) for request in requests)
        usual = max(1, min(USUAL_TOKENS, per_minute // USUAL_PART))
        self._take_tokens(prompt_tokens + sum(min(request.max_tokens, usual) for request in limited))
        return limited

    def _within_budgets(self, requests: Sequence[Request], has_limit: bool) -> Sequence[Request]:
        """Hold of the caller's budgets what the requests may cost, and return them with as many tokens as are left.
        Raise where the prompts leave none."""
        if not self._limits.has_budget:
            return requests
        is_whole = has_limit or self._ledger.place == JOB_RUNNER  # a line that has begun is not cut
        with self._ledger.row(self.caller.id) as row:
            most = (self._left_of_budgets(row) - self._used) // len(requests)
            limited = [replace(each, max_tokens=min(each.max_tokens, most)) for each in requests]
            if most >= 1:
                sure = most if is_whole else USUAL_TOKENS
                self._hold(row, self._used + sum(min(each.max_tokens, sure) for each in limited))
                return limited
        raise self._over_budget(self._used + len(requests))

    def _hold(self, row: CallerRow, tokens: int) -> None:
        row.held_at[self._ledger.place] += tokens - self._held
        self._held = tokens

    def _hold_more(self) -> bool:
        """Hold the tokens that were used beyond those held, and a lump; return whether any was left."""
        if not self._limits.has_budget:
            return True
        with self._ledger.row(self.caller.id) as row:
            lump = max(0, min(LUMP, self._left_of_budgets(row) - (self._used - self._held)))
            self._hold(row, self._used + lump)
        return lump > 0

    def use(self, tokens: int) -> bool:
        """Count tokens of an output that have arrived, and return whether its caller may have more."""
        self._used += tokens
        self._foreseen -= tokens
        has_room = self._foreseen >= 0 or not self._logprobs_each or self._foresee_more()
        has_minute = self._used <= self._taken or self._take_more()
        return has_room and has_minute and (self._used <= self._held or self._hold_more())

    def _foresee_more(self) -> bool:
        """Hold more log-probabilities; return whether there is room. An answer alone has it: its body was let in."""
        self._hold_logprobs((LUMP - self._foreseen) * self._logprobs_each)
        self._foreseen = LUMP
        held = self._ledger.logprobs[self.caller.id]
        return held <= self._limits.logprobs_at_once or held == self._logprobs

    def _take_more(self) -> bool:
        """Take the tokens that were used beyond those taken, and a lump; return whether any was left."""
        per_minute = self._limits.tokens_per_minute
        if per_minute is None:
            return True
        with self._ledger.row(self.caller.id) as row:
            row.tokens.fill(per_minute, self._now())
            left = row.tokens.left - (self._used - self._taken)
            lump = max(0, min(LUMP, math.floor(left)))
            row.tokens.left = left - lump
        self._taken = self._used + lump
        return lump > 0

    def convert(self, tokens: int) -> None:
        """Pay for tokens that were counted, or converted."""
        self._work(tokens / CONVERTED_TOKENS)

    def receive(self, num_bytes: int) -> None:
        """Pay for bytes of a file that have arrived."""
        self._work(num_bytes / FILE_BYTES)

    def try_grammars(self, trials: Sequence[float]) -> None:
        """Pay for trials of grammars that took these seconds of a processor, also where the body is refused for what
        they found. Each costs a token at least: some systems measure short times as 0."""
        self._tried += self._work(sum(max(1.0, cpu_s / TRIAL_S) for cpu_s in trials))

    def _work(self, tokens: float) -> int:
        """Take tokens for other work, however few are left, and return their number."""
        if not tokens or (self._limits.tokens_per_minute is None and not self._limits.has_budget):
            return 0
        most = self._limits.tokens_per_minute or sys.maxsize
        before, self._worked = self._worked, self._worked + tokens
        cost = min(most, math.ceil(self._worked)) - min(most, math.ceil(before))
        self._used += cost
        if self._used > self._taken:
            self._settle(self._used)
        return cost

    def settle(self) -> None:
        """Give the tokens back that the body did not use: all of its choices have ended."""
        self._settle(self._used)

    def close(self, is_refused: bool = False) -> None:
        """Give back the places, the log-probabilities and the unused tokens: all but those of trials where the body
        was refused."""
        used = self._tried if is_refused else self._used
        self._settle(used)
        if used != self._counted and self._limits.has_budget:
            self._ledger.budgets.use(self.caller.id, used - self._counted)
            self._counted = used
        self._hold_logprobs(-self._logprobs)
        self._ledger.choices.give(self.caller, self._choices)
        self._choices = 0
        if self._places or self._held:
            with self._ledger.row(self.caller.id) as row:
                row.open_at[self._ledger.place] -= self._places
                self._hold(row, 0)
            self._places = 0

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
                    headers[f"x-ratelimit-limit-{name}"] = str(per_minute)
                    headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.left)))
                    headers[f"x-ratelimit-reset-{name}"] = format_time(bucket.wait_s(per_minute, per_minute))
        return headers

    def _take_tokens(self, cost: int, least: int = 0) -> None:
        """Take tokens; raise, and take none, where fewer are left than these or than `least`."""
        per_minute = self._limits.tokens_per_minute
        if per_minute is None:
            return
        if cost > per_minute:
            message = f"the body may cost {cost} tokens, and this API key is limited to {per_minute} in a minute: "
            message += "ask for fewer tokens or choices, or send a shorter prompt"
            raise ApiError(400, message, code="beyond_key_limit")
        self._take("tokens", per_minute, max(cost, least), cost)
        self._taken += cost

    def _settle(self, tokens: int) -> None:
        """Make the tokens that are taken this many."""
        per_minute = self._limits.tokens_per_minute
        if per_minute is None or tokens == self._taken:
            return
        with self._ledger.row(self.caller.id) as row:
            row.tokens.fill(per_minute, self._now())
            row.tokens.left -= tokens - self._taken
        self._taken = tokens


class Pace:
    """Spaces out what a caller does: after a rest `at_once` of it, then `per_s` in a second."""

    def __init__(self, per_s: float, at_once: float, most_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """A caller waits for `most_s` at most."""
        self._per_s, self._at_once, self._most_s, self._now = per_s, at_once, most_s, now
        self._due_at: dict[str, float] = {}  # caller -> when all that it has done so far is paid for

    def wait_s(self, caller: str, amount: float = 1.0) -> float:
        """Count an amount, and return how long it waits."""
        now = self._now()
        began_at = max(self._due_at.get(caller, -math.inf), now - self._at_once / self._per_s)
        self._due_at[caller] = min(began_at + amount / self._per_s, now + self._most_s)
        return max(0.0, self._due_at[caller] - now)


class RefusalPace(Pace):
    """Space out the refusals of a caller: a program that sends what is refused in a loop, which costs it nothing, would
    take a processor from all others."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(REFUSALS_PER_S, REFUSALS_AT_ONCE, REFUSAL_WAIT_S, now)
        self._num_held = 0

    async def hold_back(self, caller: str) -> None:
        """Wait until the next refusal of this caller may be sent."""
        wait_s = self.wait_s(caller)
        if not wait_s or self._num_held >= MOST_HELD_BACK:
            return
        self._num_held += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._num_held -= 1


class BytePace(Pace):
    """Space out the bytes of a caller's files, up and down: the event loop and the disk move some 100 MB in a second,
    and a chat waits behind each piece."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(BYTES_PER_S, BYTES_AT_ONCE, math.inf, now)

    async def take(self, caller: str, num_bytes: int) -> None:
        """Wait until the caller may move these bytes, one turn of the event loop at least. A small piece counts as
        LEAST_PIECE, since that is what it costs."""
        await asyncio.sleep(self.wait_s(caller, max(num_bytes, LEAST_PIECE)))


class LoopPace(Pace):
    """Spaces out the bodies of a caller by what parsing them takes of the event loop: all others wait meanwhile, for
    0.3 s where a body of 4 MB has nothing but small objects."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(LOOP_SHARE, LOOP_AT_ONCE_S, math.inf, now)
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[float]:
        """Hold the caller's turn at parsing: one at a time, after these seconds."""
        async with self._turns[caller]:
            yield self.wait_s(caller, 0.0)

    def measured(self, caller: str, parse: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            return parse()
        finally:
            self.wait_s(caller, max(0.0, time.thread_time() - began - LOOP_FREE_S))


class LookPace:
    """Limits what a caller looks up in a minute: a look takes no request of its key, and a large one costs the event
    loop as much as an answer."""

    def __init__(self, most: int, what: str, now: Callable[[], float] = time.monotonic) -> None:
        """A caller may look up `most` of `what` in a minute."""
        self._most, self._what, self._now = most, what, now
        self._left = defaultdict[str, Bucket](Bucket)  # by caller; there are few
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)

    def take(self, caller: str, number: int) -> None:
        """Count a look of this caller; raise if a minute's worth is used up. The last look may go beyond it."""
        left = self._left[caller]
        left.fill(self._most, self._now())
        if wait_s := left.wait_s(1, self._most):
            raise rate_limited(f"{self._most} {self._what} in a minute", wait_s)
        left.left -= number

    @asynccontextmanager
    async def turn(self, caller: str, is_paced: bool = True) -> AsyncIterator[None]:
        """Hold the caller's turn at a look whose cost is taken once it is known: one at a time, since each may be
        large. Raise if a minute's worth is used up, where that counts."""
        async with self._turns[caller]:
            if is_paced:
                self.take(caller, 0)
            yield


def format_time(seconds: float) -> str:
    """Return a time as OpenAI writes it: 6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{f'{minutes}m' if minutes else ''}{rest / 1000:.10g}s"
