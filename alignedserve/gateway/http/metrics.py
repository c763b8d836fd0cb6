"""Measure requests: metrics for Prometheus, under the names that vLLM's users know, and a log line for each request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from alignedserve.core import ServiceClass, Slo
from alignedserve.protocol.messages import SPREADS, DecodeSteps, Figures

_log = logging.getLogger("alignedserve.gateway")

PREFIX = "alignedserve:"
CLIENT_CLOSED = 499  # in the log: the client left before its answer or in the middle of it

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


@dataclass
class HttpRecord:
    """One HTTP request as its log line shows it; the gateway fills it in while the request runs."""

    id: str
    method: str
    path: str
    began_at: float
    client_id: str | None = None  # the client's own id of the request, which the answer repeats
    caller: str | None = None  # the id of the caller
    service: ServiceClass | None = None  # None: the request does not ask for tokens
    prompt_tokens: int = 0  # of all requests of the body
    cached_tokens: int = 0  # of the prompt tokens, those whose KV a device or the pool had
    output_tokens: int = 0
    ttft_s: float | None = None
    finish: str | None = None  # stop, length, abort (the client left) or error
    status: int | None = None

    def log(self, now: float) -> None:
        """Write the log line, which never shows any of a prompt or an output."""
        fields = {
            "request_id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_s": round(now - self.began_at, 6),
            "caller": self.caller,
            "client_request_id": self.client_id,
        }
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


class SpreadHistograms(Collector):
    """A histogram for each decode worker, which counts for itself: it starts anew with the worker."""

    def __init__(self) -> None:
        self.steps: dict[str, DecodeSteps] = {}  # worker -> its counts

    def collect(self) -> Iterator[HistogramMetricFamily]:
        about = "Decode steps by the spread of their prefixes: tokens of the longest less the shortest."
        family = HistogramMetricFamily(f"{PREFIX}decode_step_spread_tokens", about, labels=["worker"])
        bounds = [*map(str, map(float, SPREADS)), "+Inf"]
        for worker, steps in self.steps.items():
            buckets = list(zip(bounds, accumulate(steps.by_spread), strict=True))
            family.add_metric([worker], buckets, steps.spread_tokens)
        yield family


class Metrics:
    """The metrics of one application. Nothing is global, so that two applications in one process stay apart."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()  # for this gateway's own requests
        self._parts = CollectorRegistry()  # for figures that other parts report to every gateway
        self._succeeded = self._counter("request_success", "Requests that ended.", "finished_reason", "class")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got output.", "class")
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens of such requests whose KV a device or the pool had.", "class"
        )
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens that were looked up.", "class")
        self._hits = self._counter("prefix_cache_hits", "Of those, the tokens that were found.", "class")
        self._generation_tokens = self._counter("generation_tokens", "Output tokens that reached the gateway.", "class")
        self._attained = self._counter("slo_attained", "Requests that ended within all of their deadlines.", "class")
        self._missed = self._counter("slo_missed", "Requests that ended and missed one of their deadlines.", "class")
        self._http_errors = self._counter("http_errors", "Answers with a status of 400 or more.", "status")
        self._running = Gauge(
            f"{PREFIX}num_requests_running", "Requests that are open.", ["class"], registry=self._registry
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival until its first token was written to the client.",
            _TTFT_BUCKETS,
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Time between the writes of two chunks to a client.", _ITL_BUCKETS
        )
        self._refused = self._part_counter(
            "kv_copies_refused",
            "Copies from the KV pool with a page that failed its check; its KV is computed again.",
            "worker",
        )
        self._compressed = self._part_counter(
            "kv_pages_compressed", "Pages of the KV pool that were compressed to int8.", "pool"
        )
        self._incompressible = self._part_counter(
            "kv_pages_incompressible", "Pages of the KV pool that could not be compressed to int8.", "pool"
        )
        self._failed_transfers = self._part_counter(
            "kv_transfers_failed",
            "Transfers of KV between workers that failed, as either end saw it; the KV is sent another way.",
            "worker",
        )
        self._decode_steps = self._part_counter(
            "decode_steps", "Decode steps, by how many of the pool's batches had members in them.", "worker", "batches"
        )
        self._switches = self._part_counter(
            "batch_switches", "Batches of the pool that began to run on a decode worker.", "worker"
        )
        self._prefetches = self._part_counter(
            "kv_prefetches",
            "Requests whose KV a prefill worker fetched ahead of need: used, or wasted.",
            "worker",
            "outcome",
        )
        self._slowdown = Gauge(
            f"{PREFIX}step_slowdown",
            "How many times as long steps take as when the worker's profile was measured.",
            ["worker"],
            registry=self._parts,
        )
        self._spreads = SpreadHistograms()
        self._parts.register(self._spreads)
        self._rebuilt = Gauge(
            f"{PREFIX}router_rebuilt_seconds",
            "Time from the router's last start until it knew all open requests and their places again.",
            registry=self._parts,
        )
        self._stages = Gauge(
            f"{PREFIX}num_requests_at",
            "Open requests by their place: unplaced, with prefill workers, in the pool, with decode workers.",
            ["class", "stage"],
            registry=self._parts,
        )
        self._pool_pages = Gauge(
            f"{PREFIX}kv_pool_pages",
            "Pages of the KV pool: held by requests of class rt, be or both (shared), idle, leased or free.",
            ["pool", "state"],
            registry=self._parts,
        )
        self._known: dict[tuple[Counter, tuple[str, ...]], int] = {}  # (counter, labels) -> the count last reported
        for service in ServiceClass:  # make the series now, so that it has no gap before its first event
            self._running.labels(service.value)
        # Looked up once: these count every token, and to look a series up costs more than to add to it.
        self._generated = {service: self._generation_tokens.labels(service.value) for service in ServiceClass}
        self._between = {service: self._itl.labels(service.value) for service in ServiceClass}

    def series(self) -> bytes:
        """Return the series of this gateway's own requests."""
        return generate_latest(self._registry)

    async def series_alone(self) -> bytes:
        """Return the series of all gateways when this is the only gateway."""
        return self.series()

    def series_of_parts(self) -> bytes:
        return generate_latest(self._parts)

    def update_parts(self, figures: Figures) -> None:
        """Take the figures that a pool, a worker or the router reports; always call it from the same thread."""
        if figures.rebuilt_s is not None:
            self._rebuilt.set(figures.rebuilt_s)
        for service, stages in ((ServiceClass.RT, figures.rt), (ServiceClass.BE, figures.be)):
            for stage, count in ({} if stages is None else asdict(stages)).items():
                self._stages.labels(service.value, stage).set(count)
        if figures.usage is not None:
            for state, pages in asdict(figures.usage).items():
                self._pool_pages.labels(figures.member, state).set(pages)
        for counter, now in (
            (self._refused, figures.num_refused),
            (self._failed_transfers, figures.num_failed_transfers),
            (self._compressed, figures.num_compressed),
            (self._incompressible, figures.num_incompressible),
        ):
            if now:
                self._raise_counter(counter, now, figures.member)
        if figures.slowdown:
            self._slowdown.labels(figures.member).set(figures.slowdown)
        if figures.steps is not None:
            self._update_steps(figures.member, figures.steps)

    def _update_steps(self, worker: str, steps: DecodeSteps) -> None:
        self._spreads.steps[worker] = steps
        for batches, num in zip(("0", "1", "2+"), steps.by_batches, strict=True):
            self._raise_counter(self._decode_steps, num, worker, batches)
        self._raise_counter(self._switches, steps.switches, worker)
        self._raise_counter(self._prefetches, steps.prefetched, worker, "used")
        self._raise_counter(self._prefetches, steps.in_vain, worker, "wasted")

    def _raise_counter(self, counter: Counter, now: int, *labels: str) -> None:
        known = self._known.get((counter, labels), 0)
        self._known[counter, labels] = now
        counter.labels(*labels).inc(now - known if now >= known else now)  # a smaller count is of its next life

    def count_answer(self, record: HttpRecord) -> None:
        if record.status is not None and record.status >= 400:
            self._http_errors.labels(str(record.status)).inc()
        if record.service is not None and record.finish not in (None, "error"):
            self._succeeded.labels(record.finish, record.service.value).inc()

    def open(self, service: ServiceClass) -> None:
        self._running.labels(service.value).inc()

    def close(self, service: ServiceClass) -> None:
        self._running.labels(service.value).dec()

    def count_slo(self, service: ServiceClass, is_attained: bool) -> None:
        """Count a request that has ended, by whether it met all of its deadlines."""
        (self._attained if is_attained else self._missed).labels(service.value).inc()

    def count_prompt(self, service: ServiceClass, tokens: int, num_cached: int) -> None:
        self._prompt_tokens.labels(service.value).inc(tokens)
        self._cached_tokens.labels(service.value).inc(num_cached)
        self._queries.labels(service.value).inc(tokens)
        self._hits.labels(service.value).inc(num_cached)

    def count_output(self, service: ServiceClass, tokens: int) -> None:
        self._generated[service].inc(tokens)

    def observe_first_token(self, service: ServiceClass, after_s: float) -> None:
        self._ttft.labels(service.value).observe(after_s)

    def observe_next_token(self, service: ServiceClass, after_s: float) -> None:
        self._between[service].observe(after_s)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", about, labels, registry=self._registry)

    def _part_counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", about, labels, registry=self._parts)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}{name}", about, ["class"], buckets=buckets, registry=self._registry)


