"""Define the records of a run: the simulation writes them; figures, tables, plots and the timeline read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import nan
from typing import NamedTuple

from alignedserve.core import Role, ServiceClass, Slo, Usage
from alignedserve.cost.model import Shape


class RequestOutcome(Enum):
    OPEN = "open"  # the run ended before the request
    FINISHED = "finished"
    REFUSED = "refused"
    LEFT = "left"  # the client gave up waiting
    BROKEN = "broken"  # the gateway of the request died


@dataclass(slots=True)
class RequestRecord:
    """A request as the client saw it. Times are virtual seconds."""

    id: str
    service: ServiceClass
    slo: Slo
    arrival_at: float
    num_prompt: int  # tokens
    token_at: Sequence[float] = ()  # time at which each output token reached the client
    outcome: RequestOutcome = RequestOutcome.OPEN
    ended_at: float = 0.0
    num_preempted: int = 0
    job: str | None = None  # the batch job that the request is a line of
    refused: str | None = None  # the reason, of a request that was refused


class StepRecord(NamedTuple):
    worker: str
    began_at: float
    seconds: float  # true duration, as the simulator decided it
    predicted_s: float  # by the worker's cost model when it planned the step; NaN without a prediction
    shape: Shape
    shortest: int  # shortest prefix among the decodes; `shape.longest` less this is the spread
    budget: int = 0  # most tokens that the worker may run in a step; 0 without a budget
    free_share: float = nan  # share of the device's KV blocks that were free at the start; NaN if not measured
    emitted: tuple[str, ...] = ()  # requests that got a token from this step


@dataclass(frozen=True, slots=True)
class CopyRecord:
    worker: str
    began_at: float
    seconds: float
    to_device: bool  # False: from the device
    num_tokens: int
    aside: bool = False  # beside steps


@dataclass
class RunRecord:
    """A whole run, from the first arrival to the end of the last request."""

    began_at: float
    ended_at: float
    wall_s: float  # real time that the simulation took
    workers: Mapping[str, Role]
    requests: list[RequestRecord] = field(default_factory=list)
    steps: Sequence[StepRecord] = ()
    copies: list[CopyRecord] = field(default_factory=list)
    received: list[CopyRecord] = field(default_factory=list)  # KV that came from another worker's device
    pool: Sequence[Usage] = ()  # usage of the KV pool's pages, as the pool reported it every few seconds
    problems: tuple[str, ...] = ()  # errors of the simulation itself; a run with any proves nothing
    notes: tuple[str, ...] = ()  # hints for the reader of the figures, such as requests that were cut

    @property
    def duration_s(self) -> float:
        return self.ended_at - self.began_at
