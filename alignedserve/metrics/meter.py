"""Measure a request from its arrival to its end, by the clock of its owner.

Latencies are taken when tokens are written to the client, since that is what the client feels. If the client does not
stream and gets all tokens at once, a token counts as written when it reaches the owner.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from alignedserve.core import NO_OPENING, Opening, Request, ServiceClass
from alignedserve.dashboard.picture import EndedRequest, RefusedRequest
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.metrics.window import Deadline, DeadlineOutcome
from alignedserve.owner.client import Overloaded

ABORT = "abort"  # the finish of a request whose client left
FAILED = "error"  # the finish of a request that an error of ours ended


class RequestMeter:
    """Measures the request while it is open, that is inside of `with`."""

    def __init__(self, metrics: RequestMetrics, request: Request, tier: str, now: Callable[[], float]) -> None:
        self._metrics, self._request, self._tier, self._now = metrics, request, tier, now
        self._of, self._tokens = metrics.of[request.service], metrics.log.tokens[request.service]
        self.num_output = self._num_gaps = self._num_late = 0
        self._has_stalled = False
        self._longest_gap_s = 0.0
        self._waited_s = 0.0  # until its prompt began to run
        self._num_cached = 0  # tokens of its prompt
        self._first_at: float | None = None  # when its first token was written
        self._written_at = 0.0  # the same of the last one
        self.finish = ABORT  # until it has another

    def __enter__(self) -> RequestMeter:
        self._metrics.opened(self._request.service)
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        service = self._request.service
        self._metrics.closed(service)
        if isinstance(error, Overloaded):
            self._metrics.count_rejected(service, error.reason.value)
            self._metrics.log.refuse(self._refused(error))
        elif isinstance(error, Exception):
            self._metrics.count_end(service, FAILED)
        else:
            self._metrics.count_end(service, self.finish)
            if self.finish in ("stop", "length"):
                self._count_times()
                self._count_promise()

    @property
    def ttft_s(self) -> float | None:
        return None if self._first_at is None else self._first_at - self._request.arrival_at

    def deliver(self, tokens: int, opening: Opening = NO_OPENING) -> None:
        """Count tokens that have reached the owner; the opening comes with the first of them."""
        counters = self._of.counters
        if not self.num_output:
            num_prompt = len(self._request.prompt)
            counters.prompt_tokens.inc(num_prompt)
            counters.cached_tokens.inc(opening.num_cached)
            counters.queries.inc(num_prompt)
            counters.hits.inc(opening.num_cached)
            self._waited_s, self._num_cached = opening.waited_s, opening.num_cached
        self.num_output += tokens
        self._tokens.num += tokens
        counters.generated.inc(tokens)

    def write(self) -> None:
        """Count that what was delivered has been written to the client."""
        now = self._now()
        before, self._written_at = self._written_at, now
        if self._first_at is None:
            self._first_at = now
            self._of.histograms.ttft.observe(now - self._request.arrival_at)
            return
        gap_s, slo = now - before, self._request.slo
        self._num_gaps += 1
        self._num_late += gap_s > slo.tbt_s
        self._has_stalled |= gap_s > slo.stall_s
        if gap_s > self._longest_gap_s:
            self._longest_gap_s = gap_s
        self._of.histograms.gap.observe(gap_s)

    def _count_times(self) -> None:
        request, of, now = self._request, self._of.histograms, self._now()
        first_at = now if self._first_at is None else self._first_at
        all_s, to_first_s, decode_s = now - request.arrival_at, first_at - request.arrival_at, now - first_at
        prefill_s = max(0.0, to_first_s - self._waited_s)
        of.latency.observe(all_s)
        of.queue.observe(self._waited_s)
        of.prefill.observe(prefill_s)
        of.decode.observe(decode_s)
        of.inference.observe(prefill_s + decode_s)
        of.prompt_length.observe(len(request.prompt))
        of.computed.observe(len(request.prompt) - self._num_cached)
        of.output_length.observe(self.num_output)
        of.longest_output.observe(request.max_tokens)
        if self.num_output > 1:
            of.token_time.observe(decode_s / (self.num_output - 1))

    def _count_promise(self) -> None:
        """Count which deadlines the request met, by the simulator's rule.

        A real-time request needs its first token and 99 of 100 gaps in time, and no gap that is many times too long; a
        best-effort request needs its end in time."""
        slo, service = self._request.slo, self._request.service
        ttft_s = self._now() - self._request.arrival_at if self.ttft_s is None else self.ttft_s  # it is written next
        if service is ServiceClass.BE:
            kept = {Deadline.JCT: self._now() - self._request.arrival_at <= slo.jct_s}
        else:
            is_steady = not self._has_stalled and 100 * self._num_late <= self._num_gaps
            kept = {Deadline.TTFT: ttft_s <= slo.ttft_s, Deadline.TBT: is_steady}
        kept[Deadline.ALL] = all(kept.values())
        (self._of.counters.attained if kept[Deadline.ALL] else self._of.counters.missed).inc()
        for deadline, is_kept in kept.items():
            self._metrics.count_outcome(DeadlineOutcome(service, deadline, self._tier, is_kept))
        self._metrics.log.end(self._ended(ttft_s, kept[Deadline.ALL]))

    def _ended(self, ttft_s: float, is_kept: bool) -> EndedRequest:
        request, now = self._request, self._now()
        times = ttft_s, self._longest_gap_s, now - request.arrival_at
        lengths = len(request.prompt), self.num_output
        return EndedRequest(request.id, request.service, self._tier, now, is_kept, *times, *lengths)

    def _refused(self, error: Overloaded) -> RefusedRequest:
        request = self._request
        return RefusedRequest(request.id, request.service, self._tier, self._now(), error.reason.value, error.why)
