"""Tests that a kernel that fails while it runs is replaced, and that other errors are passed on."""

from __future__ import annotations

import logging

import pytest
import torch

from alignedserve.errors import DeviceLost, PlanError
from alignedserve.fallbacks import fallbacks
from alignedserve.kernels.common.failing import fault_of_kernel, guard, is_replaced, loss, noticing_loss
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NAMES = ("silu_mul", "rms_norm", "quantise")


class _Failing(Reference):
    name = "ours"

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        raise self.error


def test_a_kernel_that_cannot_be_compiled_is_replaced_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    error = triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
    kernels, x = _Failing(error), torch.randn(3, 8)
    guard(kernels, NAMES, CPU)
    assert not is_replaced(kernels, "silu_mul")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(kernels.silu_mul(x), Reference().silu_mul(x))
    assert kernels.calls == 1
    assert [is_replaced(kernels, name) for name in NAMES] == [True, False, False]
    (said,) = (record.message for record in caplog.records)
    assert said.startswith("kernel silu_mul: torch reference takes its place (OutOfResources: out of resource: shared")
    (told,) = fallbacks()
    assert (told.what, told.instead) == ("kernel silu_mul", "torch reference takes its place")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_triton_kernel_that_raises_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_of = pytest.importorskip("alignedserve.kernels.triton.kernels", reason="Triton is not installed")
    tokens = pytest.importorskip("alignedserve.kernels.triton.tokens")

    class Grid:
        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("ptxas fatal: unresolved extern function")

    kernels, x = kernels_of.TritonKernels(), torch.randn(3, 8)
    guard(kernels, NAMES, CPU)
    monkeypatch.setattr(tokens, "_gated", Grid())
    assert torch.equal(kernels.silu_mul(x), Reference().silu_mul(x))
    monkeypatch.undo()
    assert torch.equal(kernels.silu_mul(x), Reference().silu_mul(x))


def test_steps_are_captured_as_long_as_attention_is_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention that replaces it reads tables on the CPU, which a capture cannot do."""
    kernels_of = pytest.importorskip("alignedserve.kernels.triton.kernels", reason="Triton is not installed")
    kernels = kernels_of.TritonKernels()
    assert kernels.captures
    guard(kernels, ("attend",), CPU)
    assert kernels.captures

    def broken(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(kernels, "_attend_some", broken)
    kernels.attend(torch.randn(1, 1, 16), torch.randn(2, 16, 16), Spans([QuerySpan(1, 1, (0,))], 16), Scoring(1.0))
    assert not kernels.captures
    assert kernels.captures_latent, "attention to compressed vectors is another kernel"


def test_steps_with_compressed_vectors_are_captured_as_long_as_their_attention_is_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels_of = pytest.importorskip("alignedserve.kernels.triton.kernels", reason="Triton is not installed")
    kernels = kernels_of.TritonKernels()
    guard(kernels, ("attend_latent",), CPU)
    assert kernels.captures_latent

    def broken(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(kernels, "_attend_latent_some", broken)
    kernels.attend_latent(torch.randn(1, 1, 32), torch.randn(2, 16, 16), Spans([QuerySpan(1, 1, (0,))], 16), 1.0, 20)
    assert not kernels.captures_latent
    assert kernels.captures


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        PlanError("slots"),
        TypeError("queries are fp16, the cache fp32"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_fault_of_the_kernel_is_passed_on(error: Exception) -> None:
    kernels = _Failing(error)
    guard(kernels, NAMES, CPU)
    for _ in range(2):
        with pytest.raises(type(error)):
            kernels.silu_mul(torch.randn(1, 2))
    assert kernels.calls == 2, "it is tried again"


def gone(_: object = None) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")


def test_a_device_is_lost_where_it_does_not_even_wait() -> None:
    assert loss(GPU, gone) == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert loss(GPU, lambda _: None) is None
    assert loss(CPU, gone) is None


def test_the_error_of_a_lost_device_says_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.kernels.common.failing.loss", lambda _: "RuntimeError: CUDA error: gone")
    said = r"^cuda:0 computes nothing any more \(RuntimeError: CUDA error: gone\): this process ends, and is restarted$"
    with pytest.raises(DeviceLost, match=said):
        fault_of_kernel(RuntimeError("CUDA error: gone"), GPU)
    with pytest.raises(DeviceLost, match=said), noticing_loss(GPU):
        raise RuntimeError("CUDA error: gone")
    with pytest.raises(PlanError), noticing_loss(GPU):
        raise PlanError("slots")


def test_an_error_of_a_device_that_goes_on_stays_what_it_is() -> None:
    with pytest.raises(KeyError), noticing_loss(CPU):
        raise KeyError("token")
