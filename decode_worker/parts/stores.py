"""The state that the parts of a decode worker share. A part takes what it needs of it when it is made."""

from __future__ import annotations

from itertools import count

from alignedserve.core import WorkerLimits
from alignedserve.decode_worker.memory.hidden import WeighedMemory
from alignedserve.decode_worker.memory.plain import PlainMemory
from alignedserve.decode_worker.memory.shared import SharedMemory
from alignedserve.decode_worker.requests.band import RunningBatch
from alignedserve.decode_worker.requests.candidates import CandidateLists
from alignedserve.decode_worker.requests.line import CandidateOrder
from alignedserve.decode_worker.requests.occupancy import Occupancy
from alignedserve.decode_worker.requests.serving_order import ServingOrder
from alignedserve.decode_worker.requests.step_counts import StepCounts
from alignedserve.scheduling.policy import Cache, Layout, Packing, Policy
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.pool_holds import PoolHolds
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.setup import WorkerSetup


class Stores(Common):
    memory: PlainMemory

    def __init__(self, setup: WorkerSetup) -> None:
        self.here, self.candidates, self.batch = Occupancy(), CandidateLists(), RunningBatch()
        self.step_counts = StepCounts()
        super().__init__(setup, self._memory_of)
        self.line = CandidateOrder(self.pace, self.here, self.candidates, self.steps)
        self.holds, self.copy_numbers = PoolHolds(self.pool), count(1)  # of copies from the pool
        self.queue = PromptQueue(self, lambda prompt: self.holds.release(prompt.key))
        # Beside steps only what stays where it is can be copied.
        self.copies_beside = setup.copies_beside and self.memory.keeps_places

    def _memory_of(self, steps: StepsInFlight) -> PlainMemory:
        """Make the memory, and the order of service that it goes by; the pace is known by now."""
        self.order = ServingOrder(self.limits, self.pace, self.batch)
        return memory_for(self.limits, self.pace, steps, self.here, self.order)


def memory_for(
    limits: WorkerLimits, pace: Pace, steps: StepsInFlight, here: Occupancy, order: ServingOrder
) -> PlainMemory:
    return _kind_for(pace.policy)(limits, pace, steps, here, order)


def _kind_for(policy: Policy) -> type[PlainMemory]:
    if policy.blocks is Layout.BIDIRECTIONAL:
        return SharedMemory
    if policy.cache is Cache.HYBRID or policy.packing is Packing.KNAPSACK:  # a knapsack weighs requests as KV, too
        return WeighedMemory
    return PlainMemory
