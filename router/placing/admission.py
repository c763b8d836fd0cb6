"""Admission decides whether the router takes a new request, and when a refused client should come again (429).

The router refuses a request that passes one of these bounds:

    most open       the number of all open requests
    queues          for each class: the number of requests that have not begun, and the tokens of these prompts
    first token     of a real-time request: too late because of the prompts before and of the decodes beside. In
                    a burst the token may be several times too late; once the queue stands, not at all
    answers         real-time answers would stand still for lack of memory
    patience        of a chat that asked for no promise, in place of the two bounds above: its first token would come
                    later than the server's patience allows, or five times the time of its prompt

Where there are several callers, each has a part, by its weight, of what may be open and of both queues, and with chats
of the prompts' time and of the memory: what others have beyond theirs gives way to a caller that stays within its own,
here and on workers. For example, of a queue of 50 places each of two callers finds 25, also where the other has taken
all 50; the queue then holds 75. At twice its bound a queue takes nobody beyond it.

Lines of batch jobs are in no queue: they wait in their store, and the job runner keeps only few here (jobs/shares.py).
A refused client should come again when there will be room, as predicted, after earlier refused clients. Clients that
come again may wait for longer, so that the two retries of the usual clients are enough: with a patience of 60 s, one
that would wait for 170 s is told 60 s, and then finds 110 s to wait, of at most 120.

Memory is looked at to the end of answers (answers.py): a chat is refused if all chats together would want more than
decode workers have before they end. Best-effort requests do not count: they give memory to real-time requests. Later
attempts are never refused: the request was admitted before.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from alignedserve.core import KEEPS_ALL, Rejection, Request, Retention, ServiceClass
from alignedserve.router.placing.answers import NO_SHORTAGE, Shortage
from alignedserve.router.placing.held import Holdings
from alignedserve.router.placing.line import Lines, Turn, before_in_turns
from alignedserve.router.placing.recent import MovingSum
from alignedserve.scheduling.policy import Policy

PATIENCE_S = 60.0
MAX_OVERCOMMIT = 2  # the bounds, of all callers together
_MAX_RETURNING = 4096  # clients that are remembered; from there on each is told the longest time anyway
_RECENT_S = 30.0  # ends so long ago count half
_SOON_S = 1.0  # the shortest wait that a client is asked for ...
_LATEST_S = 60.0  # ... and the longest: OpenAI's own client ignores a longer Retry-After
_PATIENT_PROMPTS = 5  # times as long as its prompt alone takes: a chat in line may wait so long in any case
_MOST_TRIES = 2  # that make a client's patience longer: as often as OpenAI's and Anthropic's clients come again
_NAMED = {ServiceClass.RT: "chats", ServiceClass.BE: "best-effort requests"}
# A queue that empties now and then is a burst: its requests are served, if late. A queue that stands is too much load:
# without refusals every request would be late.
_CALM = 0.1  # of the wait that a ttft leaves: such a wait is next to none
_SURE = 0.7  # of that wait: predictions are off by as much
_OVERLOAD_S = 30.0  # overload ends this long after the last refusal
_STANDING_S = 2.0  # a queue stands that was not calm for this time ...
_STANDING_PROMPTS = 5  # ... and for the time of five prompts like the new prompt


class Returns(NamedTuple):
    """All requests that are to come again."""

    requests: int = 0
    tokens: int = 0  # of their prompts


_NONE = Returns()


class Returning:
    """Clients of one class that were refused and told when to come again, until that time has come.

    These clients come before clients that are refused later. So of many clients refused at once, each is told a later
    time, and they do not all come back at the same moment.
    """

    def __init__(self) -> None:
        self._expected: list[tuple[float, int]] = []  # a heap: (time, tokens of the prompt)
        self._tokens = 0

    def add(self, at: float, tokens: int) -> None:
        if len(self._expected) < _MAX_RETURNING:
            heapq.heappush(self._expected, (at, tokens))
            self._tokens += tokens

    def before(self, now: float) -> Returns:
        """Return what is still to come again, and forget clients whose time has come."""
        while self._expected and self._expected[0][0] <= now:
            self._tokens -= heapq.heappop(self._expected)[1]
        return Returns(len(self._expected), self._tokens)


@dataclass(frozen=True, slots=True)
class Bound:
    """The bounds of a queue."""

    requests: int = 1 << 40
    tokens: int = 1 << 40  # tokens of the prompts


@dataclass(frozen=True, slots=True)
class Queues:
    rt: Bound = Bound()
    be: Bound = Bound()

    @classmethod
    def of_chats(cls, requests: int, tokens: int) -> Queues:
        """Return the bounds of both queues, given those of chats: a batch may wait longer."""
        return cls(Bound(requests, tokens), Bound(2 * requests, 4 * tokens))

    def bound(self, service: ServiceClass) -> Bound:
        return self.rt if service is ServiceClass.RT else self.be


@dataclass(slots=True)  # made for every request and worker, and a frozen one takes three times as long
class WorkAhead:
    """The work before a new request, on the worker that would run it."""

    prompts_s: float = 0.0  # until the request's prompt begins, and how much longer it takes beside other work
    prompt_s: float = 0.0  # time of the request's prompt
    token_s: float = 0.0  # time of a prompt token on that worker
    memory: int = 0  # tokens that all decode workers hold; 0: not known
    num_workers: int = 1  # workers that share the prompts
    worker: str | None = None  # that would run the request
    loaded_s: float = 0.0  # time of the request's prompt there, behind and beside what the worker has
    shortage: Shortage = NO_SHORTAGE  # of memory, before all chats' answers have ended
    held: int = 0  # tokens that requests hold there, those that run before the request

    @property
    def takes_s(self) -> float:
        """Return the time of the request's prompt there, at least that which it takes alone."""
        return max(self.prompt_s, self.loaded_s)