class RequestMeter:
    """Measures the requests of one body; each is known by the number of its choice.

    Latencies are taken when tokens are written to the client, since that is what the client feels. If the client does
    not stream and gets all tokens at once, a token counts as written when it reaches the gateway.
    """

    def __init__(
        self,
        metrics: Metrics,
        record: HttpRecord,
        service: ServiceClass,
        now: Callable[[], float],
        take: Callable[[int], None],
        slo: Slo,
    ) -> None:
        """`take` is called with the number of output tokens in each delivery."""
        self._metrics, self._record, self._service, self._now, self._take = metrics, record, service, now, take
        self._slo, self._num_gaps, self._num_late, self._has_stalled = slo, 0, 0, False
        self._written_at: dict[int, float] = {}  # choice -> its last write
        self._begun: set[int] = set()  # choices that have output

    def open(self) -> None:
        self._metrics.open(self._service)

    def close(self) -> None:
        self._metrics.close(self._service)
        if self._record.finish in ("stop", "length"):
            self._metrics.count_slo(self._service, self._is_attained())

    def _is_attained(self) -> bool:
        """Return whether the request met its deadlines, by the simulator's rule.

        A real-time request needs its first token and 99 of 100 gaps in time, and no gap that is many times too long; a
        best-effort request needs its end in time."""
        if self._service is ServiceClass.BE:
            return self._now() - self._record.began_at <= self._slo.jct_s
        ttft_s, has_stalled = self._record.ttft_s, self._has_stalled
        is_first_in_time = ttft_s is not None and ttft_s <= self._slo.ttft_s
        return is_first_in_time and not has_stalled and 100 * self._num_late <= self._num_gaps

    def count_delivery(self, choice: int, prompt_tokens: int, tokens: int, num_cached: int = 0) -> None:
        if choice not in self._begun:
            self._begun.add(choice)
            self._record.cached_tokens += num_cached
            self._metrics.count_prompt(self._service, prompt_tokens, num_cached)
        self._record.output_tokens += tokens
        self._take(tokens)
        self._metrics.count_output(self._service, tokens)

    def count_write(self, choice: int) -> None:
        now = self._now()
        before, self._written_at[choice] = self._written_at.get(choice), now
        if before is not None:
            self._num_gaps += 1
            self._num_late += now - before > self._slo.tbt_s
            self._has_stalled |= now - before > self._slo.stall_s
            self._metrics.observe_next_token(self._service, now - before)
            return
        ttft_s = now - self._record.began_at
        self._metrics.observe_first_token(self._service, ttft_s)
        if self._record.ttft_s is None:
            self._record.ttft_s = ttft_s

    def finish(self, finish: str) -> None:
        self._record.finish = finish
