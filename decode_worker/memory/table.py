"""The table of memories: which one a policy has."""

from __future__ import annotations

from alignedserve.core import WorkerLimits
from alignedserve.decode_worker.memory.hidden import HiddenMemory
from alignedserve.decode_worker.memory.plain import PlainMemory
from alignedserve.decode_worker.memory.shared import SharedMemory
from alignedserve.decode_worker.packing.order import ServingOrder
from alignedserve.decode_worker.requests.occupancy import Occupancy
from alignedserve.scheduling.policy import Cache, Layout, Packing, Policy
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace


def memory_for(
    limits: WorkerLimits, pace: Pace, steps: StepsInFlight, here: Occupancy, order: ServingOrder
) -> PlainMemory:
    return _kind_for(pace.policy)(limits, pace, steps, here, order)


def _kind_for(policy: Policy) -> type[PlainMemory]:
    if policy.blocks is Layout.BIDIRECTIONAL:
        return SharedMemory
    if policy.cache is Cache.HYBRID or policy.packing is Packing.KNAPSACK:  # a knapsack weighs requests as KV, too
        return HiddenMemory
    return PlainMemory
