"""Send spans to a collector by OTLP over HTTP, where one is configured.

A thread of OpenTelemetry's own sends them, some at a time. Where the collector is slow or away, spans wait in a queue
of 2,048, and where that is full the oldest are dropped: no request waits for a collector.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeAlias
from urllib.parse import urlsplit

from alignedserve.core import Request
from alignedserve.errors import ConfigError
from alignedserve.owner.client import Delivered
from alignedserve.tracing.request_trace import RequestTrace, Span

if TYPE_CHECKING:
    from opentelemetry.context import Context

_PATH = "/v1/traces"  # of OTLP over HTTP
_SERVICE = "alignedserve"
_FLUSH_S = 2.0  # at the end of the process
_NANOS = 1_000_000_000


Follow: TypeAlias = Callable[[Request], AbstractContextManager["Trace"]]


class Trace(Protocol):
    def deliver(self, delivered: Delivered) -> None: ...

    def finish(self, finish: str) -> None: ...


class _NoTrace(AbstractContextManager["_NoTrace"]):
    def __exit__(self, *_: object) -> None: ...

    def deliver(self, delivered: Delivered) -> None: ...

    def finish(self, finish: str) -> None: ...


_NO_TRACE = _NoTrace()


class Traces:
    """Follows requests without telling anyone: what a process has for which no collector is configured."""

    def follow(
        self, request: Request, headers: Mapping[str, str], choices: int, now: Callable[[], float]
    ) -> AbstractContextManager[Trace]:
        """Follow a request; `headers` are those that its client sent, with the span that it belongs to."""
        return _NO_TRACE

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
    ) -> AbstractContextManager[Trace]:
        parent = self._propagator.extract(headers)
        return RequestTrace(request, self._model, choices, now, lambda root, stages: self._emit(parent, root, stages))

    def _emit(self, parent: Context, root: Span, stages: Sequence[Span]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        spoken = self._tracer.start_span(
            root.name, parent, SpanKind.SERVER, root.attributes, start_time=_nanos(root.began_at)
        )
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
    if not _is_installed():
        raise ConfigError("server.otlp_endpoint needs OpenTelemetry: pip install 'alignedserve[traces]'")


def _is_installed() -> bool:
    try:
        return (
            find_spec("opentelemetry.sdk") is not None
            and find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        )
    except ModuleNotFoundError:  # a package above it is not there
        return False


def _nanos(at: float) -> int:
    return int(at * _NANOS)
