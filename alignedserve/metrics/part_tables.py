"""The metrics of workers, pools and the router as tables: their names, and how each is read from what a part told.

The client library takes 10 µs and more for a line, and there are a hundred lines for a worker, so lines are written
here. A part counts from the start of its life on, and Prometheus knows a count that begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar

from alignedserve.core import Usage
from alignedserve.metrics.series import PART, block, label, line
from alignedserve.protocol.figures import (
    RATIOS,
    SPREADS,
    STEP_S,
    STEP_TOKENS,
    ByClass,
    DecodeSteps,
    EnergyFigures,
    GpuFigures,
    MachineFigures,
    ProcessFigures,
    WorkerLoad,
)
from alignedserve.protocol.messages import Figures

# Values with labels of their own, a single number without, or None where the part has no such metric.
Values: TypeAlias = Iterable[tuple[str, float]] | float | None
T = TypeVar("T")
_WORKER, _POOL = "worker", "pool"
FALLBACKS = ("fallbacks", "What does not work in a part, which does something else: 1 for each; /status says why.")


@dataclass(frozen=True)
class PartMetric(Generic[T]):
    """A gauge or a counter."""

    kind: str
    name: str
    about: str
    of: str  # the label with the part's name; the router has none
    read: Callable[[T], Values]

    def lines(self, full_name: str, common: str, part: str, told: T) -> Iterator[str]:
        whose, found = label(self.of, part) if self.of else "", self.read(told)
        for labels, value in (("", found),) if isinstance(found, int | float) else found or ():
            yield line(full_name, ",".join(filter(None, (common, labels, whose))), value)


@dataclass(frozen=True)
class WorkerHistogram:
    name: str
    about: str
    bounds: Sequence[float]
    told: str  # path of the tally in the figures
    kind = "histogram"

    def lines(self, full_name: str, common: str, part: str, figures: Figures) -> Iterator[str]:
        tally, labels = _at(figures, self.told), f'{common},{_WORKER}="{part}"'
        if tally is None:
            return
        bounds = [*map(float, self.bounds), "+Inf"]
        counts = [*accumulate(tally.buckets or (0,) * len(bounds))]
        for bound, count in zip(bounds, counts, strict=True):
            yield line(f"{full_name}_bucket", f'{labels},le="{bound}"', count)
        yield line(f"{full_name}_count", labels, counts[-1])
        yield line(f"{full_name}_sum", labels, tally.total)


def _at(figures: Figures, path: str) -> Any:
    """Return the part of the figures at this path; None where they have none."""
    found: Any = figures
    for name in filter(None, path.split(".")):
        found = None if found is None else getattr(found, name)
    return found


# --- Gauges and counters: each is a function of its name, and the docstring is its meaning

PART_METRICS: list[PartMetric[Figures]] = []


def _metric(kind: str, of: str, told: str = "") -> Callable[[Callable[[Any], Values]], Callable[[Any], Values]]:
    """Add a metric that is read from all figures, or from the part of them at this path, where they have it."""

    def add(read: Callable[[Any], Values]) -> Callable[[Any], Values]:
        def read_there(figures: Figures) -> Values:
            return None if (found := _at(figures, told)) is None else read(found)

        PART_METRICS.append(PartMetric(kind, read.__name__, str(read.__doc__), of, read_there))
        return read

    return add


_gauge, _counter = partial(_metric, "gauge"), partial(_metric, "counter")


def _by_class(counts: ByClass) -> Iterable[tuple[str, float]]:
    return ('class="rt"', counts.rt), ('class="be"', counts.be)


@_gauge(_POOL, "usage")
def kv_pool_pages(usage: Usage) -> Values:
    """Pages of the KV pool: held by requests of class rt, be or both (shared), idle, leased or free."""
    return [(f'state="{state}"', pages) for state, pages in asdict(usage).items()]


@_counter(_POOL)
def kv_pages_compressed_total(figures: Figures) -> Values:
    """Pages of the KV pool that were compressed to int8."""
    return None if figures.usage is None else figures.num_compressed


@_counter(_POOL)
def kv_pages_incompressible_total(figures: Figures) -> Values:
    """Pages of the KV pool that could not be compressed to int8."""
    return None if figures.usage is None else figures.num_incompressible


@_gauge(_WORKER)
def step_slowdown(figures: Figures) -> Values:
    """How many times as long steps take as when the worker's profile was measured."""
    return None if figures.worker is None else figures.slowdown


