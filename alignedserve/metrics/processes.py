"""Metrics of processes and their Python, under the names that Prometheus' clients give them; and of their machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from alignedserve.metrics.part_tables import PartMetric, Values
from alignedserve.metrics.series import PART, block, label, line
from alignedserve.protocol.figures import GpuFigures, MachineFigures, ProcessFigures

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
