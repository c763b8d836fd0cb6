"""The metrics of workers, pools and the router as tables: their names, and how each is read from what a part told.

The client library takes 10 µs and more for a line, and there are a hundred lines for a worker, so lines are written
here. A part counts from the start of its life on, and Prometheus knows a count that begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Generic, TypeAlias, TypeVar

from alignedserve.metrics.exposition import label, line
from alignedserve.metrics.series import PART
from alignedserve.protocol.figures import RATIOS, SPREADS, STEP_S, STEP_TOKENS, ByClass, DecodeSteps, Tally, WorkerLoad
from alignedserve.protocol.messages import Figures

Values: TypeAlias = Iterable[tuple[str, float]]  # each with labels of its own, if any
T = TypeVar("T")
_WORKER, _POOL = "worker", "pool"
FALLBACKS = ("fallbacks", "What does not work in a part, which does something else: 1 for each; /status says why.")
_BATCHES = "0", "1", "2+"


@dataclass(frozen=True)
class PartMetric(Generic[T]):
    """A gauge or a counter."""

    kind: str
    name: str
    about: str
    of: str  # the label with the part's name; the router has none
    read: Callable[[T], Values]  # nothing where the part has no such metric

    def lines(self, full_name: str, common: str, part: str, told: T) -> Iterator[str]:
        whose = label(self.of, part) if self.of else ""
        for labels, value in self.read(told):
            yield line(full_name, ",".join(filter(None, (common, labels, whose))), value)


@dataclass(frozen=True)
class WorkerHistogram:
    name: str
    about: str
    bounds: Sequence[float]
    read: Callable[[Figures], Tally | None]
    kind = "histogram"

    def lines(self, full_name: str, common: str, part: str, figures: Figures) -> Iterator[str]:
        tally, labels = self.read(figures), f'{common},{_WORKER}="{part}"'
        if tally is None:
            return
        bounds = [*map(float, self.bounds), "+Inf"]
        counts = [*accumulate(tally.buckets or (0,) * len(bounds))]
        for bound, count in zip(bounds, counts, strict=True):
            yield line(f"{full_name}_bucket", f'{labels},le="{bound}"', count)
        yield line(f"{full_name}_count", labels, counts[-1])
        yield line(f"{full_name}_sum", labels, tally.total)


def _of_load(read: Callable[[WorkerLoad], Values]) -> Callable[[Figures], Values]:
    return lambda figures: () if figures.worker is None else read(figures.worker)


def _of_worker(read: Callable[[Figures], float]) -> Callable[[Figures], Values]:
    return lambda figures: () if figures.worker is None else (("", read(figures)),)


def _of_steps(read: Callable[[DecodeSteps], Values]) -> Callable[[Figures], Values]:
    return lambda figures: () if figures.steps is None else read(figures.steps)


def _of_pool(read: Callable[[Figures], float]) -> Callable[[Figures], Values]:
    return lambda figures: () if figures.usage is None else (("", read(figures)),)


def _by_class(counts: ByClass) -> Values:
    return ('class="rt"', counts.rt), ('class="be"', counts.be)


def _pages(figures: Figures) -> Values:
    usage = {} if figures.usage is None else asdict(figures.usage)
    return [(f'state="{state}"', pages) for state, pages in usage.items()]


def _preempted(load: WorkerLoad) -> Values:
    for left in load.preempted:
        kv = "kept" if left.keeps_kv else "lost"
        yield f'class="{left.service.value}",cause="{left.cause.value}",kv="{kv}"', left.number


def _open_at(figures: Figures) -> Values:
    for service, stages in (("rt", figures.rt), ("be", figures.be)):
        for stage, count in ({} if stages is None else asdict(stages)).items():
            yield f'class="{service}",stage="{stage}"', count


def _replaced(figures: Figures) -> Values:
    if figures.rt is None:
        return
    for reason, counts in (("returned", figures.returned), ("lost", figures.lost)):
        yield from ((f'{service},reason="{reason}"', count) for service, count in _by_class(counts))


def _failed_policies(figures: Figures) -> Values:
    for failed in () if figures.process is None else figures.process.failed:
        yield f'failure="{failed.how.value}",policy="{failed.kind.label}"', failed.number


def _energy(figures: Figures) -> Values:
    told = None if figures.process is None else figures.process.energy
    if told is None:
        return
    for use, joules in (("steps", told.joules - told.rest_joules), ("rest", told.rest_joules)):
        yield f'{label("source", told.source)},use="{use}"', joules


def _fallbacks(figures: Figures) -> Values:
    for fallback in () if figures.process is None else figures.process.fell_back:
        yield label("what", fallback.what), 1


_STEP_COUNTS: tuple[tuple[str, str, Callable[[DecodeSteps], Values]], ...] = (
    (
        "decode_steps_total",
        "Decode steps, by how many of the pool's batches had members in them.",
        lambda steps: [(f'batches="{num}"', count) for num, count in zip(_BATCHES, steps.by_batches, strict=True)],
    ),
    (
        "batch_switches_total",
        "Batches of the pool that began to run on a decode worker.",
        lambda steps: (("", steps.switches),),
    ),
    (
        "kv_prefetches_total",
        "Requests whose KV a prefill worker fetched ahead of need: used, or wasted.",
        lambda steps: (('outcome="used"', steps.prefetched), ('outcome="wasted"', steps.in_vain)),
    ),
    (
        "be_tokens_held_back_total",
        "Tokens that best-effort requests with memory did not get in steps that had real-time requests.",
        lambda steps: (("", steps.held_back),),
    ),
)

PART_METRICS: tuple[PartMetric[Figures], ...] = (
    PartMetric(
        "gauge",
        "kv_pool_pages",
        "Pages of the KV pool: held by requests of class rt, be or both (shared), idle, leased or free.",
        _POOL,
        _pages,
    ),
    PartMetric(
        "counter",
        "kv_pages_compressed_total",
        "Pages of the KV pool that were compressed to int8.",
        _POOL,
        _of_pool(lambda figures: figures.num_compressed),
    ),
    PartMetric(
        "counter",
        "kv_pages_incompressible_total",
        "Pages of the KV pool that could not be compressed to int8.",
        _POOL,
        _of_pool(lambda figures: figures.num_incompressible),
    ),
    PartMetric(
        "gauge",
        "step_slowdown",
        "How many times as long steps take as when the worker's profile was measured.",
        _WORKER,
        _of_worker(lambda figures: figures.slowdown),
    ),
    PartMetric(
        "gauge",
        "num_requests_running",
        "Requests in a worker's steps.",
        _WORKER,
        _of_load(lambda load: _by_class(load.running)),
    ),
    PartMetric(
        "gauge",
        "num_requests_waiting",
        "Requests that wait on a worker: for a place in its steps, or for their KV.",
        _WORKER,
        _of_load(lambda load: _by_class(load.waiting)),
    ),
    PartMetric(
        "gauge",
        "kv_cache_usage_perc",
        "Share of a device's KV cache in use; 1 is all of it.",
        _WORKER,
        _of_load(lambda load: (("", load.used),)),
    ),
    PartMetric(
        "gauge",
        "slack_seconds",
        "Time until the next token of a worker's most urgent real-time request is due; below 0 it is late.",
        _WORKER,
        _of_load(lambda load: () if load.slack_s is None else (("", load.slack_s),)),
    ),
    PartMetric(
        "counter",
        "num_preemptions_total",
        "Requests that had to leave a worker's steps: why, and whether their KV was kept or lost.",
        _WORKER,
        _of_load(_preempted),
    ),
    PartMetric(
        "counter",
        "kv_copies_refused_total",
        "Copies from the KV pool with a page that failed its check; its KV is computed again.",
        _WORKER,
        _of_worker(lambda figures: figures.num_refused),
    ),
    PartMetric(
        "counter",
        "kv_transfers_failed_total",
        "Transfers of KV between workers that failed, as either end saw it; the KV is sent another way.",
        _WORKER,
        _of_worker(lambda figures: figures.num_failed_transfers),
    ),
    PartMetric(
        "counter",
        "energy_joules_total",
        "Energy of a worker's devices, in steps and at rest: counted (nvml, rapl), or modelled.",
        _WORKER,
        _energy,
    ),
    PartMetric(
        "counter",
        "policy_failures_total",
        "Decisions that the default made, since a custom policy had failed.",
        PART,
        _failed_policies,
    ),
    PartMetric("gauge", *FALLBACKS, PART, _fallbacks),
    *(PartMetric("counter", name, about, _WORKER, _of_steps(read)) for name, about, read in _STEP_COUNTS),
    PartMetric(
        "gauge",
        "router_rebuilt_seconds",
        "Time from the router's last start until it knew all open requests and their places again.",
        "",
        lambda figures: () if figures.rebuilt_s is None else (("", figures.rebuilt_s),),
    ),
    PartMetric(
        "gauge",
        "num_requests_at",
        "Open requests by their place: unplaced, with prefill workers, in the pool, with decode workers.",
        "",
        _open_at,
    ),
    PartMetric(
        "counter",
        "request_replacements_total",
        "Times that an open request lost its place: its worker gave it back (returned), or the attempt was lost.",
        "",
        _replaced,
    ),
)


def _tally(read: Callable[[WorkerLoad], Tally]) -> Callable[[Figures], Tally | None]:
    return lambda figures: None if figures.worker is None else read(figures.worker)


HISTOGRAMS = (
    WorkerHistogram("iteration_tokens_total", "Tokens of a step.", STEP_TOKENS, _tally(lambda load: load.step_tokens)),
    WorkerHistogram("iteration_time_seconds", "Time of a step.", STEP_S, _tally(lambda load: load.step_s)),
    WorkerHistogram(
        "iteration_time_ratio",
        "Time of a step over the time that its worker predicted.",
        RATIOS,
        _tally(lambda load: load.step_ratio),
    ),
    WorkerHistogram(
        "generation_tokens_ratio",
        "Tokens of an output over the tokens that were predicted.",
        RATIOS,
        _tally(lambda load: load.length_ratio),
    ),
    WorkerHistogram(
        "decode_step_spread_tokens",
        "Decode steps by the spread of their prefixes: tokens of the longest less the shortest.",
        SPREADS,
        lambda figures: None if figures.steps is None else figures.steps.spread,
    ),
)
