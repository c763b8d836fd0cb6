"""The result of a simulated run in a few figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from alignedserve.lab.loads.records.distribution import percentile
from alignedserve.lab.loads.records.records import RequestOutcome
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import FIRST_ARRIVAL_AT, Settings


@dataclass(frozen=True)
class Summary:
    num_requests: int
    num_finished: int
    num_refused: int
    num_left: int  # their clients left before the end
    num_unfinished: int
    duration_s: float
    p99_ttft_s: float
    digest: str  # of all commands of all cores
    problems: tuple[str, ...]  # wrong tokens, requests that never ended, memory that is not free at the end


def simulate(settings: Settings) -> Summary:
    return summary_of(Simulation(settings))


def summary_of(simulation: Simulation) -> Summary:
    """Run a simulation to its end, and return what came of it."""
    simulation.run()
    record = simulation.record(0.0)
    outcomes = Counter(request.outcome for request in record.requests)
    first = (request.token_at[0] - request.arrival_at for request in record.requests if request.token_at)
    return Summary(
        num_requests=len(record.requests),
        num_finished=outcomes[RequestOutcome.FINISHED],
        num_refused=outcomes[RequestOutcome.REFUSED],
        num_left=outcomes[RequestOutcome.LEFT],
        num_unfinished=outcomes[RequestOutcome.OPEN],
        duration_s=max((request.ended_at for request in record.requests), default=0.0) - FIRST_ARRIVAL_AT,
        p99_ttft_s=percentile(first, 99),
        digest=simulation.world.digest,
        problems=record.problems,
    )
