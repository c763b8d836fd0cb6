"""What clients got: of each request whether its promises were kept, and of all of one class the figures.

A token is in time when it came within ttft of the arrival (the first) or within tbt of the token before it. A request
that did not finish is a miss, whoever ended it, and counts one late token: the one that it still waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from alignedserve.core import ServiceClass
from alignedserve.simulator.records.distribution import NOTHING, Distribution, mean, percentile, ratio, share
from alignedserve.simulator.records.records import RequestOutcome, RequestRecord

# --- One request


def ttft_s(request: RequestRecord) -> float:
    return request.token_at[0] - request.arrival_at if request.token_at else NOTHING


def gaps_s(request: RequestRecord) -> list[float]:
    return [after - before for before, after in pairwise(request.token_at)]


def mean_tpot_s(request: RequestRecord) -> float:
    """Of the tokens after the first."""
    return ratio(request.token_at[-1] - request.token_at[0], len(request.token_at) - 1) if request.token_at else NOTHING


def end_to_end_s(request: RequestRecord) -> float:
    return request.ended_at - request.arrival_at


def normalised_s(request: RequestRecord) -> float:
    return ratio(end_to_end_s(request), len(request.token_at))


def has_finished(request: RequestRecord) -> bool:
    return request.outcome is RequestOutcome.FINISHED


def keeps_ttft(request: RequestRecord) -> bool:
    return has_finished(request) and ttft_s(request) <= request.slo.ttft_s


def keeps_tbt(request: RequestRecord) -> bool:
    """The 99th percentile of its own gaps; where it has none there is nothing to break."""
    gaps = gaps_s(request)
    return has_finished(request) and (not gaps or percentile(gaps, 99) <= request.slo.tbt_s)


def attains(request: RequestRecord) -> bool:
    return keeps_ttft(request) and keeps_tbt(request)


def keeps_jct(request: RequestRecord) -> bool:
    return has_finished(request) and end_to_end_s(request) <= request.slo.jct_s


def keeps_all(request: RequestRecord) -> bool:
    """Every promise that its class has: a BE request has no deadlines for single tokens."""
    return keeps_jct(request) and (request.service is ServiceClass.BE or attains(request))


def in_time(request: RequestRecord) -> list[bool]:
    """Each of the tokens that reached its client."""
    slo = request.slo
    first = [ttft_s(request) <= slo.ttft_s] if request.token_at else []
    return first + [gap <= slo.tbt_s for gap in gaps_s(request)]


def promised_in_time(request: RequestRecord) -> list[bool]:
    """Those, and the one that it still waited for where it did not finish."""
    return in_time(request) + ([] if has_finished(request) else [False])


# --- All


@dataclass(frozen=True, slots=True)
class RequestFigures:
    count: int
    finished: int
    refused: int
    left: int
    broken: int
    unfinished: int
    preemptions: int
    output_tokens: int  # that reached a client, of whatever became of the request

    @classmethod
    def of(cls, requests: Sequence[RequestRecord]) -> RequestFigures:
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
    tokens_in_time: float
    ttft_s: Distribution  # of requests with a token
    tbt_s: Distribution  # of all gaps of all of them
    mean_tpot_s: Distribution  # one value a request, of those with two tokens
    end_to_end_s: Distribution  # of finished ones

    @classmethod
    def of(cls, requests: Sequence[RequestRecord]) -> RtFigures:
        begun = [request for request in requests if request.token_at]
        return cls(
            requests=RequestFigures.of(requests),
            attainment=share([attains(request) for request in requests]),
            ttft_attainment=share([keeps_ttft(request) for request in requests]),
            tbt_attainment=share([keeps_tbt(request) for request in requests]),
            tokens_in_time=share([held for request in requests for held in promised_in_time(request)]),
            ttft_s=Distribution.of(ttft_s(request) for request in begun),
            tbt_s=Distribution.of(gap for request in begun for gap in gaps_s(request)),
            mean_tpot_s=Distribution.of(mean_tpot_s(request) for request in begun if len(request.token_at) > 1),
            end_to_end_s=Distribution.of(end_to_end_s(request) for request in finished(requests)),
        )


@dataclass(frozen=True, slots=True)
class BeFigures:
    """Rates are over the whole run, its drain included."""

    requests: RequestFigures
    tokens_per_s: float  # output of finished requests
    requests_per_s: float
    jct_attainment: float
    jct_s: Distribution  # of finished ones

    @classmethod
    def of(cls, requests: Sequence[RequestRecord], duration_s: float) -> BeFigures:
        done = finished(requests)
        return cls(
            requests=RequestFigures.of(requests),
            tokens_per_s=ratio(sum(len(request.token_at) for request in done), duration_s),
            requests_per_s=ratio(len(done), duration_s),
            jct_attainment=share([keeps_jct(request) for request in requests]),
            jct_s=Distribution.of(end_to_end_s(request) for request in done),
        )


def finished(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [request for request in requests if has_finished(request)]


def of_class(requests: Iterable[RequestRecord], service: ServiceClass) -> list[RequestRecord]:
    return [request for request in requests if request.service is service]


def normalised_latency_s(requests: Iterable[RequestRecord]) -> float:
    """Mean of end-to-end ÷ output tokens, of those that finished."""
    return mean([normalised_s(request) for request in finished(requests) if request.token_at])
