"""The interface of a packing. As it stands it is first come, first served: every seated request runs.

A packing says which of the seated requests run in the next step, which request is seated next, and which request leaves
for lack of memory. A resident is a request that has memory on the device; the step batch is those residents that run
now. Residents that are not in a step keep their memory: they are paused, never evicted for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from alignedserve.decode_worker.requests.band import RunningBatch
from alignedserve.protocol.commands import Command
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import StepTimes
from alignedserve.worker.step.limits import Selection
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.waiting import Waiting

FirstToLeave: TypeAlias = Callable[[Sequence[Running], float], Running]  # chooses among requests of one class, now
MaySeat: TypeAlias = Callable[[Running], bool]  # tells whether a prompt waits for memory alone
Runnable: TypeAlias = tuple[Sequence[Running], Sequence[Running]]  # decodes and prompts, in the order in which they run


class TypeChoice(Protocol):
    """A packing that is told how long prompts and decodes have been pending."""

    def choose(self, prompts_s: float, decodes_s: float) -> None:
        """Choose the type of the next step."""

    @property
    def takes_prompts(self) -> bool:
        """Return whether prompts may be seated for the next step."""


class MemoryGiver(Protocol):
    """The part that gives residents memory before a step is chosen."""

    def grow(self, now: float) -> list[Command]:
        """Give each decode a place for its next token; where there is none, a request leaves."""

    def assign(self, types: TypeChoice, now: float) -> list[Command]:
        """Choose which requests have memory, by what they are worth."""

    def swap(self, now: float) -> list[Command]:
        """Do as `grow`; then let requests of higher levels take memory from requests of lower ones."""


@dataclass(frozen=True)
class PackingSetup:
    """The policy, the limit and the batch that a packing is built from."""

    policy: Policy
    most: int  # requests in a step that the engine takes
    first_to_leave: FirstToLeave = lambda requests, _now: requests[-1]
    times: Callable[[], StepTimes] = StepTimes  # of recent steps
    batch: RunningBatch = field(default_factory=RunningBatch)


class Packer:
    """First come, first served: every seated request runs; the newest leaves for lack of memory."""

    def __init__(self, setup: PackingSetup) -> None:
        self._most = setup.most

    @property
    def batch(self) -> int:
        """Return the largest number of requests for the next step."""
        return self._most

    def has_seat(self, num_seated: int) -> bool:
        """Return whether a prompt may be seated beside so many requests, where the step's choice does not seat it."""
        return num_seated < self._most

    def first(self, waiting: Waiting, may_seat: MaySeat) -> Running | None:
        """Return the prompt that is seated next, where the step's choice does not seat it."""
        return next(filter(may_seat, waiting), None)

    def prepare(self, room: MemoryGiver, now: float) -> list[Command]:
        """Give the residents memory for their next tokens before a step is chosen."""
        return room.grow(now)

    def runnable(self, decodes: Sequence[Running], prompts: Sequence[Running]) -> Runnable:
        """Return the requests that may run in the next step."""
        return decodes, prompts

    def leaving(self, prompts: Sequence[Running], decodes: Sequence[Running], now: float) -> Running:
        """Return the seated request that leaves for lack of memory; both are in the order of their seats."""
        return (prompts or decodes)[-1]

    def level(self, running: Running, now: float) -> int:
        """Return the level of a request, where requests take memory from others of lower levels (Policy.swaps)."""
        return 0

    def gives_way(self, seated: Sequence[Running], to: Running, now: float) -> list[Running]:
        """Return the seated requests that may leave for this one, the first to leave last."""
        return []

    def planned(self, selection: Selection) -> None:
        """Note what runs next."""
