"""What a request was promised: when its next token is due, how much slack that leaves, and its place in the order.

A real-time request (RT) has a due for the first token, and for every token after:

    arrival ── ttft ──▶ due ·· first token ── tbt ──▶ due ·· next token ── tbt ──▶ due ··

A best-effort request (BE) has a completion window, cut into an equal allowance for each of its n steps. The dues do not
move, whenever steps end:

    arrival ─ jct/n ─▶ due 1 ─ jct/n ─▶ due 2 ─ ... ─▶ due n = arrival + jct

So a step that ends late leaves less time to the next step, a step that ends early leaves more, and the whole never
takes longer than was promised (AccelGen §4.3). Slack is the time until the due less the work before it (BROS §4.1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import ceil, inf
from typing import ClassVar

from alignedserve.core import Due, Request, ServiceClass
from alignedserve.scheduling.lengths import expected, num_outlived, outlived, planned
from alignedserve.scheduling.levels import INTERRUPTED, STEP_PROMPT, Level
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import Late, Standing, StepTimes, Work

DECAY = 0.4  # factor of a request's value, and of how soon the next token is due, at each miss (Apt-Serve §5)
MOST_MISSES = 4  # misses in a row that count
BEHIND = 1 << 80  # more than the priorities of requests differ by


def decays(late: Late) -> bool:
    """Return whether the due of a late chat moves from miss to miss, so that the chat stops pushing others aside.

    Gain, eight seeds: over capacity, 2xcolocated, long prompts +1.3 points (error 0.5), short chats +1.3 (0.8); on 24
    other loads 0 to +0.6. Beside a flood on a CPU single seeds spread from -2.9 to +15.6."""
    return late is Late.DECAY


def late_of(request: Request, policy: Policy) -> Late:
    """Return how a late chat is treated. One that asked for nothing waits in line: if it is late, those behind it in
    the line do not overtake it."""
    return Late.KEEP if decays(policy.late) and not request.slo.is_asked else policy.late


class Promise(ABC):
    """The promise of a request. The part that has the request tells the promise what has happened."""

    __slots__ = ("request",)
    # Plain attributes, because step selection reads them for many requests at every step:
    is_rt: ClassVar[bool] = False
    next_due_at: float = inf  # when the next token of a real-time request is due, though that may have passed
    tbt_s: float = inf  # planned time between two tokens of a real-time request
    num_missed: int = 0  # dues that a real-time request has missed in a row
    has_missed: bool = False  # whether this worker knows of a missed due

    def __init__(self, request: Request) -> None:
        self.request = request

    @abstractmethod
    def is_late(self, now: float) -> bool: ...

    @abstractmethod
    def due_at(self, now: float) -> float:
        """Return when the next token is due."""

    @property
    def due(self) -> Due | None:
        """Return the state that goes with the request to another part."""
        return None

    @abstractmethod
    def emitted(self, now: float, num_output: int) -> None:
        """Count a token, the `num_output`-th of the output."""

    def served(self, now: float) -> None:  # noqa: B027  (most promises have no levels)
        """Note that a step with this request has ended."""

    @abstractmethod
    def changes_at(self, now: float) -> float:
        """Return when the request's place among others changes by itself: when the due passes, for example."""

    def chunk_ran(self) -> None:  # noqa: B027  (most promises do not count steps)
        """Count a chunk of the prompt that was not the last."""

    @abstractmethod
    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        """Return all that the request's place in the order depends on."""

    def step_room_s(self, now: float, steps: int, step_s: float, alone_s: float) -> float:
        """Return how long the coming step may take so that the request, which needs `steps` steps, is in time.

        R, the bound of a step, is the least over all real-time requests. The coming step itself is not subtracted: the
        question is whether that step fits. A request that is late, or would be late even alone in a step, sets no bound
        (AccelGen §4.2).
        """
        return inf


