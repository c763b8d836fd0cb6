"""What happened in a run: written by the simulation while it runs, read by figures, tables, plots and the timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import nan
from typing import NamedTuple

from alignedserve.core import Role, ServiceClass, Slo, Usage
from alignedserve.cost.model import Shape


class RequestOutcome(Enum):
    OPEN = "open"  # nothing ended it: at the end of a run it is unfinished
    FINISHED = "finished"
    REFUSED = "refused"
    LEFT = "left"  # the client had no patience
    BROKEN = "broken"  # its gateway died


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are virtual seconds."""

    id: str
    service: ServiceClass
    slo: Slo
    arrival_at: float
    num_prompt: int  # tokens
    token_at: Sequence[float] = ()  # when each token of its output reached the client
    outcome: RequestOutcome = RequestOutcome.OPEN
    ended_at: float = 0.0
    num_preempted: int = 0
    job: str | None = None  # what it is a line of


class StepRecord(NamedTuple):
    worker: str
    began_at: float
    seconds: float  # what it took: the simulator's truth
    predicted_s: float  # what the worker's cost model said when it was planned; NaN where it said nothing
    shape: Shape
    shortest: int  # prefix among its decodes; with `shape.longest` their spread
    budget: int = 0  # most tokens that its worker may run in a step; 0 where there is none
    free_share: float = nan  # of the device's KV blocks, when it began; NaN where nobody looked
    emitted: tuple[str, ...] = ()  # requests that it made a token for


@dataclass(frozen=True, slots=True)
class CopyRecord:
    worker: str
    began_at: float
    seconds: float
    to_device: bool  # else from it
    num_tokens: int


@dataclass
class RunRecord:
    """A whole run. It begins with the first arrival, and ends when the last request has ended."""

    began_at: float
    ended_at: float
    wall_s: float  # what it took to simulate
    workers: Mapping[str, Role]
    requests: list[RequestRecord] = field(default_factory=list)
    steps: Sequence[StepRecord] = ()
    copies: list[CopyRecord] = field(default_factory=list)
    pool: Sequence[Usage] = ()  # of the KV pool's pages, as it told every few seconds
    problems: tuple[str, ...] = ()  # what the simulation found wrong with itself; a run with any proves nothing
    notes: tuple[str, ...] = ()  # what the reader of its figures should know, such as requests that were cut

    @property
    def duration_s(self) -> float:
        return self.ended_at - self.began_at
