"""Whether a new request is taken in, and when to come again if it is not (429 with Retry-After).

    most open       of all requests, whatever becomes of them
    queues          one for each class, bounded in requests and in tokens, of those that have not begun
    first token     of a real-time request, predicted: it waits for prompts before it, and for memory

Lines of batch jobs are in no queue: they wait in their store, and their runner keeps few of them here (jobs/window.py).
Who is refused is to come again when there is room for it, as predicted, after those that were told so before it.

Memory is reckoned with as much as all real-time requests together hold in nine of ten moments (holdings.py). While that
is more than the decode workers have, the next one waits until enough of it has come free, as fast as it came free
lately. Best-effort ones do not count: they give their memory to real-time ones.
Later attempts are never refused: their clients have been told yes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import log

from alignedserve.config.config import ServerConfig
from alignedserve.core import Request, ServiceClass
from alignedserve.router.placing.holdings import Holdings
from alignedserve.router.placing.returning import Returning, Returns
from alignedserve.scheduling.policy import Policy

_RECENT_S = 30.0  # in which what came free counts half
_SOON_S = 1.0  # the least that a client is asked to wait ...
_LATEST_S = 60.0  # ... and the most: OpenAI's own client passes over a longer Retry-After
_NONE = Returns()


@dataclass(frozen=True, slots=True)
class Bound:
    """Of a queue."""

    requests: int = 1 << 40
    tokens: int = 1 << 40  # of their prompts


@dataclass(frozen=True, slots=True)
class Queues:
    rt: Bound = Bound()
    be: Bound = Bound()

    def of(self, service: ServiceClass) -> Bound:
        return self.rt if service is ServiceClass.RT else self.be


_BE_REQUESTS, _BE_TOKENS = 2, 4  # best-effort requests that may wait, times the chats: a batch may wait longer


def queues_of(server: ServerConfig) -> Queues:
    """Return the bounds of both queues: the settings are those of real-time requests."""
    requests, tokens = server.max_queue, server.max_queue_tokens
    return Queues(Bound(requests, tokens), Bound(_BE_REQUESTS * requests, _BE_TOKENS * tokens))


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a new request finds before it, on the worker that would have it."""

    prompts_s: float = 0.0  # until its own prompt begins
    prompt_s: float = 0.0  # what that takes
    token_s: float = 0.0  # what a token of any prompt takes there
    memory: int = 0  # tokens, of all decode workers; 0: not known
    num_workers: int = 1  # that run prompts, and share those that come


@dataclass(frozen=True, slots=True)
class Refusal:
    why: str
    retry_after_s: float


class Freed:
    """How fast something came free lately, as a moving sum in which old is forgotten."""

    def __init__(self) -> None:
        self._sum, self._since, self._at = 0.0, 0.0, 0.0

    def add(self, amount: int, now: float) -> None:
        if not self._sum:
            self._since = self._at = now
        self._sum = self._left(now) + amount
        self._at = now

    def rate(self, now: float) -> float:
        """In a second; 0 before there was any for some time."""
        seen_s = _RECENT_S / log(2) * (1 - 0.5 ** ((now - self._since) / _RECENT_S))
        return self._left(now) / seen_s if self._sum and seen_s >= _SOON_S else 0.0

    def _left(self, now: float) -> float:
        return self._sum * float(0.5 ** ((now - self._at) / _RECENT_S))


