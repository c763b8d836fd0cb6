"""What all Triton kernels share: how they are tuned, and what an interpreter changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton


def interpreting() -> bool:
    """In Triton's interpreter, on a CPU: numpy knows no bf16, so what computes must be widened before."""
    return bool(triton.knobs.runtime.interpret)


def tuned(
    choices: Sequence[Mapping[str, int]],
    key: Sequence[str],
    warps: Sequence[int] = (4, 8),
    stages: Sequence[int] = (2, 3),
) -> Callable[[Any], Any]:
    """The fastest of these for each `key`, measured when it is first needed and kept over a restart."""
    autotune: Callable[..., Callable[[Any], Any]] = triton.autotune
    if interpreting():
        return autotune([triton.Config(dict(choices[0]))], key=list(key))
    configs = [
        triton.Config(dict(choice), num_warps=one, num_stages=other)
        for choice in choices
        for one in warps
        for other in stages
    ]
    return autotune(configs, key=list(key), cache_results=True)


def power_of_2(count: int) -> int:
    """The next one that is not less."""
    return 1 << (count - 1).bit_length()
