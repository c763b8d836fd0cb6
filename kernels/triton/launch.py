"""Shared by all Triton kernels: how they are tuned, and what versions of Triton and its interpreter change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

import triton
import triton.language as tl
from alignedserve.kernels.common.failing import fault_of_kernel
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench_cudagraph

log = logging.getLogger("alignedserve.kernels")

_GRAPHS_HAVE_PDL = 12030  # the CUDA of a driver
_NEVER = [float("inf")] * 3  # the time of a configuration that cannot be used, as Triton writes it


def interpreting() -> bool:
    """Return whether Triton's interpreter runs, on a CPU: numpy has no bf16, so arithmetic widens numbers first."""
    return bool(triton.knobs.runtime.interpret)


def tuned(
    choices: Sequence[tuple[Mapping[str, int], Sequence[int]]],
    key: Sequence[str],
    stages: Sequence[int],
    fits: Callable[[Any, Mapping[str, Any]], bool] = lambda _config, _arguments: True,
    changes: Sequence[str] = (),
) -> Callable[[Any], Any]:
    """Return a decorator that picks the fastest of these configurations for each `key`.

    It measures when a key is first needed (tuning.py) and keeps the result over a restart. Each configuration comes
    with the numbers of warps that suit it; those that do not fit the arguments are not tried. Tensors that the kernel
    `changes`, rather than writes, are restored after each run that is measured.
    """

    def fitting(configs: Sequence[Any], arguments: Mapping[str, Any], **named: Any) -> list[Any]:
        return [config for config in configs if fits(config, {**arguments, **named})]

    configs = [
        triton.Config(dict(choice), num_warps=num_warps, num_stages=num_stages)
        for choice, warps in choices
        for num_warps in warps
        for num_stages in stages
    ]

    def made(kernel: Any) -> Any:
        _tuned.append(_Tuner(kernel, configs[:1] if interpreting() else configs, list(key), fitting, list(changes)))
        return _tuned[-1]

    return made


