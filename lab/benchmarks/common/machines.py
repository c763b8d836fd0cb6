"""Workers whose steps were measured, as profiles from which the simulator takes what a step lasts.

All are of about a 160 M Llama on two quiet cores. `usual` has the steps of docs/how/kernels.md; `zen4`, `zen5` and
`amx` (Emerald Rapids, at rest) are what such workers measured of themselves (docs/measured.md). The links are the
median of what five workers of a Zen 4 measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from alignedserve.core import WorkerLimits
from alignedserve.cost.fit import Point
from alignedserve.cost.model import Coefficients, CostModel, Kind, Link, Route, Shape, Uncertainty
from alignedserve.cost.profile import MeasuredMemory, Profile, Subject, save

GATEWAY_MS = 8.0  # time that HTTP and the gateway add to a first token
_HIDDEN_S = 3.5e-5  # to make K and V of a hidden token


@dataclass(frozen=True)
class Machine:
    step: Coefficients
    limits: WorkerLimits
    off: Uncertainty  # how far steps are from predictions: in the median and at the 90th percentile
    has_goals: bool = False  # goals for tokens in a second were set for this machine


_LIMITS = WorkerLimits(num_blocks=910, block_size=16, page_size=64, max_step_tokens=512, max_batch=64)
_ZEN4_TOKENS = (0.0, 6e-5, 1.3e-4, 4.1e-4, 5.1e-4, 5.3e-4, 5.5e-4)
MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "usual": Machine(
            Coefficients(
                fixed=0.0086, token=(2.3e-4,), work=1.5e-8, chunk=3e-4, cached=1e-6, decode=1.2e-4, prefix=1.74e-6
            ),
            _LIMITS,
            Uncertainty(0.06, 0.14),
        ),
        "zen4": Machine(
            Coefficients(fixed=0.0088, token=_ZEN4_TOKENS, work=1.1e-7, cached=2.1e-6, decode=1.0e-4, prefix=1.85e-6),
            _LIMITS,
            Uncertainty(0.04, 0.12),
        ),
        "zen5": Machine(
            Coefficients(
                fixed=0.0075, token=(3.0e-4,), work=1.5e-8, chunk=3e-4, cached=1e-6, decode=1.0e-4, prefix=1.1e-6
            ),
            WorkerLimits(num_blocks=3600, block_size=16, page_size=64, max_step_tokens=512, max_batch=16),
            Uncertainty(0.04, 0.12),
            has_goals=True,
        ),
        "amx": Machine(
            Coefficients(
                fixed=0.0095, token=(1.6e-4,), work=1.5e-8, chunk=3e-4, cached=1e-6, decode=1.2e-4, prefix=1.3e-6
            ),
            _LIMITS,
            Uncertainty(0.05, 0.15),
        ),
    }
)


def save_profile(path: Path, machine: Machine) -> None:
    """Write the profile of a worker on this machine."""
    step = replace(machine.step, remade=_HIDDEN_S)
    cost = CostModel(dict.fromkeys(Kind, step), dict.fromkeys(Kind, machine.off))
    chunks = [Shape.build([(size, cached)]) for size in (1, 16, 128, 512) for cached in (0, 512)]
    decodes = [Shape.build(prefixes=[prefix] * size) for size in (1, 8, 64) for prefix in (16, 512)]
    mixed = [Shape.build([(size, 0)], [256] * 8) for size in (1, 16, 128, 384)]
    points = tuple(Point(shape, cost.seconds(shape)) for shape in (*chunks, *decodes, *mixed))
    links = {Route.DEVICE_TO_ARENA: Link(11.8e9, 2.3e-4), Route.ARENA_TO_DEVICE: Link(11.4e9, 2.3e-4)}
    subject = Subject("160 M", "two quiet cores", "bfloat16", 1, "-", "-")
    save(Profile(subject, MeasuredMemory(machine.limits, kv_bytes=36_864), points, cost, links=links), path)
