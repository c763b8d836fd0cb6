"""Follow one HTTP request: the log line, and the measures of the requests that the body makes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.config.prices import Charged
from alignedserve.core import Request, ServiceClass
from alignedserve.gateway.http.limits import CallerQuota
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.metrics.meter import RequestMeter
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.owner.client import Delivered

_log = logging.getLogger("alignedserve.gateway")

HEADER = "server-timing"
MOST_MESSAGE = 500  # characters of an error that are remembered
CLIENT_CLOSED = 499  # in the log: the client left before its answer or in the middle of it


class Fault(NamedTuple):
    """An error that was answered, or ended a stream: without the exception, which would keep the body."""

    status: int
    code: str | None
    message: str
    logged: str  # without what the client sent


@dataclass
class HttpRecord:
    """One HTTP request as its log line shows it; the gateway fills it in while the request runs."""

    id: str
    method: str
    path: str
    began_at: float
    route: str | None = None  # such as /v1/files/{id}: only what the client has not chosen is logged of the path
    client_id: str | None = None  # the client's own id of the request, which the answer repeats
    caller: str | None = None  # the id of the caller
    service: ServiceClass | None = None  # None: the request does not ask for tokens
    prompt_tokens: int = 0  # of all requests of the body
    cached_tokens: int = 0  # prompt tokens with KV on a device or in the pool
    output_tokens: int = 0
    ttft_s: float | None = None
    finish: str | None = None  # stop, length, abort (the client left) or error
    status: int | None = None
    fault: Fault | None = None

    @property
    def error(self) -> int | None:
        """Return the status if the answer was an error; that a client leaves, or closes the live page, is none."""
        return None if self.status is None or self.status < 400 or self.status == CLIENT_CLOSED else self.status

    def note(self, error: ApiError) -> None:
        self.fault = Fault(error.status, error.code, error.message[:MOST_MESSAGE], error.logged)

    def log(self, now: float) -> None:
        """Write the log line, which never shows any of a prompt or an output."""
        fields = {
            "request_id": self.id,
            "method": self.method,
            "path": self.route,
            "status": self.status,
            "duration_s": round(now - self.began_at, 6),
            "caller": self.caller,
            "client_request_id": self.client_id,
        }
        if self.fault is not None:
            fields |= {"error": self.fault.logged, "code": self.fault.code}
        if self.service is not None:
            fields |= {
                "class": self.service.value,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "output_tokens": self.output_tokens,
                "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 6),
                "finish": self.finish,
            }
        _log.info("answered", extra={"fields": fields})


class BodyMeter:
    """Measures the requests of one body, each named by the number of the choice."""

    def __init__(
        self, metrics: RequestMetrics, record: HttpRecord, tier: str, now: Callable[[], float], tab: CallerQuota
    ) -> None:
        self._metrics, self._record, self._tier, self._now, self._tab = metrics, record, tier, now, tab
        self._meters: dict[int, RequestMeter] = {}
        self._first_at, self._waited_s = 0.0, 0.0  # of the first token of any choice, and until the prompt began to run

    def meter(self, choice: int, request: Request) -> RequestMeter:
        """Return the meter of a request of the body, for all that is counted of the choice."""
        self._meters[choice] = meter = RequestMeter(self._metrics, request, self._tier, self._now, self._tab.caller.id)
        return meter

    def count_delivery(self, choice: int, delivered: Delivered) -> bool:
        """Count a delivery, and return whether the body's caller may have more tokens."""
        if not self._first_at:
            self._first_at, self._waited_s = self._now(), delivered.opening.waited_s
        num_tokens = len(delivered.tokens)
        self._record.cached_tokens += delivered.opening.num_cached
        self._record.output_tokens += num_tokens
        self._meters[choice].deliver(num_tokens, delivered.opening, delivered.spent)
        return self._tab.use(num_tokens)

    @property
    def charged(self) -> list[Charged]:
        """Return what each choice is charged with so far."""
        return [meter.use.charged for meter in self._meters.values()]

    def count_write(self, choice: int) -> None:
        meter = self._meters[choice]
        meter.write()
        if self._record.ttft_s is None:
            self._record.ttft_s = meter.ttft_s

    def timing_headers(self, is_over: bool) -> dict[str, str]:
        """Return the header of the times until now, in milliseconds; a stream's headers are sent with its first
        token, or before it where the chat waits in line: then there are no times yet."""
        if not self._first_at:
            return {}
        queue_s, prompt_s, output_s = self._times_s()
        first_s = queue_s + prompt_s
        times = {"queue": queue_s, "prefill": prompt_s, "first_token": first_s}
        if is_over:
            times |= {"decode": output_s, "total": first_s + output_s}
        return {HEADER: ", ".join(f"{name};dur={1e3 * seconds:.1f}" for name, seconds in times.items())}

    def timing_usage(self) -> dict[str, float]:
        """Return the times of an answer that is over as fields of a usage, in seconds."""
        queue_s, prompt_s, output_s = times = self._times_s()
        named = {"queue_time": queue_s, "prompt_time": prompt_s, "completion_time": output_s, "total_time": sum(times)}
        return {name: round(seconds, 6) for name, seconds in named.items()}

    def _times_s(self) -> tuple[float, float, float]:
        """Return how long the prompt of the first choice waited, how long from then to the first token of any choice,
        and how long from that until now."""
        first_s = self._first_at - self._record.began_at
        queue_s = min(self._waited_s, first_s)
        return queue_s, first_s - queue_s, self._now() - self._first_at

    def end(self) -> None:
        """Count what is known when all choices have ended."""
        self._tab.settle()
        if self._record.service is not None:
            longest = max(meter.num_output for meter in self._meters.values())
            self._metrics.of[self._record.service].longest_choice.observe(longest)

    def finish(self, finish: str, error: ApiError | None = None) -> None:
        """Note how the body's answer ends, and by which error."""
        self._record.finish = finish
        if error is not None:
            self._record.note(error)

    def finish_choice(self, choice: int, finish: str) -> None:
        self._meters[choice].finish = finish
        self.finish(finish)
