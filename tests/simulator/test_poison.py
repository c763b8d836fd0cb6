"""A request that ends every worker that runs it: it is given up after three deaths, and nobody else loses a token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from alignedserve.config.topology import Topology
from alignedserve.core import SUSPECT_DEATHS, Rejection, Role, WorkerLimits
from alignedserve.lab.loads.records.records import RequestOutcome
from alignedserve.lab.loads.workload import Workload
from alignedserve.lab.simulator.machines.faults import Poison
from alignedserve.lab.simulator.machines.process import Witness
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import Settings
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import Member, Prefill
from alignedserve.router.suspects import TRIED_TOGETHER
from tests.conftest import SOAK, examples
from tests.rare import rare, rarely
from tests.simulator.summary import summary_of

MANY = WorkerLimits(num_blocks=4_000, block_size=16, page_size=64, max_step_tokens=512, max_batch=64)
LIMITS = WorkerLimits(num_blocks=80, block_size=16, page_size=64, max_step_tokens=64, max_batch=16)
TOPOLOGIES = ("colocated", "2xcolocated", "1+1", "2+1", "1+2", "2+2")
MOST_DEATHS = SUSPECT_DEATHS + 1

generated = settings(
    max_examples=2_000 if SOAK else examples(25),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def deployment(seed: int, topology: str, look_ahead: int = 0) -> Settings:
    workload = Workload(num_requests=21, rate=200.0)
    parsed = Topology.parse(topology)
    return Settings(seed, parsed, workload=workload, limits=LIMITS, num_pages=40, most_s=300.0, look_ahead=look_ahead)


def run(of: Settings) -> tuple[Simulation, int]:
    """Run the deployment; return it and how many deaths there were, and check that nothing else went wrong."""
    simulation = Simulation(of)
    summary = summary_of(simulation)
    assert summary.problems == ()
    assert summary.num_unfinished == 0
    return simulation, sum(process.member.incarnation - 1 for process in simulation.world.processes)


@generated
@given(st.integers(0, 1 << 30), st.sampled_from(TOPOLOGIES), st.integers(0, 20), st.integers(0, 30), st.booleans())
@example(5197300, "1+2", 1, 3, False)  # heard of the end before the join
def test_the_culprit_is_given_up_and_all_others_are_finished(
    seed: int, topology: str, number: int, index: int, at_end: bool
) -> None:
    of = deployment(seed, topology)
    name = f"request-{number}"
    simulation, died = run(replace(of, faults=(Poison(0.0, name, index, at_end),)))
    outcomes = {client.request.id: client.outcome for client in simulation.clients.kept.values()}
    culprit = simulation.clients.kept[name]
    assert set(outcomes.values()) <= {RequestOutcome.FINISHED, RequestOutcome.REFUSED}
    others = {outcome for id, outcome in outcomes.items() if id != name}
    assert others == {RequestOutcome.FINISHED}
    if died:
        assert culprit.refused == Rejection.CULPRIT.value
        assert died == MOST_DEATHS


class Alone(Witness):
    """Counts the requests that a router lets run alone."""

    def __init__(self) -> None:
        self.names = set[str]()

    def commanded(self, by: Member, command: Command, frame: bytes) -> None:
        match command:
            case Send(message=Prefill(request)) if by.role is Role.ROUTER and request.is_suspect:
                self.names.add(request.id)


@pytest.mark.parametrize(
    ("topology", "number", "index"),
    [("colocated", 100, 0), *map(rarely, [("colocated", 5, 5), ("1+1", 5, 11), ("1+4", 100, 0)])],
)
def test_few_of_two_hundred_requests_run_alone(topology: str, number: int, index: int) -> None:
    """All that a worker has when it ends is charged, whether it ran or waited there."""
    of = replace(deployment(1, topology), limits=MANY, num_pages=2_000, workload=Workload(200, 2_000.0))
    simulation = Simulation(replace(of, faults=(Poison(0.0, f"request-{number}", index),)))
    alone = Alone()
    simulation.world.witnesses.append(alone)
    summary = summary_of(simulation)
    assert (summary.num_refused, summary.num_finished, summary.problems) == (1, 199, ())
    assert sum(process.member.incarnation - 1 for process in simulation.world.processes) == MOST_DEATHS
    assert 1 <= len(alone.names) <= TRIED_TOGETHER


@rare
def test_among_many_culprits_no_innocent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where workers die so often, long outputs are present at as many deaths as culprits: here few are enough."""
    monkeypatch.setattr("alignedserve.owner.core.MOST_PASSED", 2)
    workload = Workload(40, 8.0, mean_output=150, most_output=600)  # some end before the place that kills
    bad = {f"request-{number}" for number in range(10, 40, 3)}
    faults = tuple(Poison(0.0, name, 3) for name in sorted(bad))
    of = replace(deployment(1, "2xcolocated"), limits=MANY, num_pages=2_000, workload=workload, most_s=5_000.0)
    simulation, _ = run(replace(of, faults=faults))
    kept = simulation.clients.kept
    refused = {client.request.id: client.refused for client in kept.values() if client.refused}
    assert len(refused) > len(bad) / 2
    assert refused.keys() <= bad
    assert set(refused.values()) == {Rejection.CULPRIT.value}
