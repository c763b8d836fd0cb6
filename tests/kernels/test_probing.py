"""Each kernel is tried on a few numbers: one that fails or is wrong is named alone. The fastest way is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.paged_attention import Fastest, nothing_can_be_timed
from alignedserve.kernels.dispatch.probing import KERNELS, broken, replace

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_are_right_are_kept(dtype: torch.dtype) -> None:
    assert broken(Reference(), CPU, dtype) == {}


def test_each_that_fails_is_named_with_its_reason_and_replaced() -> None:
    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("no such\ninstruction")

    kernels = Reference()
    for name in KERNELS:
        setattr(kernels, name, fail)
    faults = broken(kernels, CPU, torch.float32)
    assert faults.keys() == KERNELS
    assert all("no such" in why and "\n" not in why for why in faults.values())
    replace(kernels, faults)
    assert broken(kernels, CPU, torch.float32) == {}


def test_one_that_is_off_is_named_alone() -> None:
    class Off(Reference):
        def gelu_mul(self, gate_up: Tensor) -> Tensor:
            return super().gelu_mul(gate_up) + 0.5

    assert broken(Off(), CPU, torch.bfloat16) == {"gelu_mul": "it is off by 0.5"}


def test_the_fastest_way_is_the_one_with_the_shortest_turn_and_is_measured_once() -> None:
    times: dict[object, Iterator[float]] = {"a": iter((3.0, 1.0, 9.0)), "b": iter((2.0, 2.0, 2.0))}
    fastest = Fastest(lambda work: next(times[work()]), lambda: False)
    assert [fastest.find("key", {"b": lambda: "b", "a": lambda: "a"}) for _ in range(2)] == ["a", "a"]


def test_where_nothing_can_be_timed_the_first_way_is_taken_until_it_can() -> None:
    cannot = iter((True, False))
    fastest = Fastest(lambda work: {"a": 2.0, "b": 1.0}[str(work())], lambda: next(cannot))
    ways = {"a": lambda: "a", "b": lambda: "b"}
    assert [fastest.find("key", ways) for _ in range(2)] == ["a", "b"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a graph could be captured")
def test_without_a_gpu_no_graph_is_captured() -> None:
    assert not nothing_can_be_timed()