class TokenPromise(Promise):
    """The promise of a real-time request: every token has a due. Preemptions move no due: only emitted tokens do.

    With `slo_scale` below 1 a due comes earlier than promised. Where the token is not there by then, the due moves to
    the promised time: only after that the request is late.
    """

    __slots__ = (
        *("_allowance_s", "_counts_chunks", "_expected", "_grace", "_grace_s", "_late", "_num_output"),
        *("has_missed", "is_behind", "next_due_at", "num_missed", "tbt_s"),
    )
    is_rt = True
    is_behind: bool  # whether the prompt is beyond its caller's part: behind all other real-time requests

    def __init__(self, request: Request, policy: Policy, num_output: int, due: Due | None = None) -> None:
        """Go on from the `due` of another worker; without a due, the last token of an earlier attempt counts."""
        super().__init__(request)
        self._expected, self._num_output = expected(request, policy).mean, num_output
        self._late, self._counts_chunks = late_of(request, policy), policy.ordering.counts_chunks
        self.tbt_s = self._allowance_s = policy.slo_scale * request.slo.tbt_s
        last_at, planned_s = request.emitted_at, self.tbt_s
        if last_at is None and not (due and num_output):
            last_at, planned_s = request.arrival_at, policy.slo_scale * request.slo.ttft_s
        self._grace = 1 / policy.slo_scale - 1  # of each allowance: from the planned due to the promised due
        self._grace_s = 0.0 if due and due.num_missed else self._grace * planned_s  # of the next due
        if due is None:
            assert last_at is not None
            due, self._allowance_s = Due(last_at + planned_s + self._grace_s), planned_s
        self.next_due_at = due.at - self._grace_s  # `due_at` moves a due that has passed
        self.num_missed = due.num_missed
        self.has_missed = due.num_missed > 0
        self.is_behind = False

    @property
    def due(self) -> Due:
        """Return the promised due: another part plans for an earlier one itself."""
        return Due(self.next_due_at + self._grace_s, self.num_missed)

    def due_at(self, now: float) -> float:
        """Return when the next token is due; a promised due that has passed counts as a miss here."""
        if now > self.next_due_at and self._has_passed(now) and decays(self._late):
            self._miss(now)
        return self.next_due_at

    def changes_at(self, now: float) -> float:
        return self.due_at(now)

    def is_late(self, now: float) -> bool:
        return self.num_missed > 0 or (now > self.next_due_at and self._has_passed(now))

    def _has_passed(self, now: float) -> bool:
        """Return whether the promised due has passed; this due counts once the planned due has passed."""
        self.next_due_at, self._grace_s = self.next_due_at + self._grace_s, 0.0
        return now > self.next_due_at

    @property
    def worth(self) -> float:
        """Return the factor of the request's value (Apt-Serve §5)."""
        return DECAY**self.num_missed if decays(self._late) else 1.0

    def emitted(self, now: float, num_output: int) -> None:
        """Count a token that reached the client, and set the next due."""
        self._num_output = num_output
        self._allowance_s = next_s = self.tbt_s
        if now <= self.next_due_at or not self._has_passed(now):
            self.num_missed, self.next_due_at, self._grace_s = 0, now + next_s, self._grace * next_s
        elif decays(self._late):
            self._miss(now)
        else:
            self.num_missed, self.next_due_at, self.has_missed = self.num_missed + 1, now + next_s, True

    def _miss(self, now: float) -> None:
        self.num_missed, self.has_missed = min(self.num_missed + 1, MOST_MISSES), True
        self.next_due_at = now + self._allowance_s / DECAY**self.num_missed

    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        slack_s = self.due_at(now) - now - work.seconds(times, self._counts_chunks)
        request, behind = self.request, 0
        if self.is_behind:
            slack_s, behind = inf, BEHIND
        whole = outlived(self._expected, request.max_tokens, self._num_output)
        return Standing(
            request.id,
            request.service,
            slack_s,
            request.arrival_at,
            self.is_late(now),
            request.priority + behind,
            0,
            0.0,
            work.prompt + max(1, whole - self._num_output),
            work.prompt > 0,
            now,
        )

    def step_room_s(self, now: float, steps: int, step_s: float, alone_s: float) -> float:
        due_at = self.next_due_at
        if now > due_at:
            due_at = self.due_at(now)
        room_s = due_at - now - (steps - 1) * step_s
        if room_s < alone_s:
            room_s += self._grace_s
        return inf if self.num_missed or room_s < alone_s else room_s


class Yielding(Promise):
    """The promise of a real-time request that is beyond its caller's part of the seats (caller_shares.py).

    Beyond that part the request is served like best-effort requests. Dues pass meanwhile."""

    __slots__ = ("kept",)

    def __init__(self, kept: Promise) -> None:
        super().__init__(kept.request)
        self.kept = kept

    @property
    def due(self) -> Due | None:
        return self.kept.due

    def due_at(self, now: float) -> float:
        return self.kept.due_at(now)

    def changes_at(self, now: float) -> float:
        return inf

    def is_late(self, now: float) -> bool:
        return False

    def emitted(self, now: float, num_output: int) -> None:
        self.kept.emitted(now, num_output)

    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        standing = self.kept.standing(now, work, times)
        standing.service, standing.slack_s, standing.is_late = ServiceClass.BE, inf, False
        return standing


