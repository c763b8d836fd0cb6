"""What the router and the metrics hear of a decode worker's steps and requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.figures import MOST_LENGTHS, SPREADS, DecodeLengths, Lengths
from alignedserve.protocol.messages import ROUTER, Report
from alignedserve.worker.log import Buckets
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.requests import Requests
from alignedserve.worker.step.request import WorkerRequest


class StepCounts:
    """Counts steps: the batches whose members ran together, how far their prefixes lay apart, and the best-effort
    requests that sat out a step for real-time ones.
    """

    def __init__(self) -> None:
        self.by_batches = [0, 0, 0]  # members of no batch (guests alone), of one, of two or more
        self.spread = Buckets(SPREADS)
        self.num_held_back = 0  # best-effort requests that could decode, once for each step

    def count(self, decodes: Sequence[WorkerRequest]) -> None:
        if not decodes:
            return
        batches, prefixes = {running.batch for running in decodes}, [running.prefix for running in decodes]
        self.by_batches[min(len(batches - {0}), 2)] += 1
        self.spread.count(max(prefixes) - min(prefixes))

    def count_held_back(
        self, residents: Iterable[WorkerRequest], decodes: Sequence[WorkerRequest], num_rt_prompts: int
    ) -> None:
        """Count the best-effort residents that a step with real-time requests leaves out."""
        if not num_rt_prompts and not any(running.promise.is_rt for running in decodes):
            return
        chosen = set(decodes)
        left_out = (running for running in residents if running not in chosen)
        self.num_held_back += sum(not running.promise.is_rt for running in left_out)


class LengthsHere:
    """The requests by their lengths, as the live page shows them."""

    def __init__(self, here: Requests) -> None:
        self._here, self._candidates, self._batch = here, here.candidates, here.batch

    @property
    def now(self) -> DecodeLengths:
        seated, number = self._here.with_kv, self._batch.number
        members = [running for running in seated if number and running.batch == number]
        guests = [running for running in seated if not number or running.batch != number]
        return DecodeLengths(
            batch=_lengths((running.prefix, running.promise.is_rt) for running in members),
            guests=_lengths((running.prefix, running.promise.is_rt) for running in guests),
            prompts=_lengths((len(running.request.prompt), running.promise.is_rt) for running in self._here.unfinished),
            waiting=_lengths((waiting.entry.prefix, waiting.is_rt) for waiting in self._candidates.requests),
            coming=_lengths((coming.entry.prefix, coming.is_rt) for coming in self._candidates.batch),
            band=self._batch.band(seated) or span_of(seated),
        )


def span_of(requests: Sequence[WorkerRequest]) -> tuple[int, int] | None:
    """Return the shortest and the longest prefix among these requests."""
    prefixes = [running.prefix for running in requests]
    return (min(prefixes), max(prefixes)) if prefixes else None


def _lengths(requests: Iterable[tuple[int, bool]]) -> Lengths:
    """Return these prefixes by class; each comes with whether its request is real-time."""
    by_class: tuple[list[int], list[int]] = [], []
    for prefix, is_rt in requests:
        by_class[not is_rt].append(prefix)
    rt, be = map(sorted, by_class)
    return Lengths(some_of(rt), some_of(be), len(rt), len(be))


def some_of(ascending: list[int]) -> tuple[int, ...]:
    """Return all of them, or as many as a message has, from the first to the last."""
    most, last = MOST_LENGTHS - 1, len(ascending) - 1
    if last <= most:
        return tuple(ascending)
    return tuple(ascending[at * last // most] for at in range(MOST_LENGTHS))


REPORT_STEPS = 8  # between two reports to the router


class Reporting:
    """Tells the router the load, every few steps."""

    def __init__(self, here: Requests, memory: PlainMemory) -> None:
        self._here, self._batch = here, here.batch
        self._memory, self._steps, self._pace = memory, memory.steps, memory.pace
        self._gives = memory.pace.policy.is_rt_first
        self._reported = 0  # the newest step when the router got a report

    def report(self, now: float) -> list[Command]:
        """Report every few steps, and when there are none."""
        steps = self._steps.number - self._reported
        if not steps or (self._steps.running is not None and steps < REPORT_STEPS):
            return []
        self._reported = self._steps.number
        return [Send(ROUTER, self._report(now))]

    def _report(self, now: float) -> Report:
        here = tuple(self._here.occupants())
        chats = [running.promise for running in here if running.promise.is_rt]
        return Report(
            band=self._batch.band(self._here.with_kv) or span_of(self._here.with_kv),
            free_blocks=self._memory.num_free,
            step_s=self._pace.times.mean_s,
            num_rt=len(chats),
            num_late=sum(promise.is_late(now) for promise in chats),
            given_blocks=sum(len(running.blocks) for running in here if not running.promise.is_rt)
            if self._gives
            else 0,
        )
