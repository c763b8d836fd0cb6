"""Metrics of machines: their processors, memory and GPUs, whoever uses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alignedserve.metrics.exposition import block, label, line
from alignedserve.protocol.figures import GpuFigures, MachineFigures

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
