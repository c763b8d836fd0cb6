"""Records the steps and copies of a simulation while it runs, if the settings ask for it: only what the figures need.

Record objects are built when the record is read. Work that a worker was doing when it died is not recorded: it had no
result.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import nan
from struct import Struct
from typing import overload

from alignedserve.core import StepPlan
from alignedserve.cost.model import Shape
from alignedserve.lab.loads.records.records import CopyRecord, StepRecord
from alignedserve.lab.simulator.machines.clock import Agenda
from alignedserve.lab.simulator.machines.process import WorkHands
from alignedserve.lab.simulator.machines.transfers import SimulatedTransfers
from alignedserve.protocol.commands import Command, CopyIn, CopyOut, ReceiveKv, RunStep, SendKv
from alignedserve.protocol.events import Event, KvReceived
from alignedserve.protocol.messages import Member


class Recorder:
    def __init__(self, budget: int) -> None:
        # request -> how often the prompt was computed again after the first token
        self.num_recomputed: Counter[str] = Counter()
        self.steps = StepLog(budget)
        # worker, began_at, seconds, to_device, tokens, beside steps
        self._copies: list[tuple[str, float, float, bool, int, bool]] = []
        self.received: list[CopyRecord] = []

    def step(self, worker: str, began_at: float, seconds: float, free_share: float, plan: StepPlan) -> None:
        if plan.chunks:
            self.num_recomputed.update(chunk.request for chunk in plan.chunks if not chunk.start and chunk.index)
        self.steps.add(worker, began_at, seconds, free_share, plan)

    def copy(self, worker: str, began_at: float, seconds: float, command: CopyIn | CopyOut) -> None:
        to_device = isinstance(command, CopyIn)
        self._copies.append((worker, began_at, seconds, to_device, len(command.tokens), command.aside))

    def receive(self, worker: str, began_at: float, ended_at: float, num_tokens: int) -> None:
        self.received.append(CopyRecord(worker, began_at, ended_at - began_at, True, num_tokens, aside=True))

    def copies(self) -> list[CopyRecord]:
        return [CopyRecord(*copy) for copy in self._copies]


class RecordedHands:
    """A worker's hands, with a record of what they do; the worker does one piece of work at a time."""

    def __init__(
        self, hands: WorkHands, worker: str, agenda: Agenda, free_share: Callable[[], float], recorder: Recorder
    ) -> None:
        self._hands, self._worker, self._agenda, self._recorder = hands, worker, agenda, recorder
        self._free_share = free_share  # share of the device's blocks that is free
        self._begun_at, self._was_free = 0.0, 1.0

    def meet(self, member: Member) -> None:
        self._hands.meet(member)

    def part_from(self, member: Member) -> None:
        self._hands.part_from(member)

    def perform(self, command: Command) -> None:
        self._hands.perform(command)

    def transfer(
        self, command: SendKv | ReceiveKv, transfers: SimulatedTransfers, me: str, post: Callable[[Event], None]
    ) -> None:
        began_at = self._agenda.now

        def ended(event: Event) -> None:
            if isinstance(event, KvReceived):
                self._recorder.receive(self._worker, began_at, self._agenda.now, len(command.tokens))
            post(event)

        self._hands.transfer(command, transfers, me, ended)

    def begin(self, command: Command) -> float:
        if not (isinstance(command, CopyIn | CopyOut) and command.aside):
            self._begun_at, self._was_free = self._agenda.now, self._free_share()
        return self._hands.begin(command)

    def finish(self, command: Command, seconds: float) -> Event | None:
        match command:
            case RunStep(plan):
                self._recorder.step(self._worker, self._begun_at, seconds, self._was_free, plan)
            case CopyIn() | CopyOut():
                began_at = self._agenda.now - seconds if command.aside else self._begun_at
                self._recorder.copy(self._worker, began_at, seconds, command)
        return self._hands.finish(command, seconds)


# worker; began_at, seconds, predicted_s; the shape; shortest, free share; end of the step's requests in the list
_ROW = Struct("=I3d2I2QIQ2IIdQ")


class _Numbers(dict[str, int]):
    """Numbers for names, in order of first use."""

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        return number


class StepLog(Sequence[StepRecord]):
    """The steps in the order in which they ended, packed: a run has millions, and objects would fill the memory.

    A row holds the fields of a step that have a fixed size. The requests that got a token are numbers in a separate
    list. Reading a step builds its record.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget  # of every worker, in tokens
        self._rows = bytearray()
        self._emitted = array("I")
        self._workers, self._requests = _Numbers(), _Numbers()

    def add(self, worker: str, began_at: float, seconds: float, free_share: float, plan: StepPlan) -> None:
        numbers, decodes = self._requests, plan.decodes
        if plan.chunks:
            self._emitted.extend([numbers[chunk.request] for chunk in plan.chunks if chunk.sampling is not None])
        self._emitted.extend([numbers[decode.request] for decode in decodes])
        prefixes = [decode.start - decode.kv.dropped for decode in decodes]
        shape = Shape.build(
            [(len(chunk.tokens), chunk.start - chunk.kv.dropped) for chunk in plan.chunks] if plan.chunks else (),
            prefixes,
        )
        shortest = min(prefixes) if prefixes else 0
        self._rows += _ROW.pack(
            *(self._workers[worker], began_at, seconds, plan.predicted_s or nan),
            *shape,
            *(shortest, free_share, len(self._emitted)),
        )

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def __iter__(self) -> Iterator[StepRecord]:
        workers, requests, budget, start = list(self._workers), list(self._requests), self._budget, 0
        for worker, began_at, seconds, predicted_s, *shape, shortest, free_share, end in _ROW.iter_unpack(self._rows):
            emitted = tuple([requests[number] for number in self._emitted[start:end]])
            start = end
            yield StepRecord(
                workers[worker], began_at, seconds, predicted_s, Shape(*shape), shortest, budget, free_share, emitted
            )

    @overload
    def __getitem__(self, at: int) -> StepRecord: ...
    @overload
    def __getitem__(self, at: slice) -> list[StepRecord]: ...
    def __getitem__(self, at: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(at, slice):
            return list(self)[at]
        return next(islice(self, range(len(self))[at], None))
