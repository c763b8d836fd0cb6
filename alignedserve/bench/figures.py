"""The figures of a load test, by class: what they are, how they are computed, and how they are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from alignedserve.core import ServiceClass
from alignedserve.loads.figures.request_figures import (
    RequestFigures,
    attains,
    end_to_end_s,
    finished,
    gaps_s,
    has_stalled,
    keeps_all,
    keeps_jct,
    keeps_tbt,
    keeps_ttft,
    mean_tpot_s,
    promised_in_time,
    requests_of_class,
    ttft_s,
)
from alignedserve.loads.figures.tables import Unit
from alignedserve.loads.records.distribution import Distribution, ratio, share
from alignedserve.loads.records.records import RequestRecord, RunRecord

ClassFigures: TypeAlias = Mapping[str, float]  # of one class, by the paths of ROWS
_ENDS = ("count", "finished", "refused", "broken", "left")  # of requests
_PARTS = ("mean", "p50", "p95", "p99")  # of a distribution


def class_figures(requests: Sequence[RequestRecord], service: ServiceClass, duration_s: float) -> ClassFigures:
    """Return the figures of one class. Rates are over the whole test, from the first request to the end of the last."""
    is_kept = attains if service is ServiceClass.RT else keeps_jct
    timed = [promised_in_time(request) for request in requests if service is ServiceClass.RT]
    streamed = [request for request in requests if request.token_at and request.job is None]
    counted = RequestFigures.from_requests(requests)
    num_prompt = sum(request.num_prompt for request in requests if request.token_at)
    found = {
        **{f"requests.{name}": getattr(counted, name) for name in _ENDS},
        "attainment": share([is_kept(request) for request in requests]),
        "ttft_attainment": share([keeps_ttft(request) for request in requests]),
        "tbt_attainment": share([keeps_tbt(request) for request in requests]),  # of 99 of 100 gaps
        "stalled": share([has_stalled(request) for request in requests]),
        "goodput": ratio(sum(map(keeps_all, requests)), duration_s),
        "tokens_in_time": share([is_in_time for tokens in timed for is_in_time in tokens]),
        "tokens_per_s": ratio(counted.output_tokens, duration_s),  # that reached the client
        "prompt_tokens_per_s": ratio(num_prompt, duration_s),
    }
    distributions: dict[str, Iterable[float]] = {
        "ttft_s": map(ttft_s, streamed),
        "tpot_s": (mean_tpot_s(request) for request in streamed if len(request.token_at) > 1),
        "gap_s": (gap for request in streamed for gap in gaps_s(request)),  # of all requests together
        "end_to_end_s": map(end_to_end_s, finished(requests)),
    }
    for name, values in distributions.items():
        spread = Distribution.from_values(values)
        found |= {f"{name}.{part}": getattr(spread, part) for part in _PARTS}
    return found


@dataclass(frozen=True, slots=True)
class LoadFigures:
    duration_s: float
    tokens_per_s: float
    goodput: float
    classes: dict[ServiceClass, ClassFigures]  # those that had requests

    @classmethod
    def from_record(cls, record: RunRecord) -> LoadFigures:
        by_class = {service: requests_of_class(record.requests, service) for service in ServiceClass}
        classes = {
            service: class_figures(requests, service, record.duration_s)
            for service, requests in by_class.items()
            if requests
        }
        return cls(
            record.duration_s,
            sum(figures["tokens_per_s"] for figures in classes.values()),
            sum(figures["goodput"] for figures in classes.values()),
            classes,
        )


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    path: str
    unit: Unit

    def show(self, figures: ClassFigures) -> str:
        return self.unit.show(figures[self.path])


_TIMES = {"TTFT": "ttft_s", "TPOT": "tpot_s", "gap": "gap_s"}

ROWS = (
    Row("requests", "requests.count", Unit.NUMBER),
    Row("finished", "requests.finished", Unit.NUMBER),
    Row("refused", "requests.refused", Unit.NUMBER),
    Row("broken", "requests.broken", Unit.NUMBER),
    Row("left", "requests.left", Unit.NUMBER),
    Row("attainment", "attainment", Unit.SHARE),
    Row("TTFT in time", "ttft_attainment", Unit.SHARE),
    Row("P99 gap in time", "tbt_attainment", Unit.SHARE),
    Row("stalled", "stalled", Unit.SHARE),
    Row("goodput", "goodput", Unit.PER_SECOND),
    Row("tokens in time", "tokens_in_time", Unit.SHARE),
    Row("output tokens", "tokens_per_s", Unit.PER_SECOND),
    Row("prompt tokens", "prompt_tokens_per_s", Unit.PER_SECOND),
    *(Row(f"{name} {part}", f"{path}.{part}", Unit.MILLISECONDS) for name, path in _TIMES.items() for part in _PARTS),
    *(Row(f"end to end {part}", f"end_to_end_s.{part}", Unit.SECONDS) for part in _PARTS),
)