class Admission:
    """Told of every request that opens, begins and closes."""

    def __init__(self, policy: Policy, most_open: int, queues: Queues) -> None:
        self._policy, self._most_open, self._queues = policy, most_open, queues
        self._holdings = Holdings(policy)  # of all that are open
        self._queued: dict[str, Request] = {}  # of them, those that have not begun
        self._num_queued: Counter[ServiceClass] = Counter()
        self._tokens_queued: Counter[ServiceClass] = Counter()
        self._freed = Freed()  # memory of real-time ones
        self._ends = Freed()  # of requests
        self._returning = {service: Returning() for service in ServiceClass}

    @property
    def num_open(self) -> int:
        return len(self._holdings)

    @property
    def memory_wanted(self) -> int:
        """Tokens, by all open requests."""
        return self._holdings.tokens

    @property
    def rt_memory_wanted(self) -> int:
        """By real-time ones."""
        return self._holdings.rt_tokens

    def opened(self, request: Request) -> None:
        """Also a later attempt, which takes the place of the one before it; and one with another estimate."""
        self._holdings.put(request)

    def queued(self, request: Request) -> None:
        if request.id not in self._queued:
            self._queued[request.id] = request
            self._num_queued[request.service] += 1
            self._tokens_queued[request.service] += len(request.prompt)

    def began(self, request: str) -> None:
        """Its prompt runs, or is through: it waits in no queue of ours."""
        one = self._queued.pop(request, None)
        if one is not None:
            self._num_queued[one.service] -= 1
            self._tokens_queued[one.service] -= len(one.prompt)

    def ended(self, request: Request, now: float) -> None:
        """It has its whole output: its memory is free. It closes too."""
        self._ends.add(1, now)
        if request.service is ServiceClass.RT:
            self._freed.add(self._holdings.rt_freed_by(request.id), now)

    def closed(self, request: Request) -> None:
        """However that came."""
        self.began(request.id)
        self._holdings.remove(request.id)

    def ends_per_s(self, now: float) -> float:
        """Requests, lately."""
        return self._ends.rate(now)

    def refusal(self, request: Request, ahead: Ahead, now: float, is_line: bool = False) -> Refusal | None:
        """Why a new request cannot be taken in."""
        before = self._returning[request.service].before(now)
        refusal = self._too_many(before, now) or (None if is_line else self._queue_full(request, ahead, before))
        refusal = refusal or self._too_late(request, ahead, before, now)
        if refusal is None:
            return None
        retry_after_s = min(_LATEST_S, max(_SOON_S, refusal.retry_after_s))
        if not is_line:  # its runner asks for fewer of them
            holds = self._holdings.usual(request)
            self._returning[request.service].told(now + retry_after_s, len(request.prompt), holds)
        return replace(refusal, retry_after_s=retry_after_s)

    def first_token_s(self, request: Request, ahead: Ahead, now: float, before: Returns = _NONE) -> float:
        """From now, as predicted, after those who come again before it: prompts and memory are waited for at the same
        time."""
        theirs_s = before.tokens * ahead.token_s / ahead.num_workers
        return max(ahead.prompts_s + theirs_s, self._memory_s(request, ahead, before, now)) + ahead.prompt_s

    def _too_many(self, before: Returns, now: float) -> Refusal | None:
        if self.num_open < self._most_open:
            return None
        rate = self._ends.rate(now)
        why = f"{self.num_open} requests are open, the limit is {self._most_open}"
        return Refusal(why, (1 + before.requests) / rate if rate else _SOON_S)

    def _queue_full(self, request: Request, ahead: Ahead, before: Returns) -> Refusal | None:
        """It is through in `prompts_s`: room is there when as much of it as is too much has begun."""
        service = request.service
        bound, num, tokens = self._queues.of(service), self._num_queued[service], self._tokens_queued[service]
        if num >= bound.requests:
            why = f"{num} {service.value} requests wait, the limit is {bound.requests}"
            over = num + 1 - bound.requests + before.requests
            return Refusal(why, ahead.prompts_s * over / num)
        if num and tokens + len(request.prompt) > bound.tokens:  # one alone waits for nobody
            why = f"{tokens} tokens of {service.value} prompts wait, {len(request.prompt)} more pass {bound.tokens}"
            over = tokens + len(request.prompt) - bound.tokens + before.tokens
            return Refusal(why, ahead.prompts_s * over / tokens)
        return None

    def _too_late(self, request: Request, ahead: Ahead, before: Returns, now: float) -> Refusal | None:
        if request.service is not ServiceClass.RT or not self._policy.refuse_ttfts:
            return None
        most_s, predicted_s = self._policy.refuse_ttfts * request.slo.ttft_s, self.first_token_s(request, ahead, now)
        if predicted_s <= most_s:
            return None
        why = f"its first token is predicted in {predicted_s:.1f} s, more than {self._policy.refuse_ttfts:g} times"
        why += f" its ttft of {request.slo.ttft_s:g} s"
        return Refusal(why, self.first_token_s(request, ahead, now, before) - most_s)

    def _memory_s(self, request: Request, ahead: Ahead, before: Returns, now: float) -> float:
        """Until it finds room for itself."""
        lacks = self._holdings.rt_with_one_more(request) + before.memory - ahead.memory
        rate = self._freed.rate(now)
        return lacks / rate if ahead.memory and lacks > 0 and rate > 0 else 0.0
