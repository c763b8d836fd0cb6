"""Traces by OpenTelemetry: a span for each request that this process owns, and one for each of its stages.

    llm_request  │──────────────────────────────────────────────│
    queue        │────────│
    prefill               │───────────│
    decode                            │─────────────────────────│

The span of the request and its attributes have the names that vLLM gives them, so that boards made for vLLM read them.
Spans go to a collector by OTLP over HTTP, where one is configured. A thread of OpenTelemetry's own sends them, some at
a time. Where the collector is slow or away, spans wait in a queue of 2,048, and where that is full the oldest are
dropped: no request waits for a collector.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from alignedserve.core import Request
from alignedserve.errors import ConfigError
from alignedserve.owner.client import Delivered, Overloaded

if TYPE_CHECKING:
    from opentelemetry.context import Context

_PATH = "/v1/traces"  # of OTLP over HTTP
_SERVICE = "alignedserve"
_FLUSH_S = 2.0  # at the end of the process
_NANOS = 1_000_000_000
ROOT = "llm_request"
Attributes: TypeAlias = Mapping[str, str | int | float]
_ABORT = "abort"  # the finish of a request whose client left


@dataclass(frozen=True)
class TraceSpan:
    name: str
    began_at: float
    ended_at: float
    attributes: Attributes = field(default_factory=dict)
    error: str | None = None


Emit: TypeAlias = Callable[[TraceSpan, Sequence[TraceSpan]], None]  # the span of a request, and those of its stages


class RequestTrace:
    """Follows the request while it is open, that is inside of `with`, and emits its spans at the end."""

    __slots__ = (
        *("_request", "_model", "_choices", "_now", "_emit"),
        *("_waited_s", "_first_at", "_num_output", "_num_cached", "_finish"),
    )

    def __init__(self, request: Request, model: str, choices: int, now: Callable[[], float], emit: Emit | None) -> None:
        self._request, self._model, self._choices, self._now, self._emit = request, model, choices, now, emit
        self._waited_s = 0.0
        self._first_at: float | None = None
        self._num_output, self._num_cached, self._finish = 0, 0, _ABORT

    def __enter__(self) -> RequestTrace:
        return self

    def deliver(self, delivered: Delivered) -> None:
        if self._first_at is None:
            self._first_at = self._now()
            self._waited_s, self._num_cached = delivered.opening.waited_s, delivered.opening.num_cached
        self._num_output += len(delivered.tokens)

    def finish(self, finish: str) -> None:
        """Note how the output ends; without it, its client has left."""
        self._finish = finish

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._emit is None:
            return
        ended_at, came_at = self._now(), self._request.arrival_at
        why = str(error) if isinstance(error, Exception) else None
        kind = error.reason.value if isinstance(error, Overloaded) else type(error).__name__
        end = {"gen_ai.response.finish_reason": self._finish} if why is None else {"error.type": kind}
        root = TraceSpan(ROOT, came_at, ended_at, {**self._about(), **self._latencies(ended_at), **end}, why)
        self._emit(root, self._stages(ended_at))

    def _about(self) -> Attributes:
        request, sampling = self._request, self._request.sampling
        return {
            "gen_ai.request.id": request.id,
            "gen_ai.request.n": self._choices,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.num_sequences": 1,
            "gen_ai.usage.prompt_tokens": len(request.prompt),
            "gen_ai.usage.completion_tokens": self._num_output,
            "alignedserve.class": request.service.value,
            "alignedserve.cached_tokens": self._num_cached,
        }

    def _latencies(self, ended_at: float) -> Attributes:
        came_at, first_at = self._request.arrival_at, self._first_at
        all_s = {"gen_ai.latency.e2e": ended_at - came_at}
        if first_at is None:
            return all_s
        began_at = self._began_at(first_at)
        return {
            **all_s,
            "gen_ai.latency.time_in_queue": began_at - came_at,
            "gen_ai.latency.time_to_first_token": first_at - came_at,
            "gen_ai.latency.time_in_model_prefill": first_at - began_at,
            "gen_ai.latency.time_in_model_decode": ended_at - first_at,
            "gen_ai.latency.time_in_model_inference": ended_at - began_at,
        }

    def _stages(self, ended_at: float) -> Sequence[TraceSpan]:
        came_at, first_at = self._request.arrival_at, self._first_at
        if first_at is None:
            return (TraceSpan("queue", came_at, ended_at),)
        began_at = self._began_at(first_at)
        return (
            TraceSpan("queue", came_at, began_at),
            TraceSpan("prefill", began_at, first_at),
            TraceSpan("decode", first_at, ended_at),
        )

    def _began_at(self, first_at: float) -> float:
        """Return when the first chunk of its prompt began."""
        return min(self._request.arrival_at + self._waited_s, first_at)


# --- To a collector

Follow: TypeAlias = Callable[[Request], RequestTrace]


class Traces:
    """Follows requests without telling anyone: what a process has for which no collector is configured."""

    def follow(
        self, request: Request, headers: Mapping[str, str], choices: int, now: Callable[[], float]
    ) -> RequestTrace:
        """Follow a request; `headers` are those that its client sent, with the span that it belongs to."""
        return RequestTrace(request, "", choices, now, None)

    def close(self) -> None:
        """Send what waits, and stop."""


class OtlpTraces(Traces):
    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # each failure to send would be a traceback
        self._model, self._propagator = model, TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": _SERVICE}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer(_SERVICE)

    def follow(
        self, request: Request, headers: Mapping[str, str], choices: int, now: Callable[[], float]
    ) -> RequestTrace:
        parent = self._propagator.extract(headers)
        return RequestTrace(request, self._model, choices, now, lambda root, stages: self._emit(parent, root, stages))

    def _emit(self, parent: Context, root: TraceSpan, stages: Sequence[TraceSpan]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        about = root.name, parent, SpanKind.SERVER, root.attributes
        spoken = self._tracer.start_span(*about, start_time=_nanos(root.began_at))
        within = set_span_in_context(spoken, parent)
        for stage in stages:
            span = self._tracer.start_span(stage.name, within, start_time=_nanos(stage.began_at))
            span.end(_nanos(stage.ended_at))
        if root.error is not None:
            spoken.set_status(Status(StatusCode.ERROR, root.error))
        spoken.end(_nanos(root.ended_at))

    def close(self) -> None:
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)  # the SDK would wait for a collector that hangs


def traces_to(endpoint: str | None, model: str) -> Traces:
    return Traces() if endpoint is None else OtlpTraces(trace_url(endpoint), model)


def trace_url(endpoint: str) -> str:
    """Return where spans are sent: a collector's address gets the path that OTLP gives it."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        what = "must be http://HOST:4318 or https://..., where a collector takes OTLP over HTTP"
        raise ConfigError(f"server.otlp_endpoint {what}, not {endpoint!r:.100}")
    return parts._replace(path=_PATH).geturl() if parts.path in ("", "/") else endpoint


def check_collector(endpoint: str | None) -> None:
    """Raise ConfigError where spans cannot be sent: at the start, and not in each process."""
    if endpoint is None:
        return
    trace_url(endpoint)
    try:
        is_installed = all(map(find_spec, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")))
    except ModuleNotFoundError:  # a package above it is not there
        is_installed = False
    if not is_installed:
        raise ConfigError("server.otlp_endpoint needs OpenTelemetry: pip install 'alignedserve[traces]'")


def _nanos(at: float) -> int:
    return int(at * _NANOS)
