"""What Prometheus is told, under the names that vLLM's users know, and what the log is told of one request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from alignedserve.core import ServiceClass, Slo
from alignedserve.protocol.messages import Figures

_log = logging.getLogger("alignedserve.gateway")

PREFIX = "alignedserve:"
CLIENT_CLOSED = 499  # in the log: the client left before there was an answer, or in the middle of it

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


@dataclass
class Record:
    """One HTTP request, as its log line has it. The gateway's parts write into it as they learn."""

    id: str
    method: str
    path: str
    began_at: float
    client_id: str | None = None  # the client's own name of the request, which its answer gets back
    caller: str | None = None  # whose key it is
    service: ServiceClass | None = None  # of those that ask for tokens
    prompt_tokens: int = 0  # of all of its requests
    cached_tokens: int = 0  # of them
    output_tokens: int = 0
    ttft_s: float | None = None
    finish: str | None = None  # stop, length, abort (the client left) or error
    status: int | None = None

    def log(self, now: float) -> None:
        """Never with anything of a prompt or an output."""
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


class Metrics:
    """Of one application; nothing is global, so that two in one process do not meet."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()  # of our own requests
        self._parts = CollectorRegistry()  # what other parts say of themselves, to every gateway
        self._succeeded = self._counter("request_success", "Requests that ended.", "finished_reason", "class")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got output.", "class")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Of them, those whose KV the pool had.", "class")
        self._generation_tokens = self._counter("generation_tokens", "Output tokens that reached the gateway.", "class")
        self._attained = self._counter("slo_attained", "Requests that ended with all that was promised them.", "class")
        self._missed = self._counter("slo_missed", "Requests that ended, and not with all that was promised.", "class")
        self._http_errors = self._counter("http_errors", "Answers with a status of 400 or more.", "status")
        self._running = Gauge(
            f"{PREFIX}num_requests_running", "Requests that are open.", ["class"], registry=self._registry
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token's being written.", _TTFT_BUCKETS
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Between two chunks' being written to a client.", _ITL_BUCKETS
        )
        self._refused = self._part_counter(
            "kv_copies_refused",
            "Copies from the KV pool of which a page was not what it should be; what it held is computed anew.",
            "worker",
        )
        self._compressed = self._part_counter("kv_pages_compressed", "Pages of the KV pool that became int8.", "pool")
        self._incompressible = self._part_counter(
            "kv_pages_incompressible", "Pages of the KV pool that were to become int8 and could not.", "pool"
        )
        self._failed_transfers = self._part_counter(
            "kv_transfers_failed",
            "Transfers of KV between workers that failed, as either end saw it; what was sent goes another way.",
            "worker",
        )
        self._rebuilt = Gauge(
            f"{PREFIX}router_rebuilt_seconds",
            "From the router's last start until it knew again what was open, and where.",
            registry=self._parts,
        )
        self._stages = Gauge(
            f"{PREFIX}num_requests_at",
            "Open requests by where they are: unplaced, with prefill workers, in the pool, with decode workers.",
            ["class", "stage"],
            registry=self._parts,
        )
        self._pool_pages = Gauge(
            f"{PREFIX}kv_pool_pages",
            "Pages of the KV pool: held by requests of class rt, be or both (shared), idle, leased or free.",
            ["pool", "state"],
            registry=self._parts,
        )
        self._known: dict[tuple[Counter, str], int] = {}  # (counter, member) -> what it has told in its life
        for service in ServiceClass:  # a series that is there from the start has no gap before its first event
            self._running.labels(service.value)
        # For each token: looking a series up costs more than adding to it.
        self._generated = {service: self._generation_tokens.labels(service.value) for service in ServiceClass}
        self._between = {service: self._itl.labels(service.value) for service in ServiceClass}

    def series(self) -> bytes:
        """Of what this gateway served."""
        return generate_latest(self._registry)

    async def alone(self) -> bytes:
        """Of all gateways, where there is only this one."""
        return self.series()

    def series_of_parts(self) -> bytes:
        return generate_latest(self._parts)

    def told(self, figures: Figures) -> None:
        """What a pool, a worker or the router says of itself; from any one thread."""
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
                self._counted(counter, figures.member, now)

    def _counted(self, counter: Counter, member: str, now: int) -> None:
        known = self._known.get((counter, member), 0)
        self._known[counter, member] = now
        counter.labels(member).inc(now - known if now >= known else now)  # less: of its next life

    def answered(self, record: Record) -> None:
        if record.status is not None and record.status >= 400:
            self._http_errors.labels(str(record.status)).inc()
        if record.service is not None and record.finish not in (None, "error"):
            self._succeeded.labels(record.finish, record.service.value).inc()

    def opened(self, service: ServiceClass) -> None:
        self._running.labels(service.value).inc()

    def closed(self, service: ServiceClass) -> None:
        self._running.labels(service.value).dec()

    def kept(self, service: ServiceClass, all_of_it: bool) -> None:
        """What was promised to a request that has ended."""
        (self._attained if all_of_it else self._missed).labels(service.value).inc()

    def prompt_read(self, service: ServiceClass, tokens: int, num_cached: int) -> None:
        self._prompt_tokens.labels(service.value).inc(tokens)
        self._cached_tokens.labels(service.value).inc(num_cached)

    def generated(self, service: ServiceClass, tokens: int) -> None:
        self._generated[service].inc(tokens)

    def first_token(self, service: ServiceClass, after_s: float) -> None:
        self._ttft.labels(service.value).observe(after_s)

    def next_token(self, service: ServiceClass, after_s: float) -> None:
        self._between[service].observe(after_s)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", about, labels, registry=self._registry)

    def _part_counter(self, name: str, about: str, label: str) -> Counter:
        return Counter(f"{PREFIX}{name}", about, [label], registry=self._parts)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}{name}", about, ["class"], buckets=buckets, registry=self._registry)


class Meter:
    """Measures the requests of one body, by the numbers of their choices. Latencies are taken where tokens are written
    to the client, which is what it feels.

    A client that does not stream gets all at once: for it, a token counts as written when it is here.
    """

    def __init__(
        self,
        metrics: Metrics,
        record: Record,
        service: ServiceClass,
        now: Callable[[], float],
        take: Callable[[int], None],
        slo: Slo,
    ) -> None:
        """`take` is told of every token of output."""
        self._metrics, self._record, self._service, self._now, self._take = metrics, record, service, now, take
        self._slo, self._num_gaps, self._num_late = slo, 0, 0
        self._written_at: dict[int, float] = {}  # by choice
        self._begun: set[int] = set()  # choices that have output

    def opened(self) -> None:
        self._metrics.opened(self._service)

    def closed(self) -> None:
        self._metrics.closed(self._service)
        if self._record.finish in ("stop", "length"):
            self._metrics.kept(self._service, self._is_kept())

    def _is_kept(self) -> bool:
        """As the simulator has it: of a chat's gaps 99 of 100 in time, and the first token; of others the end."""
        if self._service is ServiceClass.BE:
            return self._now() - self._record.began_at <= self._slo.jct_s
        ttft_s = self._record.ttft_s
        return ttft_s is not None and ttft_s <= self._slo.ttft_s and 100 * self._num_late <= self._num_gaps

    def delivered(self, choice: int, prompt_tokens: int, tokens: int, num_cached: int = 0) -> None:
        if choice not in self._begun:
            self._begun.add(choice)
            self._record.cached_tokens += num_cached
            self._metrics.prompt_read(self._service, prompt_tokens, num_cached)
        self._record.output_tokens += tokens
        self._take(tokens)
        self._metrics.generated(self._service, tokens)

    def written(self, choice: int) -> None:
        now = self._now()
        before, self._written_at[choice] = self._written_at.get(choice), now
        if before is not None:
            self._num_gaps += 1
            self._num_late += now - before > self._slo.tbt_s
            self._metrics.next_token(self._service, now - before)
            return
        ttft_s = now - self._record.began_at
        self._metrics.first_token(self._service, ttft_s)
        if self._record.ttft_s is None:
            self._record.ttft_s = ttft_s

    def ended(self, finish: str) -> None:
        self._record.finish = finish
