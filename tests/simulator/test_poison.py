"""A request that ends every worker that runs it: it is given up after three deaths, and nobody else loses a token."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.config.topology import Topology
from alignedserve.core import SUSPECT_DEATHS, Rejection, WorkerLimits
from alignedserve.simulator.machines.faults import Poison
from alignedserve.simulator.records.records import RequestOutcome
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import Settings
from alignedserve.simulator.workload import Workload
from tests.conftest import SOAK

LIMITS = WorkerLimits(num_pairs=80, block_size=16, page_size=64, max_step_tokens=64, max_batch=16)
TOPOLOGIES = ("colocated", "2xcolocated", "1+1", "2+1", "1+2", "2+2")
MOST_DEATHS = SUSPECT_DEATHS + 1

generated = settings(
    max_examples=2_000 if SOAK else 60,
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
    summary = simulation.run()
    assert summary.problems == ()
    assert summary.num_unfinished == 0
    return simulation, sum(process.member.incarnation - 1 for process in simulation.world.processes)


@generated
@given(st.integers(0, 1 << 30), st.sampled_from(TOPOLOGIES), st.integers(0, 20), st.integers(0, 30), st.booleans())
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
