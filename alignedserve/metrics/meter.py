"""Measure a request from arrival to end, by the clock of the owner.

Latencies are taken when tokens are written to the client, since that is what the client feels. If the client does not
stream and gets all tokens at once, a token counts as written when it reaches the owner.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from alignedserve.config.prices import NOTHING_CHARGED, Charged
from alignedserve.core import NO_OPENING, NOTHING_SPENT, Opening, Request, ServiceClass, Spent, TokenTimes
from alignedserve.metrics.recent import EndedRequest, RefusedRequest
from alignedserve.metrics.requests import ALL, FAILED, REFUSED, RequestMetrics
from alignedserve.owner.client import Overloaded

ABORT = "abort"  # the finish when the client left


class UseMeter:
    """Counts what a request has used of workers. It may be told after the request has ended, and holds no prompt."""

    __slots__ = ("_key", "_metrics", "_service", "charged")

    def __init__(self, metrics: RequestMetrics, service: ServiceClass, key: str) -> None:
        self._metrics, self._service, self._key = metrics, service, key
        self.charged = NOTHING_CHARGED  # so far

    def charge(self, spent: Spent) -> None:
        """Count what was used since the last charge; `spent` is all of it. A delivery that waited may tell of less."""
        before, price = self.charged
        if spent.seconds > before.seconds:
            more = Spent(spent.seconds - before.seconds, spent.joules - before.joules)
            self.charged = Charged(spent, price + self._metrics.count_use(self._service, self._key, more))


class RequestMeter:
    """Measures an open request, that is inside of `with`. There may be thousands, each with few bytes."""

    __slots__ = (
        *("_metrics", "_request", "_tier", "_now", "_key", "_of", "_tokens", "_longest_gap_s", "_waited_s"),
        *("_num_cached", "_first_at", "_written_at", "num_output", "_num_late", "use", "finish"),
    )

    def __init__(
        self, metrics: RequestMetrics, request: Request, tier: str, now: Callable[[], float], key: str = ""
    ) -> None:
        self._metrics, self._request, self._tier, self._now, self._key = metrics, request, tier, now, key
        self._of, self._tokens = metrics.of[request.service], metrics.log.tokens[request.service]
        self.num_output = self._num_late = 0
        self._longest_gap_s = 0.0
        self._waited_s = 0.0  # until the prompt began to run
        self._num_cached = 0  # tokens of the prompt
        self._first_at: float | None = None  # when the first token was written
        self._written_at = 0.0  # the same of the last one
        self.use = UseMeter(metrics, request.service, key)
        self.finish = ABORT  # until it has another

    def __enter__(self) -> RequestMeter:
        self._metrics.open.of(self._request.service.value).inc()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        service = self._request.service
        self._metrics.open.of(service.value).dec()
        if isinstance(error, Overloaded):
            self._metrics.rejected.of(error.reason.value, service.value).inc()
            named, is_asked = (self._request.id, service, self._tier, self._now()), self._request.slo.is_asked
            self._metrics.log.refuse(RefusedRequest(*named, error.reason.value, error.why, self._key, is_asked))
            self._count_outcome(REFUSED)
        elif isinstance(error, Exception):
            self._metrics.succeeded.of(FAILED, service.value).inc()
            self._metrics.log.end(self._ended(self._times(), FAILED))
            self._count_outcome(FAILED)
        else:
            self._metrics.succeeded.of(self.finish, service.value).inc()
            if self.finish in ("stop", "length"):
                self._count_times()
                self._count_promise()

    @property
    def ttft_s(self) -> float | None:
        return None if self._first_at is None else self._first_at - self._request.arrival_at

    def deliver(self, tokens: int, opening: Opening = NO_OPENING, spent: Spent = NOTHING_SPENT) -> None:
        """Count tokens that have reached the owner, and what the request has used so far; the opening comes with the
        first of them."""
        counters = self._of
        if spent is not self.use.charged.spent:  # mostly nothing was told since the last token
            self.use.charge(spent)
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
            self._of.ttft.observe(now - self._request.arrival_at)
            return
        gap_s = now - before
        self._num_late += gap_s > self._request.slo.tbt_s
        if gap_s > self._longest_gap_s:
            self._longest_gap_s = gap_s
        self._of.gap.observe(gap_s)
        self._tokens.add_gap(gap_s)

    def _count_times(self) -> None:
        request, of, now = self._request, self._of, self._now()
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
        """Count which deadlines the request met, by the rule of `Slo.outcomes`: none where it asked for nothing."""
        request, times = self._request, self._times()
        kept = request.slo.outcomes(request.service, times) if request.slo.is_asked else {}
        for deadline, is_kept in kept.items():
            self._metrics.window.count(request.service, deadline.value, self._tier, is_kept)
        missed = next((deadline.value for deadline, is_kept in kept.items() if not is_kept), "")
        self._count_outcome(missed)
        self._metrics.log.end(self._ended(times, missed))

    def _count_outcome(self, missed: str) -> None:
        """Count whether the request got all that it asked for, or the first miss."""
        service = self._request.service
        if not self._request.slo.is_asked:
            return
        if missed:
            self._metrics.missed.of(missed, service.value).inc()
        else:
            self._of.attained.inc()
        self._metrics.window.count(service, ALL, self._tier, not missed)

    def _times(self) -> TokenTimes:
        """Return the times until now. Tokens that are written together have no gap between them."""
        all_s = self._now() - self._request.arrival_at
        ttft_s = all_s if self.ttft_s is None else self.ttft_s  # it is written next
        return TokenTimes(ttft_s, max(0, self.num_output - 1), self._num_late, self._longest_gap_s, all_s)

    def _ended(self, times: TokenTimes, missed: str) -> EndedRequest:
        request = self._request
        lengths = len(request.prompt), self.num_output, self._num_cached
        is_asked = request.slo.is_asked
        promised = (request.slo.ttft_s, request.slo.tbt_s) if is_asked else (0.0, 0.0)
        named = request.id, request.service, self._tier, self._now(), missed
        (device_s, joules, _), price = self.use.charged
        used = self._key, device_s, joules, price, is_asked
        return EndedRequest(*named, times, *lengths, self._waited_s, *promised, *used)