@_gauge(_WORKER, "worker")
def num_requests_running(load: WorkerLoad) -> Values:
    """Requests in a worker's steps."""
    return _by_class(load.running)


@_gauge(_WORKER, "worker")
def num_requests_waiting(load: WorkerLoad) -> Values:
    """Requests that wait on a worker: for a place in its steps, or for their KV."""
    return _by_class(load.waiting)


@_gauge(_WORKER, "worker")
def kv_cache_usage_perc(load: WorkerLoad) -> Values:
    """Share of a device's KV cache in use; 1 is all of it."""
    return load.used


@_gauge(_WORKER, "worker")
def slack_seconds(load: WorkerLoad) -> Values:
    """Time until the next token of a worker's most urgent real-time request is due; below 0 it is late."""
    return load.slack_s


@_counter(_WORKER, "worker")
def num_preemptions_total(load: WorkerLoad) -> Values:
    """Requests that had to leave a worker's steps: why, and whether their KV was kept or lost."""
    for left in load.preempted:
        kv = "kept" if left.keeps_kv else "lost"
        yield f'class="{left.service.value}",cause="{left.cause.value}",kv="{kv}"', left.number


@_counter(_WORKER)
def kv_copies_refused_total(figures: Figures) -> Values:
    """Copies from the KV pool with a page that failed its check; its KV is computed again."""
    return None if figures.worker is None else figures.num_refused


@_counter(_WORKER)
def kv_transfers_failed_total(figures: Figures) -> Values:
    """Transfers of KV between workers that failed, as either end saw it; the KV is sent another way."""
    return None if figures.worker is None else figures.num_failed_transfers


@_counter(_WORKER, "process.energy")
def energy_joules_total(told: EnergyFigures) -> Values:
    """Energy of a worker's devices, in steps and at rest: counted (nvml, rapl), or modelled."""
    for use, joules in (("steps", told.joules - told.rest_joules), ("rest", told.rest_joules)):
        yield f'{label("source", told.source)},use="{use}"', joules


def _fallbacks(figures: Figures) -> Values:
    for fallback in () if figures.process is None else figures.process.fell_back:
        yield label("what", fallback.what), 1


PART_METRICS.append(PartMetric("gauge", *FALLBACKS, PART, _fallbacks))


@_counter(_WORKER, "steps")
def decode_steps_total(steps: DecodeSteps) -> Values:
    """Decode steps, by how many of the pool's batches had members in them."""
    return [(f'batches="{num}"', count) for num, count in zip(("0", "1", "2+"), steps.by_batches, strict=True)]


@_counter(_WORKER, "steps")
def decode_steps_grouped_total(steps: DecodeSteps) -> Values:
    """Decode steps that documents of other lengths sat out, since tokens were cheaper so."""
    return steps.grouped


@_counter(_WORKER, "steps")
def batch_switches_total(steps: DecodeSteps) -> Values:
    """Batches of the pool that began to run on a decode worker."""
    return steps.switches


@_counter(_WORKER, "steps")
def kv_prefetches_total(steps: DecodeSteps) -> Values:
    """Requests whose KV a prefill worker fetched ahead of need: used, or wasted."""
    return ('outcome="used"', steps.prefetched), ('outcome="wasted"', steps.in_vain)


@_counter(_WORKER, "steps")
def be_tokens_held_back_total(steps: DecodeSteps) -> Values:
    """Tokens that best-effort requests with memory did not get in steps that had real-time requests."""
    return steps.held_back


@_counter(_WORKER, "steps")
def step_pauses_total(steps: DecodeSteps) -> Values:
    """Pauses of steps, in which prompts of chats ran."""
    return steps.pauses


@_gauge("")
def router_rebuilt_seconds(figures: Figures) -> Values:
    """Time from the router's last start until it knew all open requests and their places again."""
    return figures.rebuilt_s


@_gauge("")
def num_requests_at(figures: Figures) -> Values:
    """Open requests by their place: unplaced, with prefill workers, in the pool, with decode workers."""
    for service, stages in (("rt", figures.rt), ("be", figures.be)):
        for stage, count in ({} if stages is None else asdict(stages)).items():
            yield f'class="{service}",stage="{stage}"', count


@_counter("")
def request_replacements_total(figures: Figures) -> Values:
    """Times that an open request lost its place: its worker gave it back (returned), or the attempt was lost."""
    for reason, counts in () if figures.rt is None else (("returned", figures.returned), ("lost", figures.lost)):
        yield from ((f'{service},reason="{reason}"', count) for service, count in _by_class(counts))


