"""The NUMA node for memory that a device and its workers share.

Linux places a page of shared memory on the node whose CPU touches it first. So nothing is bound: the process that takes
the memory runs on that node meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # the vendor, and the prefix of a display controller's class


@dataclass(frozen=True)
class NumaPlace:
    node: int
    cpus: frozenset[int]  # CPUs of the node that this process may use
    why: str


def num_nodes(sysfs: Path = SYSFS) -> int:
    return len(_nodes(sysfs))


def best_place(sysfs: Path = SYSFS, usable: frozenset[int] | None = None) -> NumaPlace | None:
    """Return the node of the GPUs if all share one, else the node with most CPUs that this process may use.

    None where there is nothing to choose, or where this process may not run on that node.
    """
    usable = frozenset(os.sched_getaffinity(0)) if usable is None else usable
    nodes = {node: cpus & usable for node, cpus in _nodes(sysfs).items()}
    if len(nodes) < 2:
        return None
    of_gpus = _gpu_nodes(sysfs)
    if len(of_gpus) == 1 and of_gpus <= nodes.keys():
        node, why = of_gpus.pop(), "the GPUs are there"
    else:
        node, why = max(nodes, key=lambda node: (len(nodes[node]), -node)), "most CPUs of this process are there"
    return NumaPlace(node, nodes[node], why) if nodes[node] else None


@contextmanager
def running_on(place: NumaPlace | None) -> Iterator[None]:
    """Run this thread on the CPUs of the place meanwhile."""
    if place is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, place.cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _nodes(sysfs: Path) -> dict[int, frozenset[int]]:
    """Return the nodes that have memory, and the CPUs of each."""
    root = sysfs / "devices/system/node"
    having = _numbers(root / "has_memory")
    return {node: _numbers(root / f"node{node}/cpulist") for node in sorted(having)}


def _gpu_nodes(sysfs: Path) -> set[int]:
    found = set()
    for device in (sysfs / "bus/pci/devices").glob("*"):
        if _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY):
            found.add(int(_text(device / "numa_node") or -1))
    return found


def _numbers(path: Path) -> frozenset[int]:
    """Read a list such as 0-3,8."""
    spans = [span.partition("-") for span in _text(path).split(",") if span]
    return frozenset(number for first, _, last in spans for number in range(int(first), int(last or first) + 1))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