NOTHING_AHEAD = WorkAhead()


def is_infeasible(request: Request, ahead: WorkAhead) -> bool:
    """Return whether the prompt alone takes longer than the time to the first token that was promised."""
    return request.service is ServiceClass.RT and ahead.prompt_s > request.slo.ttft_s


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: Rejection
    why: str
    retry_after_s: float


@dataclass(slots=True)
class _CallerLoad:
    """What a caller has of one class, or all callers together."""

    weight: int = 0
    num_open: int = 0
    num_queued: int = 0  # of the open ones: those that have not begun
    tokens_queued: int = 0  # of their prompts
    tokens_begun: int = 0  # of prompts that were queued and have begun

    def queue(self, tokens: int, number: int = 1) -> None:
        self.num_queued += number
        self.tokens_queued += number * tokens


class _ClassLoad:
    """The open requests of one class, by caller."""

    def __init__(self) -> None:
        self.of: dict[str, _CallerLoad] = {}  # caller -> what it has: something is open
        self.all = _CallerLoad()
        self._has_begun: dict[str, bool] = {}  # request that was queued -> whether it has begun

    @property
    def weights(self) -> dict[str, int]:
        return {caller: load.weight for caller, load in self.of.items()}

    def own(self, caller: str) -> _CallerLoad:
        return self.of.get(caller) or _CallerLoad()

    def open(self, request: Request) -> None:
        self.of.setdefault(request.caller, _CallerLoad()).weight = request.weight
        for load in self._counted(request):
            load.num_open += 1

    def queue(self, request: Request) -> None:
        if request.id not in self._has_begun:
            self._has_begun[request.id] = False
            for load in self._counted(request):
                load.queue(len(request.prompt))

    def begin(self, request: Request) -> None:
        if self._has_begun.get(request.id) is False:
            self._has_begun[request.id] = True
            for load in self._counted(request):
                load.queue(len(request.prompt), -1)
                load.tokens_begun += len(request.prompt)

    def close(self, request: Request) -> None:
        self.begin(request)
        has_begun = self._has_begun.pop(request.id, False)
        for load in self._counted(request):
            load.num_open -= 1
            load.tokens_begun -= len(request.prompt) * has_begun
        if not self.of[request.caller].num_open:
            del self.of[request.caller]

    def _counted(self, request: Request) -> tuple[_CallerLoad, _CallerLoad]:
        return self.of[request.caller], self.all


