"""One compute thread, for work that has one core: a second thread of numpy's spins between calls, and only takes a core
from others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

# What numpy and torch read when they are loaded.
ONE_THREAD: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)


@contextmanager
def one_compute_thread() -> Iterator[None]:
    """Let numpy compute in one thread if this block loads it, and so in all processes that the block starts."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ |= ONE_THREAD
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
