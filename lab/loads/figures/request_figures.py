"""Compute whether the promises of each request were kept, and how requests ended.

The first token is in time when it came within ttft of the arrival, a later token when it came within tbt of the token
before it. A request that did not finish is a miss, whatever the cause, and counts one late token: the next token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from alignedserve.core import Deadline, ServiceClass, TokenTimes
from alignedserve.lab.loads.records.distribution import NOTHING, mean, ratio
from alignedserve.lab.loads.records.records import RequestOutcome, RequestRecord

# --- A single request


def ttft_s(request: RequestRecord) -> float:
    return request.token_at[0] - request.arrival_at if request.token_at else NOTHING


def gaps_s(request: RequestRecord) -> list[float]:
    return [after - before for before, after in pairwise(request.token_at)]


def mean_tpot_s(request: RequestRecord) -> float:
    """Return the mean time per token, over the tokens after the first."""
    return ratio(request.token_at[-1] - request.token_at[0], len(request.token_at) - 1) if request.token_at else NOTHING


def end_to_end_s(request: RequestRecord) -> float:
    return request.ended_at - request.arrival_at


def normalised_s(request: RequestRecord) -> float:
    return ratio(end_to_end_s(request), len(request.token_at))


def has_finished(request: RequestRecord) -> bool:
    return request.outcome is RequestOutcome.FINISHED


def times_of(request: RequestRecord) -> TokenTimes:
    gaps = gaps_s(request)
    num_late = sum(gap > request.slo.tbt_s for gap in gaps)
    return TokenTimes(ttft_s(request), len(gaps), num_late, max(gaps, default=0.0), end_to_end_s(request))


def _keeps(request: RequestRecord, service: ServiceClass, *deadlines: Deadline) -> bool:
    if not has_finished(request):
        return False
    kept = request.slo.outcomes(service, times_of(request))
    return all(kept[deadline] for deadline in deadlines or kept)


def keeps_ttft(request: RequestRecord) -> bool:
    return _keeps(request, ServiceClass.RT, Deadline.TTFT)


def keeps_tbt(request: RequestRecord) -> bool:
    """Return whether the 99th percentile of the request's own gaps is in time. Without gaps the promise is kept."""
    return _keeps(request, ServiceClass.RT, Deadline.TBT)


def attains_p99(request: RequestRecord) -> bool:
    """Return whether the promise is kept as papers count: one gap in a hundred may be of any length."""
    return _keeps(request, ServiceClass.RT, Deadline.TTFT, Deadline.TBT)


def has_stalled(request: RequestRecord) -> bool:
    return max(gaps_s(request), default=0.0) > request.slo.stall_s


def attains(request: RequestRecord) -> bool:
    return _keeps(request, ServiceClass.RT)


def keeps_jct(request: RequestRecord) -> bool:
    return _keeps(request, ServiceClass.BE)


def keeps_all(request: RequestRecord) -> bool:
    """Return whether every promise of the request's class is kept: a BE request has no deadlines for single tokens."""
    return keeps_jct(request) and (request.service is ServiceClass.BE or attains(request))


def in_time(request: RequestRecord) -> list[bool]:
    """Return for each token that reached the client whether it was in time."""
    slo = request.slo
    first = [ttft_s(request) <= slo.ttft_s] if request.token_at else []
    return first + [gap <= slo.tbt_s for gap in gaps_s(request)]


def promised_in_time(request: RequestRecord) -> list[bool]:
    """Return the same as `in_time`, plus a late token for a request that did not finish."""
    return in_time(request) + ([] if has_finished(request) else [False])


# --- All requests


@dataclass(frozen=True, slots=True)
class RequestFigures:
    count: int
    finished: int
    refused: int
    left: int
    broken: int
    unfinished: int
    preemptions: int
    output_tokens: int  # that reached a client, whatever the outcome of the request

    @classmethod
    def from_requests(cls, requests: Sequence[RequestRecord]) -> RequestFigures:
        outcomes = Counter(request.outcome for request in requests)
        return cls(
            count=len(requests),
            finished=outcomes[RequestOutcome.FINISHED],
            refused=outcomes[RequestOutcome.REFUSED],
            left=outcomes[RequestOutcome.LEFT],
            broken=outcomes[RequestOutcome.BROKEN],
            unfinished=outcomes[RequestOutcome.OPEN],
            preemptions=sum(request.num_preempted for request in requests),
            output_tokens=sum(len(request.token_at) for request in requests),
        )


def finished(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [request for request in requests if has_finished(request)]


def requests_of_class(requests: Iterable[RequestRecord], service: ServiceClass) -> list[RequestRecord]:
    return [request for request in requests if request.service is service]


def normalised_latency_s(requests: Iterable[RequestRecord]) -> float:
    """Return the mean of end-to-end time ÷ output tokens, over finished requests."""
    return mean([normalised_s(request) for request in finished(requests) if request.token_at])
