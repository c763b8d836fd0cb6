"""The metrics of the requests that one process owns.

A request counts in the owning process: the gateway, or for a line of a batch the job runner.
"""

# ruff: noqa: RUF009  (fields are made by functions)

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from math import inf
from time import monotonic
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from alignedserve.config.choices import MetricsPrefix
from alignedserve.config.prices import Prices
from alignedserve.core import DEADLINES, ServiceClass, Spent
from alignedserve.fallbacks import fallbacks
from alignedserve.metrics.part_tables import FALLBACKS, process_blocks
from alignedserve.metrics.recent import RequestLog
from alignedserve.metrics.series import MetricFamily, Series, in_turns
from alignedserve.shell.process import own_process

FAILED = "error"  # the finish of a request that an error of ours ended
REFUSED = "refused"
WINDOW_S, _SLOT_S = 900.0, 15.0  # of the promises that are shown, and of the slots in it
KEPT_S = 3600.0  # of the series of a key that counts no more
ALL = "all"  # the deadlines of a request together

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(1.5, 2.5, 4, 5, 7.5, 10, 15, 20, 30, 40, 80, 160, 640, 2560),
)
_GAP_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY_BUCKETS = (*(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60), *(120, 240, 480, 960, 1920, 7680))
_LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_CHOICES_BUCKETS = (1, 2, 5, 10, 20)


def _counter(name: str, about: str) -> Any:
    return field(metadata={"make": Series.counter, "declared": (name, about)})


def _histogram(name: str, about: str, buckets: tuple[float, ...]) -> Any:
    return field(metadata={"make": Series.histogram, "declared": (name, about, buckets)})


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """The metrics of one service class, looked up once: to look one up costs more than to count a token."""

    prompt_tokens: Counter = _counter("prompt_tokens", "Prompt tokens of requests that got output.")
    cached_tokens: Counter = _counter("prompt_tokens_cached", "Tokens of prompts whose KV a device or the pool had.")
    queries: Counter = _counter("prefix_cache_queries", "Prompt tokens that were looked up.")
    hits: Counter = _counter("prefix_cache_hits", "Prompt tokens that were found, of those that were looked up.")
    generated: Counter = _counter("generation_tokens", "Output tokens that reached their owner.")
    attained: Counter = _counter("slo_attained", "Requests that got all that was promised to them.")
    ttft: Histogram = _histogram(
        "time_to_first_token_seconds",
        "Time from a request's arrival until its first token was written to the client.",
        _TTFT_BUCKETS,
    )
    gap: Histogram = _histogram(
        "inter_token_latency_seconds", "Time between the writes of two chunks to a client.", _GAP_BUCKETS
    )
    token_time: Histogram = _histogram(
        "request_time_per_output_token_seconds", "Mean time of a request for each token after its first.", _GAP_BUCKETS
    )
    latency: Histogram = _histogram(
        "e2e_request_latency_seconds", "Time from a request's arrival to its end.", _LATENCY_BUCKETS
    )
    queue: Histogram = _histogram(
        "request_queue_time_seconds", "Time from a request's arrival until its prompt began to run.", _LATENCY_BUCKETS
    )
    prefill: Histogram = _histogram(
        "request_prefill_time_seconds",
        "Time from the beginning of a request's prompt to its first token.",
        _LATENCY_BUCKETS,
    )
    decode: Histogram = _histogram(
        "request_decode_time_seconds", "Time from a request's first token to its last.", _LATENCY_BUCKETS
    )
    inference: Histogram = _histogram(
        "request_inference_time_seconds", "Time of prefill and decode together.", _LATENCY_BUCKETS
    )
    prompt_length: Histogram = _histogram("request_prompt_tokens", "Tokens of a request's prompt.", _LENGTH_BUCKETS)
    output_length: Histogram = _histogram("request_generation_tokens", "Tokens of a request's output.", _LENGTH_BUCKETS)
    longest_choice: Histogram = _histogram(
        "request_max_num_generation_tokens",
        "Tokens of the longest output among the choices of a body.",
        _LENGTH_BUCKETS,
    )
    computed: Histogram = _histogram(
        "request_prefill_kv_computed_tokens", "Tokens of a request's prompt that no cache had.", _LENGTH_BUCKETS
    )
    longest_output: Histogram = _histogram(
        "request_params_max_tokens", "Most tokens of output that a request allows.", _LENGTH_BUCKETS
    )
    choices: Histogram = _histogram(
        "request_params_n", "Choices that the body of a request asks for.", _CHOICES_BUCKETS
    )


