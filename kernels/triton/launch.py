"""What all Triton kernels share: how they are tuned, and what an interpreter changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import triton


def interpreting() -> bool:
    """In Triton's interpreter, on a CPU: numpy knows no bf16, so what computes must be widened before."""
    return bool(triton.knobs.runtime.interpret)


def tuned(
    choices: Sequence[tuple[Mapping[str, int], Sequence[int]]],
    key: Sequence[str],
    stages: Sequence[int],
    fits: Callable[[Any, Mapping[str, Any]], bool] = lambda _config, _arguments: True,
) -> Callable[[Any], Any]:
    """The fastest of these for each `key`, measured when it is first needed (rehearsing.py) and kept over a restart.
    Each is told with the numbers of warps that suit it; what does not fit the arguments is not tried."""

    def fitting(configs: Sequence[Any], arguments: Mapping[str, Any], **_: Any) -> list[Any]:
        return [one for one in configs if fits(one, arguments)]

    configs = [
        triton.Config(dict(choice), num_warps=one, num_stages=other)
        for choice, warps in choices
        for one in warps
        for other in stages
    ]
    autotune = triton.autotune(
        configs[:1] if interpreting() else configs,
        key=list(key),
        prune_configs_by={"early_config_prune": fitting},
        cache_results=True,
    )

    def made(kernel: Any) -> Any:
        _tuned.append(autotune(kernel))
        return _tuned[-1]

    return made


_tuned: list[Any] = []  # all kernels that are


@contextmanager
def with_choice(number: int) -> Iterator[None]:
    """Within, nothing is measured: each kernel takes its choice of this number, or round again. Known choices stay."""
    all_choices = [(kernel, kernel.configs) for kernel in _tuned]
    for kernel, choices in all_choices:
        kernel.configs = [choices[number % len(choices)]]
    try:
        yield
    finally:
        for kernel, choices in all_choices:
            kernel.configs = choices


def power_of_2(count: int) -> int:
    """The next one that is not less."""
    return 1 << (count - 1).bit_length()
