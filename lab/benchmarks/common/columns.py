"""The columns of every table of simulated loads: `row_of(load) -> Row`.

A load with documents alone has the times of these in the columns of chats. Chats of a stream named `flood` count as
documents: they are another key's, and what the load asks is how the others fare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from time import process_time
from typing import Any, TypeAlias

from alignedserve.core import ServiceClass
from alignedserve.lab.benchmarks.common.simulating import record_of
from alignedserve.lab.loads.figures.request_figures import (
    attains,
    gaps_s,
    normalised_latency_s,
    requests_of_class,
    ttft_s,
)
from alignedserve.lab.loads.records.distribution import Distribution, ratio, share
from alignedserve.lab.loads.records.records import RequestRecord, RunRecord
from alignedserve.lab.reports.trial import SimulationTrial

Columns: TypeAlias = Mapping[str, float | None]  # None: the load has nothing of the kind
Row: TypeAlias = dict[str, Any]  # load, seed, the columns, and the processor time of the run
FLOOD = "flood"
NAMES = ("attained", "documents", "latency_ms", "first_p50_ms", "first_p95_ms", "gap_p99_ms", "tokens")
_DIGITS = 5


@dataclass(frozen=True)
class Load:
    """A load of the default scheduler; its name begins with its kind, and a colon."""

    name: str
    trial: SimulationTrial
    attained: Callable[[RequestRecord], bool] = attains  # what counts as a promise kept


def kind_of(load: str) -> str:
    return load.partition(":")[0]


def row_of(load: Load) -> Row:
    """Run a load with its seed."""
    began_s = process_time()
    columns = columns_of(record_of(load.trial), load.attained)
    return {"load": load.name, "seed": load.trial.seed, **columns, "cpu_s": round(process_time() - began_s)}


def columns_of(record: RunRecord, attained: Callable[[RequestRecord], bool] = attains) -> Columns:
    chats, documents = (requests_of_class(record.requests, service) for service in ServiceClass)
    if flood := [chat for chat in chats if chat.id.startswith(FLOOD)]:
        chats, documents = [chat for chat in chats if not chat.id.startswith(FLOOD)], flood
    timed = chats or documents
    begun = [request for request in timed if request.token_at]
    first = Distribution.from_values(map(ttft_s, begun))
    gaps = Distribution.from_values(gap for request in begun for gap in gaps_s(request))
    # beyond the last chat, a single late document would count much
    until = max((chat.arrival_at for chat in chats), default=record.began_at + record.duration_s)
    made = sum(at <= until for document in documents for at in document.token_at)
    tokens = sum(len(request.token_at) for request in record.requests)
    values = (
        100 * share([attained(chat) for chat in chats]),  # % of chats
        ratio(made, until - record.began_at) if documents else None,  # tokens in a second
        1000 * normalised_latency_s(timed),  # of a token, with the wait for the first
        *(1000 * seconds for seconds in (first.p50, first.p95, gaps.p99)),
        ratio(tokens, record.duration_s),  # in a second, of all requests
    )
    return {name: _rounded(value) for name, value in zip(NAMES, values, strict=True)}


def means(seeds: Iterable[Columns]) -> Columns:
    """Return the mean of each column over the seeds that have it."""
    each = [*seeds]
    known = {name: [value for one in each if (value := one[name]) is not None] for name in NAMES}
    return {name: _rounded(fmean(values)) for name, values in known.items() if values}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not isfinite(value) else float(f"{value:.{_DIGITS}g}")
