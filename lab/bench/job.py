"""The best-effort requests of a load as the lines of one batch job, which the server looks after.

Nobody reads the tokens of a line as they come. A line counts when a look at the job finds one more that has ended, with
its share of the tokens that the job has made since the look before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from alignedserve.core import ServiceClass
from alignedserve.lab.bench.core import Dialect
from alignedserve.lab.bench.wording import AnyWording
from alignedserve.lab.loads.records.records import RequestOutcome, RequestRecord, RunRecord
from alignedserve.lab.loads.workload import Arrival, Mixture, arrivals

USUAL_LINES = 1000  # of a stream that does not say how many requests it has


@dataclass(frozen=True, slots=True)
class Look:
    """The lines that a job has answered until a time."""

    at: float
    completed: int = 0
    failed: int = 0
    tokens: int = 0  # of the outputs of completed lines


def of_class(workload: Mixture, service: ServiceClass) -> Mixture:
    return Mixture(tuple(stream for stream in workload.streams if stream.promise.service is service))


def lines_of(workload: Mixture, seed: int) -> list[Arrival]:
    """Return all best-effort requests of the workload."""
    streams = of_class(workload, ServiceClass.BE).streams
    every = Mixture(tuple(stream.at_once(stream.span.num_requests or USUAL_LINES) for stream in streams))
    return list(arrivals(every, ["bench"], seed, 0.0))


def file_of(lines: Sequence[Arrival], wording: AnyWording, dialect: Dialect) -> str:
    """Return the file of a job with these lines."""
    return "".join(json.dumps(_line(arrival, wording, dialect)) + "\n" for arrival in lines)


def _line(arrival: Arrival, wording: AnyWording, dialect: Dialect) -> dict[str, object]:
    path, fields = wording.prompt(arrival.request)
    wording.forget(arrival.request.id)
    body = dialect.body(arrival, fields)
    for name in ("stream", "stream_options", "service_tier", "slo", "return_token_ids"):
        body.pop(name, None)
    return {"custom_id": arrival.request.id, "method": "POST", "url": f"/v1{path}", "body": body}


def endpoint_of(lines: Sequence[Arrival], wording: AnyWording) -> str:
    path, _ = wording.prompt(lines[0].request)
    wording.forget(lines[0].request.id)
    return f"/v1{path}"


def records_of(lines: Sequence[Arrival], job: str, looks: Sequence[Look]) -> list[RequestRecord]:
    """Return the records of the lines that have ended; which of them it is that ended, a job does not say."""
    records, remaining, before = list[RequestRecord](), iter(lines), Look(0.0)
    for look in looks:
        ended = list(islice(remaining, max(0, look.completed - before.completed)))
        tokens = look.tokens - before.tokens
        for number, arrival in enumerate(ended):
            share = tokens * (number + 1) // len(ended) - tokens * number // len(ended)
            records.append(_record(arrival, job, look.at, share, RequestOutcome.FINISHED))
        for arrival in islice(remaining, max(0, look.failed - before.failed)):
            records.append(_record(arrival, job, look.at, 0, RequestOutcome.BROKEN))
        before = look
    return records


def _record(arrival: Arrival, job: str, at: float, num_tokens: int, outcome: RequestOutcome) -> RequestRecord:
    request = arrival.request
    token_at = (at,) * max(0, num_tokens)
    return RequestRecord(
        request.id, request.service, request.slo, 0.0, len(request.prompt), token_at, outcome, at, job=job
    )


def together(chats: RunRecord, lines: Sequence[RequestRecord], notes: Sequence[str]) -> RunRecord:
    """Return the record of chats beside the lines of a job that began with them."""
    requests = [*chats.requests, *lines]
    ended_at = max((request.ended_at for request in requests), default=0.0)
    return RunRecord(0.0, ended_at, ended_at, {}, requests, notes=(*chats.notes, *notes))