class StepPromise(Promise):
    """The promise of a best-effort request: a plan of n steps over the completion window, with a fixed end.

    The plan has as many tokens as the prior says: by the predicted length a long request would be urgent from the
    start, and all others would wait. When a request outlives the plan, the remaining steps are spaced over the
    remaining time.
    """

    def __init__(self, request: Request, policy: Policy, num_output: int) -> None:
        super().__init__(request)
        self._expected = outlived(expected(request, policy).mean, request.max_tokens, num_output)
        self._planned = outlived(planned(request, policy), request.max_tokens, num_output)
        self._num_output = num_output
        self._early_chunks = ceil(len(request.prompt) / policy.expected_chunk) - 1  # the last chunk samples a token
        self._from_at, self._end_at = request.arrival_at, request.arrival_at + request.slo.jct_s
        self._from_step, self._steps = 0, max(1, self._early_chunks + self._planned)
        self._num_done = self._early_chunks + num_output if num_output else 0
        self._level = Level(request.arrival_at, policy.age_s)

    def due_at(self, now: float) -> float:
        """Return when the next step is due; once the plan has run out, the end of the window."""
        steps, ahead = self._steps - self._from_step, self._num_done + 1 - self._from_step
        if ahead > steps:
            ahead = steps
        return self._from_at + ahead * (self._end_at - self._from_at) / steps

    def emitted(self, now: float, num_output: int) -> None:
        self._num_done, self._num_output = self._early_chunks + num_output, num_output
        self._level.served(now)
        most = self.request.max_tokens
        if (whole := outlived(self._expected, most, num_output)) != self._expected:
            self._expected = whole
            self._level.num_outlived += 1
        if (whole := outlived(self._planned, most, num_output)) != self._planned:
            self._planned = whole
            left = max(1, whole - num_output)
            if left != self._steps - self._num_done:
                self._from_at, self._from_step = min(now, self._end_at), self._num_done
                self._steps = self._num_done + left

    def served(self, now: float) -> None:
        self._level.served(now)

    def changes_at(self, now: float) -> float:
        rises_at = self._level.rises_at(now)
        return rises_at if now > self._end_at else min(self._end_at, rises_at)

    def chunk_ran(self) -> None:
        if self._num_done < self._early_chunks:  # recomputed chunks were counted before
            self._num_done += 1

    def is_late(self, now: float) -> bool:
        return now > self._end_at

    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        """Preemptions take too little of the slack to count (docs/how/steps.md)."""
        request = self.request
        remaining = work.prompt + max(1, self._early_chunks + self._expected - self._num_done)
        has_begun = self._num_output > 0
        is_interrupted = has_begun and work.prompt > 0
        return Standing(
            request.id,
            request.service,
            self.due_at(now) - now - times.most_s,
            request.arrival_at,
            now > self._end_at,
            request.priority,
            INTERRUPTED if is_interrupted else self._level.at(now, remaining, has_begun),
            work.transfer_s,
            remaining,
            work.prompt > 0,
            now,
        )


class _Levelled(Promise):
    """A promise by the steps that the request is predicted to take; each doubling of the prediction is a level.

    A request ages from the arrival on, served or not: no step takes a request down from a level that was reached by
    age. Each part reckons the level from the arrival, so that no message carries it.
    """

    __slots__ = ()
    _aged: Level
    _predicted: int
    _num_output: int

    def _begin(self, request: Request, policy: Policy) -> None:
        self._aged, self._predicted = Level(request.arrival_at, policy.age_s), expected(request, policy).mean

    def changes_at(self, now: float) -> float:
        return self._aged.rises_at(now)

    def standing(self, now: float, work: Work, times: StepTimes) -> Standing:
        standing = super().standing(now, work, times)  # pyrefly: ignore[abstract-method-call]
        predicted, num_output = self._predicted, self._num_output
        left = outlived(predicted, self.request.max_tokens, num_output) - num_output
        standing.remaining = steps = work.prompt // STEP_PROMPT + max(1, left)
        self._aged.num_outlived = num_outlived(predicted, num_output)
        standing.level = self._aged.at(now, steps)
        return standing


class LevelledTokens(_Levelled, TokenPromise):
    __slots__ = ("_aged", "_predicted")

    def __init__(self, request: Request, policy: Policy, num_output: int, due: Due | None) -> None:
        super().__init__(request, policy, num_output, due)
        self._begin(request, policy)


class LevelledSteps(_Levelled, StepPromise):
    def __init__(self, request: Request, policy: Policy, num_output: int) -> None:
        super().__init__(request, policy, num_output)
        self._begin(request, policy)


def promise(request: Request, policy: Policy, num_output: int = 0, due: Due | None = None) -> Promise:
    """Return the promise of a request with `num_output` tokens; `due` is the state that another part left."""
    has_levels = policy.ordering.has_levels
    if request.service is ServiceClass.RT:
        return (LevelledTokens if has_levels else TokenPromise)(request, policy, num_output, due)
    return (LevelledSteps if has_levels else StepPromise)(request, policy, num_output)
