"""The cores of both workers, for tests of what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from alignedserve.decode_worker.state import DecodeCore
from alignedserve.forms.prefetching import Prefetching
from alignedserve.worker.setup import WorkerSetup

MakeCore: TypeAlias = Callable[[WorkerSetup], DecodeCore]


def prefetching_of(core: DecodeCore) -> Prefetching:
    """Return the part of a decode worker that has prefill workers hold KV for it."""
    assert isinstance(core.elsewhere, Prefetching)
    return core.elsewhere
