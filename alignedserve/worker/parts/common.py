"""The state that all parts of a worker's core share. A part takes what it needs of it when it is made."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.explain.decisions import DecisionRing
from alignedserve.worker.counts import WorkerCounts
from alignedserve.worker.device import DeviceMemory, blocks_for
from alignedserve.worker.dropping import Dropping
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.notes import Faults, Notes
from alignedserve.worker.pace import Pace
from alignedserve.worker.page_writer import PageNames, PageWriter
from alignedserve.worker.parts.owners import Owners
from alignedserve.worker.parts.part import Roster
from alignedserve.worker.parts.pool_link import PoolLink
from alignedserve.worker.parts.retirement import Retirement
from alignedserve.worker.setup import WorkerSetup


class Common:
    def __init__(self, setup: WorkerSetup, make_memory: Callable[[StepsInFlight], DeviceMemory] | None = None) -> None:
        """`make_memory` is given where the device's memory is another than usual."""
        self.setup, self.limits, self.policy = setup, setup.limits, setup.policy
        self.roster = Roster()
        self.steps = StepsInFlight()
        self.pace = Pace(setup)
        if make_memory is None:
            self.memory = DeviceMemory(setup.limits, self.steps, blocks_for(setup.limits, self.pace))
        else:
            self.memory = make_memory(self.steps)
        self.names = PageNames(setup.limits.page_size, setup.limits.block_size, setup.root)
        self.pages = self.memory.share_pages(self.names.blocks_of, self.pace)
        self.pool = PoolLink()
        self.notes = Notes()
        self.faults = Faults()
        self.counts = WorkerCounts()
        self.decisions = DecisionRing()
        self.writer = PageWriter(setup.limits.page_size, setup.limits.block_size)
        self.dropping = Dropping(self.memory, self.writer)
        self.owners = Owners(self.pace.coming, self.pages, self.dropping)
        self.retirement = Retirement(self.roster, self.steps, self.owners.outputs)
