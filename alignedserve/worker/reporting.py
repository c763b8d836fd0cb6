"""What a worker tells the router: whether it takes requests, which it has, which moved on, the work left, figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from math import inf

from alignedserve.protocol.commands import Command, End, Send
from alignedserve.protocol.events import MemberJoined, MemberLost, Received
from alignedserve.protocol.figures import MOST_LENGTHS, ByClass, DecodeLengths, DecodeSteps, Lengths, WorkerLoad
from alignedserve.protocol.messages import ROUTER, Attempt, Figures, Holding, Inquire, Report, Reserve, Retire
from alignedserve.scheduling.dues import Promise
from alignedserve.worker.owners import Outputs
from alignedserve.worker.part import FormPart, Worker, WorkerPart
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State
from alignedserve.worker.steps import PromptRate

_COUNTS_S = 1.0  # between two messages with figures
_REPORT_STEPS = 8  # between two reports to the router
_WITHOUT_NEXT_TOKEN = frozenset((State.KEPT, State.ABANDONED))


class RouterLink(WorkerPart):
    """Tells the router which requests are here, which have moved on, how much is left to run, and the worker's load;
    and the gateways, by way of the router, what metrics show."""

    def __init__(self, worker: Worker, outputs: Outputs, elsewhere: FormPart) -> None:
        super().__init__(worker)
        self._outputs, self._elsewhere, self.rate = outputs, elsewhere, PromptRate(worker)
        self._reported = 0  # the newest step when the router got a report
        self._reported_chats = 0  # in that report
        self._told: Figures | None = None
        self._told_at = 0.0

    def retire(self, message: Retire, frame: Received, now: float) -> None:
        self._here.is_retiring = True
        self._told_at = -inf  # the worker may end in this turn

    def reserve(self, message: Reserve, frame: Received, now: float) -> list[Command]:
        self._here.is_reserved = message.is_on
        return [self._holding()] if message.is_on else []

    def router_lost(self, event: MemberLost, now: float) -> None:
        self._here.is_reserved = False  # the router's next life says so again

    def inquired(self, message: Inquire, frame: Received, now: float) -> list[Command]:
        """Tell the router which attempts are not here; where the pool asks, release its pages for them."""
        held = set(self._here.attempts())
        unknown = [attempt for attempt in message.attempts if attempt not in held]
        if frame.sender == ROUTER or self._pool.member is None:
            for attempt in unknown:
                self._notes.note("unknown", attempt)
            return []
        settled = self.settled
        left = [attempt for attempt in unknown if attempt not in settled]
        return [command for attempt in left for command in self._holds.decline(attempt, now)]

    def router_joined(self, event: MemberJoined, now: float) -> list[Command]:
        self._notes.renew()
        if self._told is not None:
            self._told, self._told_at = None, -inf  # this router knows nothing of what was told
        return [self._holding()]

    @property
    def settled(self) -> set[Attempt]:
        """Return the ended attempts with an answer on the way to the pool."""
        copied = [copy.running for copy in self._writer.copies if copy.has_ended]
        return {running.key for running in (*copied, *self._here.kept)}

    def repeat(self, to: str) -> list[Command]:
        return [self._holding()] if to == ROUTER else []

    def _holding(self) -> Command:
        held = tuple(self._here.attempts())
        waiting = tuple(running.key for running in self._here.among(State.WAITING))
        free, here = self._memory.num_free, self._here
        return Send(ROUTER, Holding(held, free, here.is_retiring, here.is_reserved, waiting))

    def report(self, now: float) -> list[Command]:
        """Tell the router what is new, if anything."""
        progress = self._notes.report(partial(self.rate.backlog, now), self._memory.num_free, now)
        return [] if progress is None else [Send(ROUTER, progress)]

    def end(self, now: float) -> list[Command]:
        """End the worker if it retires and is idle: all requests have gone on, and the owners have the tokens."""
        is_idle = self._here.is_retiring and self._steps.running is None and not self._outputs.num_kept
        return [End()] if is_idle and not self._here.attempts() else []

    # --- The load, for the router

    def report_load(self, now: float) -> list[Command]:
        """Report every few steps, when there are none, and when the last chat has left without a step."""
        steps = self._steps.number - self._reported
        if self._steps.running is not None:
            is_due = steps >= _REPORT_STEPS
        else:
            is_due = steps > 0 or (self._reported_chats > 0 and not self._chats())
        if not is_due:
            return []
        self._reported = self._steps.number
        here, gives, chats = self._here.occupants(), self._policy.is_rt_first, self._chats()
        self._reported_chats = len(chats)
        report = Report(
            band=self._band(self._here.with_kv),
            free_blocks=self._memory.num_free,
            step_s=self._pace.times.mean_s,
            num_rt=len(chats),
            num_late=sum(promise.is_late(now) for promise in chats),
            given_blocks=sum(len(running.blocks) for running in here if gives and not running.promise.is_rt),
        )
        return [Send(ROUTER, report)]

    def _chats(self) -> list[Promise]:
        """Return the promises of chats whose next token is to come: of others the last lateness would stay for ever."""
        promises = [running.promise for running in self._here.occupants() if running.state not in _WITHOUT_NEXT_TOKEN]
        return [promise for promise in promises if promise.is_rt]

    def _band(self, seated: Sequence[WorkerRequest]) -> tuple[int, int] | None:
        """Return the shortest and the longest prefix of the batch that runs, or else of all requests."""
        prefixes = [running.prefix for running in seated]
        return self._batch.band(seated) or ((min(prefixes), max(prefixes)) if prefixes else None)

    # --- Metrics

    def tell(self, now: float) -> list[Command]:
        """Tell what is new, about once a second while anything happens; the refresh timer wakes an idle worker."""
        if now - self._told_at < _COUNTS_S:
            return []
        counts, self._told_at = self._counts, now
        steps = DecodeSteps(
            tuple(counts.by_batches),
            counts.spread.tally,
            counts.num_switches,
            held_back=counts.num_held_back,
            pauses=counts.num_pauses,
            grouped=counts.num_grouped,
        )
        figures = Figures(
            num_refused=self._counts.num_refused,
            num_failed_transfers=self._counts.num_failed_transfers,
            steps=self._elsewhere.counted(steps),
            lengths=self._lengths(),
            slowdown=self._pace.fit.slowdown,
            worker=self._load(now),
            promise=self._pace.promise(now),
        )
        if figures == self._told:
            return []
        self._told = figures
        return [Send(ROUTER, figures)]

    def _lengths(self) -> DecodeLengths:
        """Return the requests by length, as the live page shows them."""
        seated, number = self._here.with_kv, self._batch.number
        members = [running for running in seated if number and running.batch == number]
        guests = [running for running in seated if not number or running.batch != number]
        return DecodeLengths(
            batch=_by_length((running.prefix, running.promise.is_rt) for running in members),
            guests=_by_length((running.prefix, running.promise.is_rt) for running in guests),
            prompts=_by_length((len(of.request.prompt), of.promise.is_rt) for of in self._here.unfinished),
            waiting=_by_length((of.running.prefix, of.is_rt) for of in self._candidates.requests),
            coming=_by_length((of.running.prefix, of.is_rt) for of in self._candidates.batch),
            band=self._band(seated),
        )

    def _load(self, now: float) -> WorkerLoad:
        queue, counts = self._queue.waiting, self._counts
        running = [running.promise for running in self._here.seated]
        moving = self._here.of(State.FETCHING, State.JOINING, State.RECEIVING, State.ASKING, State.CANDIDATE)
        coming = [running.promise for running in moving]
        here, elsewhere = _by_class(running), _by_class(coming)
        in_queue = [waiting.promise for waiting in queue.real_time]
        dues = [promise.due_at(now) for promise in chain(running, coming, in_queue) if promise.is_rt]
        return WorkerLoad(
            here,
            ByClass(len(in_queue) + elsewhere.rt, len(queue) - len(in_queue) + elsewhere.be),
            used=1 - self._memory.free_share,
            slack_s=min(dues) - now if dues else None,
            step_tokens=counts.step_tokens.tally,
            step_s=counts.step_s.tally,
            step_ratio=counts.step_ratio.tally,
            length_ratio=counts.length_ratio.tally,
            preempted=counts.preempted,
            is_retiring=self._here.is_retiring,
        )


def _by_class(promises: Sequence[Promise]) -> ByClass:
    num_rt = sum(promise.is_rt for promise in promises)
    return ByClass(num_rt, len(promises) - num_rt)


def _by_length(requests: Iterable[tuple[int, bool]]) -> Lengths:
    """Return these prefixes by class; each comes with whether the request is real-time."""
    by_class: tuple[list[int], list[int]] = [], []
    for prefix, is_rt in requests:
        by_class[not is_rt].append(prefix)
    rt, be = map(sorted, by_class)
    return Lengths(some_of(rt), some_of(be), len(rt), len(be))


def some_of(ascending: list[int]) -> tuple[int, ...]:
    """Return all the numbers, or as many as a message may have, spread from the first to the last."""
    most, last = MOST_LENGTHS - 1, len(ascending) - 1
    if last <= most:
        return tuple(ascending)
    return tuple(ascending[at * last // most] for at in range(MOST_LENGTHS))
