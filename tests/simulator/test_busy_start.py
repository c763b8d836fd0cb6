"""Workers whose profile was taken on a busy machine find out between requests that it is quiet by now."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from alignedserve.config.topology import Topology
from alignedserve.cost.fit import OnlineCost, Point
from alignedserve.cost.trials import Bounds, trials
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.lab.loads.workload import Workload
from alignedserve.lab.simulator.machines.engine import Costs
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import Settings
from tests.cost.fitted import cost_of
from tests.simulator.summary import summary_of

SLOWDOWN = 2.0


def belief_of(costs: Costs, settings: Settings) -> OnlineCost:
    """Return what a worker believes of a device with these costs that was busy when it was measured."""
    known = []
    for trial in trials(Bounds(settings.limits, 400)):
        tokens, prefixes = trial.shape.tokens, trial.shape.cached + trial.shape.prefixes
        known.append(Point(trial.shape, costs.step_s + costs.token_s * tokens + costs.prefix_token_s * prefixes))
    return cost_of(known, slowdown=SLOWDOWN)


@pytest.mark.parametrize("cluster", ["colocated", "1+1"])
def test_a_slowdown_that_is_over_is_found_out_while_nothing_runs(cluster: str) -> None:
    settings = Settings(
        topology=Topology.parse(cluster), workload=Workload(num_requests=4, rate=0.1, mean_output=2, most_output=3)
    )
    settings = replace(settings, belief=partial(belief_of, Costs(), settings))
    simulation = Simulation(settings)
    summary = summary_of(simulation)
    assert not simulation.problems, "KV is what it should be, and nothing is left, trials or not"
    assert summary.num_requests == 4
    cores = [process.core for name in simulation.launcher.members if (process := simulation.world.alive(name))]
    workers = [core for core in cores if isinstance(core, DecodeCore)]
    assert workers
    for core in workers:
        assert core.pace.fit.slowdown == pytest.approx(1.0, abs=0.15)
