"""The requests of a decode worker by their lengths, as the live page shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.decode_worker.requests.band import RunningBatch
from alignedserve.decode_worker.requests.candidates import CandidateLists
from alignedserve.decode_worker.requests.occupancy import Occupancy
from alignedserve.protocol.figures import MOST_LENGTHS, DecodeLengths, Lengths
from alignedserve.worker.step.running import Running


class LengthsHere:
    def __init__(self, here: Occupancy, candidates: CandidateLists, batch: RunningBatch) -> None:
        self._here, self._candidates, self._batch = here, candidates, batch

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


def span_of(requests: Sequence[Running]) -> tuple[int, int] | None:
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
