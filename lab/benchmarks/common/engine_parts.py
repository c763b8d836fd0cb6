"""Show where the time of a step goes: first as it is served, then layer by layer, each kernel and linear layer timed.

A step of few tokens runs all layers in one call, which cannot be looked into from here: so the second table is of the
same work done call by call, and what it takes more is what the one call saves. With one thread the thread's own CPU
time is counted, which other work on the machine disturbs less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import Any

import torch

from alignedserve.engine.engine import Engine
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.native.decoder import NativeDecoder

_KERNELS = "write attend rms_norm add_rms_norm layer_norm add_layer_norm rotate silu_mul".split()


class Clocked:
    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._depth = 0
        self.now = thread_time if torch.get_num_threads() == 1 else perf_counter

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same call with its time added up. A kernel that calls another kernel counts once."""

        def clocked(*args: Any, **more: Any) -> Any:
            self._depth += 1
            began = self.now()
            try:
                return call(*args, **more)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds[name] += self.now() - began

        return clocked


@contextmanager
def clocked(engine: Engine, layer_by_layer: bool) -> Iterator[Clocked]:
    clock = Clocked()
    kernels = engine._kernels
    call, add_to = Linear.__call__, Linear.add_to
    for name in _KERNELS:
        setattr(kernels, name, clock.timed(name, getattr(kernels, name)))

    def named(linear: Linear, run: Callable[..., Any], *args: Any) -> Any:
        return clock.timed(f"linear {linear.shape}", run)(linear, *args)

    Linear.__call__ = lambda self, x: named(self, call, x)  # type: ignore[method-assign]
    Linear.add_to = lambda self, x, residual: named(self, add_to, x, residual)  # type: ignore[method-assign]
    model, sampler = engine._model, engine._sampler
    head, sample = model._head, sampler.sample  # type: ignore[attr-defined]  # models of our own have one
    model._head, sampler.sample = clock.timed("head", head), clock.timed("from logits to tokens", sample)  # type: ignore
    takes, run = NativeDecoder.takes, NativeDecoder.run
    NativeDecoder.run = clock.timed("all layers in one call", run)  # type: ignore[method-assign]
    if layer_by_layer:
        NativeDecoder.takes = lambda *_: False  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        NativeDecoder.takes, NativeDecoder.run = takes, run  # type: ignore[method-assign]
        model._head, sampler.sample = head, sample  # type: ignore[attr-defined, method-assign]
        Linear.__call__, Linear.add_to = call, add_to  # type: ignore[method-assign]
        for name in _KERNELS:
            delattr(kernels, name)


def print_parts(engine: Engine, runs: Sequence[tuple[str, Callable[[], Any]]]) -> None:
    """Print a table for each run; the rest is Python and torch around the model."""
    for name, run in runs:
        for layer_by_layer in (False, True):
            with clocked(engine, layer_by_layer) as clock:
                began = clock.now()
                run()
                whole = clock.now() - began
            clock.seconds["all else"] = whole - sum(clock.seconds.values())
            print(f"\n{name}{', layer by layer' if layer_by_layer else ''}: {1e3 * whole:.1f} ms in all")
            for part, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
                print(f"    {part:32} {1e3 * seconds:10.1f} ms  {100 * seconds / whole:5.1f} %")
