"""The job runner's core: which lines of which jobs run now, and what becomes of the jobs.

    Found ─▶ Check ─▶ Save(IN_PROGRESS) ─▶ Index ─▶ Run, Run, ... ─▶ Save(FINALIZING) ─▶ Assemble(COMPLETED)
                └──▶ Save(FAILED)                     │  window over ─▶ Assemble(EXPIRED)
                                                      └─ cancelled ───▶ Assemble(CANCELLED)

It holds nothing that the store does not: a runner that starts anew finds the open jobs, and goes on with the lines that
have no result. Whatever an order comes to, a job waits for it in one phase; where it came to nothing (Undone), the job
is looked at anew as the store has it then.

A line is open from its Run until its result is Kept, so results that cannot be written hold up the lines after them.
Its deadline is paced: of the time that the job has left, the part that falls to the lines now open. A job with
ample time asks for nothing; one that has to hurry says so in the deadlines of its lines.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from heapq import heappop, heappush

from alignedserve.core import Estimate
from alignedserve.jobs.exchange import (
    Assemble,
    Check,
    Checked,
    Drop,
    Fact,
    Found,
    Index,
    Indexed,
    Keep,
    Kept,
    LeaseLost,
    LeaseTaken,
    LineEnded,
    LineRuns,
    Order,
    Outcome,
    Run,
    Save,
    Saved,
    Tell,
    Undone,
)
from alignedserve.jobs.rate import Rate
from alignedserve.jobs.shares import Demand, finishes, shares
from alignedserve.jobs.window import FIRST, Window
from alignedserve.protocol.commands import SetTimer
from alignedserve.protocol.events import TimerFired
from alignedserve.store.job import Forecast, Job, LineResult, Status

TICK_S = 1.0  # between two looks at the time and at how everybody gets on
TELL_S = 2.0
STEADY_S, STEADY_SHARE = 10.0, 0.02  # so long, or such a part of its window, a job looks late before that is said
RETRIES = 5  # of a line, after failures that may pass
MOST_BACKOFF_S = 60.0
LEAST_JCT_S = 1.0
PRIOR_TOKENS = 512.0  # of a line's prompt and output, while none has ended
AIM, LAST_LINES = 0.9, 1.25  # of its window is when a job is to be through; the times of a line before it ends
LEARNING = 0.1  # the share that a line has in the mean of how long lines take
TELLING = 8  # lines that have ended before they tell the lengths of the others
_REMEMBERED = 256  # of the lengths
_TICK = "tick"


class Phase(Enum):
    NEW = "new"  # to be looked at
    WAITING = "waiting"  # for what an order comes to
    RUNNING = "running"


@dataclass
class _Line:
    opened_at: float
    has_place: bool = False


@dataclass
class _Open:
    job: Job
    phase: Phase = Phase.NEW
    pending: array[int] = field(default_factory=partial(array, "I"))  # lines, the next one last
    later: list[tuple[float, int]] = field(default_factory=list)  # (when it is tried again, line), a heap
    running: dict[int, _Line] = field(default_factory=dict)  # those that are open
    tries: dict[int, int] = field(default_factory=dict)  # of lines that have failed
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # of outputs
    num_ended: int = 0  # here
    num_tokens: int = 0  # of them, prompts and outputs
    rate: Rate | None = None
    looks_late_since: float | None = None

    @property
    def window_s(self) -> float:
        return self.job.expires_at - self.job.created_at

    def aim(self, line_s: float) -> float:
        """Who is opened last is to be through too."""
        return self.job.expires_at - max((1 - AIM) * self.window_s, LAST_LINES * line_s)

    @property
    def num_left(self) -> int:
        return len(self.pending) + len(self.later) + len(self.running)

    @property
    def tokens_per_line(self) -> float | None:
        return self.num_tokens / self.num_ended if self.num_ended else None

    @property
    def estimate(self) -> Estimate | None:
        """Of an output, by those of its other lines (algorithms §3)."""
        if len(self.lengths) < TELLING:
            return None
        ordered = sorted(self.lengths)
        mean = max(1, round(sum(ordered) / len(ordered)))
        return Estimate(mean, max(mean, ordered[int(0.9 * (len(ordered) - 1))]))


class RunnerCore:
    def __init__(self, most_open: int, retries: int) -> None:
        self._retries = retries
        self._window = Window(most_open)
        self._jobs: dict[str, _Open] = {}
        self._is_active = False
        self._rate: Rate | None = None  # of all lines together
        self._line_s = 0.0  # from its Run to its end, on average of late
        self._told_at = 0.0
        self._is_ticking = False

    def handle(self, fact: Fact, now: float) -> list[Order]:
        orders: list[Order] = []
        match fact:
            case LeaseTaken():
                self._is_active = True
            case LeaseLost():
                self._is_active = False
                orders += [Drop(id) for id in self._jobs]
                self._jobs.clear()
            case Found(jobs) if self._is_active:
                orders += self._found(jobs, now)
            case Checked(id) if one := self._jobs.get(id):
                orders += self._checked(one, fact, now)
            case Indexed(id, lines) if one := self._jobs.get(id):
                one.phase, one.pending, one.rate = Phase.RUNNING, array("I", reversed(lines)), Rate(now)
                orders += self._through(one, now)
            case Saved(job) if one := self._jobs.get(job.id):
                one.job, one.phase = job, Phase.NEW
                orders += self._look_at(one, now)
            case Undone(id) if one := self._jobs.get(id):
                one.phase = Phase.NEW
            case LineRuns(id, line) if (one := self._jobs.get(id)) and line in one.running:
                self._placed(one.running[line], now)
            case LineEnded(id, line) if (one := self._jobs.get(id)) and line in one.running:
                orders += self._ended(one, fact, now)
            case Kept(id, lines) if one := self._jobs.get(id):
                for line in lines:
                    one.running.pop(line, None)
                orders += self._through(one, now)
            case TimerFired():
                self._is_ticking = False
                orders += self._ticked(now)
        return [*orders, *self._open_lines(now), *self._tick(now)]

    @property
    def num_open(self) -> int:
        """Lines."""
        return sum(len(one.running) for one in self._jobs.values())

    @property
    def held(self) -> dict[str, int]:
        """What is taken now; nothing when no job is open."""
        return {"jobs": len(self._jobs), "lines": self.num_open}

    # --- Jobs

    def _found(self, jobs: Iterable[Job], now: float) -> list[Order]:
        orders: list[Order] = []
        for job in jobs:
            one = self._jobs.setdefault(job.id, _Open(job))
            if job.revision >= one.job.revision:
                one.job = job
            if one.phase is Phase.RUNNING and job.status is Status.CANCELLING:
                orders += self._stop(one, Status.CANCELLED)
            elif one.phase is Phase.NEW:
                orders += self._look_at(one, now)
        return orders

    def _look_at(self, one: _Open, now: float) -> list[Order]:
        """What is to be done for a job that waits for nothing."""
        job = one.job
        if not job.is_open:
            del self._jobs[job.id]
            return []
        one.phase = Phase.WAITING
        match job.status:
            case Status.CANCELLING:
                return [Assemble(job, Status.CANCELLED)]
            case Status.FINALIZING:
                return [Assemble(job, Status.COMPLETED)]
            case _ if now >= job.expires_at:
                return [Assemble(job, Status.EXPIRED)]
            case Status.VALIDATING:
                return [Check(job)]
        return [Index(job)]

    def _checked(self, one: _Open, verdict: Checked, now: float) -> list[Order]:
        if verdict.problems:
            return [Save(one.job.moved(Status.FAILED, now, problems=verdict.problems))]
        return [Save(one.job.moved(Status.IN_PROGRESS, now, total=verdict.total, model=verdict.model))]

    def _through(self, one: _Open, now: float) -> list[Order]:
        if one.phase is not Phase.RUNNING or one.num_left:
            return []
        one.phase = Phase.WAITING
        return [Save(one.job.moved(Status.FINALIZING, now))]

    def _stop(self, one: _Open, status: Status) -> list[Order]:
        """With what is done. What its open lines still say is not waited for."""
        one.phase = Phase.WAITING
        del one.pending[:]
        one.later.clear()
        one.running.clear()
        return [Drop(one.job.id), Assemble(one.job, status)]

    # --- Lines

    def _ended(self, one: _Open, ended: LineEnded, now: float) -> list[Order]:
        if ended.outcome is Outcome.REFUSED:
            self._window.refused(self.num_open, ended.retry_after_s, now)
            del one.running[ended.line]
            one.pending.append(ended.line)
            return []
        assert ended.result is not None
        self._window.ended()
        tries = one.tries.get(ended.line, 0)
        if ended.outcome is Outcome.FAILED and tries < self._retries:
            del one.running[ended.line]
            one.tries[ended.line] = tries + 1
            heappush(one.later, (now + max(ended.retry_after_s, min(MOST_BACKOFF_S, 2.0**tries)), ended.line))
            return []
        one.tries.pop(ended.line, None)
        line = one.running[ended.line]
        if ended.result.is_ok:  # an error comes soon, and says nothing of places
            self._placed(line, now)
        line.has_place = True  # it is not among those that wait
        self._learn(one, ended.result, now - line.opened_at, now)
        return [Keep(one.job.id, ended.result)]

    def _placed(self, line: _Line, now: float) -> None:
        if not line.has_place:
            line.has_place = True
            self._window.placed(now - line.opened_at)

    def _learn(self, one: _Open, result: LineResult, took_s: float, now: float) -> None:
        tokens = result.input_tokens + result.output_tokens
        if not result.is_ok or one.rate is None:
            return
        one.lengths.append(max(1, result.output_tokens))
        one.num_ended += 1
        one.num_tokens += tokens
        one.rate.add(tokens, now)
        self._line_s += LEARNING * (took_s - self._line_s)
        if self._rate is None:  # counted from here: with the time until the first has ended all would look too slow
            self._rate = Rate(now)
        else:
            self._rate.add(tokens, now)

    def _open_lines(self, now: float) -> list[Order]:
        """As long as there is room, of the job that has least of its share."""
        orders: list[Order] = []
        self._due_again(now)
        num_open = self.num_open
        num_running = sum(line.has_place for one in self._jobs.values() for line in one.running.values())
        share: dict[str, float] | None = None
        while self._window.may_open(num_open, num_running, now) and (ready := list(self._ready())):
            share = share or shares(list(self._demands()), self._tokens_per_s(now), now)
            one = min(ready, key=lambda one: _furthest_behind(one, share))
            orders.append(self._run(one, now))
            num_open += 1
        if not num_open:
            self._rate = None
        return orders

    def _ready(self) -> Iterator[_Open]:
        return (one for one in self._jobs.values() if one.phase is Phase.RUNNING and one.pending)

    def _run(self, one: _Open, now: float) -> Run:
        num_left = one.num_left
        line = one.pending.pop()
        one.running[line] = _Line(now)
        left_s = one.job.expires_at - now
        jct_s = max(LEAST_JCT_S, left_s * min(1.0, max(FIRST, len(one.running)) / num_left))
        return Run(one.job, line, jct_s, one.estimate)

    def _due_again(self, now: float) -> None:
        for one in self._jobs.values():
            while one.later and one.later[0][0] <= now:
                one.pending.append(heappop(one.later)[1])

    # --- How they get on

    def _tick(self, now: float) -> list[Order]:
        if self._is_ticking or not self._jobs:
            return []
        self._is_ticking = True
        return [SetTimer(_TICK, now + TICK_S)]

    def _ticked(self, now: float) -> list[Order]:
        over = [one for one in self._jobs.values() if one.phase is Phase.RUNNING and now >= one.job.expires_at]
        orders = [order for one in over for order in self._stop(one, Status.EXPIRED)]
        if now - self._told_at >= TELL_S:
            self._told_at = now
            orders += self._tell(now)
        return orders

    def _tell(self, now: float) -> list[Order]:
        tokens_per_s = self._tokens_per_s(now)
        through = finishes(list(self._demands()), tokens_per_s, now) if tokens_per_s else {}
        told: dict[str, Forecast] = {}
        for one in self._jobs.values():
            if one.rate is None or one.phase is not Phase.RUNNING:
                continue
            finish_at = through.get(one.job.id)
            is_late = self._is_late(one, finish_at, now)
            told[one.job.id] = Forecast(now, one.rate.per_s(now) or 0.0, finish_at, is_late)
        return [Tell(told)] if told else []

    def _is_late(self, one: _Open, finish_at: float | None, now: float) -> bool:
        """As it looks for some time: the first lines take their time, and what is known of them is little. Where none
        has ended for a good part of the window, there is no room for it."""
        if finish_at is None:
            assert one.rate is not None
            return now - one.rate.began_at > max(STEADY_S, (1 - AIM) * one.window_s)
        if finish_at <= one.job.expires_at:
            one.looks_late_since = None
            return False
        one.looks_late_since = now if one.looks_late_since is None else one.looks_late_since
        return now - one.looks_late_since >= min(STEADY_S, STEADY_SHARE * one.window_s)

    def _tokens_per_s(self, now: float) -> float | None:
        return self._rate.per_s(now) if self._rate is not None else None

    def _demands(self) -> Iterator[Demand]:
        """What nobody knows yet of a job is taken from the others."""
        known = [tokens for one in self._jobs.values() if (tokens := one.tokens_per_line) is not None]
        usual = sum(known) / len(known) if known else PRIOR_TOKENS
        for one in self._jobs.values():
            if one.phase is Phase.RUNNING and one.num_left:
                tokens = one.num_left * (one.tokens_per_line or usual)
                yield Demand(one.job.id, one.job.expires_at, one.aim(self._line_s), one.job.weight, tokens)


def _furthest_behind(one: _Open, share: dict[str, float]) -> tuple[bool, float, float, str]:
    """Its open lines over its share; who has no share comes last, by deadline."""
    due = share[one.job.id]
    return due <= 0, (len(one.running) + 1) / due if due > 0 else 0.0, one.job.expires_at, one.job.id