class Admission:
    """Decides about new requests; the router tells when a request opens, begins and closes."""

    def __init__(
        self,
        policy: Policy,
        most_open: int,
        queues: Queues,
        retention: Retention = KEEPS_ALL,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._policy, self._most_open, self._queues, self._patience_s = policy, most_open, queues, patience_s
        self.lines = Lines()  # of chats that asked for nothing
        self.holdings = Holdings(policy, retention)  # memory that all open requests will need
        self.ends = MovingSum(_RECENT_S)  # requests that got the whole output
        self._loads = {service: _ClassLoad() for service in ServiceClass}
        self._returning = {service: Returning() for service in ServiceClass}
        self._calm_at = 0.0  # when a real-time request last found next to no work, or nobody came for long
        self._asked_at = -inf  # when the last real-time request came
        self._overloaded_until = 0.0

    @property
    def num_open(self) -> int:
        return len(self.holdings)

    def opened(self, request: Request) -> None:
        """Count the request; a later attempt or another estimate takes the place of the earlier one."""
        if self.holdings.held_by(request.id) is None:
            self._loads[request.service].open(request)
        self.holdings.put(request)

    def queued(self, request: Request) -> None:
        self._loads[request.service].queue(request)

    def began(self, request: Request) -> None:
        """Take the request out of the queue: the prompt runs, or has run."""
        self._loads[request.service].begin(request)

    def closed(self, request: Request) -> None:
        """Forget the request after any end."""
        self.lines.leave(request.id)
        if self.holdings.remove(request.id) is not None:
            self._loads[request.service].close(request)

    def refusal(self, request: Request, ahead: WorkAhead, now: float, is_line: bool = False) -> Refusal | None:
        """Return why the router cannot admit a new request, or None."""
        if request.slo.strict and is_infeasible(request, ahead):  # to come again later would not help
            why = f"its prompt alone takes {ahead.prompt_s:.2g} s, and its ttft is {request.slo.ttft_s:g} s: ask for a"
            why += " longer slo.ttft_ms, for service_tier flex, or not for slo.strict"
            return Refusal(Rejection.INFEASIBLE, why, _SOON_S)
        before = self._returning[request.service].before(now)
        refusal = self._too_many(request, before, now)
        refusal = refusal or (None if is_line else self._queue_full(request, ahead, before))
        if request.service is ServiceClass.RT and self._policy.refuse_ttfts:
            refusal = refusal or self._overload(request, ahead, before, now)
        if refusal is None:
            return None
        retry_after_s = min(_LATEST_S, max(_SOON_S, refusal.retry_after_s))
        if not is_line:  # the job runner sends fewer lines then
            self._returning[request.service].add(now + retry_after_s, len(request.prompt))
        return replace(refusal, retry_after_s=retry_after_s)

    # --- When a first token comes

    def first_token_s(self, request: Request, ahead: WorkAhead, before: Returns = _NONE) -> float:
        """Predict the seconds until the request's first token, after the requests of `before`, which come again
        earlier."""
        returning_s = before.tokens * ahead.token_s / ahead.num_workers
        beside_s = min(ahead.prompts_s, max(0.0, ahead.loaded_s - ahead.prompt_s))
        queue_s = ahead.prompts_s - beside_s
        return queue_s * self._part_before(request, ahead, queue_s) + beside_s + returning_s + ahead.prompt_s

    def turn(self, request: Request, ahead: WorkAhead, now: float, before: Returns = _NONE) -> Turn:
        """Predict when the turn of a chat in line comes, after the chats of `before`, which come again earlier."""
        line = self.lines.of(ahead.worker)
        turn = line.turn(request, ahead.takes_s, now)
        returning_s = before.tokens * ahead.token_s / ahead.num_workers
        wait_s, first_s = turn.wait_s + returning_s, turn.first_s + returning_s
        if not line.is_known:
            first_s = self.first_token_s(request, ahead, before)
            wait_s = first_s - ahead.prompt_s
        return Turn(turn.num_before + before.requests, wait_s, first_s)

    def _part_before(self, request: Request, ahead: WorkAhead, queue_s: float) -> float:
        """Return the part of the prompts on the worker, of `queue_s`, that runs before the prompt of a new chat.

        Workers give each caller a part of a step by its weight (caller_shares.py). So until the chat's prompt is
        through, no other caller of this weight has more of its own computed than the chat's caller, this prompt
        included. That holds for prompts that have begun, too. How much is left of these is what the worker's prompts
        take beyond those that wait, divided as the prompts that have begun were long: for example, of 2,000 tokens a
        caller with 6,000 tokens of prompts that have begun has 1,500, and a caller with 2,000 has 500. The router does
        not know which of them are through: a caller whose chats only decode counts with their prompts."""
        load = self._loads[ServiceClass.RT]
        if request.service is not ServiceClass.RT or load.of.keys() <= {request.caller}:
            return 1.0
        begun, share = load.all.tokens_begun, 0.0
        if begun and ahead.token_s:
            token_s = ahead.token_s * max(1.0, ahead.loaded_s / ahead.prompt_s if ahead.prompt_s else 1.0)
            left = queue_s * ahead.num_workers / token_s - load.all.tokens_queued
            share = min(1.0, max(0.0, left / begun))
        sizes = [(caller, of.tokens_queued + of.tokens_begun * share, of.weight) for caller, of in load.of.items()]
        own = sum(size for caller, size, _ in sizes if caller == request.caller)
        before = own + before_in_turns(sizes, request, own + len(request.prompt))
        return before / all_tokens if (all_tokens := sum(size for _, size, _ in sizes)) else 1.0

    # --- Bounds

    def _is_within(self, wanted: float, capacity: float, request: Request, weights: Mapping[str, int]) -> bool:
        """Return whether the request's caller stays within its part: what others have beyond theirs gives way then.
        `weights` are those of callers that have something of it."""
        others = sum(weight for caller, weight in weights.items() if caller != request.caller)
        return others > 0 and wanted <= capacity * request.weight / (others + request.weight)

    def _too_many(self, request: Request, before: Returns, now: float) -> Refusal | None:
        if self.num_open < self._most_open:
            return None
        loads = self._loads.values()
        weights = {caller: weight for load in loads for caller, weight in load.weights.items()}
        own = sum(load.own(request.caller).num_open for load in loads)
        is_within = self._is_within(own + 1, self._most_open, request, weights)
        if is_within and self.num_open < MAX_OVERCOMMIT * self._most_open:
            return None
        rate = self.ends.rate(now)
        why = f"the server is full: {self.num_open} requests are open, and at most {self._most_open} may be"
        return Refusal(Rejection.OPEN, why, (1 + before.requests) / rate if rate else _SOON_S)

    def _queue_full(self, request: Request, ahead: WorkAhead, before: Returns) -> Refusal | None:
        """Refuse a request if the queue is full.

        The queue takes `prompts_s`, and has room again when the excess has begun.
        """
        service, size = request.service, len(request.prompt)
        bound, load = self._queues.bound(service), self._loads[service]
        num, tokens = load.all.num_queued, load.all.tokens_queued
        is_bounded = num < MAX_OVERCOMMIT * bound.requests and tokens < MAX_OVERCOMMIT * bound.tokens
        own, weights = load.own(request.caller), {of: each.weight for of, each in load.of.items() if each.num_queued}
        is_within = self._is_within(own.num_queued + 1, bound.requests, request, weights) and (
            not own.tokens_queued or self._is_within(own.tokens_queued + size, bound.tokens, request, weights)
        )
        if is_bounded and is_within:  # a first prompt may be of any length
            return None
        if num >= bound.requests:
            why = f"the server is full: {num} {_NAMED[service]} wait, and at most {bound.requests} may"
            return Refusal(Rejection.QUEUED, why, ahead.prompts_s * (num + 1 - bound.requests + before.requests) / num)
        if num and tokens + size > bound.tokens:  # a single prompt waits for no other
            why = f"the server is full: {_NAMED[service]} with {tokens} tokens of prompts wait, and {size} more would"
            why += f" pass {bound.tokens}"
            return Refusal(
                Rejection.QUEUED, why, ahead.prompts_s * (tokens + size - bound.tokens + before.tokens) / tokens
            )
        return None

    # --- Overload

    def _overload(self, request: Request, ahead: WorkAhead, before: Returns, now: float) -> Refusal | None:
        """Refuse a chat because of the load."""
        if request.slo.is_asked:
            return self._too_late(request, ahead, before, now) or self._too_long(request, ahead)
        return self._beyond_patience(request, ahead, before, now)

    def _beyond_patience(self, request: Request, ahead: WorkAhead, before: Returns, now: float) -> Refusal | None:
        """Refuse a chat that asked for nothing, and would wait in line for longer than the server's patience.

        Clients that were told to come again go before newcomers, in what half of the patience leaves: some never come,
        and the line must not empty while newcomers are refused for them."""
        tries = min(request.tries, _MOST_TRIES)
        most_s = (1 + tries) * max(self._patience_s, _PATIENT_PROMPTS * ahead.prompt_s)
        turn = self.turn(request, ahead, now)
        if not tries and turn.first_s > most_s / 2:
            turn = self.turn(request, ahead, now, before)
        if turn.first_s <= most_s:
            return None
        why = f"the server is full: with {turn.num_before} chats before it, its first token would come in about"
        why += f" {turn.first_s:.0f} s, and it may wait for {most_s:.0f} s (--patience-s)"
        return Refusal(Rejection.LATE, why, turn.first_s - most_s)

    def _too_late(self, request: Request, ahead: WorkAhead, before: Returns, now: float) -> Refusal | None:
        """Refuse a real-time request that others make late.

        The request's own time never counts: a prompt that alone takes longer than the ttft is late on an idle server
        too.
        """
        ttft_s, alone_s = request.slo.ttft_s, ahead.prompt_s
        # Chats in line have later dues, and let one pass that asked for less time.
        in_line_s = self.lines.of(ahead.worker).takes_s
        wait_s = max(0.0, self.first_token_s(request, ahead) - alone_s - in_line_s)
        usual_s = max(ttft_s, alone_s)
        left_s = ttft_s - alone_s if alone_s < ttft_s else usual_s
        is_calm = ahead.prompts_s <= _CALM * left_s  # for all callers, not for this one alone
        if now - self._asked_at > _OVERLOAD_S or is_calm:
            self._calm_at = now
        self._asked_at = now
        is_standing = now - self._calm_at > max(_STANDING_S, _STANDING_PROMPTS * alone_s)
        is_overloaded = is_standing or now < self._overloaded_until
        most_s = _SURE * left_s if is_overloaded else self._policy.refuse_ttfts * usual_s
        callers = self._loads[ServiceClass.RT].of
        if wait_s <= most_s or (callers and request.caller not in callers):  # what makes it late is all of others
            return None
        self._overloaded_until = now + _OVERLOAD_S
        why = f"the server is full for this promise: it would wait {wait_s:.2f} s for others, and may wait"
        why += f" {most_s:.2f} s with its ttft of {ttft_s:g} s; come again later, or ask for a longer slo.ttft_ms or"
        why += " service_tier flex"
        again_s = self.first_token_s(request, ahead, before) - alone_s - in_line_s - most_s
        return Refusal(Rejection.LATE, why, again_s)

    def _too_long(self, request: Request, ahead: WorkAhead) -> Refusal | None:
        """Refuse a chat if answers, of this chat or others, would stand still for lack of memory. A caller may have its
        part of the decode workers' memory, as its chats need on average what all do."""
        if ahead.shortage.tokens <= 0:
            return None
        load = self._loads[ServiceClass.RT]
        own = self.holdings.rt_tokens * load.own(request.caller).num_open / max(1, load.all.num_open)
        if self._is_within(own + self.holdings.marginal_tokens(request), ahead.memory, request, load.weights):
            return None
        why = "the server is full: its answer and those of other chats would want"
        why += f" {ahead.shortage.tokens:.0f} tokens of memory more than there are; come again later, or ask for fewer"
        why += " max_tokens or service_tier flex"
        return Refusal(Rejection.LATE, why, ahead.shortage.after_s)
