"""A receiver of traces that speaks OTLP over HTTP, with the messages of OpenTelemetry's own protocol."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver(ThreadingHTTPServer):
    """A collector: it keeps the spans that it is sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: list[str] = []
        self.exports: list[ExportTraceServiceRequest] = []
        self.answers = threading.Event()
        self.answers.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def classes(self) -> set[str]:
        """Return the classes of the requests that spans have come of."""
        given = [each for span in self._all() for each in span.attributes]
        return {each.value.string_value for each in given if each.key == "alignedserve.class"}

    def spans(self) -> dict[str, Span]:
        return {span.name: span for span in self._all()}

    def _all(self) -> list[Span]:
        resources = [resource for export in list(self.exports) for resource in export.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver = self.server
        assert isinstance(receiver, Receiver)
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        receiver.answers.wait(60)
        receiver.paths.append(self.path)
        receiver.exports.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.answers.set()
            server.shutdown()
            thread.join()
