"""Tests that a step that finds too little memory reports it, and that requests keep the KV that they had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.core import StepFailure, StepPlan, StepResult
from alignedserve.engine.engine import Engine
from alignedserve.executor.hands import EngineHands
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans
from alignedserve.kernels.library import Library
from alignedserve.kernels.native.kernels import Native
from alignedserve.protocol.commands import RunStep
from alignedserve.protocol.events import StepDone
from tests.engine.driver import Driver, prompt_of
from tests.kernels.every import native_sets
from tests.kernels.samples import scratch_of
from tests.reference import Tally, compare

FolderOf = Callable[[str], Path]


class Short(Reference):
    """Kernels that report too little memory when a test tells them to."""

    error: Exception | None = None
    after = 0  # calls of attend that still succeed before the error

    def attend(self, query: torch.Tensor, cache: torch.Tensor, spans: Spans, scoring: Scoring) -> torch.Tensor:
        if self.error is not None:
            if not self.after:
                raise self.error
            self.after -= 1
        return super().attend(query, cache, spans, scoring)


@pytest.fixture
def kernels() -> Short:
    return Short()


@pytest.fixture
def driver(kernels: Short, folder_of: FolderOf) -> Driver:
    return Driver(Engine(folder_of("mha-tied"), num_blocks=60, block_size=4, kernels=kernels), 1)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_step_fails_and_the_same_step_goes_on_later(
    error: Exception,
    after: int,
    driver: Driver,
    kernels: Short,
    folder_of: FolderOf,
    reference_of: Callable[[Path], Any],
    tally: Tally,
) -> None:
    """The step has a request with KV, a hidden request and a prompt; it fails in the first layer and in the second."""
    kv, hidden = driver.start("kv", prompt_of(1, 20), 8), driver.start_hidden("hidden", prompt_of(2, 20), 8)
    new = driver.start("new", prompt_of(3, 30), 8)
    for live in (kv, hidden):
        driver.prefill(live)
        driver.generate(live, 3)
    driver.run(new, parts=[new.chunk(10)])
    kernels.error, kernels.after = error, 2 * after
    plan = StepPlan(77, (new.chunk(20),), (kv.decode(), hidden.decode()))
    failed = driver.engine.step(plan)
    assert failed == StepResult(77, (), failure=failed.failure)
    assert failed.failure is not None
    assert "\n" not in failed.failure.why
    kernels.error = None
    sampled = dict(driver.engine.step(plan).tokens)
    for live in (kv, hidden, new):
        live.output.append(sampled[live.name])
        compare(reference_of(folder_of("mha-tied")), live.prompt, driver.generate(live, 8), tally, live.name)


def test_the_step_before_a_failed_step_is_still_the_last(driver: Driver, kernels: Short) -> None:
    live = driver.start("r", prompt_of(1, 20), 8)
    driver.prefill(live)
    kernels.error = MemoryError()
    ahead = StepPlan(9, decodes=(live.decode_ahead(None, 0),))
    assert driver.engine.step(ahead).failure == StepFailure("out of memory")
    kernels.error = None
    assert driver.engine.step(ahead).tokens == driver.engine.step(StepPlan(10, decodes=(live.decode(),))).tokens


def test_the_worker_s_core_hears_of_it(
    driver: Driver, kernels: Short, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hands = EngineHands(driver.engine, tmp_path / "arena", 16, verify=False)
    kernels.error = MemoryError()
    done = hands.perform(RunStep(StepPlan(5, (driver.start("r", prompt_of(1, 20), 8).chunk(7),))))
    assert isinstance(done, StepDone)
    assert done.result == StepResult(5, (), failure=StepFailure("out of memory"))
    assert "too little memory for step 5 of 7 tokens: out of memory" in caplog.text


def test_another_error_is_not_taken_for_it(driver: Driver, kernels: Short) -> None:
    live = driver.start("r", prompt_of(1, 20), 8)
    kernels.error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        driver.prefill(live)


def test_torch_s_own_refusal_is_understood(folder_of: FolderOf) -> None:
    """torch raises this error for a tensor that no machine has memory for."""

    class Huge(Reference):
        def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
            return torch.empty(1 << 46)

    driver = Driver(Engine(folder_of("mha-tied"), num_blocks=8, block_size=4, kernels=Huge()), 1)
    result = driver.engine.step(StepPlan(1, (driver.start("r", prompt_of(1, 9), 1).chunk(9),)))
    assert result.failure is not None
    assert "memory" in result.failure.why


@pytest.mark.skipif(not native_sets(), reason="the C++ library was not built")
def test_so_is_that_kernels_find_none_for_what_they_work_in(folder_of: Callable[[str], Path]) -> None:
    kernels = Native(Library())
    driver = Driver(Engine(folder_of("mha-tied"), num_blocks=60, block_size=4, kernels=kernels), 1)
    live = driver.start("r", prompt_of(1, 20), 8)
    driver.prefill(live)
    plan = StepPlan(7, decodes=(live.decode(),))
    with scratch_of(kernels, 100):
        failed = driver.engine.step(plan)
    assert failed.failure is not None
    assert "no memory for what the kernel" in failed.failure.why
    assert not failed.tokens
    again = driver.engine.step(plan)
    assert again.failure is None
    assert [request for request, _ in again.tokens] == ["r"]