class AttainmentWindow(Collector):
    """Counts of the last WINDOW_S seconds, in slots of time; it shows their shares as a gauge when it is asked."""

    def __init__(self, series: Series, now: Callable[[], float]) -> None:
        self._series, self._now = series, now
        # The oldest first; what is counted is (class, deadline, tier, whether kept).
        self._slots = collections.deque[tuple[int, collections.Counter[tuple[ServiceClass, str, str, bool]]]]()
        series.registry.register(self)

    def count(self, service: ServiceClass, deadline: str, tier: str, is_kept: bool) -> None:
        """Count a deadline of an ended request, or ALL of its deadlines."""
        slot = int(self._now() // _SLOT_S)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, collections.Counter()))
            self._forget(slot)
        self._slots[-1][1][service, deadline, tier, is_kept] += 1

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the share that was kept, by class, deadline and tier."""
        self._forget(int(self._now() // _SLOT_S))
        kept = collections.Counter[tuple[ServiceClass, str, str]]()
        every = collections.Counter[tuple[ServiceClass, str, str]]()
        for _, counts in self._slots:
            for (service, deadline, tier, is_kept), number in counts.items():
                every[service, deadline, tier] += number
                kept[service, deadline, tier] += number * is_kept
        minutes = f"{WINDOW_S / 60:g} minutes"
        about = f"Share of requests with a promise that ended in the last {minutes} with this deadline kept."
        labels = (*self._series.names, "class", "kind", "tier")
        family = GaugeMetricFamily(f"{self._series.prefix}slo_attainment", about, labels=labels)
        for key in sorted(every, key=lambda key: str((key, kept[key] / every[key]))):
            service, deadline, tier = key
            family.add_metric([*self._series.values, service.value, deadline, tier], kept[key] / every[key])
        yield family

    def _forget(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - WINDOW_S / _SLOT_S:
            self._slots.popleft()


class RequestMetrics:
    def __init__(
        self,
        model: str = "",
        prefix: MetricsPrefix = MetricsPrefix.ALIGNEDSERVE,
        now: Callable[[], float] = monotonic,
        part: str = "gateway-0",
        knows_key: Callable[[str], bool] = lambda _: True,
        prices: Prices | None = None,
    ) -> None:
        """`knows_key` returns whether a key of this name counts."""
        self._part, self.series = part, Series(model, prefix, part)
        self._like, self._others = (prefix, now, part, knows_key, prices), list[RequestMetrics]()
        counter = self.series.counter
        self.succeeded = counter("request_success", "Requests that ended.", "finished_reason", "class")
        self.rejected = counter("admission_rejections", "Requests that were not admitted.", "reason", "class")
        self.missed = counter(
            "slo_missed", "Requests that did not get what was promised to them, by the first miss.", "why", "class"
        )
        self.http_errors = counter("http_errors", "Answers with a status of 400 or more.", "status")
        device_s = "Time of workers that requests used: their shares of the steps that they were in."
        self._device_s = counter("request_device_seconds", device_s, "class", "key")
        self._joules = counter("request_energy_joules", "Energy that requests used in these steps.", "class", "key")
        self._price = counter("request_price", "Price of this time and energy, where prices are set.", "class", "key")
        self._prices = Prices() if prices is None else prices
        self.open = self.series.gauge("num_requests_open", "Requests that have not ended.", "class")
        self._fallbacks = self.series.gauge(*FALLBACKS, "what")
        self._knows_key = knows_key
        self._gone_at: dict[str, float] = {}  # when each key that has series was found to be unknown; else infinity
        self._now, self.window = now, AttainmentWindow(self.series, now)
        self.log = RequestLog()  # for the live page
        self.of = self._by_class()
        for service in ServiceClass:  # make the series now, so that it has no gap before its first event
            self.open.of(service.value)
            for why in (REFUSED, FAILED, *(deadline.value for deadline in DEADLINES[service])):
                self.missed.of(why, service.value)

    def of_model(self, model: str) -> RequestMetrics:
        """Return metrics of this process's requests for another model, which are shown with these."""
        self._others.append(made := RequestMetrics(model, *self._like))
        made.log = self.log
        return made

    def _by_class(self) -> dict[ServiceClass, ClassMetrics]:
        made: dict[str, MetricFamily[Any]] = {
            declared.name: declared.metadata["make"](self.series, *declared.metadata["declared"], "class")
            for declared in fields(ClassMetrics)
        }
        return {
            service: ClassMetrics(**{name: family.of(service.value) for name, family in made.items()})
            for service in ServiceClass
        }

    def blocks(self) -> Iterator[str]:
        """Yield the series of this process and of its own requests, a family at a time."""
        for fallback in fallbacks():
            self._fallbacks.of(fallback.what).set(1)
        for each in (self, *self._others):
            each._forget_keys()
            yield from each.series.blocks()
        process = own_process()
        if process is not None:
            yield from process_blocks([(self._part, process)])

    async def text(self) -> bytes:
        """Return the same as one text; the event loop goes on meanwhile."""
        return "".join(await in_turns(self.blocks())).encode()

    def count_use(self, service: ServiceClass, key: str, spent: Spent) -> float:
        """Count what requests of a key have used, and return the price of it; 0 without prices."""
        self._gone_at.setdefault(key, inf)
        self._device_s.of(service.value, key).inc(spent.seconds)
        self._joules.of(service.value, key).inc(spent.joules)
        if price := self._prices.of(spent.seconds, spent.joules):
            self._price.of(service.value, key).inc(price)
        return price

    def _forget_keys(self) -> None:
        """Forget the series of keys that have not counted for KEPT_S: a bill has them by then."""
        now = self._now()
        for key, gone_at in [*self._gone_at.items()]:
            self._gone_at[key] = gone_at = inf if self._knows_key(key) else min(now, gone_at)
            if gone_at > now - KEPT_S:
                continue
            del self._gone_at[key]
            for service in ServiceClass:
                for family in (self._device_s, self._joules, self._price):
                    family.forget(service.value, key)