class _Tuner(Autotuner):
    """Leaves out a configuration that fails, whatever the error. When all fail, the kernel fails.

    Triton itself leaves out only what needs more shared memory or registers than the GPU has, and that is no fault.
    Only one thread may run a kernel that is tuned: copies beside the steps use kernels without choices.
    """

    configs: list[Any]

    def __init__(self, kernel: Any, configs: list[Any], key: list[str], fitting: Any, changes: list[str]) -> None:
        super().__init__(
            *(kernel, kernel.arg_names, configs, key, None, changes),
            prune_configs_by={"early_config_prune": fitting},
            do_bench=_measured,
            cache_results=True,
        )
        self._told = set[str]()

    def _bench(self, *args: Any, config: Any, **meta: Any) -> Any:
        try:
            return super()._bench(*args, config=config, **meta)
        except _FailedError as failed:
            self._leave_out(config, failed.why, args)
            return _NEVER

    def run(self, *args: Any, **named: Any) -> Any:
        """Run the best configuration, or one of the others where it fails."""
        try:
            return super().run(*args, **named)
        except (TypeError, ValueError):  # the caller's arguments are wrong
            raise
        except Exception as error:
            if len(self.configs) == 1:
                raise
            best = getattr(self, "best_config", None)
            self._leave_out(best, error, args)
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            others = [config for config in self.prune_configs(named) if config != best]
            return self._run_one_of(others, best, error, args, named)

    def _run_one_of(
        self, others: Sequence[Any], best: Any, error: Exception, args: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        for config in others:
            try:
                result = self.fn.run(*args, **named, **config.all_kwargs())
            except Exception as its_error:
                self._leave_out(config, its_error, args)
            else:
                for key in [key for key, chosen in self.cache.items() if chosen == best]:
                    self.cache[key] = config
                return result
        raise error

    def _leave_out(self, config: Any, error: Exception, args: Sequence[Any]) -> None:
        """Say so once; raise an error that is not of the kernel."""
        devices = (argument.device for argument in args if isinstance(argument, torch.Tensor))
        why = fault_of_kernel(error, next(devices, torch.device("cpu")))
        choice = f"{self.base_fn.__name__} with {config}"
        if choice not in self._told:
            self._told.add(choice)
            log.warning("Triton %s: %s has failed (%s): this choice is left out", triton.__version__, choice, why)


class _FailedError(Exception):
    """A run that was to be measured has failed."""

    def __init__(self, why: Exception) -> None:
        self.why = why


def _measured(call: Callable[[], object], quantiles: Sequence[float]) -> Any:
    try:
        return benchmark(call, quantiles)
    except OutOfResources:  # Triton leaves it out by itself
        raise
    except Exception as error:
        raise _FailedError(error) from error


def benchmark(call: Callable[[], object], quantiles: Sequence[float]) -> Any:
    """Return these quantiles of the milliseconds that a call takes."""
    return triton.runtime.driver.active.get_benchmarker()(call, quantiles=quantiles)


def benchmark_in_a_graph(call: Callable[[], object]) -> float:
    """Return the median of the milliseconds that a call takes when a CUDA graph repeats it."""
    torch.cuda.current_stream().synchronize()  # it runs the call in a stream of its own
    return float(do_bench_cudagraph(call, return_mode="median"))


_tuned: list[Any] = []  # all kernels that are tuned


@contextmanager
def with_choice(number: int) -> Iterator[None]:
    """Measure nothing within: each kernel takes its configuration of this number, modulo their count.

    Choices that were made before stay.
    """
    all_choices = [(kernel, kernel.configs) for kernel in _tuned]
    for kernel, choices in all_choices:
        kernel.configs = [choices[number % len(choices)]]
    try:
        yield
    finally:
        for kernel, choices in all_choices:
            kernel.configs = choices


@cache
def processors(device: torch.device) -> int:
    """Return how many processors a GPU has; four where there is none, and an interpreter runs."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def power_of_2(count: int) -> int:
    """Return the least power of 2 that is not below the count."""
    return 1 << (count - 1).bit_length()


def aligned(count: int) -> int:
    """Return after how many numbers of four bytes, at least `count`, a multiple of 16 bytes is reached: tables that lie
    one behind another begin there, since Triton compiles another kernel for other addresses."""
    return -(-count // 4) * 4


@cache
def has_pdl(device: torch.device) -> bool:
    """Return whether programmatic dependent launches work, in graphs too: from compute capability 9.0, Triton 3.4 and
    a driver of CUDA 12.3 on."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and hasattr(tl.extra.cuda, "gdc_wait")
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and getattr(torch._C, "_cuda_getDriverVersion", int)() >= _GRAPHS_HAVE_PDL
    )


def pdl(device: torch.device) -> dict[str, bool]:
    """Return how to launch a kernel that begins by `wait_for_kernels_before`: while the one before it still ends."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(device) else {}


@triton.jit
def wait_for_kernels_before(PDL: tl.constexpr):
    """Let the next kernel begin, and wait until all kernels before this one are done, and can be seen.

    Each program does so before it reads or writes anything: a kernel is done when all its programs are, and the next
    kernel, which waits for this one alone, relies on this one's wait for those before.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def nearest(x):
    """Return the nearest whole number, of two the even one, as torch does: all versions have floor, and no more."""
    down = tl.floor(x)
    odd_down = (down * 0.5 - tl.floor(down * 0.5)) > 0.0
    up = ((x - down) > 0.5) | (((x - down) == 0.5) & odd_down)
    return down + tl.where(up, 1.0, 0.0)


@triton.jit
def bits_of_bf16(x):
    """Return the bits of a number, rounded to bf16 as torch does."""
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, near, 0x7FC0).to(tl.int16)


@triton.jit
def from_bits_of_bf16(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def weighed_norm(x, inverse, weight, dtype: tl.constexpr):
    """Return the RMSNorm of numbers in fp32, whose weight may be in fp32 where other numbers are not."""
    normed = x * inverse
    if weight.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype).to(tl.float32)