_HISTOGRAMS = (
    ("iteration_tokens_total", "Tokens of a step.", STEP_TOKENS, "worker.step_tokens"),
    ("iteration_time_seconds", "Time of a step.", STEP_S, "worker.step_s"),
    ("iteration_time_ratio", "Time of a step over the time that its worker predicted.", RATIOS, "worker.step_ratio"),
    (
        "generation_tokens_ratio",
        "Tokens of an output over the tokens that were predicted.",
        RATIOS,
        "worker.length_ratio",
    ),
    (
        "decode_step_spread_tokens",
        "Decode steps by the spread of their prefixes: tokens of the longest less the shortest.",
        SPREADS,
        "steps.spread",
    ),
)
HISTOGRAMS = tuple(WorkerHistogram(*row) for row in _HISTOGRAMS)


# --- Processes


def _version(told: ProcessFigures) -> Values:
    return ((label("version", told.python), 1),) if told.python else None


def _of_garbage(field: str) -> Callable[[ProcessFigures], Values]:
    return lambda told: [(f'generation="{age}"', getattr(found, field)) for age, found in enumerate(told.garbage)]


_FREED, _KEPT = "Objects that the collector freed.", "Objects that the collector found unreachable and could not free."
_STARTED = "When the process started, in seconds since 1970."
_OF_PROCESSES: tuple[tuple[str, str, str, Callable[[ProcessFigures], Values]], ...] = (
    ("counter", "process_cpu_seconds_total", "Processor time of the process.", lambda told: told.cpu_s),
    ("gauge", "process_resident_memory_bytes", "Memory of the process.", lambda told: told.resident_bytes),
    ("gauge", "process_open_fds", "Files that the process has open.", lambda told: told.num_files),
    ("gauge", "process_start_time_seconds", _STARTED, lambda told: told.started_at),
    ("gauge", "python_info", "The version of Python that the process runs.", _version),
    (
        "counter",
        "python_gc_collections_total",
        "Runs of Python's collector of garbage, by generation.",
        _of_garbage("collections"),
    ),
    ("counter", "python_gc_objects_collected_total", _FREED, _of_garbage("collected")),
    ("counter", "python_gc_objects_uncollectable_total", _KEPT, _of_garbage("uncollectable")),
)


def process_blocks(parts: Sequence[tuple[str, ProcessFigures]]) -> Iterator[str]:
    """Yield the families of the processes of these parts, each with its part's name."""
    for kind, name, about, read in _OF_PROCESSES:
        metric = PartMetric(kind, name, about, PART, read)
        yield block(name, kind, about, [line for part, told in parts for line in metric.lines(name, "", part, told)])


# --- Machines, whoever uses them

_OF_MACHINES = (
    ("node_cores_busy", "Processors of a node in use by all its processes.", "busy_cores"),
    ("node_cores", "Processors of a node.", "cores"),
    ("node_memory_used_bytes", "Memory of a node, or of its container, in use.", "used_bytes"),
    ("node_memory_bytes", "All of it.", "total_bytes"),
)
_OF_GPUS = (
    ("gpu_busy", "Share of the time in which a kernel ran on the GPU, as its driver tells.", "busy"),
    ("gpu_memory_used_bytes", "Memory of the GPU in use.", "used_bytes"),
    ("gpu_memory_bytes", "All of it.", "total_bytes"),
)


def machine_blocks(prefix: str, common: str, machines: Mapping[str, MachineFigures]) -> Iterator[str]:
    """Yield the families of these machines and of their GPUs, by node."""
    nodes = [(label("node", node), machine) for node, machine in sorted(machines.items())]
    gpus = [
        (f"{node},{label('gpu', str(number))}", gpu)
        for node, machine in nodes
        for number, gpu in enumerate(machine.gpus)
    ]
    for metrics, told in ((_OF_MACHINES, nodes), (_OF_GPUS, gpus)):
        for name, about, field in metrics:
            yield block(f"{prefix}{name}", "gauge", about, _lines(f"{prefix}{name}", common, told, field))


def _lines(
    name: str, common: str, told: list[tuple[str, MachineFigures]] | list[tuple[str, GpuFigures]], field: str
) -> Iterator[str]:
    """Yield a line for each of those that know this figure."""
    for labels, figures in told:
        if (value := getattr(figures, field)) is not None:
            yield line(name, f"{common},{labels}", value)
