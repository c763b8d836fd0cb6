"""The NUMA node that the pool's memory comes from, on machines that a test makes as folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from alignedserve.kvpool.arena.numa import NumaPlace, best_place, num_nodes, running_on


def machine(root: Path, *cpulists: str, gpus: tuple[int, ...] = ()) -> Path:
    """Make one node for each list of CPUs; `gpus` has the node of each GPU."""
    nodes = root / "devices/system/node"
    for node, cpus in enumerate(cpulists):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}/cpulist").write_text(f"{cpus}\n")
    nodes.mkdir(parents=True, exist_ok=True)
    (nodes / "has_memory").write_text(f"0-{len(cpulists) - 1}\n" if cpulists else "\n")
    for number, node in enumerate(gpus):
        device = root / f"bus/pci/devices/0000:{number:02x}:00.0"
        device.mkdir(parents=True)
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(node))):
            (device / name).write_text(f"{text}\n")
    return root


CPUS = frozenset(range(8))


def test_one_node_is_no_choice(tmp_path: Path) -> None:
    assert best_place(machine(tmp_path, "0-7", gpus=(0,)), CPUS) is None


def test_a_machine_that_tells_nothing_is_left_alone(tmp_path: Path) -> None:
    assert best_place(tmp_path, CPUS) is None
    assert num_nodes(tmp_path) == 0


def test_memory_lies_where_the_gpus_are(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-5", "6,7", gpus=(1, 1))
    assert best_place(root, CPUS) == NumaPlace(1, frozenset({6, 7}), "the GPUs are there")


@pytest.mark.parametrize("gpus", [(), (0, 1), (-1,)])
def test_where_gpus_decide_nothing_it_lies_where_the_process_runs(tmp_path: Path, gpus: tuple[int, ...]) -> None:
    root = machine(tmp_path, "0-3", "4-7", gpus=gpus)
    assert best_place(root, frozenset({3, 4, 5})) == NumaPlace(
        1, frozenset({4, 5}), "most CPUs of this process are there"
    )


def test_a_node_on_which_the_process_may_not_run_is_not_chosen(tmp_path: Path) -> None:
    assert best_place(machine(tmp_path, "0-3", "4-7", gpus=(1,)), frozenset({0, 1})) is None


def test_the_thread_is_there_and_comes_back() -> None:
    before = os.sched_getaffinity(0)
    cpus = frozenset({min(before)})
    with running_on(NumaPlace(0, cpus, "")):
        assert os.sched_getaffinity(0) == cpus
    assert os.sched_getaffinity(0) == before
