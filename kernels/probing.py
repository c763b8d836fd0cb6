"""Tries each kernel on a few numbers before anything depends on it: one that does not compile, or that is wrong on this
device, is replaced by the torch reference, and whoever chose it hears why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from alignedserve.kernels.reference import Reference
from alignedserve.kernels.spans import Lie, Spans

_OFF = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}  # far more than rounding, far less than a fault
_SIZE, _BLOCK_SIZE = 32, 16


def without_broken(kernels: Reference, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """In place, and by name why each was replaced."""
    reference, broken = Reference(), dict[str, str]()
    for name, trial in _TRIALS.items():
        why = _fault(trial, kernels, reference, device, dtype)
        if why is not None:
            broken[name] = why
            setattr(kernels, name, getattr(reference, name))
    return broken


Trial = Callable[[Reference, Callable[..., torch.Tensor]], torch.Tensor]


def _fault(
    trial: Trial, kernels: Reference, reference: Reference, device: torch.device, dtype: torch.dtype
) -> str | None:
    def run(one: Reference) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return trial(one, lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)).float().cpu()

    try:
        off = float((run(kernels) - run(reference)).abs().max())
    except Exception as error:  # of a compiler, a driver, a library: whatever it is, the reference takes its place
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return None if off <= _OFF[dtype] else f"it is off by {off:.2g}"


def _spans() -> Spans:
    return Spans([Lie(1, 30, (2, 0), (0,)), Lie(5, 21, (1, 3))], _BLOCK_SIZE)


def _cache(made: Callable[..., torch.Tensor]) -> torch.Tensor:
    return made(8, _BLOCK_SIZE, _SIZE)


def _in_place(x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    change(x)
    return x


def _gathered(kernels: Reference, made: Callable[..., torch.Tensor]) -> torch.Tensor:
    out = torch.empty(1, 2, 3, _SIZE, dtype=made(1).dtype)
    kernels.gather(_cache(made)[None], torch.tensor([3, 40, 70]), out)
    return out


def _levels(kernels: Reference, made: Callable[..., torch.Tensor], *, back: bool) -> torch.Tensor:
    rows = made(2, 5, _SIZE)
    q = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    least, step = torch.empty((2, 2, _SIZE), dtype=torch.float32, device=rows.device)
    (Reference() if back else kernels).quantise(rows, q, least, step)
    if not back:
        mean: torch.Tensor = least + q.float().mean(1) * step
        return mean
    out = torch.empty_like(rows)
    kernels.dequantise(q, least, step, out)
    return out


_AT = torch.tensor([3, 40, 70])
_TRIALS: dict[str, Trial] = {
    "write": lambda one, made: _in_place(
        _cache(made), lambda cache: one.write(cache, _spans(), made(6, _SIZE), made(6, _SIZE))
    ),
    "attend": lambda one, made: one.attend(made(6, 4, _SIZE // 2), _cache(made), _spans(), 0.2),
    "write_hidden": lambda one, made: _in_place(_cache(made), lambda cache: one.write_hidden(cache, _AT, made(3, 20))),
    "read_hidden": lambda one, made: one.read_hidden(_cache(made), _AT, 20),
    "rms_norm": lambda one, made: one.rms_norm(made(3, _SIZE), made(_SIZE), 1e-5),
    "add_rms_norm": lambda one, made: one.add_rms_norm(made(3, _SIZE), made(3, _SIZE), made(_SIZE), 1e-5),
    "layer_norm": lambda one, made: one.layer_norm(made(3, _SIZE), made(_SIZE), made(_SIZE), 1e-5),
    "add_layer_norm": lambda one, made: one.add_layer_norm(made(3, _SIZE), made(3, _SIZE), None, None, 1e-5),
    "rotate": lambda one, made: _in_place(
        made(3, 2, _SIZE), lambda x: one.rotate(x, made(3, 8).float(), made(3, 8).float())
    ),
    "silu_mul": lambda one, made: one.silu_mul(made(3, 2 * _SIZE)),
    "gather": _gathered,
    "scatter": lambda one, made: _in_place(
        _cache(made)[None], lambda cache: one.scatter(cache, _AT, made(1, 2, 3, _SIZE))
    ),
    "quantise": lambda one, made: _levels(one, made, back=False),
    "dequantise": lambda one, made: _levels(one, made, back=True),
}
