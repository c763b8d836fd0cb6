"""Compute whether the promises of each request were kept, and the figures of each class.

The first token is in time when it came within ttft of the arrival, a later token when it came within tbt of the token
before it. A request that did not finish is a miss, whatever the cause, and counts one late token: the next token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from alignedserve.core import Deadline, ServiceClass, TokenTimes
from alignedserve.loads.records.distribution import NOTHING, Distribution, mean, ratio, share
from alignedserve.loads.records.records import RequestOutcome, RequestRecord

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


@dataclass(frozen=True, slots=True)
class RtFigures:
    requests: RequestFigures
    attainment: float
    ttft_attainment: float
    tbt_attainment: float
    p99_attainment: float  # by TTFT and TBT, however long the longest gap was
    stalled: float  # share of requests with a gap that breaks the promise by itself
    tokens_in_time: float
    ttft_s: Distribution  # over requests with a token
    tbt_s: Distribution  # over all gaps of these requests
    mean_tpot_s: Distribution  # one value for each request with at least two tokens
    end_to_end_s: Distribution  # over finished requests

    @classmethod
    def from_requests(cls, requests: Sequence[RequestRecord]) -> RtFigures:
        begun = [request for request in requests if request.token_at]
        return cls(
            requests=RequestFigures.from_requests(requests),
            attainment=share([attains(request) for request in requests]),
            ttft_attainment=share([keeps_ttft(request) for request in requests]),
            tbt_attainment=share([keeps_tbt(request) for request in requests]),
            p99_attainment=share([attains_p99(request) for request in requests]),
            stalled=share([has_stalled(request) for request in requests]),
            tokens_in_time=share([is_in_time for request in requests for is_in_time in promised_in_time(request)]),
            ttft_s=Distribution.from_values(ttft_s(request) for request in begun),
            tbt_s=Distribution.from_values(gap for request in begun for gap in gaps_s(request)),
            mean_tpot_s=Distribution.from_values(
                mean_tpot_s(request) for request in begun if len(request.token_at) > 1
            ),
            end_to_end_s=Distribution.from_values(end_to_end_s(request) for request in finished(requests)),
        )


@dataclass(frozen=True, slots=True)
class BeFigures:
    """Figures of BE requests. Rates are over the whole run, including the drain at its end."""

    requests: RequestFigures
    tokens_per_s: float  # output of finished requests
    requests_per_s: float
    jct_attainment: float
    jct_s: Distribution  # over finished requests

    @classmethod
    def from_requests(cls, requests: Sequence[RequestRecord], duration_s: float) -> BeFigures:
        done = finished(requests)
        return cls(
            requests=RequestFigures.from_requests(requests),
            tokens_per_s=ratio(sum(len(request.token_at) for request in done), duration_s),
            requests_per_s=ratio(len(done), duration_s),
            jct_attainment=share([keeps_jct(request) for request in requests]),
            jct_s=Distribution.from_values(end_to_end_s(request) for request in done),
        )


def finished(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [request for request in requests if has_finished(request)]


def requests_of_class(requests: Iterable[RequestRecord], service: ServiceClass) -> list[RequestRecord]:
    return [request for request in requests if request.service is service]


def normalised_latency_s(requests: Iterable[RequestRecord]) -> float:
    """Return the mean of end-to-end time ÷ output tokens, over finished requests."""
    return mean([normalised_s(request) for request in finished(requests) if request.token_at])
